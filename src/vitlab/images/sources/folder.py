"""A folder of class folders, with or without train/, val/ and test/ above them."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np

from vitlab.errors import DataError
from vitlab.images.bands import ARRAY_EXTENSION
from vitlab.images.read import EXTENSIONS
from vitlab.images.sources.dataset import SPLIT_NAMES, FileDataset, Splits

READ = (*EXTENSIONS, ARRAY_EXTENSION)
LAYOUT = "Put the images of each class into a folder of its own, named after the class: {0}/cat/1.jpg, {0}/dog/2.jpg."


def open_folder(path: Path) -> Splits:
    """Classes are the names of train's folders, sorted."""
    folders = split_folders(path)
    train = _images_by_class(folders["train"])
    classes, notes = list(train), []
    _check_train(folders["train"], train)
    if loose := _loose(folders["train"]):
        notes.append(f"{folders['train']}: {len(loose)} images outside the class folders are not used.")
    splits = {"train": _dataset(train, classes)}
    for split in ("val", "test"):
        if split not in folders:
            continue
        by_class = {name: paths for name, paths in _images_by_class(folders[split]).items() if paths}
        if split == "test" and not by_class:
            notes.append(f"{folders[split]}: no images in class folders, so there is no test split.")
            continue
        if not by_class:
            raise DataError(
                f"{folders[split]}: no images in class folders. Fill it as train is filled, or remove it: part of "
                "train will be used."
            )
        if unknown := [name for name in by_class if name not in train]:
            raise DataError(
                f"{folders[split]}: class {unknown[0]!r} is not in {folders['train']}"
                + (f" (nor are {len(unknown) - 1} others)" if len(unknown) > 1 else "")
                + f". Add images of it to train, or take it out of {folders[split].name}."
            )
        splits[split] = _dataset(by_class, classes)
    return Splits(classes, splits["train"], splits.get("val"), splits.get("test"), notes)


def open_unlabelled(path: Path) -> Splits | None:
    """A folder of images without classes, or with one: nothing to train a classifier on. None where it is another."""
    folders = split_folders(path)
    by_class = {name: paths for name, paths in _images_by_class(folders["train"]).items() if paths}
    classes = list(by_class) if len(by_class) == 1 and not _loose(folders["train"]) else []
    if len(by_class) > 1 or not images_under(folders["train"]):
        return None
    parts: dict[str, FileDataset | None] = {"train": None, "val": None, "test": None}
    for split, folder in folders.items():
        files = images_under(folder)
        parts[split] = FileDataset(files, np.zeros(len(files), dtype=np.int64), classes) if files else None
    assert parts["train"] is not None
    return Splits(classes, parts["train"], parts["val"], parts["test"])


def subfolders(path: Path) -> dict[str, Path]:
    """Visible folders by name, sorted; __MACOSX and the like are what archives leave behind."""
    return {entry.name: Path(entry.path) for entry in _scan(path) if entry.is_dir() and not entry.name.startswith("__")}


def is_image_name(name: str) -> bool:
    return name.lower().endswith(READ)


def _scan(path: Path) -> list[os.DirEntry[str]]:
    """Entries that are not hidden, sorted by name, so that no file system's order matters."""
    try:
        with os.scandir(path) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(f"{path}: the folder cannot be read ({error.strerror}).") from None


def split_folders(path: Path) -> dict[str, Path]:
    """Split -> its folder. Without train/, all of it is train; "train" may also be a class, as in CIFAR-100."""
    inside = subfolders(path)
    by_split: dict[str, list[Path]] = {}
    for name, folder in inside.items():
        if split := SPLIT_NAMES.get(name.lower()):
            by_split.setdefault(split, []).append(folder)
    all_named = sum(map(len, by_split.values())) == len(inside)
    if "train" in by_split and (all_named or subfolders(by_split["train"][0])):
        for split, folders in by_split.items():
            if len(folders) > 1:
                raise DataError(f"{path}: {' and '.join(f.name for f in folders)} both mean {split}. Keep one of them.")
        return {split: folders[0] for split, folders in by_split.items()}
    if by_split and all_named:
        raise DataError(
            f"{path}: has {' and '.join(f'{folder}/' for folder in inside)}, but no train/. Rename the folder that is "
            "to be trained on."
        )
    return {"train": path}


def _images_by_class(folder: Path) -> dict[str, list[str]]:
    return {name: images_under(path) for name, path in subfolders(folder).items()}


def images_under(folder: Path) -> list[str]:
    """All images at any depth, sorted. A folder is entered once, so that links in a circle end."""
    files, entered, waiting = [], set(), [folder]
    while waiting:
        here = waiting.pop()
        status = here.stat()
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        for entry in _scan(here):
            if entry.is_dir():
                waiting.append(Path(entry.path))
            elif is_image_name(entry.name):  # a dangling link or a FIFO fails by name when it is read
                files.append(entry.path)
    return sorted(files)


def _dataset(by_class: dict[str, list[str]], classes: list[str]) -> FileDataset:
    counts = [len(by_class.get(name, ())) for name in classes]
    paths = (path for name in classes for path in by_class.get(name, ()))
    return FileDataset(paths, np.repeat(np.arange(len(classes)), counts), classes)


def _loose(folder: Path) -> list[str]:
    return [entry.name for entry in _scan(folder) if is_image_name(entry.name) and not entry.is_dir()]


def _check_train(folder: Path, by_class: dict[str, list[str]]) -> None:
    """Refuse folders that cannot be trained on, each with its own message."""
    here = LAYOUT.format(folder)
    if not by_class:
        entries = _scan(folder)
        if not entries:
            raise DataError(f"{folder}: the folder is empty. {here}")
        tables = [entry.name for entry in entries if entry.name.lower().endswith((".csv", ".tsv"))]
        hint = f" Or pass the table: {folder / tables[0]}." if tables else ""
        if loose := _loose(folder):
            raise DataError(f"{folder}: {len(loose)} images lie directly in it, without class folders. {here}{hint}")
        raise DataError(f"{folder}: no class folders and no images in it. {here}{hint}")
    if not any(by_class.values()):
        raise DataError(f"{folder}: no images in its {len(by_class)} folders{_other_endings(folder)}. {here}")
    if empty := [name for name, paths in by_class.items() if not paths]:
        names = ", ".join(map(repr, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise DataError(
            f"{folder}: no images in class {names}{_other_endings(folder / empty[0])}. "
            "Add some, or remove the empty folder."
        )
    if len(by_class) == 1:
        (only,) = by_class
        deeper = [name for name in subfolders(folder / only) if images_under(folder / only / name)]
        hint = f" Did you mean {folder / only}?" if len(deeper) > 1 else ""
        raise DataError(f"{folder}: only one class, {only!r}; a classifier needs two or more.{hint} {here}")


def _other_endings(folder: Path) -> str:
    """The endings of the other files, for a message."""
    endings = Counter(Path(name).suffix.lower() for _, _, names in os.walk(folder) for name in names)
    endings.pop("", None)
    if not endings:
        return ""
    return f" (files there end in {', '.join(e for e, _ in endings.most_common(3))}; read are {', '.join(READ)})"
