"""What is marked on an image: objects with boxes and masks, or a class for every pixel; and how that moves with it.

    regions = dataset.regions(3)                              # of images/sources/annotated.py
    view = RegionView(preprocess.geometry(regions.size), preprocess.size, mirrored=True)
    view.masks(regions.shapes, regions.size)                  # (n, h, w) bool, as the model sees the image

Pixel (row, column) covers [column, column + 1) x [row, row + 1): boxes and polygons are in these coordinates, and a
mask holds the pixels whose centre lies inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from vitlab.errors import DataError, ImageError
from vitlab.images.preprocess import Geometry

VOID = 255  # in a map of classes: belongs to no class, and is neither learned nor counted
CROSSINGS = 1 << 20  # of rows by edges that are in memory at a time
DIGIT, MORE, SIGN, FIRST = 0x1F, 0x20, 0x10, 48  # of a compressed run length: five bits a character


class AnnotationError(DataError):
    """An annotation that cannot be used: it is named, counted and left out."""


class Shape(Protocol):
    """The outline of one object."""

    def mask(self, size: tuple[int, int]) -> np.ndarray: ...  # (H, W) bool, of an image of this size


@dataclass(frozen=True)
class Polygons:
    """The union of the insides of closed lines, each (p, 2): x, y."""

    parts: tuple[np.ndarray, ...]

    def mask(self, size: tuple[int, int]) -> np.ndarray:
        inside = np.zeros(size, dtype=bool)
        for points in self.parts:
            inside |= fill_polygon(points, size)
        return inside


@dataclass(frozen=True)
class RunLengths:
    """COCO's RLE: lengths of runs of 0 and 1 in turn, down one column after another."""

    counts: np.ndarray  # (r,) int64

    def mask(self, size: tuple[int, int]) -> np.ndarray:
        if (total := int(self.counts.sum())) != size[0] * size[1]:
            raise ImageError(f"run lengths of {total:,} pixels for an image of {size[1]} x {size[0]}.")
        ones = np.arange(len(self.counts)) % 2 == 1
        return np.repeat(ones, self.counts).reshape(size[::-1]).T

    @classmethod
    def of_mask(cls, mask: np.ndarray) -> RunLengths:
        """(H, W) bool"""
        flat = mask.T.ravel()
        edges = np.flatnonzero(np.diff(flat, prepend=False))
        return cls(np.diff(edges, prepend=0, append=mask.size))

    def to_coco(self, size: tuple[int, int]) -> dict[str, object]:
        """As COCO's JSON holds it: {"size": [H, W], "counts": compressed}."""
        return {"size": list(size), "counts": compress_counts(self.counts.tolist())}


@dataclass(frozen=True)
class IdRegion:
    """The pixels that have one number in a map of numbers."""

    ids: np.ndarray  # (H, W)
    number: int

    def mask(self, size: tuple[int, int]) -> np.ndarray:
        assert self.ids.shape == size
        return self.ids == self.number


@dataclass(frozen=True)
class Regions:
    """What is marked on one image of `size` (H, W)."""

    size: tuple[int, int]
    labels: np.ndarray  # (n,) int64
    boxes: np.ndarray  # (n, 4) float64: left, top, right, bottom
    crowd: np.ndarray  # (n,) bool: a group of objects, which is neither learned nor counted as a mistake
    shapes: tuple[Shape, ...] | None = None  # None: boxes alone
    semantic: np.ndarray | None = None  # (H, W) uint8; VOID where no class is known

    @classmethod
    def of_map(cls, semantic: np.ndarray) -> Regions:
        """Classes of pixels, and no objects."""
        none = np.zeros(0, dtype=np.int64)
        size = (semantic.shape[0], semantic.shape[1])
        return cls(size, none, np.zeros((0, 4)), none.astype(bool), (), semantic)

    @classmethod
    def of_ids(cls, ids: np.ndarray, numbers: np.ndarray, labels: np.ndarray, crowd: np.ndarray) -> Regions:
        """Objects that are numbered in a map; a number that the map lacks has an empty box."""
        from scipy.ndimage import find_objects

        size = (ids.shape[0], ids.shape[1])
        order = np.argsort(numbers)
        ranks = np.searchsorted(numbers[order], ids).clip(max=max(len(numbers) - 1, 0))
        slices = (
            find_objects(np.where(numbers[order][ranks] == ids, ranks + 1, 0), len(numbers)) if len(numbers) else []
        )
        boxes = np.zeros((len(numbers), 4))
        for rank, place in enumerate(slices):
            if place is not None:
                rows, columns = place
                boxes[order[rank]] = columns.start, rows.start, columns.stop, rows.stop
        return cls(size, labels, boxes, crowd, tuple(IdRegion(ids, int(number)) for number in numbers))

    @cached_property
    def painted(self) -> np.ndarray:
        """(H, W) uint8: the map of classes; or the objects, the largest below, as classes from 1 on background 0."""
        if self.semantic is not None:
            return self.semantic
        assert self.shapes is not None
        canvas = np.zeros(self.size, dtype=np.uint8)
        areas = (self.boxes[:, 2:] - self.boxes[:, :2]).prod(axis=1)
        for i in np.argsort(-areas, kind="stable"):
            canvas[self.shapes[i].mask(self.size)] = self.labels[i] + 1
        return canvas


