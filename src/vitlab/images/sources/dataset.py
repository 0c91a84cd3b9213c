"""What every source gives: a Dataset (one split) and Splits (all of them), in memory or read one by one.

Datasets go to worker processes: they pickle, and they keep no large lists of Python objects, whose reference counts
would make every forked worker copy them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from vitlab.advice import option_or_setting
from vitlab.errors import DataError, ImageError
from vitlab.images.bands import SCALES, StoredPixels, read_bands
from vitlab.images.digest import file_digest, pixel_digest
from vitlab.images.randomness import uniform
from vitlab.images.read import Source, read_image
from vitlab.images.regions import Regions
from vitlab.special_files import special_kind

CAPTION = 3  # coordinate of the draw that picks one of an image's captions
SPLIT_NAMES = {  # what people call the splits
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}


TargetKind = Literal["class", "labels", "number"]  # what is learned of an image
KIND_NAMES: dict[TargetKind, str] = {
    "class": "one class an image",
    "labels": "several labels an image",
    "number": "a number for each image",
}


class Dataset(Protocol):
    """One split. `read` raises ImageError, naming the file, where an image cannot be read."""

    groups: np.ndarray | None  # (N,) int64: images of one group belong on one side of every split

    @property
    def classes(self) -> list[str]: ...
    @property
    def labels(self) -> np.ndarray: ...  # (N,) int64; (N, K) bool where images have several; (N,) float64: numbers
    @property
    def channels(self) -> int: ...  # of photos 1 or 3
    @property
    def stored(self) -> StoredPixels | None: ...  # what its images hold; None: photos
    @property
    def images(self) -> np.ndarray | None: ...  # (N, H, W, C) where the whole split lives in memory
    def __len__(self) -> int: ...
    def read(self, index: int) -> np.ndarray: ...  # (H, W, C) uint8, or as stored
    def source(self, index: int) -> Source: ...  # what `read` decodes: a path, the bytes of a file, or pixels
    def name_of(self, index: int) -> str: ...  # a path, or "cifar10/train/123"
    def digest(self, index: int) -> bytes: ...  # of the image's contents; raises as `read` does


def target_kind(labels: np.ndarray) -> TargetKind:
    """What the labels of a dataset are."""
    return "labels" if labels.ndim == 2 else "number" if labels.dtype.kind == "f" else "class"


def label_text(dataset: Dataset, index: int) -> str:
    """The label of an image as people write it: a class; several, with commas; a number; empty where it has none."""
    label, kind = dataset.labels[index], target_kind(dataset.labels)
    if kind == "labels":
        return ", ".join(dataset.classes[k].strip() for k in np.flatnonzero(label))
    if kind == "number":
        return f"{float(label):.10g}"
    return dataset.classes[int(label)].strip() if dataset.classes else ""


@dataclass(frozen=True)
class Allow:
    """What is refused unless allowed, because it could silently change the dataset."""

    cut: bool = False  # tar files without their end
    outside: bool = False  # tables that name files outside their own folder


def how_to_allow(what: str) -> str:
    """What allows it, as it is typed."""
    return option_or_setting(f"data.allow_{what}", "true")


def refuse_special(path: str | Path) -> None:
    """Raise where a path leads to a FIFO, a device or a socket, before anybody opens it."""
    if kind := special_kind(path):
        raise DataError(f"{path}: is {kind}, not a regular file. Copy what it holds into a file, and name that.")


def is_text(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON can spell halves of characters (lone surrogates), which cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True)
class Splits:
    """The splits of a source, before a missing val is split off train."""

    classes: list[str]
    train: Dataset
    val: Dataset | None = None
    test: Dataset | None = None
    notes: list[str] = field(default_factory=list)  # what a user should know, but need not change
    groups: Mapping[str, Sequence[str]] | None = None  # by split, the group of every image, where a table says it

    @property
    def parts(self) -> dict[str, Dataset | None]:
        return {"train": self.train, "val": self.val, "test": self.test}


class Strings(Sequence[str]):
    """Many strings in two arrays."""

    def __init__(self, strings: Iterable[str]) -> None:
        encoded = [s.encode("utf-8", "surrogateescape") for s in strings]  # paths need not be UTF-8
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._starts = np.cumsum([0, *map(len, encoded)], dtype=np.int64)  # (N + 1,)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index):  # one only: no caller slices
        index = range(len(self))[index]
        start, end = self._starts[index], self._starts[index + 1]
        return self._bytes[start:end].tobytes().decode("utf-8", "surrogateescape")


class ArrayDataset:
    """A split in memory."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, classes: list[str], name: str, ids: np.ndarray | None = None
    ) -> None:
        assert images.dtype.name in SCALES and images.ndim == 4 and len(images) == len(labels)
        self.images: np.ndarray | None = images  # (N, H, W, C)
        self.labels = np.asarray(labels, dtype=np.int64)
        self.classes = classes
        self.channels = images.shape[3]
        photos = images.dtype == np.uint8 and self.channels in (1, 3)
        self.stored = None if photos else StoredPixels(images.dtype.name, self.channels)
        self.groups: np.ndarray | None = None
        self.name = name
        self.ids = np.arange(len(images)) if ids is None else ids  # where each image stands in the original files

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> np.ndarray:
        assert self.images is not None
        return self.images[index].copy()  # (H, W, C)

    def source(self, index: int) -> Source:
        return self.read(index)

    def name_of(self, index: int) -> str:
        return f"{self.name}/{self.ids[index]}"

    def digest(self, index: int) -> bytes:
        return pixel_digest(self.read(index))


