"""What readers of masks and boxes share: which images belong to which marks, objects as records, and bad annotations.

An object is a class, a box and, where it is known, an outline. The objects of one image are stored as one line of JSON,
and become `Regions` when the image is read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.errors import DataError, ImageError
from vitlab.images.regions import AnnotationError, Polygons, Regions, RunLengths, Shape, read_counts
from vitlab.images.sources.dataset import SPLIT_NAMES, Marks, RegionKind, refuse_special
from vitlab.images.sources.folder import images_under, subfolders
from vitlab.images.sources.table import decode_text, read_bytes
from vitlab.parsing import is_object

SLACK = 0.01  # of an image's side, that a box or polygon may reach outside by rounding
MOST_POINTS = 100_000  # of one polygon
MOST_YAML = 4 << 20  # bytes; a table of class names is far below
CONFIGS = ("config.yaml", "data.yaml", "dataset.yaml", "classes.json")
VOID_NAMES = ("void", "ignore", "ignored", "unlabeled", "unlabelled")  # classes that mean: not known
SHOWN = 20  # bad annotations in one message

Box = tuple[float, float, float, float]  # left, top, right, bottom
StoredShape = list[list[float]] | dict[str, str | list[int]]  # COCO's polygons, or its run lengths


@dataclass
class BadAnnotations:
    """Annotations that cannot be used: where they are -> what is wrong. They are left out, up to a limit."""

    limit: int
    problems: dict[str, str] = field(default_factory=dict)
    unmarked: list[str] = field(default_factory=list)  # images without a mask, which may be meant: they are left out

    def add(self, place: str, why: str) -> None:
        self.problems[place] = why

    def lines(self, most: int) -> list[str]:
        return [f"{place}: {why}" for place, why in list(self.problems.items())[:most]]

    def check(self, source: str) -> None:
        if len(self.problems) <= self.limit:
            return
        more = len(self.problems) - SHOWN
        listed = "\n  ".join([*self.lines(SHOWN), *([f"and {more:,} more"] if more > 0 else [])])
        raise DataError(
            f"{source}: {len(self.problems):,} annotations are wrong, more than the {self.limit:,} that may be left "
            f"out:\n  {listed}\nMend them, or allow more: data.max_bad_annotations={len(self.problems)} (vitlab train "
            "and data), --max-unreadable (vitlab eval)."
        )

    def notes(self) -> list[str]:
        notes: list[str] = []
        if self.problems:
            notes.append(f"{len(self.problems):,} annotations are wrong and left out: {_few(self.lines(4))}")
        if self.unmarked:
            notes.append(f"{len(self.unmarked):,} images have no mask and are left out: {_few(self.unmarked)}")
        return notes


def _few(texts: Sequence[str], most: int = 3) -> str:
    return "; ".join(texts[:most]) + ("; ..." if len(texts) > most else "")


@dataclass(frozen=True)
class MarkedSplit:
    """The images of a split, and what is marked on each."""

    images: list[str]
    marks: Marks


@dataclass(frozen=True)
class Marked:
    """What a reader of masks or boxes found."""

    classes: list[str]
    splits: dict[str, MarkedSplit]
    kinds: tuple[RegionKind, ...]  # what can be learned of it, the most detailed first
    bad: BadAnnotations
    notes: list[str] = field(default_factory=list)


# ---- which files belong together


def split_of(name: str) -> str | None:
    """The split that a folder's or file's name means: train2017 is train."""
    return SPLIT_NAMES.get(re.sub(r"[\d_.-]+$", "", name).lower())


def paired_folders(path: Path, marks: str) -> dict[str, tuple[Path, Path]]:
    """Split -> its folders of images and of marks: train/images beside train/masks, or images/train beside
    masks/train; without splits all is train. Empty where the folder is laid out in another way.
    """
    inside = subfolders(path)
    if "images" in inside and marks in inside:
        return paired_splits(inside["images"], inside[marks])
    pairs: dict[str, tuple[Path, Path]] = {}
    for name, folder in inside.items():
        deeper, split = subfolders(folder), split_of(name)
        if split is not None and "images" in deeper and marks in deeper:
            if split in pairs:
                raise DataError(
                    f"{path}: {pairs[split][0].parent.name} and {name} both mean {split}. Keep one of them."
                )
            pairs[split] = deeper["images"], deeper[marks]
    return pairs


def paired_splits(images: Path, marks: Path) -> dict[str, tuple[Path, Path]]:
    """images/train with masks/train, where the folders are divided so; otherwise all is train."""
    by_name = subfolders(marks)
    pairs = {split_of(name): (folder, by_name[name]) for name, folder in subfolders(images).items() if name in by_name}
    divided = {split: pair for split, pair in pairs.items() if split is not None}
    return divided if "train" in divided else {"train": (images, marks)}


def files_by_stem(folder: Path, paths: Iterable[str]) -> dict[str, str]:
    """The path within the folder without its ending -> the file."""
    return {Path(path).relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def images_with_marks(images: Path, marks: Path, bad: BadAnnotations) -> tuple[list[str], list[str]]:
    """Image files and the mask of each; images without one are left out."""
    masks = files_by_stem(marks, images_under(marks))
    kept: list[str] = []
    matched: list[str] = []
    for stem, image in files_by_stem(images, images_under(images)).items():
        if mask := masks.get(stem):
            kept.append(image)
            matched.append(mask)
        else:
            bad.unmarked.append(image)
    if not kept:
        raise DataError(f"{images}: none of its images has a mask of the same name in {marks}.")
    return kept, matched


# ---- class names


def read_config(folder: Path) -> tuple[Path, dict[Any, Any]] | None:
    """The table that names a folder's classes, and perhaps its splits."""
    for name in CONFIGS:
        refuse_special(folder / name)
        if (folder / name).is_file():
            return folder / name, read_yaml(folder / name)
    return None


