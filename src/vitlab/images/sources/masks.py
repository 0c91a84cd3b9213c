"""Folders of masks: a class for every pixel, or a number for each object.

    DATA/images/a.jpg  DATA/masks/a.png          # class numbers (grey or palette), or a colour for each class
    DATA/images/a.jpg  DATA/instances/a.png      # 0: background, 1, 2, ...: one object each; 8 or 16 bits
    DATA/config.yaml                             # classes: {0: road, 1: car}; or colours: {road: [128, 64, 128]}

Splits are folders, above (train/images, train/masks) or below (images/train, masks/train); config.yaml may name them.
In maps of class numbers 255 is void, and so are classes named void, ignore or unlabeled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.errors import DataError, ImageError
from vitlab.images.bands import naming
from vitlab.images.read import FORMATS, MAX_PIXELS, decode, open_file
from vitlab.images.regions import VOID, Regions
from vitlab.images.sources.dataset import Allow, Marks, Strings, how_to_allow
from vitlab.images.sources.labels import read_classes
from vitlab.images.sources.marks import (
    VOID_NAMES,
    BadAnnotations,
    Marked,
    MarkedSplit,
    check_different,
    images_with_marks,
    numbered_names,
    paired_folders,
    read_config,
    split_of,
)
from vitlab.parsing import is_object, is_sequence

OBJECT = "object"  # the class of numbered objects that have no name
NUMBERS = 1 << 16  # of 16 bits
MOST_CLASSES = VOID  # a map of classes is of 8 bits


@dataclass(frozen=True)
class ClassTable:
    """Which class a value of a mask is: a number, or a colour as 0xRRGGBB."""

    classes: tuple[str, ...]
    values: tuple[int, ...]  # of each class
    void: tuple[int, ...] = ()  # other values, that belong to no class
    colours: bool = False
    binary: bool = False  # masks of 0 and 255: 255 is the second class, and not void

    def __call__(self, record: str, size: tuple[int, int]) -> Regions:
        """A RegionReader: `record` is the path of a mask."""
        ids = read_ids(record, size)
        if (ids.ndim == 3) != self.colours:
            holds, others = ("colours", "class numbers")[:: 1 if ids.ndim == 3 else -1]
            raise ImageError(f"its mask {record} holds {holds}, where others hold {others}.")
        codes = colour_codes(ids) if self.colours else ids
        stated = np.array(self.values + self.void)
        order = np.argsort(stated)
        places = order[np.searchsorted(stated[order], codes).clip(max=len(stated) - 1)]
        wrong = (stated[places] != codes) & (self.colours | self.binary | (codes != VOID))
        if wrong.any():
            raise ImageError(f"its mask {record} holds {self.shown(int(codes[wrong][0]))}, which no class has.")
        numbers = np.append(np.arange(len(self.values)), [VOID] * len(self.void)).astype(np.uint8)
        return Regions.of_map(np.where(stated[places] == codes, numbers[places], np.uint8(VOID)))

    def shown(self, value: int) -> str:
        return f"colour #{value:06x}" if self.colours else f"class number {value}"


def read_instances(record: str, size: tuple[int, int]) -> Regions:
    """A RegionReader of maps of object numbers: `record` is the path of one."""
    ids = read_ids(record, size)
    if ids.ndim != 2:
        raise ImageError(f"its map {record} holds colours. Save the objects' numbers as a grey PNG of 16 bits.")
    numbers = np.unique(ids)
    numbers = numbers[numbers > 0]
    none = np.zeros(len(numbers), dtype=np.int64)
    return Regions.of_ids(ids, numbers, none, none.astype(bool))


def read_ids(path: str, size: tuple[int, int] | None = None) -> np.ndarray:
    """(H, W) numbers, or (H, W, 3) uint8 colours, as stored; `size`: that of the image it belongs to."""
    with naming(path), open_file(path) as stream:
        ids = decode(stream, MAX_PIXELS, FORMATS, _as_stored)
    if size is not None and ids.shape[:2] != size:
        raise ImageError(f"is {size[1]} x {size[0]} pixels, and its mask {path} is {ids.shape[1]} x {ids.shape[0]}.")
    return ids


def _as_stored(image: Image.Image) -> np.ndarray:
    if image.mode in ("LA", "PA", "RGBA", "CMYK", "YCbCr"):
        image = image.convert("L" if image.mode == "LA" else "RGB")
    ids = np.asarray(image)
    if ids.dtype == bool:
        return ids.astype(np.uint8)
    if ids.dtype.kind not in "iu" or (ids.size and not 0 <= ids.min() <= ids.max() < NUMBERS):
        raise ImageError(f"holds {ids.dtype} values from {ids.min()} to {ids.max()}: expected 0 to {NUMBERS - 1}.")
    return ids


def colour_codes(colours: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 -> (H, W): 0xRRGGBB"""
    return colours.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])


# ---- folders


def open_masks(path: Path, bad: BadAnnotations, allow: Allow) -> Marked | None:
    """A folder of images and of masks of classes; None: another kind."""
    config = read_config(path)
    pairs = paired_folders(path, "masks") or (_configured(*config, allow) if config is not None else {})
    if not pairs:
        return None
    splits, records = _collect(pairs, bad)
    names = read_classes(path / "classes.txt")
    notes: list[str] = []
    if config is not None and (stated := config[1].get("classes", config[1] if config[0].suffix == ".json" else None)):
        table = _stated_table(config[0], stated)
    elif names is not None:
        table = _without_void(dict(enumerate(names)), {})
    else:
        table = measured_table([mask for masks in records.values() for mask in masks])
        notes.append(
            f"{len(table.classes)} classes, by the {'colours' if table.colours else 'numbers'} in the masks. "
            f"{path / 'classes.txt'} gives them names, one a line."
        )
    if table.void:
        notes.append(f"pixels of {', '.join(map(table.shown, table.void))} are void: not learned and not counted.")
    marked = {split: MarkedSplit(splits[split], Marks(Strings(records[split]), table)) for split in splits}
    return Marked(list(table.classes), marked, ("semantic",), bad, notes)


