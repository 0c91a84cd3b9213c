"""Labels as written in a CSV or beside a shard's images -> class names and numbers, or an error that names the place.

Labels that are all whole numbers are the class numbers; others are class names. A file classes.txt, one name a line,
fixes the names and their order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources.dataset import refuse_special

Place = Callable[[str, int], str]  # (split, index) -> where that label is written


def read_classes(path: Path) -> list[str] | None:
    """The names of classes.txt, if there is one."""
    refuse_special(path)
    if not path.is_file():
        return None
    try:
        names = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8 text. Save it as UTF-8, one class name a line.") from None
    if not names:
        raise DataError(f"{path}: is empty. Write one class name a line, or remove the file.")
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{path}: names {repeated!r} twice. Each class stands on one line.")
    return names


def number_labels(
    written: Mapping[str, Sequence[str]], place: Place, classes_file: Path
) -> tuple[list[str], dict[str, np.ndarray]]:
    """Labels by split -> the classes, and each split's class numbers (int64)."""
    classes = read_classes(classes_file)
    present = {label for labels in written.values() for label in labels}
    numeric = all(label.isascii() and label.isdigit() for label in present)
    if classes is None:
        _check_none_below_zero(written, place)
        classes = _counted(written["train"], place, classes_file) if numeric else sorted(set(written["train"]))
        number_of, source = {name: i for i, name in enumerate(classes)}, "train"
    else:
        by_number = numeric and not present <= set(classes)
        number_of = {str(i) if by_number else name: i for i, name in enumerate(classes)}
        source = str(classes_file)
    if numeric:
        number_of |= {
            label: number_of[str(int(label))] for label in present if str(int(label)) in number_of
        }  # "007" is 7
    numbers = {}
    for split, labels in written.items():
        for i, label in enumerate(labels):
            if label not in number_of:
                raise DataError(f"{place(split, i)}: {_outside(label, split, source, list(number_of), numeric)}")
        numbers[split] = np.fromiter((number_of[label] for label in labels), dtype=np.int64, count=len(labels))
    return classes, numbers


def _counted(labels: Sequence[str], place: Place, classes_file: Path) -> list[str]:
    """Classes "0" .. the largest, so that a label is its class number."""
    numbers = [int(label) for label in labels]
    different, largest = len(set(numbers)), max(numbers)
    if largest >= 1000 + 10 * different:
        raise DataError(
            f"{place('train', numbers.index(largest))}: label {largest}, but only {different} different ones occur. "
            f"Class numbers count from 0; if these are names, list them in {classes_file}, one a line."
        )
    return [str(i) for i in range(largest + 1)]


def _check_none_below_zero(written: Mapping[str, Sequence[str]], place: Place) -> None:
    """-1 among class numbers is a mark for "no label", not the name of a class."""
    integer = re.compile(r"-?\d+")
    if not all(integer.fullmatch(label) for label in set().union(*map(set, written.values()))):
        return
    for split, labels in written.items():
        for i, label in enumerate(labels):
            if label.startswith("-"):
                raise DataError(
                    f"{place(split, i)}: label {label} is below 0; class numbers count from 0. Give the image its "
                    "class, or take it out."
                )


def _outside(label: str, split: str, source: str, classes: list[str], numeric: bool) -> str:
    if source == "train":
        return (
            f"{split} has class {label!r}, which train has not. Add images of it to train, or take it out of {split}."
        )
    if numeric:
        last = len(classes) - 1
        return f"label {label} is outside the {last + 1} classes of {source} (0..{last}). Correct one of them."
    listed = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    return f"label {label!r} is not among the {len(classes)} classes of {source} ({listed}). Correct one of them."
