"""Corrections of a dataset: a table that says which images to leave out, and which have another label.

    path,split,label,problems,suggested_label,action
    train/cat/7.jpg,train,cat,likely wrong label,dog,relabel
    train/cat/8.jpg,train,cat,in val too: val/cat/3.jpg,,drop

`vitlab check` writes it; its column `action` is for people to edit; data.apply=cleaned.csv applies it. Paths are
relative to the dataset's folder. The dataset's own files are never changed.
"""

from __future__ import annotations

import csv
import difflib
import io
from collections import Counter
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path, PurePath

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources.dataset import (
    KIND_NAMES,
    Dataset,
    Splits,
    label_text,
    refuse_special,
    relabelled,
    subset,
    target_kind,
)
from vitlab.images.sources.table import csv_rows, read_bytes, shown_lines, split_name

ACTIONS = ("keep", "drop", "relabel")
HEADER = "path,split,label,suggested_label,action"


@dataclass(frozen=True)
class Correction:
    """One line of the table: an image, what is wrong with it, and what is to be done."""

    path: str
    split: str
    label: str  # as the dataset has it; empty where it has no labels
    problems: str
    suggested_label: str
    action: str = "keep"


def source_folder(source: str) -> Path | None:
    """Where the paths of a source begin; None where a source is no folder or file."""
    path = Path(source).expanduser()
    return path if path.is_dir() else path.parent if path.is_file() else None


def path_in(name: str, folder: Path | None) -> str:
    """An image's name in a dataset -> its path in the table. Bytes that are not UTF-8 are spelled out."""
    if folder is not None and PurePath(name).is_relative_to(folder):
        name = PurePath(name).relative_to(folder).as_posix()
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").strip()  # as cells are read


