"""Several folders, tables or lists of image files as one dataset: classes of the same name are the same class."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources import SOURCES
from vitlab.images.sources.dataset import FileDataset, Splits

NOT_JOINED = "{}: cannot be joined with others. Several sources are folders, tables or lists of image files."
SPLITS = ("train", "val", "test")


def join_splits(parts: Mapping[str, Splits]) -> Splits:
    """`parts`: sources by name. Every image keeps its path; train, val and test are joined each for itself."""
    for name, splits in parts.items():
        if not isinstance(splits.train, FileDataset):
            raise DataError(NOT_JOINED.format(name))
    with_val = [name for name, splits in parts.items() if splits.val is not None]
    if with_val and len(with_val) < len(parts):
        without = next(name for name in parts if name not in with_val)
        raise DataError(
            f"{with_val[0]} has a val split of its own, and {without} has none. Give each of them one, or none: then "
            "part of train is split off."
        )
    classes = _united([splits.classes for splits in parts.values()])
    number = {name: i for i, name in enumerate(classes)}
    joined: dict[str, FileDataset] = {}
    for split in SPLITS:
        datasets = [data for splits in parts.values() if isinstance(data := getattr(splits, split), FileDataset)]
        if datasets:
            labels = [np.array([number[name] for name in data.classes])[data.labels] for data in datasets]
            paths = (path for data in datasets for path in data.paths)
            joined[split] = FileDataset(paths, np.concatenate(labels), classes)
    notes = [f"{name}: {note}" if name not in note else note for name, part in parts.items() for note in part.notes]
    only = {name: sorted(set(classes) - set(part.classes)) for name, part in parts.items()}
    notes += [
        f"{name} has no class {', '.join(missing[:5])}{', ...' * (len(missing) > 5)}: what tells the folders apart "
        "can be taken for what tells these classes apart."
        for name, missing in only.items()
        if missing
    ]
    return Splits(classes, joined["train"], joined.get("val"), joined.get("test"), notes, _groups(parts))


def _groups(parts: Mapping[str, Splits]) -> dict[str, list[str]] | None:
    """The groups that tables say, where all parts are such tables."""
    tables = [part.groups for part in parts.values() if part.groups is not None]
    if not tables:
        return None
    if len(tables) < len(parts):
        without = next(name for name, part in parts.items() if part.groups is None)
        raise DataError(
            f"{without}: has no column for data.group, which others have. Use one rule that all of them fit."
        )
    return {split: [g for table in tables for g in table.get(split, ())] for split in SPLITS}


def _united(lists: list[list[str]]) -> list[str]:
    """The classes of all; in their order, where it is the same, and sorted otherwise."""
    if all(classes == lists[0] for classes in lists):
        return lists[0]
    names = {name for classes in lists for name in classes}
    return sorted(names, key=lambda name: (int(name) if name.isdecimal() else -1, name))


def check_apart(names: list[str]) -> None:
    """Refuse an image in two parts: it could be learned in one and tested in the other."""
    for name in names:
        if name in SOURCES and not Path(name).exists():
            raise DataError(NOT_JOINED.format(name))
    places = {name: Path(name).expanduser().resolve() for name in names}
    if len(places) < len(names):
        raise DataError(f"{next(name for name in names if names.count(name) > 1)} is named twice.")
    for a, b in combinations(names, 2):
        for inner, outer in ((a, b), (b, a)):
            if places[outer] in (places[inner], *places[inner].parents):
                raise DataError(f"{inner} lies in {outer}, so its images would count twice. Name one of the two.")
