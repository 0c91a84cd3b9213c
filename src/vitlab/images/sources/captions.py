"""Images with captions: a table of them beside the images or inside one tar, or a text beside each image.

    photos/captions.csv      image,split,caption     one caption a line; an image may stand on several
    photos/captions.jsonl    {"image": "1.jpg", "split": "train", "captions": ["a dog", "a brown dog"]}
    photos/1.jpg, 1.txt      one caption a line; with or without train/, val/ and test/ above them

Images are named relative to the table, or to a folder images/ beside it. Without a split, all are of train.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources.dataset import (
    SPLIT_NAMES,
    Allow,
    Captioned,
    Captions,
    Dataset,
    FileDataset,
    Splits,
    is_text,
    refuse_special,
)
from vitlab.images.sources.folder import is_image_name, split_folders
from vitlab.images.sources.shards import ShardDataset, ShardIndex, cut_off, whole_members
from vitlab.images.sources.table import check_inside, csv_rows, decode_text, read_bytes, shown_lines, split_name
from vitlab.images.sources.targets import LABEL, LABELS, is_target_table
from vitlab.parsing import parse_json

TABLES = ("captions.csv", "captions.tsv", "captions.jsonl")
COLUMNS = {  # what people call the columns
    "image": ("image", "path", "file", "file_name", "filename"),
    "caption": ("caption", "captions", "text", "sentence"),
    "split": ("split",),
}
HEADER = "image,split,caption"


class CaptionRow(NamedTuple):
    line: int
    image: str
    split: str
    captions: list[str]


def table_in(folder: Path) -> Path | None:
    """The caption table of a folder, if there is one."""
    for name in TABLES:
        refuse_special(folder / name)
        if (folder / name).is_file():
            return folder / name
    return None


def holds_captions(path: Path) -> bool:
    """Whether this module opens a path; shards are opened elsewhere."""
    if path.is_dir():
        return table_in(path) is not None or has_texts(path)
    if path.suffix.lower() in (".csv", ".tsv", ".jsonl"):
        return is_table(path)
    if path.suffix != ".tar" or not path.is_file():
        return False
    try:
        with tarfile.open(path, "r:") as tar:
            return any(info.isreg() and info.name.rpartition("/")[2] in TABLES for info in tar)
    except (tarfile.TarError, OSError, ValueError, OverflowError):  # also sizes that no file can have
        return False  # whoever opens it next says what is wrong


def is_table(path: Path, preferred: bool = False) -> bool:
    """A .jsonl or CSV with captions and, unless captions are `preferred`, without classes or labels."""
    if path.suffix.lower() == ".jsonl":
        return preferred or not is_target_table(path)
    if not path.is_file():
        return False
    try:
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            columns = {word.strip(' "\n').lower() for word in re.split(r"[,;\t]", file.readline())}
    except OSError:
        return False  # whoever opens it next says what is wrong
    return not columns.isdisjoint(COLUMNS["caption"]) and (preferred or columns.isdisjoint((*LABEL, *LABELS)))


def open_table(path: Path, allow: Allow) -> Splits:
    """A caption table on disk."""
    rows = list(_rows(str(path), read_bytes(path)))

    def find(image: str) -> str | None:
        for place in (path.parent / image, path.parent / "images" / image):
            if os.path.isfile(place):  # noqa: PTH113 - a million Path objects would take seconds
                return str(place)
        return None

    def dataset(places: list[str]) -> Dataset:
        return FileDataset(places, np.zeros(len(places), dtype=np.int64), [])

    splits = _splits(str(path), str(path.parent), rows, find, dataset)
    if not allow.outside:
        lines = {row.image: row.line for row in reversed(rows)}
        check_inside(path, ((line, place) for image, line in lines.items() if (place := find(image))))
    return splits


def open_tar(path: Path, allow: Allow) -> Splits | None:
    """One tar with images and a table of captions, read without unpacking; None where it has no such table."""
    try:
        with tarfile.open(path, "r:") as tar:
            members, cut = whole_members(tar)
            inside = {info.name.removeprefix("./"): info for info in members if info.isreg()}
            table = next((name for name in inside if name.rpartition("/")[2] in TABLES), None)
            if table is None:
                return None
            if cut and not allow.cut:
                raise cut_off(path, cut)
            stream = tar.extractfile(inside[table])
            assert stream is not None
            rows = list(_rows(f"{path}/{table}", stream.read()))
        status = path.stat()
    except (tarfile.TarError, OSError):
        return None  # whoever opens it next says what is wrong
    folder = table.rpartition("/")[0]

    def find(image: str) -> str | None:
        places = ("/".join(part for part in (folder, sub, image) if part) for sub in ("", "images"))
        return next((place for place in places if place in inside), None)

    def dataset(places: list[str]) -> Dataset:
        held = [inside[place] for place in places]
        index = ShardIndex(
            status.st_size,
            status.st_mtime_ns,
            names=places,
            offsets=[info.offset_data for info in held],
            sizes=[info.size for info in held],
        )
        return ShardDataset([path], [index], np.zeros(len(places), dtype=np.int64), [])

    notes = []
    if cut:
        there = [row for row in rows if find(row.image)]
        notes.append(f"{path} is incomplete ({cut}): {len(rows) - len(there)} of {len(rows)} captions are left out.")
        rows = there
    splits = _splits(f"{path}/{table}", f"{path}/{folder}".rstrip("/"), rows, find, dataset)
    return replace(splits, notes=notes)


def has_texts(folder: Path) -> bool:
    """Whether images lie directly in the folder, or in its train/, with texts of the same name beside them."""
    for place in (folder, *(folder / name for name in os.listdir(folder) if SPLIT_NAMES.get(name.lower()) == "train")):  # noqa: PTH208
        if place.is_dir() and any(is_image_name(p.name) and p.with_suffix(".txt").is_file() for p in place.iterdir()):
            return True
    return False


def open_texts(folder: Path) -> Splits:
    """A .txt beside each image, which holds its captions, one a line."""
    splits: dict[str, Dataset] = {}
    for split, place in split_folders(folder).items():
        files = sorted(path for path in place.iterdir() if is_image_name(path.name))
        if not files and split == "train":
            raise DataError(f"{place}: no images in it. Expected 1.jpg and 1.txt beside it.")
        without = [path for path in files if not path.with_suffix(".txt").is_file()]
        if without:
            raise DataError(
                f"{place}: {len(without)} of {len(files)} images have no text beside them, e.g. "
                f"{without[0].name}. Write {without[0].with_suffix('.txt').name}, or take the image out."
            )
        texts = [_text(path.with_suffix(".txt")) for path in files]
        if files:
            splits[split] = Captioned(FileDataset(files, np.zeros(len(files), np.int64), []), Captions(texts))
    return Splits([], splits["train"], splits.get("val"), splits.get("test"))


def _text(path: Path) -> list[str]:
    try:
        lines = [single_spaced(line) for line in path.read_text(encoding="utf-8-sig").splitlines()]
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8 text. Save it as UTF-8.") from None
    if not any(lines):
        raise DataError(f"{path}: is empty. Write a caption into it, or take the image out.")
    return [line for line in lines if line]


def single_spaced(caption: str) -> str:
    """White space, line ends included, as single spaces."""
    return " ".join(caption.split())


def _rows(name: str, data: bytes) -> Iterator[CaptionRow]:
    """The table, line by line; an error names its line."""
    json = name.lower().endswith(".jsonl")
    for line, values in _json_rows(name, data) if json else csv_rows(name, data, COLUMNS, HEADER):
        captions = values["caption"] if isinstance(values["caption"], list) else [values["caption"]]
        image, split = values["image"], values.get("split", "train")
        if not isinstance(image, str) or not all(isinstance(caption, str) for caption in captions):
            raise DataError(f"{name}, line {line}: image and caption must be texts, found {image!r} and {captions!r}.")
        if not image.strip():
            raise DataError(f"{name}, line {line}: the image is empty. Fill it in, or remove the line.")
        captions = [single_spaced(caption) for caption in captions]
        if not captions or not all(captions):
            raise DataError(f"{name}, line {line}: the caption is empty. Write one, or remove the line.")
        if not all(map(is_text, captions)):
            raise DataError(f"{name}, line {line}: the caption holds half a character (a lone surrogate). Correct it.")
        yield CaptionRow(line, image.strip(), split_name(split, name, line), captions)


def _json_rows(name: str, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, written in enumerate(decode_text(name, data).splitlines(), 1):
        if not written.strip():
            continue
        values, why = None, ""
        try:
            values = parse_json(written)
        except ValueError as error:
            why = f" ({error})"
        if not isinstance(values, dict):
            expected = '{"image": ..., "caption": ...}'
            raise DataError(f"{name}, line {line}: expected {expected}, found {written[:60]!r}{why}.")
        fields = {key: values[word] for key, words in COLUMNS.items() for word in reversed(words) if word in values}
        for key in ("image", "caption"):
            if key not in fields:
                raise DataError(f"{name}, line {line}: no {key!r} in it, only {', '.join(values)}.")
        yield line, fields


def _splits(
    name: str,
    folder: str,
    rows: list[CaptionRow],
    find: Callable[[str], str | None],
    dataset: Callable[[list[str]], Dataset],
) -> Splits:
    """Groups lines by image; `find` gives the place of an image, `dataset` makes a split of such places."""
    if not rows:
        raise DataError(f"{name}: has no lines. Begin with a header line: {HEADER}; then 1.jpg,train,a dog on a beach")
    texts: dict[str, dict[str, list[str]]] = {}
    of: dict[str, CaptionRow] = {}
    for row in rows:
        first = of.setdefault(row.image, row)
        if first.split != row.split:
            raise DataError(
                f"{name}, line {row.line}: {row.image} is of {row.split} here and of {first.split} in line "
                f"{first.line}. An image belongs to one split: correct one of them."
            )
        texts.setdefault(row.split, {}).setdefault(row.image, []).extend(row.captions)
    places = {image: find(image) for image in of}
    if missing := [row for image, row in of.items() if places[image] is None]:
        lines = shown_lines((row.line, row.image) for row in missing)
        raise DataError(
            f"{name}: {len(missing)} of its {len(of)} images do not exist:\n{lines}\nThey are looked for in "
            f"{folder} and {folder}/images. Correct the names, or remove the lines."
        )
    if "train" not in texts:
        raise DataError(f"{name}: its column split never says train, only {', '.join(texts)}.")
    splits = {
        split: Captioned(dataset([str(places[image]) for image in by_image]), Captions(by_image.values()))
        for split, by_image in texts.items()
    }
    return Splits([], splits["train"], splits.get("val"), splits.get("test"))