class FileDataset:
    """A split of image files, read on access: as RGB, unless `stored` says that they are no photos."""

    images = None
    stored: StoredPixels | None = None
    groups: np.ndarray | None = None

    def __init__(self, paths: Iterable[str | Path], labels: np.ndarray, classes: list[str]) -> None:
        self.paths = Strings(map(str, paths))
        self.labels = labels if target_kind(labels) != "class" else np.asarray(labels, dtype=np.int64)
        self.classes = classes
        assert len(self.paths) == len(self.labels)

    @property
    def channels(self) -> int:
        return 3 if self.stored is None else self.stored.channels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> np.ndarray:
        path = self.name_of(index)
        if self.stored is None:
            return np.array(read_image(path))  # (H, W, 3)
        return read_bands(path, channels=self.stored.channels)  # (H, W, C)

    def source(self, index: int) -> Source:
        return self.name_of(index)

    def name_of(self, index: int) -> str:
        return self.paths[index]

    def digest(self, index: int) -> bytes:
        path = self.name_of(index)
        try:
            return file_digest(Path(path))
        except OSError as error:
            raise ImageError(f"{path}: cannot be opened ({error.strerror}).") from None


class Captions:
    """One or several captions per image: captions[3] is a list."""

    def __init__(self, written: Iterable[Sequence[str]]) -> None:
        lists = list(written)
        self._texts = Strings(text for texts in lists for text in texts)
        self._starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)  # (N + 1,)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> list[str]:
        index = range(len(self))[index]
        return [self._texts[i] for i in range(self._starts[index], self._starts[index + 1])]

    @property
    def counts(self) -> np.ndarray:
        """(N,): captions per image."""
        return np.diff(self._starts)

    def everything(self) -> list[str]:
        return list(self._texts)

    def draw(self, indices: np.ndarray, *, seed: int, epoch: int) -> list[str]:
        """One caption of each image, another in another epoch."""
        chance = uniform(seed, CAPTION, epoch, indices, count=1)[:, 0]
        picked = self._starts[indices] + (chance * self.counts[indices]).astype(np.int64)
        return [self._texts[i] for i in picked]


class Captioned:
    """A split of images with captions and without classes."""

    def __init__(self, dataset: Dataset, captions: Captions) -> None:
        assert len(dataset) == len(captions)
        self.dataset, self.captions = dataset, captions
        self.labels, self.classes = np.zeros(len(dataset), dtype=np.int64), []
        self.channels, self.images = dataset.channels, dataset.images
        self.stored = dataset.stored
        self.groups: np.ndarray | None = dataset.groups

    def __len__(self) -> int:
        return len(self.captions)

    def read(self, index: int) -> np.ndarray:
        return self.dataset.read(index)

    def source(self, index: int) -> Source:
        return self.dataset.source(index)

    def name_of(self, index: int) -> str:
        return self.dataset.name_of(index)

    def digest(self, index: int) -> bytes:
        return self.dataset.digest(index)


RegionKind = Literal["semantic", "instance", "detect"]  # what is learned of an image with masks or boxes
REGION_NAMES: dict[RegionKind, str] = {
    "semantic": "a class for every pixel",
    "instance": "a mask for each object",
    "detect": "a box for each object",
}