def open_instances(path: Path, bad: BadAnnotations) -> Marked | None:
    """A folder of images and of maps of object numbers, all of one class; None: another kind."""
    pairs = paired_folders(path, "instances")
    if not pairs:
        return None
    splits, records = _collect(pairs, bad)
    classes = read_classes(path / "classes.txt") or [OBJECT]
    if len(classes) > 1:
        raise DataError(
            f"{path / 'classes.txt'}: names {len(classes)} classes, and maps of object numbers have one. Use COCO JSON "
            "or YOLO text for objects of several classes."
        )
    marked = {split: MarkedSplit(splits[split], Marks(Strings(records[split]), read_instances)) for split in splits}
    return Marked(classes, marked, ("instance", "detect", "semantic"), bad)


def _collect(
    pairs: dict[str, tuple[Path, Path]], bad: BadAnnotations
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """By split: image files, and the mask of each."""
    images: dict[str, list[str]] = {}
    masks: dict[str, list[str]] = {}
    for split, folders in pairs.items():
        images[split], masks[split] = images_with_marks(*folders, bad)
    return images, masks


def _configured(path: Path, config: Mapping[object, object], allow: Allow) -> dict[str, tuple[Path, Path]]:
    """The folders that a config.yaml names for each split: train: {images: ..., masks: ...}"""
    pairs: dict[str, tuple[Path, Path]] = {}
    for name, value in config.items():
        split = split_of(str(name))
        if split is None or not is_object(value) or not {"images", "masks"} <= value.keys():
            continue
        folders = [inside(path, str(value[key]), allow) for key in ("images", "masks")]
        if missing := [folder for folder in folders if not folder.is_dir()]:
            raise DataError(f"{path}: {name} names {missing[0]}, which is no folder.")
        pairs[split] = folders[0], folders[1]
    return pairs


def inside(config: Path, name: str, allow: Allow) -> Path:
    """A path that a config names, relative to it; the folder above it is as far as it may lead."""
    path = Path(os.path.normpath(config.parent / name))
    if not allow.outside and not path.resolve().is_relative_to(config.parent.resolve().parent):
        raise DataError(f"{config}: names {name}, outside the folder above it. To allow it: {how_to_allow('outside')}.")
    return path


# ---- tables


def _stated_table(path: Path, classes: object) -> ClassTable:
    """{0: road, 1: car}, [road, car], or {road: [128, 64, 128]}."""
    colours = is_object(classes) and all(is_sequence(value) for value in classes.values())
    if not (is_object(classes) and classes and colours):
        return _without_void(numbered_names(path, classes), {})
    codes: dict[str, int] = {}
    for name, colour in classes.items():
        if len(colour) != 3 or not all(isinstance(part, int) and 0 <= part <= 255 for part in colour):
            raise DataError(f"{path}: the colour of {name!r} is {colour!r:.40}: expected [red, green, blue] in 0..255.")
        codes[str(name)] = colour[0] << 16 | colour[1] << 8 | colour[2]
    if len(set(codes.values())) < len(codes):
        raise DataError(f"{path}: two classes have the same colour. Each needs one of its own.")
    check_different(path, list(codes))
    return _without_void({code: name for name, code in codes.items()}, {"colours": True})


def _without_void(named: dict[int, str], options: dict[str, bool]) -> ClassTable:
    classes = {value: name for value, name in named.items() if name.lower() not in VOID_NAMES}
    if not 1 <= len(classes) <= MOST_CLASSES:
        raise DataError(f"{len(classes)} classes of pixels: expected 1 to {MOST_CLASSES}.")
    void = tuple(value for value in named if value not in classes)
    return ClassTable(tuple(classes.values()), tuple(classes), void, **options)


def measured_table(paths: Iterable[str]) -> ClassTable:
    """The values that occur in masks are the classes; only files that can be read are asked."""
    values: set[int] = set()
    colours = False
    for path in paths:
        try:
            ids = read_ids(path)
        except ImageError:  # named when its image is read
            continue
        colours = colours or ids.ndim == 3
        values.update(np.unique(colour_codes(ids) if ids.ndim == 3 else ids).tolist())
        if len(values) > NUMBERS // 16:
            break
    kind = "colours" if colours else "class numbers"
    if not values:
        raise DataError("none of the masks can be read.")
    if colours and len(values) <= MOST_CLASSES:
        codes = tuple(sorted(values))
        return ClassTable(tuple(f"#{code:06x}" for code in codes), codes, colours=True)
    if values == {0, VOID}:
        return ClassTable(("background", "foreground"), (0, VOID), binary=True)
    if colours or max(values - {VOID}, default=0) >= MOST_CLASSES:
        raise DataError(
            f"the masks hold {len(values):,} or more {kind}, up to {max(values):,}: expected at most {MOST_CLASSES}. "
            "Masks must be saved without loss, as PNG. Numbers of objects go into a folder instances/, not masks/."
        )
    count = max(values - {VOID}, default=0) + 1
    return ClassTable(tuple(map(str, range(count))), tuple(range(count)))
