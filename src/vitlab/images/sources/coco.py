"""COCO JSON: boxes, polygons and run lengths of objects, or panoptic maps with the classes of their segments.

    DATA/annotations/instances_train2017.json  DATA/train2017/*.jpg      # as COCO is published
    DATA/train/_annotations.coco.json          DATA/train/*.jpg          # a file in the folder of each split
    DATA/annotations.json                      DATA/images/*.jpg         # one set; part of it becomes val
    DATA/annotations/panoptic_val2017.json     DATA/annotations/panoptic_val2017/*.png

"crowd" (iscrowd) regions are neither learned nor counted as mistakes; pixels of no segment are void.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.errors import DataError, ImageError
from vitlab.images.regions import VOID, AnnotationError, Regions, read_counts
from vitlab.images.sources.dataset import SPLIT_NAMES, Allow, Marks, Strings, how_to_allow, refuse_special
from vitlab.images.sources.folder import subfolders
from vitlab.images.sources.marks import (
    BadAnnotations,
    Box,
    ImageObjects,
    Marked,
    MarkedSplit,
    check_different,
    checked_box,
    checked_polygon,
    polygon_box,
    read_objects,
    split_of,
)
from vitlab.images.sources.masks import read_ids
from vitlab.images.sources.table import read_bytes
from vitlab.parsing import is_object, parse_json

JSONObject = dict[str, Any]


@dataclass(frozen=True)
class CocoImage:
    """An image that a file lists."""

    name: str
    size: tuple[int, int]  # (H, W)


KINDS = ("instances", "panoptic", "")  # of annotations/KIND_train2017.json, the most wanted first
PLAIN = ("annotations.json", "_annotations.coco.json", "instances.json", "coco.json")
HEAD = 1 << 16  # bytes that tell a COCO file from other JSON


def open_coco(path: Path, bad: BadAnnotations, allow: Allow) -> Marked | None:
    """A folder, or one file; None: another kind."""
    files = annotation_files(path)
    if not files:
        return None
    read = {split: _read(file) for split, file in files.items()}
    categories = _categories(files, read)
    numbers = {number: i for i, number in enumerate(categories)}
    things = {number for number, category in categories.items() if category.get("isthing", 1)}
    panoptic = _panoptic(read["train"])
    splits, empty = {}, 0
    for split, content in read.items():
        images = _images(files[split], content)
        folder = _image_folder(files[split], images)
        names = _paths(files[split], folder, images, allow)
        if panoptic:
            records = _segments(files[split], content, images, numbers, things, bad)
            reader = read_panoptic
        else:
            objects = _objects(files[split], content, images, numbers, bad)
            records, reader = {number: found.to_json() for number, found in objects.items()}, read_objects
            empty += sum(not found.labels for found in objects.values())
        splits[split] = MarkedSplit([names[number] for number in records], Marks(Strings(records.values()), reader))
    notes = [f"{empty:,} images have no annotations, and count as images without objects."] if empty else []
    classes = [str(category["name"]) for category in categories.values()]
    if panoptic:
        return Marked(classes, splits, ("semantic", "instance", "detect"), bad, notes)
    outlined = any(is_object(a) and a.get("segmentation") for a in read["train"].get("annotations", ()))
    return Marked(classes, splits, ("instance", "detect", "semantic") if outlined else ("detect",), bad, notes)


# ---- files


def annotation_files(path: Path) -> dict[str, Path]:
    """Split -> its COCO file; empty where there is none."""
    if path.is_file():
        return {"train": path} if path.suffix.lower() == ".json" and is_coco(path) else {}
    files: dict[str, Path] = {}
    inside = subfolders(path)
    if "annotations" in inside:
        by_name = {file.stem: file for file in sorted(inside["annotations"].glob("*.json"))}
        for kind in KINDS:
            ours = {stem.removeprefix(kind).lstrip("_"): stem for stem in by_name if stem.startswith(kind)}
            by_split = {split: by_name[stem] for name, stem in ours.items() if (split := split_of(name))}
            files = {split: file for split, file in by_split.items() if is_coco(file)}
            if "train" in files:
                return files
    for name in PLAIN:
        for split, folder in [(SPLIT_NAMES.get(n.lower()), f) for n, f in inside.items()]:
            if split is not None and (folder / name).is_file() and is_coco(folder / name):
                files[split] = folder / name
        if not files and (path / name).is_file() and is_coco(path / name):
            files["train"] = path / name
    return files


def is_coco(path: Path) -> bool:
    """By its beginning: a JSON object whose first keys are COCO's. A file of another order is read whole."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD)
    except OSError:
        return False
    if not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
        return False
    keys = [b'"images"', b'"annotations"', b'"categories"']
    if len(head) < HEAD:
        return all(key in head for key in keys)
    return any(key in head for key in keys)