@dataclass(frozen=True)
class RegionView:
    """The part of an image that a model sees, (h, w); mirrored left to right, or not."""

    geometry: Geometry
    size: tuple[int, int]
    mirrored: bool = False

    def cut(self, values: np.ndarray, outside: int | bool) -> np.ndarray:
        """(H, W) of the image -> (h, w) of the view: the nearest value; `outside` where the view exceeds the image."""
        g = self.geometry
        rows, down = _nearest(g.original[0], g.resized[0], g.top, self.size[0])
        columns, across = _nearest(g.original[1], g.resized[1], g.left, self.size[1])
        seen = np.where(down[:, None] & across, values[rows[:, None], columns], values.dtype.type(outside))
        return np.ascontiguousarray(seen[:, ::-1] if self.mirrored else seen)

    def masks(self, shapes: Sequence[Shape], size: tuple[int, int]) -> np.ndarray:
        """(n, h, w) bool: what is seen of objects on an image of this (H, W)."""
        seen = np.zeros((len(shapes), *self.size), dtype=bool)
        maps: dict[int, np.ndarray] = {}  # a map of numbers is cut once for all its objects
        for i, shape in enumerate(shapes):
            if isinstance(shape, IdRegion):
                if id(shape.ids) not in maps:
                    maps[id(shape.ids)] = self.cut(shape.ids.astype(np.int64), outside=-1)
                seen[i] = maps[id(shape.ids)] == shape.number
            else:
                seen[i] = self.cut(shape.mask(size), outside=False)
        return seen

    def boxes(self, boxes: np.ndarray) -> np.ndarray:
        """(n, 4) in the image's pixels -> in the view's, cut off at its border."""
        g, (h, w) = self.geometry, self.size
        scale = np.array([g.resized[1] / g.original[1], g.resized[0] / g.original[0]] * 2)
        moved = boxes * scale - np.array([g.left, g.top] * 2)
        if self.mirrored:
            moved = np.stack([w - moved[:, 2], moved[:, 1], w - moved[:, 0], moved[:, 3]], axis=1)
        return moved.clip(0, [w, h, w, h])


def _nearest(original: int, resized: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """For each pixel of a view, which pixel of the image its centre falls on; and whether it is in the image."""
    places = np.floor((np.arange(length) + start + 0.5) * original / resized).astype(np.int64)
    return places.clip(0, original - 1), (places >= 0) & (places < original)


def mask_box(mask: np.ndarray) -> np.ndarray:
    """(H, W) bool -> (4,): left, top, right, bottom; all 0 where it is empty."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    if not len(rows):
        return np.zeros(4)
    return np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1], dtype=np.float64)


def fill_polygon(points: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(p, 2) x, y -> (H, W) bool: pixels whose centre lies inside, by the even-odd rule.

    A row's centre line is crossed by some edges; from each crossing on, inside and outside change places.
    """
    H, W = size
    turns = np.zeros((H, W + 1), dtype=np.uint8)
    for rows, crossings in _crossings(points.astype(np.float64), H):
        columns = np.ceil(crossings - 0.5).clip(0, W).astype(np.int64)  # the first pixel whose centre is to the right
        np.bitwise_xor.at(turns, (rows, columns), 1)
    return np.bitwise_xor.accumulate(turns[:, :W], axis=1).astype(bool)


def _crossings(points: np.ndarray, height: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows, and the x where an edge crosses their centre line; a limited number at a time."""
    ends = np.roll(points, -1, axis=0)
    low, high = np.minimum(points[:, 1], ends[:, 1]), np.maximum(points[:, 1], ends[:, 1])
    first, last = (np.ceil(side - 0.5).clip(0, height).astype(np.int64) for side in (low, high))
    counts = last - first  # rows whose centre lies in [low, high)
    part = (np.cumsum(counts) - 1) // CROSSINGS
    for number in np.unique(part[counts > 0]):
        edges = np.flatnonzero((part == number) & (counts > 0))
        edge = np.repeat(edges, counts[edges])
        starts = np.cumsum(counts[edges]) - counts[edges]
        rows = np.arange(len(edge)) - np.repeat(starts, counts[edges]) + first[edge]
        slope = (ends[edge, 0] - points[edge, 0]) / (ends[edge, 1] - points[edge, 1])
        yield rows, points[edge, 0] + (rows + 0.5 - points[edge, 1]) * slope


def compress_counts(counts: Sequence[int]) -> str:
    """Run lengths as COCO writes them: from the fourth on their difference from the one before the last."""
    text = []
    for i, count in enumerate(counts):
        value, more = count - (counts[i - 2] if i > 2 else 0), True
        while more:
            digit, value = value & DIGIT, value >> 5
            more = value != (-1 if digit & SIGN else 0)
            text.append(chr(FIRST + (digit | (MORE if more else 0))))
    return "".join(text)


def read_counts(text: str) -> list[int]:
    """What `compress_counts` wrote; an AnnotationError where the text is no such thing."""
    counts: list[int] = []
    value, shift = 0, 0
    for character in text:
        code = ord(character) - FIRST
        if not 0 <= code < 64 or shift > 35:
            raise AnnotationError(f"{character!r} is no digit of a run length")
        value |= (code & DIGIT) << shift
        shift += 5
        if code & MORE:
            continue
        if code & SIGN:
            value -= 1 << shift
        value += counts[-2] if len(counts) > 2 else 0
        if value < 0:
            raise AnnotationError("a run length is below 0")
        counts.append(value)
        value, shift = 0, 0
    if shift:
        raise AnnotationError("the run lengths are cut off")
    return counts
