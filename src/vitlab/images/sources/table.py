"""A CSV of paths and labels: a header, then one image a line; an optional column `split` says train, val or test."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vitlab.errors import DataError
from vitlab.images.sources.dataset import SPLIT_NAMES, Allow, FileDataset, Splits, how_to_allow
from vitlab.images.sources.labels import number_labels
from vitlab.special_files import special_kind

COLUMNS = {"path": ("path", "image", "file", "filename"), "label": ("label", "class"), "split": ("split",)}
SHOWN = 5  # lines that a message lists


@dataclass
class _Rows:
    """One split's columns."""

    lines: list[int]
    paths: list[str]
    labels: list[str]


def open_table(path: Path, allow: Allow) -> Splits:
    """Relative paths are relative to the CSV; classes.txt beside it fixes the classes and their order."""
    splits = _read_rows(path)
    _check_files(path, splits)
    if not allow.outside:
        check_inside(path, ((n, p) for rows in splits.values() for n, p in zip(rows.lines, rows.paths, strict=True)))
    if "train" not in splits:
        raise DataError(f"{path}: its column split never says train, only {', '.join(splits)}.")
    classes, numbers = number_labels(
        {split: rows.labels for split, rows in splits.items()},
        place=lambda split, i: f"{path}, line {splits[split].lines[i]}",
        classes_file=path.with_name("classes.txt"),
    )
    datasets = {split: FileDataset(rows.paths, numbers[split], classes) for split, rows in splits.items()}
    return Splits(classes, datasets["train"], datasets.get("val"), datasets.get("test"))


def _read_rows(path: Path) -> dict[str, _Rows]:
    splits: dict[str, _Rows] = {}
    for line, cells in csv_rows(str(path), read_bytes(path), COLUMNS, "path,label"):
        for key, cell in cells.items():
            if not cell:
                raise DataError(f"{path}, line {line}: the {key} is empty. Fill it in, or remove the line.")
        rows = splits.setdefault(split_name(cells.get("split", "train"), str(path), line), _Rows([], [], []))
        rows.lines.append(line)
        rows.paths.append(str(path.parent / cells["path"]))
        rows.labels.append(cells["label"])
    if not splits:
        raise DataError(f"{path}: has a header, but no lines below it. Write one image a line: cats/1.jpg,cat")
    return splits


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def decode_text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise DataError(f"{name}: is not UTF-8 text. Save it in UTF-8.") from None


def csv_rows(
    name: str, data: bytes, columns: dict[str, tuple[str, ...]], header: str
) -> Iterator[tuple[int, dict[str, str]]]:
    """Line numbers and cells by column, of lines that are not empty; `columns`: what people call each of them.

    `header` is an example, for messages: its columns are needed, but for split.
    """
    text = decode_text(name, data)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=text.partition("\n")[0].count))
    try:
        first = next(reader, [])
        titles = [title.strip().lower() for title in first]
        places = {key: titles.index(word) for key, words in columns.items() for word in words[::-1] if word in titles}
        for key in header.split(","):
            if key not in places and key != "split":
                seen = f"found {', '.join(first)}" if any(titles) else "the file is empty"
                raise DataError(
                    f"{name}: no column {' or '.join(columns[key])} ({seen}). Begin with a header line: {header}"
                )
        for row in reader:
            if any(cell.strip() for cell in row):
                yield reader.line_num, {k: row[at].strip() if at < len(row) else "" for k, at in places.items()}
    except csv.Error as error:
        raise DataError(f"{name}, line {reader.line_num}: cannot be read as CSV ({error}).") from None


def split_name(split: object, table: str, line: int) -> str:
    """train, val or test for what people write."""
    name = SPLIT_NAMES.get(str(split).strip().lower())
    if name is None:
        raise DataError(f"{table}, line {line}: split is {split!r}; write train, val or test.")
    return name


def _check_files(path: Path, splits: dict[str, _Rows]) -> None:
    missing = [
        (line, image)
        for rows in splits.values()
        for line, image in zip(rows.lines, rows.paths, strict=True)
        if not os.path.isfile(image)  # noqa: PTH113 - a million Path objects would take seconds
    ]
    for line, image in missing:
        if kind := special_kind(image):
            raise DataError(f"{path}, line {line}: {image} is {kind}, not an image file. Remove the line.")
    if missing:
        raise DataError(
            f"{path}: {len(missing)} of its files do not exist:\n{shown_lines(missing)}\n"
            f"Paths are relative to {path.parent}. Correct them, or remove the lines."
        )


def check_inside(table: Path, files: Iterable[tuple[int, str]]) -> None:
    """Raise where a table names files outside its own folder: by an absolute path, by .. or through a link.

    `files` are pairs of a line number and the file that the line names, which exists.
    """
    root = os.path.join(os.path.realpath(table.parent), "")  # noqa: PTH118 - with a separator at its end
    folders: dict[str, str] = {}  # as written -> resolved; a table has many lines and few folders

    def resolved(file: str) -> str:
        if os.path.islink(file):  # noqa: PTH114
            return os.path.realpath(file)
        folder, name = os.path.split(file)
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        return os.path.join(folders[folder], name)  # noqa: PTH118

    outside = [(line, file) for line, file in files if not resolved(file).startswith(root)]
    if outside:
        raise DataError(
            f"{table}: {len(outside)} of its files lie outside its folder:\n{shown_lines(outside)}\nA table that came "
            f"from elsewhere could name any file of yours. If these are meant: {how_to_allow('outside')}."
        )


def shown_lines(lines: Iterable[tuple[int, str]]) -> str:
    """The first few lines, for a message."""
    lines = sorted(lines)
    shown = "\n".join(f"  line {line}: {text}" for line, text in lines[:SHOWN])
    return shown + (f"\n  and {len(lines) - SHOWN} more" if len(lines) > SHOWN else "")