def _read(path: Path) -> JSONObject:
    try:
        content = parse_json(read_bytes(path))
    except ValueError as error:
        raise DataError(f"{path}: is no JSON ({error}).") from None
    if not is_object(content) or not all(isinstance(content.get(key), list) for key in ("images", "annotations")):
        raise DataError(f"{path}: is no COCO JSON: expected an object with the lists images, annotations, categories.")
    return content


def _panoptic(content: JSONObject) -> bool:
    return any(is_object(annotation) and "segments_info" in annotation for annotation in content["annotations"])


def _categories(files: dict[str, Path], read: dict[str, JSONObject]) -> dict[int, JSONObject]:
    """id -> category, of train; other splits may not have others."""
    by_split: dict[str, dict[int, JSONObject]] = {}
    for split, content in read.items():
        listed = content.get("categories")
        if not isinstance(listed, list) or not listed:
            raise DataError(f"{files[split]}: has no categories. COCO JSON lists them: {{id: 1, name: cat}}.")
        try:
            by_split[split] = {int(c["id"]): c for c in sorted(listed, key=lambda c: int(c["id"])) if str(c["name"])}
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{files[split]}: every category needs an id and a name.") from None
    names = {number: str(category["name"]) for number, category in by_split["train"].items()}
    check_different(files["train"], list(names.values()))
    for split, categories in by_split.items():
        for number, category in categories.items():
            if names.get(number) != str(category["name"]):
                raise DataError(
                    f"{files[split]}: category {number} is {category['name']!r}, and in {files['train'].name} it is "
                    f"{names.get(number, 'none')!r}. Both files must list the same categories."
                )
    return by_split["train"]


def _images(path: Path, content: JSONObject) -> dict[int, CocoImage]:
    """id -> image; every one has a file name and a size."""
    images: dict[int, CocoImage] = {}
    for entry in content["images"]:
        try:
            number, height, width = int(entry["id"]), int(entry["height"]), int(entry["width"])
            name = str(entry["file_name"])
        except (KeyError, TypeError, ValueError):
            raise DataError(f"{path}: image {entry!r:.80}: needs id, file_name, height and width.") from None
        if number in images:
            raise DataError(f"{path}: two images have the id {number}.")
        images[number] = CocoImage(name, (height, width))
    if not images:
        raise DataError(f"{path}: lists no images.")
    return images


def _image_folder(path: Path, images: dict[int, CocoImage]) -> Path:
    """Where the first image lies: beside the file, in images/, in a folder named after the split, as COCO has it."""
    name = next(iter(images.values())).name
    split = path.stem.rpartition("_")[2]
    above = path.parent.parent if path.parent.name == "annotations" else path.parent
    places = [path.parent, above, *(above / middle for middle in ("images", split, f"images/{split}"))]
    for place in places:
        if (place / name).is_file():
            return place
    raise DataError(f"{path}: its first image {name} is not in {', '.join(map(str, dict.fromkeys(places)))}.")


def _paths(path: Path, folder: Path, images: dict[int, CocoImage], allow: Allow) -> dict[int, str]:
    paths = {number: folder / image.name for number, image in images.items()}
    for file in paths.values() if not allow.outside else ():
        if ".." in file.parts[len(folder.parts) :] or not file.is_relative_to(folder):
            raise DataError(f"{path}: names {file}, outside {folder}. To allow it: {how_to_allow('outside')}.")
    return {number: str(file) for number, file in paths.items()}


# ---- objects


def _objects(
    path: Path,
    content: JSONObject,
    images: dict[int, CocoImage],
    numbers: dict[int, int],
    bad: BadAnnotations,
) -> dict[int, ImageObjects]:
    """Image id -> its objects."""
    objects = {number: ImageObjects(image.size) for number, image in images.items()}
    seen: Counter[int] = Counter()
    for place, annotation in enumerate(content["annotations"]):
        image = annotation.get("image_id") if is_object(annotation) else None
        if not isinstance(image, int) or image not in objects:
            bad.add(f"{path.name}, annotation {place}", f"belongs to image_id {image!r:.20}, which is not listed")
            continue
        seen[image] += 1
        try:
            label = numbers.get(annotation.get("category_id", -1))
            if label is None:
                raise AnnotationError(f"category_id {annotation.get('category_id')!r:.20} is not listed")
            box, shape = _outline(annotation, images[image].size)
            objects[image].add(label, box, shape, crowd=bool(annotation.get("iscrowd", 0)))
        except (ValueError, TypeError, OverflowError) as error:
            bad.add(f"{images[image].name}, object {seen[image]}", str(error))
    return objects


