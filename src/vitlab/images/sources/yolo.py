"""YOLO text: a .txt for each image, a line for each object: class x y width height, or class and a polygon x y x y ...

    DATA/images/train/a.jpg  DATA/labels/train/a.txt  DATA/data.yaml     # path, train, val, names: {0: person}

Coordinates are shares of the image's sides; x and y of a box are its centre. A file that is missing means no objects.
"""

from __future__ import annotations

from pathlib import Path

from vitlab.errors import DataError
from vitlab.images.regions import AnnotationError
from vitlab.images.sources.dataset import Allow, Marks, Strings
from vitlab.images.sources.folder import images_under
from vitlab.images.sources.labels import read_classes
from vitlab.images.sources.marks import (
    BadAnnotations,
    ImageObjects,
    Marked,
    MarkedSplit,
    checked_box,
    checked_polygon,
    files_by_stem,
    numbered_names,
    paired_folders,
    polygon_box,
    read_config,
    read_objects,
    split_of,
)
from vitlab.images.sources.masks import inside

MOST_TEXT = 64 << 20  # bytes of one label file


def open_yolo(path: Path, bad: BadAnnotations, allow: Allow) -> Marked | None:
    """A folder of images and of label files; None: another kind."""
    config = read_config(path)
    pairs = paired_folders(path, "labels")
    if not pairs and config is not None and "names" in config[1]:
        pairs = _configured(*config, allow)
    if not pairs or not any(next(labels.rglob("*.txt"), None) for _, labels in pairs.values()):
        return None
    if config is not None and "names" in config[1]:
        names = numbered_names(config[0], config[1]["names"])
    else:
        names = dict(enumerate(read_classes(path / "classes.txt") or [])) or _numbers(pairs)
    skips = bool(config and config[1].get("skip_if_label_file_missing"))
    lines = {split: _label_files(*folders) for split, folders in pairs.items()}
    outlined = any(len(line.split()) > 5 for files in lines.values() for text in files.values() for line in text or ())
    numbers = {number: i for i, number in enumerate(names)}
    splits: dict[str, MarkedSplit] = {}
    empty = 0
    for split, files in lines.items():
        kept = {image: text for image, text in files.items() if not (text is None and skips)}
        empty += sum(text is None for text in kept.values())
        records = [_objects(image, text or [], numbers, outlined, bad).to_json() for image, text in kept.items()]
        splits[split] = MarkedSplit(list(kept), Marks(Strings(records), read_objects))
    notes = [f"{empty:,} images have no label file, and count as images without objects."] if empty else []
    kinds = ("instance", "detect", "semantic") if outlined else ("detect",)
    return Marked(list(names.values()), splits, kinds, bad, notes)


def _configured(path: Path, config: dict[str, object], allow: Allow) -> dict[str, tuple[Path, Path]]:
    """The folders of each split: path/train, where "images" in it becomes "labels" for the text files.

    They are searched for beside the config, and in the folder above it, where several sets may share their images.
    """
    pairs: dict[str, tuple[Path, Path]] = {}
    for key, name in config.items():
        split = split_of(str(key))
        if split is None or not isinstance(name, str):
            continue
        place = str(Path(str(config.get("path") or ".")) / name)
        swapped = "labels".join(place.rsplit("images", 1))
        folders = []
        for wanted in (place, swapped):
            candidates = [inside(path, start + wanted, allow) for start in ("", "../")]
            folders.append(next((folder for folder in candidates if folder.is_dir()), None))
        if folders[0] is None or folders[1] is None:
            raise DataError(f"{path}: {key} names {place}, and there is no folder {place} or {swapped}.")
        pairs[split] = folders[0], folders[1]
    return pairs


def _label_files(images: Path, labels: Path) -> dict[str, list[str] | None]:
    """Image -> the lines of its label file; None: it has none."""
    texts = files_by_stem(labels, (str(path) for path in labels.rglob("*.txt")))
    files: dict[str, list[str] | None] = {}
    for stem, image in files_by_stem(images, images_under(images)).items():
        files[image] = _lines(Path(texts[stem])) if stem in texts else None
    if not any(lines is not None for lines in files.values()):
        raise DataError(f"{images}: none of its images has a label file of the same name in {labels}.")
    return files


def _lines(path: Path) -> list[str]:
    if path.stat().st_size > MOST_TEXT:
        raise DataError(f"{path}: {path.stat().st_size:,} bytes are too many for the objects of one image.")
    return [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]


def _numbers(pairs: dict[str, tuple[Path, Path]]) -> dict[int, str]:
    """Names of classes that have none: the numbers from 0 to the largest in the label files."""
    firsts = {
        line.split()[0] for _, labels in pairs.values() for path in labels.rglob("*.txt") for line in _lines(path)
    }
    numbers = [int(word) for word in firsts if word.isascii() and word.isdigit() and len(word) < 6]
    return {number: str(number) for number in range(max(numbers, default=0) + 1)}


def _objects(
    image: str, lines: list[str], numbers: dict[int, int], outlined: bool, bad: BadAnnotations
) -> ImageObjects:
    objects = ImageObjects(None)
    for count, line in enumerate(lines, 1):
        try:
            _add(objects, line.split(), numbers, outlined)
        except AnnotationError as error:
            bad.add(f"{image}, line {count} of its label file", str(error))
    return objects


def _add(objects: ImageObjects, words: list[str], numbers: dict[int, int], outlined: bool) -> None:
    try:
        values = [float(word) for word in words]
    except ValueError:
        raise AnnotationError(f"{' '.join(words)!r:.60} must be numbers") from None
    if values[0] not in numbers:
        raise AnnotationError(f"class number {words[0]:.20} has no name")
    label = numbers[int(values[0])]
    if outlined:
        points = checked_polygon(values[1:])
        box = checked_box(polygon_box([points]), (1.0, 1.0))
        objects.add(label, box, [points])
    elif len(values) == 5:
        x, y, w, h = values[1:]
        objects.add(label, checked_box((x - w / 2, y - h / 2, x + w / 2, y + h / 2), (1.0, 1.0)))
    else:
        raise AnnotationError(f"{len(values)} numbers: expected class, x, y, width, height")
