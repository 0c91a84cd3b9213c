"""Reads every image once: its size, digests of its contents, and thumbnails that copies are recognised by."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from PIL import Image

from vitlab.errors import ImageError
from vitlab.images.digest import pixel_digest
from vitlab.images.read import Source
from vitlab.images.sources.dataset import Dataset

SIDE = 64  # of a thumbnail, which holds the whole image
COLOURS = 8  # rows and columns of the coarse colours of an image
CHUNK = 64  # images between two reports of progress


class Joined:
    """The splits of a dataset as one, read one by one."""

    images = stored = None  # photos
    groups: np.ndarray | None = None

    def __init__(self, parts: dict[str, Dataset]) -> None:
        self.datasets, self.names = list(parts.values()), list(parts)
        self.starts = np.cumsum([0, *map(len, self.datasets)])
        self.labels = np.concatenate([dataset.labels for dataset in self.datasets])
        self.classes, self.channels = self.datasets[0].classes, self.datasets[0].channels

    def __len__(self) -> int:
        return len(self.labels)

    def split_of(self, index: int) -> str:
        return self.names[self._part(index)]

    def read(self, index: int) -> np.ndarray:
        part = self._part(index)
        return self.datasets[part].read(int(index - self.starts[part]))

    def source(self, index: int) -> Source:
        part = self._part(index)
        return self.datasets[part].source(int(index - self.starts[part]))

    def name_of(self, index: int) -> str:
        part = self._part(index)
        return self.datasets[part].name_of(int(index - self.starts[part]))

    def digest(self, index: int) -> bytes:
        part = self._part(index)
        return self.datasets[part].digest(int(index - self.starts[part]))

    def _part(self, index: int) -> int:
        return int(np.searchsorted(self.starts, index, side="right")) - 1


@dataclass
class ImageContents:
    """What was read of n images; of one that could not be read, zeros and a message."""

    sizes: np.ndarray  # (n, 2): height, width
    thumbnails: np.ndarray  # (n, SIDE, SIDE) uint8, grey
    colours: np.ndarray  # (n, COLOURS, COLOURS, 3) uint8
    content: list[bytes]  # digests of the files
    pixels: list[bytes]  # digests of the decoded images
    unreadable: dict[int, str] = field(default_factory=dict)

    @property
    def readable(self) -> np.ndarray:
        """(n,) bool"""
        return self.sizes[:, 0] > 0


def read_contents(data: Dataset, progress: Callable[[int], object] | None = None) -> ImageContents:
    n = len(data)
    contents = ImageContents(
        np.zeros((n, 2), dtype=np.int32),
        np.zeros((n, SIDE, SIDE), dtype=np.uint8),
        np.zeros((n, COLOURS, COLOURS, 3), dtype=np.uint8),
        [b""] * n,
        [b""] * n,
    )
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as readers:
        for start in range(0, n, CHUNK):
            numbers = range(start, min(start + CHUNK, n))
            list(readers.map(partial(_read, data, contents), numbers))
            if progress is not None:
                progress(len(numbers))
    return contents


def _read(data: Dataset, contents: ImageContents, index: int) -> None:
    try:
        image = data.read(index)  # (H, W, C)
        contents.content[index] = data.digest(index)
    except ImageError as error:
        contents.unreadable[index] = str(error)
        return
    contents.pixels[index] = pixel_digest(image)
    pil = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    contents.thumbnails[index] = np.asarray(pil.convert("L").resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    contents.colours[index] = np.asarray(pil.convert("RGB").resize((COLOURS, COLOURS), Image.Resampling.BOX))
    contents.sizes[index] = image.shape[:2]
