"""Tables that say what is to be learned of each image: one class, several labels, or a number.

    image,label          one class an image                                    (data.label names another column)
    image,labels         several labels in a cell, cat;dog; it may be empty    (data.labels names another column)
    image,cat,dog        one column of 0 and 1 for each label                  (data.labels=cat,dog chooses some)
    image,price          a number, where data.target=price says so

CSV, TSV, JSON (a list of objects) or JSONL; an optional column split says train, val or test. A table that could be
read in two ways is refused, with what to type.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.advice import option_or_setting
from vitlab.errors import DataError, UsageError
from vitlab.images.sources.dataset import Allow, FileDataset, Splits, TargetKind
from vitlab.images.sources.groups import is_path_rule
from vitlab.images.sources.labels import number_labels
from vitlab.images.sources.table import (
    COLUMNS,
    check_files,
    check_inside,
    decode_text,
    is_plain_list,
    open_table,
    read_bytes,
    split_name,
)
from vitlab.parsing import parse_json

ENDINGS = (".csv", ".tsv", ".json", ".jsonl")
PATH, LABEL, SPLIT = COLUMNS["path"], COLUMNS["label"], "split"
LABELS, CAPTION = ("labels", "tags"), ("caption", "captions", "text", "sentence")
OTHER = ("group",)  # columns with a meaning of their own
SEPARATORS = (";", "|", ",")
UNUSUAL = ("/", "+", "&", "\\", " ")  # what people also write between labels, and names contain
TRUE, FALSE = ("1", "1.0", "true"), ("0", "0.0", "false")


@dataclass(frozen=True)
class TargetColumns:
    """Columns that a user named; None: they are recognised by their titles."""

    label: str | None = None  # of class names
    labels: str | None = None  # of several labels; or several columns of 0 and 1: "cat,dog"
    target: str | None = None  # of numbers

    def __post_init__(self) -> None:
        if len(self.settings) > 1:
            raise UsageError(f"{' and '.join(self.settings)} exclude each other: one thing is learned. Keep one.")

    @property
    def settings(self) -> list[str]:
        """Those that are set, as typed."""
        return [option_or_setting(f"data.{name}", value) for name, value in self.chosen.items()]

    @property
    def chosen(self) -> dict[str, str]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def names(self) -> list[str]:
        """The columns themselves."""
        text = self.labels or self.label or self.target or ""
        return [name for part in (text.split(",") if self.labels else [text]) if (name := part.strip())]


@dataclass(frozen=True)
class TargetTable:
    """The cells of a table, by the titles of its columns."""

    path: Path
    titles: list[str]
    lines: list[int]  # where each row stands
    rows: list[dict[str, Any]]  # texts; of JSON also numbers and lists

    def place(self, row: int) -> str:
        return f"{self.path}, {'entry' if self.path.suffix.lower() == '.json' else 'line'} {self.lines[row]}"

    def find(self, names: Sequence[str]) -> list[str]:
        """The titles that are among these names, whatever their case, in the order of the names."""
        return [title for name in names for title in self.titles if title.lower() == name]

    def column(self, setting: str, name: str) -> str:
        """The title that a setting names."""
        for title in self.titles:
            if title == name or title.lower() == name.lower():
                return title
        raise DataError(f"{self.path}: {setting} names a column that is not there. Columns: {', '.join(self.titles)}.")

    def cells(self, title: str) -> list[Any]:
        return [row.get(title, "") for row in self.rows]

    @property
    def others(self) -> list[str]:
        """Columns whose titles say nothing."""
        recognised = (*PATH, SPLIT, *LABEL, *LABELS, *CAPTION, *OTHER)
        return [title for title in self.titles if title.lower() not in recognised]


@dataclass(frozen=True)
class Choice:
    """What is learned, and the columns that hold it."""

    kind: TargetKind
    titles: list[str]


def is_target_table(path: Path) -> bool:
    """Whether this module opens it: any table but one of captions alone."""
    if path.suffix.lower() not in ENDINGS or not path.is_file():
        return False
    try:
        titles = {title.lower() for title in _read(path, first=True).titles}
    except DataError:
        return path.suffix.lower() != ".jsonl"  # whoever opens it says what is wrong
    labelled = not titles.isdisjoint((*LABEL, *LABELS))
    return labelled or (titles.isdisjoint(CAPTION) and path.suffix.lower() != ".jsonl")


def table_titles(path: Path) -> list[str]:
    return _read(path, first=True).titles


def table_kind(path: Path, columns: TargetColumns) -> TargetKind:
    if not columns.settings and is_plain_list(path):
        return "class"
    return _choose(_read(path), columns).kind


def open_target_table(path: Path, columns: TargetColumns, allow: Allow, group: str | None = None) -> Splits:
    """`group` as in table.open_table."""
    if not columns.settings and is_plain_list(path):
        return open_table(path, allow, group)
    table = _read(path)
    choice = _choose(table, columns)
    if choice.kind == "class" and choice.titles == table.find(LABEL)[:1] and path.suffix.lower() in (".csv", ".tsv"):
        return open_table(path, allow, group)
    splits, files = _splits(table)
    check_files(path, files)
    if not allow.outside:
        check_inside(path, files)
    if "train" not in splits:
        raise DataError(f"{path}: its column split never says train, only {', '.join(splits)}.")
    classes, labels = READERS[choice.kind](table, choice.titles, splits)
    datasets = {
        split: FileDataset((files[row][1] for row in rows), labels[split], classes) for split, rows in splits.items()
    }
    groups = _groups(table, splits, group)
    return Splits(classes, datasets["train"], datasets.get("val"), datasets.get("test"), groups=groups)


def _groups(table: TargetTable, splits: dict[str, list[int]], group: str | None) -> dict[str, list[str]] | None:
    """By split, the group of every image, where a column says it."""
    if group is None or is_path_rule(group):
        return None
    title = next((title for title in table.titles if title.lower() == group.lower()), None)
    if title is None:
        raise DataError(f"{table.path}: no column {group}, which data.group names (found {', '.join(table.titles)}).")
    for row, cell in enumerate(table.cells(title)):
        if cell is None or not str(cell).strip():  # all images without a group would be one group
            raise DataError(f"{table.place(row)}: the {title} is empty. Fill it in, or remove the line.")
    return {split: [str(table.rows[row][title]).strip() for row in rows] for split, rows in splits.items()}


# ---------------------------------------------------------------------------------------------------------- the table


def _read(path: Path, first: bool = False) -> TargetTable:
    """`first`: its first row alone."""
    ending = path.suffix.lower()
    table = _read_csv(path) if ending in (".csv", ".tsv") else _read_json(path, first and ending == ".jsonl")
    if not table.find(PATH):
        seen = f"found {', '.join(table.titles)}" if table.titles else "the file is empty"
        raise DataError(f"{path}: no column {' or '.join(PATH[:4])} ({seen}). Begin with a header line: path,label")
    if not table.rows and not first:
        raise DataError(f"{path}: has a header, but no lines below it. Write one image a line: cats/1.jpg,cat")
    return table


def _read_csv(path: Path) -> TargetTable:
    text = decode_text(str(path), read_bytes(path))
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=text.partition("\n")[0].count))
    lines: list[int] = []
    rows: list[dict[str, Any]] = []
    try:
        titles = [title.strip() for title in next(reader, [])]
        if repeated := [title for title, n in Counter(title.lower() for title in titles).items() if n > 1 and title]:
            raise DataError(f"{path}: two columns are called {repeated[0]!r}. Rename one of them.")
        for cells in reader:
            if not any(cell.strip() for cell in cells):
                continue
            if any(cell.strip() for cell in cells[len(titles) :]):
                raise DataError(
                    f"{path}, line {reader.line_num}: has {len(cells)} cells, but the header has {len(titles)}. "
                    "Several labels of an image stand in one cell: cat;dog"
                )
            lines.append(reader.line_num)
            rows.append({title: cell.strip() for title, cell in zip(titles, cells, strict=False) if title})
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: cannot be read as CSV ({error}).") from None
    return TargetTable(path, [title for title in titles if title], lines, rows)


def _read_json(path: Path, first: bool) -> TargetTable:
    example = '{"image": "1.jpg", "labels": ["cat", "dog"]}'
    text = decode_text(str(path), read_bytes(path))
    try:
        if path.suffix.lower() == ".json":
            entries = parse_json(text)
            numbered = list(enumerate(entries, 1)) if isinstance(entries, list) else None
        else:
            written = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
            numbered = [(number, parse_json(line)) for number, line in (written[:1] if first else written)]
    except ValueError as error:
        raise DataError(f"{path}: is not valid JSON ({error}).") from None
    if numbered is None or not all(isinstance(entry, dict) for _, entry in numbered):
        raise DataError(f"{path}: expected a list of objects, each like {example}")
    titles = list(dict.fromkeys(key for _, entry in numbered for key in entry))
    return TargetTable(path, titles, [number for number, _ in numbered], [entry for _, entry in numbered])


def _splits(table: TargetTable) -> tuple[dict[str, list[int]], list[tuple[int, str]]]:
    """Rows of each split, and of each row its line and file."""
    image, split = table.find(PATH)[0], table.find((SPLIT,))
    splits: dict[str, list[int]] = {}
    files: list[tuple[int, str]] = []
    for row, cells in enumerate(table.rows):
        name, part = cells.get(image), cells.get(split[0], "") if split else "train"
        if not isinstance(name, str) or not name.strip():
            raise DataError(f"{table.place(row)}: the {image} is empty. Fill it in, or remove the line.")
        files.append((table.lines[row], str(table.path.parent / name.strip())))
        splits.setdefault(split_name(part, str(table.path), table.lines[row]), []).append(row)
    return splits, files


# ------------------------------------------------------------------------------------------------ what it is a table of


def _column(setting: str, title: str) -> str:
    """Which column is learned, as it is typed."""
    return option_or_setting(f"data.{setting}", title)


def _choose(table: TargetTable, columns: TargetColumns) -> Choice:
    if columns.target is not None:
        return Choice("number", [table.column(_column("target", columns.target), columns.target)])
    if columns.label is not None:
        return Choice("class", [table.column(_column("label", columns.label), columns.label)])
    if columns.labels is not None:
        return Choice("labels", [table.column(_column("labels", columns.labels), name) for name in columns.names])
    one, several = table.find(LABEL), table.find(LABELS)
    if one and several:
        raise DataError(
            f"{table.path}: has the columns {one[0]} and {several[0]}. Say which is learned: "
            f"{_column('label', one[0])} (one class an image) or {_column('labels', several[0])} (several)."
        )
    if several:
        return Choice("labels", several[:1])
    if one:
        _check_class_column(table, one[0])
        return Choice("class", one[:1])
    others = table.others
    if len(others) > 1 and all(_is_flag(cell) for title in others for cell in table.cells(title)):
        return Choice("labels", others)
    raise DataError(_nothing_to_learn(table, others))


def _check_class_column(table: TargetTable, title: str) -> None:
    """Refuse what could as well be several labels, or a number. Names in classes.txt settle it."""
    if table.path.with_name("classes.txt").is_file():
        return
    cells = [str(cell) for cell in table.cells(title)]
    for separator in SEPARATORS[:2]:
        if several := _shared_parts(cells, separator):
            raise DataError(
                f"{table.path}: {several!r} in the column {title} could be one class or several labels. Several: "
                f"{_column('labels', title)}; one: {_column('label', title)}"
            )
    if any("." in cell for cell in cells) and all(_number(cell) is not None for cell in cells):
        raise DataError(
            f"{table.path}: the column {title} holds numbers such as {cells[0]}. To learn the number: "
            f"{_column('target', title)}; to take each for the name of a class: {_column('label', title)}"
        )


def _nothing_to_learn(table: TargetTable, others: list[str]) -> str:
    """No column is recognised: say what could be typed for each."""
    problem = f"{table.path}: no column {' or '.join(LABEL)} (found {', '.join(table.titles)})."
    hints = []
    for title in others[:3]:
        cells = table.cells(title)
        if all(_is_flag(cell) for cell in cells):
            hints.append(f"{_column('labels', title)} (a label that an image has or has not)")
        elif all(_number(cell) is not None for cell in cells):
            whole_numbers = all(float(cell).is_integer() for cell in cells)
            hints.append(
                f"{_column('target', title)} (a number)" + f", {_column('label', title)} (a class)" * whole_numbers
            )
        else:
            hints.append(f"{_column('label', title)} (one class an image)")
    say = f" Say which column is learned: {', '.join(hints)}." if hints else ""
    return f"{problem}{say} Or begin with a header line: path,label"


def _shared_parts(cells: Sequence[str], separator: str) -> str | None:
    """A cell with the separator, where one of the parts also stands in another cell: then they look like labels."""
    different = sorted(set(cells))
    counts = Counter(part for cell in different for part in {part.strip() for part in cell.split(separator)})
    return next(
        (c for c in different if separator in c and any(counts[p.strip()] > 1 for p in c.split(separator))), None
    )


def _is_flag(cell: object) -> bool:
    return str(cell).strip().lower() in (*TRUE, *FALSE)


def _number(cell: object) -> float | None:
    """Finite, as Python writes it; None for all else."""
    if isinstance(cell, bool) or not isinstance(cell, int | float | str):
        return None
    if isinstance(cell, str) and not re.fullmatch(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", cell, re.ASCII):
        return None
    value = float(cell)
    return value if math.isfinite(value) else None


# ------------------------------------------------------------------------------------------------------- reading it

Targets = tuple[list[str], dict[str, np.ndarray]]  # names, and each split's labels


def _read_classes(table: TargetTable, titles: list[str], splits: dict[str, list[int]]) -> Targets:
    texts: dict[str, list[str]] = {}
    for split, rows in splits.items():
        cells = [table.rows[row].get(titles[0], "") for row in rows]
        for row, cell in zip(rows, cells, strict=True):
            if isinstance(cell, list | dict) or cell is None or not str(cell).strip():
                what = "is empty" if not cell else f"is {cell!s:.40}, and not one name"
                raise DataError(f"{table.place(row)}: the {titles[0]} {what}. Fill it in, or remove the line.")
        texts[split] = [str(cell).strip() for cell in cells]
    classes_file = table.path.with_name("classes.txt")
    return number_labels(texts, lambda split, i: table.place(splits[split][i]), classes_file)


def _read_labels(table: TargetTable, titles: list[str], splits: dict[str, list[int]]) -> Targets:
    in_columns = len(titles) > 1 or all(_is_flag(cell) for cell in table.cells(titles[0]))
    if in_columns:
        names, matrix = titles, _flags(table, titles)
    else:
        names, matrix = _split_cells(table, titles[0])
    _check_labels(table, names, matrix, splits, in_columns)
    return names, {split: matrix[rows] for split, rows in splits.items()}


def _flags(table: TargetTable, titles: list[str]) -> np.ndarray:
    """(N, K), of columns of 0 and 1."""
    matrix = np.zeros((len(table.rows), len(titles)), dtype=bool)
    for row, cells in enumerate(table.rows):
        for k, title in enumerate(titles):
            if not _is_flag(cells.get(title, "")):
                cell = str(cells.get(title, ""))
                raise DataError(
                    f"{table.place(row)}: {title} is {cell!r:.40}; a column for one label holds 0 or 1 in every line."
                )
            matrix[row, k] = str(cells[title]).strip().lower() in TRUE
    return matrix


def _split_cells(table: TargetTable, title: str) -> tuple[list[str], np.ndarray]:
    """The labels, sorted, and (N, K)."""
    cells = table.cells(title)
    texts = [cell for cell in cells if isinstance(cell, str)]
    separator = _separator(table, title, texts)
    written: list[list[str]] = []
    for row, cell in enumerate(cells):
        parts = [] if cell is None else cell if isinstance(cell, list) else str(cell).split(separator)
        if isinstance(cell, dict) or not all(isinstance(part, str | int | float) for part in parts):
            raise DataError(f"{table.place(row)}: {title} is {cell!r:.60}; expected a list of names.")
        written.append([name for part in parts if (name := str(part).strip())])
    names = sorted({name for labels in written for name in labels})
    number_of, matrix = {name: k for k, name in enumerate(names)}, np.zeros((len(cells), len(names)), dtype=bool)
    for row, labels in enumerate(written):
        matrix[row, [number_of[name] for name in labels]] = True
    return names, matrix


def _separator(table: TargetTable, title: str, texts: list[str]) -> str | None:
    used = [separator for separator in SEPARATORS if any(separator in text for text in texts)]
    if len(used) > 1:
        both = next(text for text in texts if used[1] in text)
        raise DataError(
            f"{table.path}: labels in the column {title} are separated by {used[0]!r} and, in {both!r:.60}, by "
            f"{used[1]!r}. Use one of them everywhere."
        )
    if used:
        return used[0]
    for separator in UNUSUAL:
        if several := _shared_parts(texts, separator):
            raise DataError(
                f"{table.path}: {several!r:.60} in the column {title} looks like labels with {separator!r} "
                f"between them. Write ; between labels. If every cell is one name: {_column('label', title)}"
            )
    return "\0"  # every cell is one label


def _check_labels(
    table: TargetTable, names: list[str], matrix: np.ndarray, splits: dict[str, list[int]], in_columns: bool
) -> None:
    """Every label needs images of train that have it, and some that have not."""
    train = matrix[splits["train"]]
    for k, name in enumerate(names):
        has = int(train[:, k].sum())
        if 0 < has < len(train):
            continue
        rest = [other for other in names if other != name]
        instead = f"leave it out: {_column('labels', ','.join(rest))}" if in_columns and rest else "take it out"
        if has:
            raise DataError(
                f"{table.path}: every training image has the label {name!r}, so there is nothing to learn of it. Add "
                f"images without it, or {instead}."
            )
        raise DataError(
            f"{table.path}: no training image has the label {name!r}, so it cannot be learned. Add images of it to "
            f"train, or {instead}."
        )
    if not names:
        raise DataError(f"{table.path}: no image has any label.")


def _read_numbers(table: TargetTable, titles: list[str], splits: dict[str, list[int]]) -> Targets:
    title, values = titles[0], np.zeros(len(table.rows), dtype=np.float64)
    for row, cell in enumerate(table.cells(title)):
        number = _number(cell)
        if number is None:
            raise DataError(f"{table.place(row)}: {title} is {_not_a_number(cell)}")
        values[row] = number
    if np.ptp(values[splits["train"]]) == 0:
        raise DataError(
            f"{table.path}: {title} is {values[splits['train'][0]]:g} for every training image, so there is nothing to "
            "learn of it."
        )
    return [title], {split: values[rows] for split, rows in splits.items()}


def _not_a_number(cell: object) -> str:
    if cell is None or not str(cell).strip():
        return "empty. Fill in the number, or remove the line."
    if re.fullmatch(r"[+-]?\d+,\d+", str(cell)):
        return f"{cell}: write a point and no comma, {str(cell).replace(',', '.')}."
    if str(cell).strip().lower() in ("nan", "inf", "-inf", "infinity", "null", "none", "na", "n/a"):
        return f"{cell}, which cannot be learned. Fill in the number, or remove the line."
    return f"{cell!r:.40}, which is no number. Correct it; for names of classes use {_column('label', 'COLUMN')}."


READERS: dict[TargetKind, Callable[[TargetTable, list[str], dict[str, list[int]]], Targets]] = {
    "class": _read_classes,
    "labels": _read_labels,
    "number": _read_numbers,
}
