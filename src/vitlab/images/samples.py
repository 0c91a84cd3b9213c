"""Single images: whatever can be given as one, SOURCE#N and sample:NAME, and (image, label) pairs as a dataset.

vitlab predict bundled:cifar10 sample:cat        # a photo that ships with the package
vitlab predict bundled:digits digits#3           # number 3 of the test split (val where there is none)
vitlab.evaluate(model, [("a.png", "cat"), ...])  # or a torch Dataset
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from operator import index
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np
from PIL import Image
from torch import Tensor

from vitlab.errors import DataError, UsageError
from vitlab.images.bands import StoredPixels, read_bands
from vitlab.images.datasets import Data, Dataset, first_few, label_text, open_data, subset
from vitlab.images.digest import pixel_digest
from vitlab.images.photos import PREFIX, find_photo
from vitlab.images.read import Source, read_image
from vitlab.images.sources.dataset import Strings


@dataclass(frozen=True)
class Sample:
    image: Image.Image
    label: str  # in words: see label_text
    name: str


def is_sample(text: str) -> bool:
    return bool(re.fullmatch(rf".+#\d{{1,18}}|{PREFIX}.*", text)) and not Path(text).exists()


def replace_sample(source: Source) -> Source:
    """The image of a sample by its name, "digits#3" or "sample:cat"; any other source unchanged."""
    if not isinstance(source, str | PathLike) or not is_sample(fspath(source)):
        return source
    name = fspath(source)
    if name.startswith(PREFIX):
        return find_photo(name).path
    split, index = _place(name)
    if split.stored is not None:
        return split.read(index)  # no image of Pillow's can hold it
    image = open_sample(name).image
    image.filename = fspath(source)  # type: ignore[attr-defined]  # used in messages
    return image


def open_sample(text: str) -> Sample:
    if text.startswith(PREFIX):
        photo = find_photo(text)
        return Sample(read_image(photo.path), photo.label, text)
    split, number = _place(text)
    pixels = split.read(number)  # (H, W, C)
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    return Sample(image, label_text(split, number), text)


def _place(text: str) -> tuple[Dataset, int]:
    """The split that a sample is in, and its number there."""
    source, _, number = text.rpartition("#")
    data = _opened(source)
    split = data.val if data.test is None else data.test
    if int(number) >= len(split):
        raise DataError(f"{text}: {data.name} has {len(split)} images to choose from, {source}#0 to #{len(split) - 1}.")
    return split, int(number)


@lru_cache(maxsize=2)
def _opened(source: str) -> Data:
    """Cached, so that several samples of one source open it once."""
    return open_data(source)


def is_image(source: object) -> TypeGuard[Source]:
    """Of a type that can hold one image; whether it does shows when it is read."""
    kinds = str | PathLike | bytes | bytearray | memoryview | np.ndarray | Image.Image
    return isinstance(source, kinds) or hasattr(source, "read")


def check_image(source: object, about_tensors: str) -> Source:
    """The source, if its type can hold one image. `about_tensors`: what to do with a tensor instead."""
    if is_image(source):
        return source
    hint = f" {about_tensors}" if isinstance(source, Tensor) else ""
    raise UsageError(
        "an image is a path, bytes, an open file, an array (H, W, 3) or a PIL image, not a "
        f"{type(source).__name__}.{hint}"
    )


def contents(source: Any) -> Source:
    """Bytes as `bytes`; an open file is one image, from its current position; a sample by its name is an image."""
    value = source.read() if hasattr(source, "read") else replace_sample(source)
    if value is not source and isinstance(value, str):
        raise UsageError(f"{getattr(source, 'name', 'the file')} was opened as text: open it as bytes, with mode 'rb'.")
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


@runtime_checkable
class Samples(Protocol):
    """(image, label) pairs by number: a list, or a torch Dataset. A label is a class's name or number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class SampleDataset:
    """Pairs as one split: RGB, or what the images hold, `stored`."""

    images = None
    groups: np.ndarray | None = None

    def __init__(
        self,
        samples: Samples,
        names: Iterable[str],
        labels: list[int],
        classes: list[str],
        stored: StoredPixels | None = None,
    ) -> None:
        self.samples, self.names, self.stored = samples, Strings(names), stored
        self.channels = 3 if stored is None else stored.channels
        self.labels, self.classes = np.array(labels, dtype=np.int64), classes

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> np.ndarray:
        image, name = contents(self.samples[index][0]), self.name_of(index)
        if self.stored is not None:
            return read_bands(image, channels=self.channels, name=name)  # (H, W, C)
        return np.array(read_image(image, name=name))  # (H, W, 3)

    def source(self, index: int) -> Source:
        return contents(self.samples[index][0])

    def name_of(self, index: int) -> str:
        return self.names[index]

    def digest(self, index: int) -> bytes:
        return pixel_digest(self.read(index))


def data_of_samples(samples: Samples, classes: list[str], stored: StoredPixels | None = None) -> Data:
    """Pairs as the test split of a dataset without others. `classes`: those of the model, which numbers stand for.
    `stored`: what the images hold; None: photos.

    A torch Dataset is read twice, first for its labels.
    """
    if not isinstance(samples, Samples) or isinstance(samples, dict) or not len(samples):
        raise UsageError(
            f"{type(samples).__name__}: is no dataset, or is empty. Pass a name, a path, an open dataset, a list of "
            "(image, label) pairs, or a torch Dataset of such pairs with a length."
        )
    names, labels = zip(*(_name_and_label(samples[i], i) for i in range(len(samples))), strict=True)
    if any(isinstance(label, str) and label not in classes for label in labels):
        classes = sorted({label for label in labels if isinstance(label, str)})
    if not classes:
        raise DataError("labels are numbers, but the model has no classes: label the images with names.")
    numbers = [classes.index(label) if isinstance(label, str) else label for label in labels]
    if wrong := [number for number in numbers if not 0 <= number < len(classes)]:
        raise DataError(f"label {wrong[0]}: there are {len(classes)} classes, {first_few(classes)}, from number 0 on.")
    split = SampleDataset(samples, names, numbers, classes, stored)
    return Data("samples", classes, none := subset(split, []), none, split)


def _name_and_label(sample: Any, number: int) -> tuple[str, int | str]:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(f"sample {number} must be a pair (image, label), but is of type {type(sample).__name__}.")
    image, label = sample
    check_image(image, "Leave out the transform of the dataset: images are preprocessed here.")
    name = fspath(image) if isinstance(image, str | PathLike) else f"image {number}"
    try:
        return name, label if isinstance(label, str) else index(label)
    except TypeError:
        kind = type(label).__name__
        raise DataError(f"the label of {name} must be a name or a whole number, not a {kind}.") from None