def _outline(annotation: JSONObject, size: tuple[int, int]) -> tuple[Box, object]:
    """The box and the outline of an object; an AnnotationError says what is wrong."""
    segmentation, box = annotation.get("segmentation"), annotation.get("bbox")
    shape: object = None
    if is_object(segmentation):
        shape = {"counts": _checked_counts(segmentation, size)}
    elif segmentation:
        if not isinstance(segmentation, list):
            raise AnnotationError(f"segmentation {segmentation!r:.40} is neither polygons nor run lengths")
        shape = [checked_polygon(part) for part in segmentation]
        outline = polygon_box(shape)
        checked_box(outline, size)
        box = box if box is not None else [outline[0], outline[1], outline[2] - outline[0], outline[3] - outline[1]]
    if not isinstance(box, list) or len(box) != 4:
        raise AnnotationError(f"bbox {box!r:.40} must be [left, top, width, height]")
    x, y, w, h = (float(side) for side in box)
    return checked_box((x, y, x + w, y + h), size), shape


def _checked_counts(segmentation: JSONObject, size: tuple[int, int]) -> object:
    counts = segmentation.get("counts")
    values = read_counts(counts) if isinstance(counts, str) else counts
    if not isinstance(values, list) or not all(isinstance(n, int) and n >= 0 for n in values):
        raise AnnotationError("run lengths must be whole numbers, or COCO's compressed text")
    stated = segmentation.get("size")
    if (isinstance(stated, list) and tuple(stated) != size) or sum(values) != math.prod(size):
        raise AnnotationError(f"run lengths of {sum(values):,} pixels for an image of {size[1]} x {size[0]}")
    return counts


# ---- panoptic maps


def read_panoptic(record: str, size: tuple[int, int]) -> Regions:
    """A RegionReader: the path of a map, and id, class, thing and crowd of its segments."""
    path, segments = json.loads(record)
    colours = read_ids(path, size)
    if colours.ndim != 3:
        raise ImageError(f"its panoptic map {path} holds no colours: an id is red + 256 green + 65536 blue.")
    ids = colours.astype(np.int64) @ np.array([1, 1 << 8, 1 << 16])
    listed = np.array(segments, dtype=np.int64).reshape(-1, 4)  # (s, 4): id, class, thing, crowd
    present = np.unique(ids)
    if unknown := set(present.tolist()) - set(listed[:, 0].tolist()) - {0}:
        raise ImageError(f"its panoptic map {path} has the segment {min(unknown)}, which segments_info does not list.")
    semantic = np.full(ids.shape, VOID, dtype=np.uint8)
    for number, label, _, _ in listed:
        semantic[ids == number] = label
    things = listed[(listed[:, 2] == 1) & np.isin(listed[:, 0], present)]
    objects = Regions.of_ids(ids, things[:, 0], things[:, 1], things[:, 3].astype(bool))
    return Regions(size, objects.labels, objects.boxes, objects.crowd, objects.shapes, semantic)


def _segments(
    path: Path,
    content: JSONObject,
    images: dict[int, CocoImage],
    numbers: dict[int, int],
    things: set[int],
    bad: BadAnnotations,
) -> dict[int, str]:
    """Image id -> the record of its map; images without one are bad."""
    folder, records = path.with_suffix(""), {}
    if not folder.is_dir():
        raise DataError(f"{path}: its panoptic maps are expected in {folder}, which is no folder.")
    for annotation in content["annotations"]:
        image = annotation.get("image_id") if is_object(annotation) else None
        if image in images:
            name = Path(str(annotation.get("file_name"))).name
            segments = list(_listed(annotation, images[image].name, numbers, things, bad))
            records[image] = json.dumps([str(folder / name), segments])
    for number in images.keys() - records.keys():
        bad.unmarked.append(images[number].name)
    if not records:
        raise DataError(f"{path}: none of its images has a panoptic map.")
    return records


def _listed(
    annotation: JSONObject, image: str, numbers: dict[int, int], things: set[int], bad: BadAnnotations
) -> Iterator[list[int]]:
    """id, class (void, where it is not known), thing and crowd of every segment."""
    for segment in annotation.get("segments_info") or ():
        try:
            number, category = int(segment["id"]), int(segment["category_id"])
        except (KeyError, TypeError, ValueError):
            bad.add(image, f"segment {segment!r:.60} needs id and category_id")
            continue
        if category not in numbers:
            bad.add(f"{image}, segment {number}", f"category_id {category} is not listed")
        listed = category in numbers
        thing = int(listed and category in things)
        yield [number, numbers[category] if listed else VOID, thing, int(bool(segment.get("iscrowd", 0)))]
