"""A CSV of paths and labels, or a list of files from another tool: one image a line.

path,label,split            a header names the columns; split (train, val or test) may be absent, others are ignored
cats/1.jpg,cat,train        without a header: the path, and perhaps the label, and perhaps the split
cats/1.jpg                  the label is then the name of the folder that the image lies in
cats/1.jpg 7                a class number behind a space
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vitlab.errors import DataError
from vitlab.images.sources.dataset import SPLIT_NAMES, Allow, FileDataset, Splits, how_to_allow
from vitlab.images.sources.folder import is_image_name
from vitlab.images.sources.groups import is_path_rule
from vitlab.images.sources.labels import number_labels
from vitlab.special_files import special_kind

COLUMNS = {
    "path": ("path", "image", "file", "filename", "file_name"),
    "label": ("label", "class"),
    "split": ("split",),
}
PEEKED = 10_000  # bytes of a text that tell what it is
SHOWN = 5  # lines that a message lists


@dataclass
class _Rows:
    """One split's columns."""

    lines: list[int]
    paths: list[str]
    labels: list[str]
    groups: list[str]


def open_table(path: Path, allow: Allow, group: str | None = None) -> Splits:
    """Relative paths are relative to the CSV; classes.txt beside it fixes the classes and their order.

    `group`: the column that says which images belong together; or a rule for paths, see images/sources/groups.py.
    """
    splits = _read_rows(path, group)
    files = [pair for rows in splits.values() for pair in zip(rows.lines, rows.paths, strict=True)]
    check_files(path, files)
    if not allow.outside:
        check_inside(path, files)
    if "train" not in splits:
        raise DataError(f"{path}: its column split never says train, only {', '.join(splits)}.")
    classes, numbers = number_labels(
        {split: rows.labels for split, rows in splits.items()},
        place=lambda split, i: f"{path}, line {splits[split].lines[i]}",
        classes_file=path.with_name("classes.txt"),
    )
    datasets = {split: FileDataset(rows.paths, numbers[split], classes) for split, rows in splits.items()}
    groups = {split: rows.groups for split, rows in splits.items()} if splits["train"].groups else None
    return Splits(classes, datasets["train"], datasets.get("val"), datasets.get("test"), groups=groups)


def is_list(path: Path) -> bool:
    """Whether a text names images, and is not somebody's notes."""
    start = read_bytes(path)[:PEEKED].decode("utf-8-sig", "replace")
    return any(is_image_name(word.strip()) for word in re.split(r"[,;\t\n]|\s+\d+$", start, flags=re.M))


def names_files(path: Path) -> bool:
    """Whether this is a list or table of images."""
    return path.suffix.lower() in (".txt", ".csv", ".tsv") and path.is_file() and is_list(path)


def listed_files(path: Path) -> list[str]:
    """The images that a list or table names, in its order, whether they exist or not. Labels are not read."""
    data, name = read_bytes(path), str(path)
    text = decode_text(name, data)
    headed = set(_titles(text)) & set(COLUMNS["path"])
    rows = csv_rows(name, data, {"path": COLUMNS["path"]}, "path") if headed else _positional(name, text)
    return [str(path.parent / cells["path"]) for _, cells in rows]


def is_plain_list(path: Path) -> bool:
    """A CSV without a header, or with columns for paths and splits alone: the folders of its files are the classes."""
    if path.suffix.lower() not in (".csv", ".tsv"):
        return False
    titles = set(_titles(decode_text(str(path), read_bytes(path))))
    if not titles & set(COLUMNS["path"]):
        rows = _positional(str(path), decode_text(str(path), read_bytes(path)))
        return bool(rows) and (path.parent / rows[0][1]["path"]).is_file()
    return not titles - {*COLUMNS["path"], *COLUMNS["split"]}


def _read_rows(path: Path, group: str | None) -> dict[str, _Rows]:
    splits: dict[str, _Rows] = {}
    for line, cells in _rows(path, group):
        for key, cell in cells.items():
            if not cell:
                raise DataError(f"{path}, line {line}: the {key} is empty. Fill it in, or remove the line.")
        rows = splits.setdefault(split_name(cells.get("split", "train"), str(path), line), _Rows([], [], [], []))
        rows.lines.append(line)
        rows.paths.append(str(path.parent / cells["path"]))
        rows.labels.append(cells["label"] if "label" in cells else Path(rows.paths[-1]).parent.name)
        rows.groups += [cells["group"]] if "group" in cells else []
    if not splits:
        raise DataError(f"{path}: has a header, but no lines below it. Write one image a line: cats/1.jpg,cat")
    return splits


def _rows(path: Path, group: str | None) -> Iterator[tuple[int, dict[str, str]]]:
    """Line numbers and cells by column, whether the file has a header or not."""
    data, name = read_bytes(path), str(path)
    titles, header = _titles(decode_text(name, data)), "path,label"
    if set(titles) & set(COLUMNS["path"]):
        if not set(titles) - {*COLUMNS["path"], *COLUMNS["split"]}:
            header = "path"  # only files: no column was meant as the label
        columns = dict(COLUMNS)
        if group is not None and group.lower() in titles:
            columns["group"] = (group.lower(),)
        elif group is not None and not is_path_rule(group):
            raise DataError(f"{name}: no column {group}, which data.group names (found {', '.join(titles)}).")
        yield from csv_rows(name, data, columns, header)
        return
    if group is not None and not is_path_rule(group):
        raise DataError(f"{name}: no column {group}, for it has no header. Begin with one: path,label,{group}")
    rows = _positional(name, decode_text(name, data))
    if rows and (path.suffix.lower() == ".txt" or (path.parent / rows[0][1]["path"]).is_file()):
        yield from rows
    else:
        yield from csv_rows(name, data, COLUMNS, header)  # which says what is wrong with the header


def _positional(name: str, text: str) -> list[tuple[int, dict[str, str]]]:
    """Lines without a header: path[,label][,split], or a path and a class number behind a space."""
    rows: list[tuple[int, list[str]]] = []
    for line, row in enumerate(csv.reader(text.splitlines(), delimiter=_delimiter(text)), 1):
        cells = [cell.strip() for cell in row]
        if len(cells) == 1 and (numbered := re.fullmatch(r"(.*\.\w+)\s+(\d+)", cells[0])):
            cells = [numbered[1], numbered[2]]
        if not any(cells) or cells[0].startswith("#"):
            continue
        rows.append((line, cells))
        if len(cells) > 3 or len(cells) != len(rows[0][1]):
            raise DataError(
                f"{name}, line {line}: has {len(cells)} columns, and the first line {len(rows[0][1])}. Without a "
                "header, every line is path, path,label or path,label,split."
            )
    keys = ["path", "label", "split"]
    if rows and len(rows[0][1]) == 2 and all(cells[1].lower() in SPLIT_NAMES for _, cells in rows):
        keys.remove("label")  # path,split
    return [(line, dict(zip(keys, cells, strict=False))) for line, cells in rows]


def _titles(text: str) -> list[str]:
    first = next(csv.reader([text.partition("\n")[0]], delimiter=_delimiter(text)), [])
    return [title.strip().lower() for title in first]


def _delimiter(text: str) -> str:
    return max(",;\t", key=text.partition("\n")[0].count)


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
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
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


def check_files(path: Path, files: Iterable[tuple[int, str]]) -> None:
    """Raise where a table names files that do not exist; `files` are pairs of a line number and a file."""
    missing = [
        (line, image)
        for line, image in files
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