def corrections_text(rows: Iterable[Correction]) -> str:
    """As CSV, with the mark that makes spreadsheets read it as UTF-8."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([column.name for column in fields(Correction)])
    writer.writerows(astuple(row) for row in rows)
    return "\ufeff" + text.getvalue()


def apply_corrections(splits: Splits, table: Path, folder: Path | None) -> Splits:
    """The splits without the images that the table drops, and with the labels that it gives.

    A line that does not fit the data is an error: it was written for other data, or mistyped.
    """
    kind = target_kind(splits.train.labels)
    parts = {name: part for name, part in splits.parts.items() if part is not None}
    changes = {name: _Changes(part, folder) for name, part in parts.items()}
    unknown: list[tuple[int, str]] = []
    for line, row in read_corrections(table):
        at = changes[row.split].find(row, f"{table}, line {line}") if row.split in changes else None
        if at is None:
            unknown.append((line, f"{row.path} ({row.split})"))
        elif row.action == "drop":
            changes[row.split].kept[at] = False
        elif row.action == "relabel":
            if kind != "class":
                raise DataError(
                    f"{table}, line {line}: relabel is for images of one class each, and the data have "
                    f"{KIND_NAMES[kind]}. Write keep or drop, and correct the label in the table of the data itself."
                )
            changes[row.split].labels[at] = _class_number(row, splits.classes, f"{table}, line {line}")
    if unknown:
        raise DataError(
            f"{table}: {len(unknown)} of its images are not in the data:\n{shown_lines(unknown)}\n"
            f"Paths are relative to {folder or 'the source'}. Check the data again, or remove the lines."
        )
    _check_classes_remain(table, splits, changes)
    corrected = {name: change.corrected() for name, change in changes.items()}
    note = f"{table}: {_summary(changes)}."
    return replace(splits, **corrected, notes=[*splits.notes, note])


@dataclass
class _Changes:
    """What becomes of the images of one split."""

    dataset: Dataset
    folder: Path | None
    kept: np.ndarray = field(init=False)  # (N,) bool
    labels: np.ndarray = field(init=False)  # (N,)

    def __post_init__(self) -> None:
        self.kept, self.labels = np.ones(len(self.dataset), dtype=bool), self.dataset.labels.copy()
        self._places: dict[str, list[int]] = {}  # a path may be listed twice
        for index in range(len(self.dataset)):
            self._places.setdefault(path_in(self.dataset.name_of(index), self.folder), []).append(index)
        self._named: set[int] = set()

    def find(self, row: Correction, place: str) -> int | None:
        """The image that a line means; None where there is none of this path."""
        if row.path not in self._places:
            return None
        indices = self._places[row.path]
        labels = {index: label_text(self.dataset, index) for index in indices}
        same = [index for index in indices if labels[index] == row.label]
        if not same:
            raise DataError(
                f"{place}: says that {row.path} has the label {row.label!r}, but in the data it is "
                f"{labels[indices[0]]!r}. To change a label, write it into suggested_label and relabel into action; if "
                "the data have changed, check them again."
            )
        free = [index for index in same if index not in self._named]
        if not free:
            raise DataError(f"{place}: names {row.path} ({row.split}) again. Keep one of its lines.")
        self._named.add(free[0])
        return free[0]

    @property
    def dropped(self) -> int:
        return int((~self.kept).sum())

    @property
    def relabelled(self) -> int:
        return int((self.labels != self.dataset.labels).sum())

    def corrected(self) -> Dataset:
        dataset = relabelled(self.dataset, self.labels) if self.relabelled else self.dataset
        return subset(dataset, self.kept) if self.dropped else dataset


def read_corrections(table: Path) -> Iterable[tuple[int, Correction]]:
    """Line numbers and corrections; whatever is not one is an error that names the line."""
    refuse_special(table)
    columns = {name: (name,) for name in (*HEADER.split(","), "problems")}
    for line, cells in csv_rows(str(table), read_bytes(table), columns, HEADER):
        place, action = f"{table}, line {line}", cells["action"].lower()
        if not cells["path"]:
            raise DataError(f"{place}: the path is empty. Fill it in, or remove the line.")
        if action not in ACTIONS:
            raise DataError(f"{place}: the action is {cells['action']!r}; write {', '.join(ACTIONS)}.")
        split = split_name(cells.get("split", ""), str(table), line)
        yield (
            line,
            Correction(
                cells["path"], split, cells["label"], cells.get("problems", ""), cells["suggested_label"], action
            ),
        )


def _class_number(row: Correction, classes: list[str], place: str) -> int:
    if not classes:
        raise DataError(f"{place}: relabel, but the data have no labels. Write keep or drop.")
    if not row.suggested_label:
        raise DataError(f"{place}: relabel, but suggested_label is empty. Write the right label into it.")
    names = [name.strip() for name in classes]
    if row.suggested_label not in names:
        near = difflib.get_close_matches(row.suggested_label, classes, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else f" Classes are {', '.join(classes[:5])}."
        raise DataError(f"{place}: suggested_label {row.suggested_label!r} is no class of the data.{hint}")
    return names.index(row.suggested_label)


def _check_classes_remain(table: Path, splits: Splits, changes: dict[str, _Changes]) -> None:
    train = changes["train"]
    if not train.kept.any():
        raise DataError(f"{table}: drops every training image. Keep some.")
    if not splits.classes or target_kind(train.labels) != "class":
        return
    before, after = Counter(train.dataset.labels.tolist()), Counter(train.labels[train.kept].tolist())
    if gone := sorted(label for label in before if not after[label]):
        raise DataError(
            f"{table}: leaves no training image of class {splits.classes[gone[0]]!r}. Keep some, or take the class out "
            "of the data."
        )


def _summary(changes: dict[str, _Changes]) -> str:
    parts = []
    for split, change in changes.items():
        done = {"left out": change.dropped, "relabelled": change.relabelled}
        if texts := [f"{count:,} {what}" for what, count in done.items() if count]:
            parts.append(f"{split} {' and '.join(texts)}")
    return f"corrections applied: {', '.join(parts)}" if parts else "keeps every image as it is"