def read_yaml(path: Path) -> dict[Any, Any]:
    """A table in YAML, or in JSON, which is YAML too."""
    import yaml

    data = read_bytes(path)
    if len(data) > MOST_YAML:
        raise DataError(f"{path}: {len(data):,} bytes are too many for a table of classes and folders.")
    try:
        values = yaml.safe_load(decode_text(str(path), data))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DataError(f"{path}: is no YAML ({str(error).partition(chr(10))[0]:.120}).") from None
    if not is_object(values):
        raise DataError(f"{path}: must be a table, e.g. names: {{0: cat, 1: dog}}.")
    return values


def numbered_names(path: Path, names: object) -> dict[int, str]:
    """{0: "cat"} or ["cat"] -> number -> name."""
    pairs = names.items() if is_object(names) else enumerate(names) if isinstance(names, list) else ()
    try:
        numbered = {int(number): str(name).strip() for number, name in pairs}
    except (TypeError, ValueError):
        numbered = {}
    if not numbered or min(numbered) < 0:
        raise DataError(f"{path}: names must be numbers and names, e.g. {{0: cat, 1: dog}}.")
    check_different(path, list(numbered.values()))
    return dict(sorted(numbered.items()))


def check_different(path: Path, names: Sequence[str]) -> None:
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: names the class {repeated!r} twice. Each needs a name of its own.")


# ---- objects


@dataclass
class ImageObjects:
    """The objects of one image, as they are collected."""

    size: tuple[int, int] | None  # (H, W); None: coordinates are shares of the image's sides
    labels: list[int] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    crowd: list[int] = field(default_factory=list)
    shapes: list[object] = field(default_factory=list)  # None, [[x, y, x, y, ...], ...] or {"counts": ...}

    def add(self, label: int, box: Box, shape: object = None, *, crowd: bool = False) -> None:
        self.labels.append(label)
        self.boxes.append(box)
        self.crowd.append(int(crowd))
        self.shapes.append(shape)

    def to_json(self) -> str:
        return json.dumps([self.size, self.labels, self.boxes, self.crowd, self.shapes], separators=(",", ":"))


def read_objects(record: str, size: tuple[int, int]) -> Regions:
    """A RegionReader of what `ImageObjects.to_json` wrote."""
    stated, labels, boxes, crowd, shapes = json.loads(record)
    if stated is not None and tuple(stated) != size:
        raise ImageError(
            f"is {size[1]} x {size[0]} pixels, and its annotations are for {stated[1]} x {stated[0]}.",
            "Annotate the image again, or put the one back that was annotated.",
        )
    scale = np.array([size[1], size[0]]) if stated is None else np.ones(2)
    outlines = tuple(_shape(shape, scale) for shape in shapes if shape is not None)
    corners = np.array(boxes, dtype=np.float64).reshape(-1, 4) * np.tile(scale, 2)
    return Regions(
        size,
        np.array(labels, dtype=np.int64),
        corners.clip(0, [size[1], size[0]] * 2),
        np.array(crowd, dtype=bool),
        outlines if len(outlines) == len(labels) else None,
    )


def _shape(shape: StoredShape, scale: np.ndarray) -> Shape:
    if isinstance(shape, dict):
        counts = shape["counts"]
        return RunLengths(np.array(read_counts(counts) if isinstance(counts, str) else counts, dtype=np.int64))
    return Polygons(tuple(np.array(part, dtype=np.float64).reshape(-1, 2) * scale for part in shape))


def checked_box(box: Sequence[float], size: tuple[float, float]) -> Box:
    """left, top, right, bottom within an image of this (H, W), cut off where they reach outside by rounding; an
    AnnotationError says what is wrong.
    """
    H, W = size
    left, top, right, bottom = box
    shown = f"box {left:.6g}, {top:.6g}, {right:.6g}, {bottom:.6g}"
    if not all(math.isfinite(side) for side in box):
        raise AnnotationError(f"{shown} is not finite")
    slack_x, slack_y = max(SLACK * W, 2 * (W > 1)), max(SLACK * H, 2 * (H > 1))  # 2 pixels, where these are pixels
    if left < -slack_x or top < -slack_y or right > W + slack_x or bottom > H + slack_y:
        raise AnnotationError(f"{shown} reaches outside the image" + (f" of {W:g} x {H:g} pixels" if W > 1 else ""))
    left, top, right, bottom = max(left, 0.0), max(top, 0.0), min(right, W), min(bottom, H)
    if right <= left or bottom <= top:
        raise AnnotationError(f"{shown} has no area")
    return left, top, right, bottom


def checked_polygon(numbers: object) -> list[float]:
    """x, y, x, y, ...; an AnnotationError says what is wrong."""
    if not isinstance(numbers, list) or not all(
        isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n) for n in numbers
    ):
        raise AnnotationError("a polygon must be a list of finite numbers")
    if len(numbers) % 2:
        raise AnnotationError(f"a polygon of {len(numbers)} numbers: x and y take turns")
    if len(numbers) < 6:
        raise AnnotationError(f"a polygon of {len(numbers) // 2} points: it needs 3 or more")
    if len(numbers) > 2 * MOST_POINTS:
        raise AnnotationError(f"a polygon of {len(numbers) // 2:,} points: more than {MOST_POINTS:,}")
    return [float(n) for n in numbers]


def polygon_box(parts: Sequence[Sequence[float]]) -> Box:
    xs = [x for part in parts for x in part[0::2]]
    ys = [y for part in parts for y in part[1::2]]
    return min(xs), min(ys), max(xs), max(ys)
