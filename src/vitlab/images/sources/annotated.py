"""Images with masks or boxes: folders of masks or of object numbers, COCO JSON, YOLO text.

splits = open_annotated(Path("nuclei"), "instance", FileOptions())
splits.train.regions(0, splits.train.read(0).shape[:2])
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources.coco import annotation_files, open_coco
from vitlab.images.sources.dataset import REGION_NAMES, Allow, Annotated, FileDataset, RegionKind, Splits
from vitlab.images.sources.folder import subfolders
from vitlab.images.sources.marks import BadAnnotations, Marked, paired_folders, read_config, split_of
from vitlab.images.sources.masks import MOST_CLASSES, open_instances, open_masks
from vitlab.images.sources.yolo import open_yolo
from vitlab.parsing import is_object

BACKGROUND = "background"
RECIPES: dict[RegionKind, str] = {"semantic": "seg_folder", "instance": "instance_folder", "detect": "detect_folder"}


def holds_marks(path: Path) -> bool:
    """Whether this module opens a path."""
    if not path.is_dir():
        return path.is_file() and bool(annotation_files(path))
    names = {*subfolders(path), *(name for folder in _split_folders(path) for name in subfolders(folder))}
    if "images" in names and any(paired_folders(path, marks) for marks in ("masks", "instances", "labels")):
        return True
    return bool(annotation_files(path)) or _configured(path)


def _split_folders(path: Path) -> list[Path]:
    return [folder for name, folder in subfolders(path).items() if split_of(name)]


def _configured(path: Path) -> bool:
    """Whether a config.yaml names the folders: of images for YOLO text, or of images and masks."""
    config = read_config(path)
    if config is None:
        return False
    values = [value for key, value in config[1].items() if split_of(str(key)) == "train"]
    return any((isinstance(v, str) and "names" in config[1]) or (is_object(v) and "masks" in v) for v in values)


def natural_kind(path: Path) -> RegionKind:
    """What is learned of a source if nothing is asked for: the most detailed that it has."""
    return read_marked(path, BadAnnotations(limit=1 << 62), Allow(outside=True)).kinds[0]


def read_marked(path: Path, bad: BadAnnotations, allow: Allow) -> Marked:
    """By the first reader that knows the layout."""
    marked = None
    if path.is_dir():
        marked = open_instances(path, bad) or open_masks(path, bad, allow)
    marked = marked or open_coco(path, bad, allow) or (open_yolo(path, bad, allow) if path.is_dir() else None)
    if marked is None:
        raise DataError(
            f"{path}: no masks or boxes found. Expected are images/ beside masks/, instances/ or labels/ (YOLO text), "
            "with or without folders of splits, or COCO JSON."
        )
    return marked


def open_annotated(path: Path, kind: RegionKind | None, max_bad: int, allow: Allow) -> Splits:
    """The splits of a source. `kind`: what is to be learned; None: the most detailed that it has."""
    bad = BadAnnotations(max_bad)
    marked = read_marked(path, bad, allow)
    bad.check(str(path))
    if kind is not None and kind not in marked.kinds:
        has = ", ".join(REGION_NAMES[k] for k in marked.kinds)
        raise DataError(
            f"{path}: has {has}, and {REGION_NAMES[kind]} was asked for. What it has is learned by: vitlab train "
            f"{RECIPES[marked.kinds[0]]} {path}"
        )
    kind = kind or marked.kinds[0]
    objects = "detect" in marked.kinds and marked.kinds[0] != "semantic"  # panoptic maps are maps of classes already
    classes = [BACKGROUND, *marked.classes] if kind == "semantic" and objects else marked.classes
    if kind == "semantic" and len(classes) > MOST_CLASSES:
        raise DataError(f"{path}: {len(classes)} classes of pixels, more than {MOST_CLASSES}.")
    if "train" not in marked.splits:
        raise DataError(f"{path}: has {', '.join(marked.splits)} and no train. Rename what is to be trained on.")
    parts = {}
    for split, part in marked.splits.items():
        files = FileDataset(part.images, np.zeros(len(part.images), dtype=np.int64), classes)
        parts[split] = Annotated(files, part.marks, kind)
    return Splits(classes, parts["train"], parts.get("val"), parts.get("test"), [*marked.notes, *bad.notes()])
