"""Every image of a source in one list, whatever its splits and labels.

items = open_items("photos/")            # images at any depth; or digits, cifar10, labels.csv, shards
items.about(0)                           # path, split and label, where known
items.source(0)                          # what vitlab.embed takes
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitlab.errors import DataError
from vitlab.images.datasets import SourceReading, open_splits
from vitlab.images.sources.dataset import SPLIT_NAMES, Allow, Dataset, FileDataset, Strings
from vitlab.images.sources.folder import images_under


class ImageInfo(NamedTuple):
    path: str
    split: str | None
    label: str | None


@dataclass(frozen=True)
class Items:
    """The images of a source, split by split."""

    name: str
    parts: list[tuple[str | None, Dataset]]
    root: Path | None = None  # where the paths begin, in a folder of images
    notes: list[str] = field(default_factory=list)  # what a user should know, but need not change

    def __len__(self) -> int:
        return sum(len(dataset) for _, dataset in self.parts)

    def about(self, number: int) -> ImageInfo:
        split, dataset, index = self._place(number)
        path = dataset.name_of(index)
        if self.root is None:
            label = dataset.classes[int(dataset.labels[index])] if dataset.classes else None
            return ImageInfo(path, split, label)
        below = Path(path).relative_to(self.root)
        folders = list(below.parts[:-1])
        split = SPLIT_NAMES.get(folders[0].lower()) if folders else None
        folders = folders[1:] if split is not None else folders
        return ImageInfo(below.as_posix(), split, folders[0] if folders else None)

    def source(self, number: int) -> str | np.ndarray:
        """A path, or pixels (H, W, C); ImageError where an image inside a file cannot be read."""
        _, dataset, index = self._place(number)
        return dataset.name_of(index) if isinstance(dataset, FileDataset) else dataset.read(index)

    def digest(self) -> str:
        """Equal where the same images, by name, come in the same order."""
        digest = hashlib.blake2b(digest_size=16)
        for path, split, label in self:
            digest.update(f"{path}\0{split}\0{label}\n".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def __iter__(self) -> Iterator[ImageInfo]:
        return (self.about(number) for number in range(len(self)))

    def _place(self, number: int) -> tuple[str | None, Dataset, int]:
        for split, dataset in self.parts:
            if number < len(dataset):
                return split, dataset, number
            number -= len(dataset)
        raise IndexError(number)


def open_items(source: str, *, path: str | None = None, allow_cut: bool = False, allow_outside: bool = False) -> Items:
    """All images of a folder, by their paths; or all splits of anything else that `open_data` opens."""
    folder = Path(source).expanduser()
    if path is None and folder.is_dir():
        folder = folder.resolve()
        if files := Strings(sorted(images_under(folder))):
            return Items(str(folder), [(None, FileDataset(files, np.zeros(len(files), dtype=np.int64), []))], folder)
    name, splits = open_splits(source, SourceReading(allow=Allow(cut=allow_cut, outside=allow_outside)), path=path)
    parts: list[tuple[str | None, Dataset]] = [
        (split, dataset)
        for split, dataset in (("train", splits.train), ("val", splits.val), ("test", splits.test))
        if dataset is not None and len(dataset)
    ]
    if not parts:
        raise DataError(f"{source}: no images in it.")
    return Items(name, parts, notes=splits.notes)