class RegionReader(Protocol):
    """Makes the regions of an image from what its source says of it."""

    def __call__(self, record: str, size: tuple[int, int]) -> Regions: ...  # raises ImageError


@dataclass(frozen=True)
class Marks:
    """What is marked on each image of a split: a record for each (a path, or JSON), and how it is read."""

    records: Strings
    reader: RegionReader

    def take(self, indices: np.ndarray) -> Marks:
        return Marks(Strings(self.records[i] for i in indices), self.reader)


class Annotated:
    """A split of images with masks or boxes, and without a class for each image."""

    def __init__(self, dataset: Dataset, marks: Marks, kind: RegionKind) -> None:
        assert len(dataset) == len(marks.records)
        self.dataset, self.marks = dataset, marks
        self.kind: RegionKind = kind
        self.labels, self.classes = np.zeros(len(dataset), dtype=np.int64), dataset.classes
        self.channels, self.images = dataset.channels, None
        self.stored = dataset.stored
        self.groups: np.ndarray | None = dataset.groups

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> np.ndarray:
        return self.dataset.read(index)

    def source(self, index: int) -> Source:
        return self.dataset.source(index)

    def regions(self, index: int, size: tuple[int, int]) -> Regions:
        """Of an image of this (H, W)."""
        try:
            return self.marks.reader(self.marks.records[index], size)
        except ImageError as error:
            raise ImageError(f"{self.name_of(index)}: {error.why}", error.remedy) from None

    def name_of(self, index: int) -> str:
        return self.dataset.name_of(index)

    def digest(self, index: int) -> bytes:
        return self.dataset.digest(index)


class Subset:
    """Some samples of a dataset that is read one by one; with labels of their own, if given."""

    images = None

    def __init__(self, dataset: Dataset, indices: np.ndarray, labels: np.ndarray | None = None) -> None:
        self.dataset, self.indices = dataset, indices
        self.labels = dataset.labels[indices] if labels is None else labels
        self.classes, self.channels, self.stored = dataset.classes, dataset.channels, dataset.stored
        self.groups: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> np.ndarray:
        return self.dataset.read(int(self.indices[index]))

    def source(self, index: int) -> Source:
        return self.dataset.source(int(self.indices[index]))

    def name_of(self, index: int) -> str:
        return self.dataset.name_of(int(self.indices[index]))

    def digest(self, index: int) -> bytes:
        return self.dataset.digest(int(self.indices[index]))


def subset(dataset: Dataset, indices: Sequence[int] | np.ndarray) -> Dataset:
    """The samples at `indices` (or where a mask is true), in that order; in memory if the dataset is."""
    indices = np.asarray(indices)
    if indices.dtype == bool:
        if indices.shape != (len(dataset),):
            raise IndexError(f"a mask of shape {indices.shape} does not fit {len(dataset)} samples.")
        indices = np.flatnonzero(indices)
    indices = indices.astype(np.int64)
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(dataset)):
        raise IndexError(f"indices {indices.min()}..{indices.max()} are outside the {len(dataset)} samples.")
    part = _part(dataset, indices)
    part.groups = None if dataset.groups is None else dataset.groups[indices]
    return part


def _part(dataset: Dataset, indices: np.ndarray) -> Dataset:
    if isinstance(dataset, ArrayDataset) and dataset.images is not None:
        images, labels = dataset.images[indices], dataset.labels[indices]
        return ArrayDataset(images, labels, dataset.classes, dataset.name, dataset.ids[indices])
    if isinstance(dataset, Captioned):
        return Captioned(subset(dataset.dataset, indices), Captions(dataset.captions[i] for i in indices))
    if isinstance(dataset, Annotated):
        return Annotated(subset(dataset.dataset, indices), dataset.marks.take(indices), dataset.kind)
    if isinstance(dataset, Subset):
        return Subset(dataset.dataset, dataset.indices[indices], dataset.labels[indices])
    return Subset(dataset, indices)


def relabelled(dataset: Dataset, labels: np.ndarray) -> Dataset:
    """The same samples with other labels (N,); in memory if the dataset is."""
    assert labels.shape == (len(dataset),)
    if isinstance(dataset, ArrayDataset) and dataset.images is not None:
        same: Dataset = ArrayDataset(dataset.images, labels, dataset.classes, dataset.name, dataset.ids)
    else:
        same = Subset(dataset, np.arange(len(dataset)), labels)
    same.groups = dataset.groups
    return same
