"""Opens datasets by name or path.

data = open_data("digits")                                    # or fashion-mnist, mnist, cifar10, cifar100
data = open_data("photos/")                                   # class folders, with or without train/ val/ test/
data = open_data("labels.csv")                                # columns path, label, and perhaps split
data = open_data("shards/train-{000000..000009}.tar")         # WebDataset
data = open_data("flickr8k/", captions=True)                  # images with captions: see sources/captions.py
data.train.read(0), data.train.labels[0]                      # (H, W, C) uint8, a class number
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

import numpy as np

from vitlab.errors import DataError, UsageError
from vitlab.images.randomness import permutation
from vitlab.images.sources import SOURCES, cifar, idx
from vitlab.images.sources import captions as captioned
from vitlab.images.sources.dataset import (
    SPLIT_NAMES,
    Allow,
    Captioned,
    Captions,
    Dataset,
    Splits,
    refuse_special,
    subset,
)
from vitlab.images.sources.folder import is_image_name, open_folder, subfolders
from vitlab.images.sources.shards import open_shards, stored_index
from vitlab.images.sources.splits import FEW, SPLIT, few_labels, stratified_split
from vitlab.images.sources.table import open_table

__all__ = [
    "SOURCES",
    "Captioned",
    "Captions",
    "Data",
    "DataError",
    "Dataset",
    "open_data",
    "stratified_split",
    "subset",
]

ACCEPTED = (
    f"A source is one of {', '.join(SOURCES)}; a folder of class folders; a CSV of paths and labels; "
    'tar shards ("shards/train-{000000..000009}.tar"); or images with captions: a folder or tar with captions.csv, '
    "or a .txt beside each image."
)


@dataclass(frozen=True)
class Data:
    """An open dataset with its splits."""

    name: str
    classes: list[str]  # none where the images have captions
    train: Dataset
    val: Dataset
    test: Dataset | None
    notes: list[str] = field(default_factory=list)  # what a user should know, but need not change

    @property
    def captioned(self) -> bool:
        return isinstance(self.train, Captioned)


def open_data(
    source: str,
    *,
    path: str | None = None,
    seed: int = 0,
    val_fraction: float = 0.1,
    per_class: int | None = None,
    fraction: float | None = None,
    captions: bool = False,
    download: bool = True,
    allow_cut: bool = False,
    allow_outside: bool = False,
) -> Data:
    """Open a source by name (`path`: where its files are) or by path.

    A missing val is a stratified `val_fraction` of train, by seed; `per_class` or `fraction` then keep part of train.
    `captions`: read texts as captions and not as class names, where a source allows both.
    `allow_cut`: use the intact part of truncated tar files. `allow_outside`: a table may name files outside its own
    folder. Without them both are errors.
    """
    _check_numbers(val_fraction, per_class, fraction)
    allow = Allow(cut=allow_cut, outside=allow_outside)
    name, splits = open_splits(source, path=path, captions=captions, download=download, allow=allow)
    return _finish(name, splits, seed, val_fraction, per_class, fraction)


def open_splits(
    source: str, *, path: str | None = None, captions: bool = False, download: bool = True, allow: Allow
) -> tuple[str, Splits]:
    """The source's name and its splits as published."""
    names = {_normalised_name(name): name for name in SOURCES}
    name = names.get(_normalised_name(source), source) if not _looks_like_path(source) else source
    if name in SOURCES:
        file, _, function = SOURCES[name].partition(".")
        open_source = getattr(import_module(f"vitlab.images.sources.{file}"), function)
        return name, open_source(name, None if path is None else Path(path).expanduser(), download)
    if path is not None:
        raise UsageError(f"{source}: a path belongs to one of {', '.join(SOURCES)}. Pass source={path!r} alone.")
    return name, _open_path(source, captions, allow)


def _open_path(source: str, captions: bool, allow: Allow) -> Splits:
    path = Path(source).expanduser()
    refuse_special(path)
    if path.is_dir():
        return _open_folder(source, path, captions, allow)
    if path.is_file():
        if kind := re.match(r"cifar-(100?)-", path.name):
            return cifar.open_cifar(f"cifar{kind[1]}", path, download=False)
        if path.suffix.lower() in (".csv", ".tsv", ".jsonl"):
            return (captioned.open_table if captioned.is_table(path, captions) else open_table)(path, allow)
        if path.name.endswith((".tar", ".tar.gz", ".tgz")):
            indexed = any(stored_index(path, kind) for kind in (False, True))  # then it is not scanned
            return (None if indexed else captioned.open_tar(path, allow)) or open_shards(source, captions, allow)
        what = (
            "one image; pass the folder above its class folder" if is_image_name(path.name) else "no kind of data known"
        )
        raise DataError(f"{source}: {what}. {ACCEPTED}")
    if re.search(r"[*?{\[]|::", source):
        return open_shards(source, captions, allow)
    if _looks_like_path(source):
        raise DataError(f"{source}: no such file or folder (from {Path.cwd()}). {ACCEPTED}")
    near = difflib.get_close_matches(source.lower(), SOURCES, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"unknown data source {source!r}, and no such file or folder.{hint} {ACCEPTED}")


def _open_folder(source: str, path: Path, captions: bool, allow: Allow) -> Splits:
    for name in cifar.KINDS:
        if cifar.locate(name, path):
            return cifar.open_cifar(name, path, download=False)
    if idx.folder_files("mnist", path):
        raise DataError(f"{path}: holds IDX files. Say which set they are: data.source=fashion-mnist data.path={path}")
    if table := captioned.table_in(path):
        return captioned.open_table(table, allow)
    folders = subfolders(path)
    in_splits = [folder for name, folder in folders.items() if name.lower() in SPLIT_NAMES and not subfolders(folder)]
    if len(in_splits) == len(folders) and any(any(folder.glob("*.tar")) for folder in [path, *in_splits]):
        return open_shards(source, captions, allow)  # a .tar beside class folders is somebody's archive
    return captioned.open_texts(path) if captioned.has_texts(path) else open_folder(path)


def _finish(
    name: str, splits: Splits, seed: int, val_fraction: float, per_class: int | None, fraction: float | None
) -> Data:
    """Split off val if there is none, note missing classes, and keep few labels if set."""
    classes, train, val, notes = splits.classes, splits.train, splits.val, list(splits.notes)
    captioned, single = isinstance(train, Captioned), "each class has a single image, so none is left for val"
    if captioned and per_class is not None:
        raise UsageError(f"per_class={per_class}: {name} has captions and no classes. Use fraction, e.g. 0.1.")
    if not captioned:
        _check_classes(name, splits)
    if val is None:
        if captioned:  # at random: there are no classes to balance
            order, held = permutation(len(train), seed, SPLIT), max(1, round(len(train) * val_fraction))
            kept, split_off = np.sort(order[held:]), np.sort(order[:held])
            single = f"{len(train)} images are too few to keep some for val"
        else:
            kept, split_off = stratified_split(train.labels, (1 - val_fraction, val_fraction), seed)
        if not len(kept) or not len(split_off):
            raise DataError(f"{name}: {single}. Add images, or a val split.")
        train, val = subset(train, kept), subset(train, split_off)
    if captioned and fraction is not None:
        few = permutation(len(train), seed, FEW)[: max(1, round(len(train) * fraction))]
        train = subset(train, np.sort(few))
    elif per_class is not None or fraction is not None:
        train = subset(train, few_labels(train.labels, classes, seed, per_class=per_class, fraction=fraction))
    for split, dataset in (("train", train), ("val", val), ("test", splits.test)):
        if dataset is not None:
            notes += _missing_classes(split, dataset)
    return Data(name, classes, train, val, splits.test, notes)


def _check_classes(name: str, splits: Splits) -> None:
    """train needs two; val and test may have none that train lacks; val, which selects the best model, needs all."""
    learned = set(np.unique(splits.train.labels))
    if len(learned) < 2:
        only = "".join(f", {splits.classes[label]!r}" for label in learned)
        raise DataError(
            f"{name}: train has only one class{only}; a classifier needs two or more. Add images of another."
        )
    for split, dataset in (("val", splits.val), ("test", splits.test)):
        present = learned if dataset is None else set(np.unique(dataset.labels))
        if unknown := present - learned:
            raise DataError(
                f"{name}: {split} has images of {_first_names(splits.classes, unknown)}, which train has not. "
                f"Add images of that to train, or take it out of {split}."
            )
        if split == "val" and (missing := learned - present):
            raise DataError(
                f"{name}: val has no images of {_first_names(splits.classes, missing)}, which train has: accuracy on "
                f"val would say nothing of it. Add images to val (in a folder: val/{splits.classes[min(missing)]}), "
                "or remove val: part of train is then split off."
            )


def _missing_classes(split: str, dataset: Dataset) -> list[str]:
    missing = np.flatnonzero(np.bincount(dataset.labels, minlength=len(dataset.classes)) == 0)
    if not len(missing):
        return []
    names = _first_names(dataset.classes, missing)
    return [f"{split} has no images of {len(missing)} of the {len(dataset.classes)} classes: {names}."]


def _first_names(classes: list[str], numbers: Iterable[int]) -> str:
    return first_few([classes[i] for i in sorted(numbers)])


def first_few(names: list[str], most: int = 5) -> str:
    """Names for a message: a, b, c, d, e and 3 more."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_numbers(val_fraction: float, per_class: int | None, fraction: float | None) -> None:
    if not 0 < val_fraction < 1:
        raise UsageError(f"val_fraction={val_fraction} must be above 0 and below 1; 0.1 is a tenth of train.")
    if per_class is not None and fraction is not None:
        raise UsageError(f"per_class={per_class} and fraction={fraction} exclude each other. Pass one of them.")
    if per_class is not None and per_class < 1:
        raise UsageError(f"per_class={per_class} must be 1 or more.")
    if fraction is not None and not 0 < fraction <= 1:
        raise UsageError(f"fraction={fraction} must be above 0 and at most 1.")


def _normalised_name(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _looks_like_path(source: str) -> bool:
    return os.sep in source or "/" in source or source.startswith((".", "~")) or bool(Path(source).suffix)
