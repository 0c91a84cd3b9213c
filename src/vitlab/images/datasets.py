"""Opens datasets by name or path.

data = open_data("digits")                                    # or fashion-mnist, mnist, cifar10, cifar100
data = open_data("photos/")                                   # class folders, with or without train/ val/ test/
data = open_data("labels.csv")                                # columns path, label, and perhaps split
data = open_data("tags.csv")                                  # several labels an image: see sources/targets.py
data = open_data("prices.csv", columns=TargetColumns(target="price"))                       # a number of each image
data = open_data("files.txt")                                 # a list of files: path, and perhaps label and split
data = open_data("lab1/,lab2/")                               # several of these: classes of one name are one class
data = open_data("tiles/", files=FileOptions(group="parent")) # images of one folder are on one side of a split
data = open_data("shards/train-{000000..000009}.tar")         # WebDataset
data = open_data("flickr8k/", captions=True)                  # images with captions: see sources/captions.py
data = open_data("nuclei/", files=FileOptions(marks="semantic"))  # masks or boxes: see sources/annotated.py
data.train.read(0), data.train.labels[0]                      # (H, W, C) uint8, and a class number; data.kind
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

import numpy as np

from vitlab.advice import option_or_setting
from vitlab.errors import DataError, ImageError, UsageError
from vitlab.images.bands import ARRAY_EXTENSION, StoredPixels, is_photo, stored_pixels
from vitlab.images.randomness import permutation
from vitlab.images.sources import SHARD_PATTERN, SOURCES, cifar, idx, sources_of
from vitlab.images.sources import captions as captioned
from vitlab.images.sources.annotated import holds_marks, open_annotated
from vitlab.images.sources.corrections import apply_corrections, source_folder
from vitlab.images.sources.dataset import (
    KIND_NAMES,
    SPLIT_NAMES,
    Allow,
    Annotated,
    Captioned,
    Captions,
    Dataset,
    FileDataset,
    RegionKind,
    Splits,
    TargetKind,
    refuse_special,
    subset,
    target_kind,
)
from vitlab.images.sources.folder import is_image_name, open_folder, subfolders
from vitlab.images.sources.groups import number_groups, path_groups
from vitlab.images.sources.joined import check_apart, join_splits
from vitlab.images.sources.shards import open_shards, stored_index
from vitlab.images.sources.splits import FEW, SPLIT, few_labels, group_split, strata, stratified_split
from vitlab.images.sources.table import is_list, open_table
from vitlab.images.sources.targets import ENDINGS, TargetColumns, is_target_table, open_target_table, table_kind

__all__ = [
    "SOURCES",
    "Annotated",
    "Captioned",
    "Captions",
    "Data",
    "DataError",
    "Dataset",
    "FileOptions",
    "TargetColumns",
    "open_data",
    "stratified_split",
    "subset",
]

ACCEPTED = (
    f"A source is one of {', '.join(SOURCES)}; a folder of class folders; a CSV, JSON or list (.txt) of paths and "
    "labels; several of these with commas between; "
    'tar shards ("shards/train-{000000..000009}.tar"); images with captions: a folder or tar with captions.csv, '
    "or a .txt beside each image; or images with masks or boxes: images/ beside masks/, instances/ or labels/, or COCO "
    "JSON."
)


PROBED = 24  # files that are looked into, to learn what they hold
PIXELS = ("auto", "photo", "stored")
DEEP_EXTENSIONS = (".tif", ".tiff", ".png", ARRAY_EXTENSION)  # of files that may hold more than photos


@dataclass(frozen=True)
class FileOptions:
    """How image files are read, and which of them belong together."""

    pixels: str = "auto"  # photo: 8-bit RGB; stored: as in the file; auto: stored where files hold more than photos
    channels: int | None = None  # of .npy files, where their shape does not tell
    group: str | None = None  # images that no split may tear apart: see images/sources/groups.py
    marks: RegionKind | None = None  # what is learned of masks and boxes; None: the most detailed that there is
    max_bad_annotations: int = 20  # wrong masks, boxes and polygons that may be left out

    def __post_init__(self) -> None:
        if self.pixels not in PIXELS:
            raise UsageError(f"pixels={self.pixels!r} must be one of {', '.join(PIXELS)}.")
        if self.channels is not None and self.channels < 1:
            raise UsageError(f"channels={self.channels} must be 1 or more.")


@dataclass(frozen=True)
class Data:
    """An open dataset with its splits."""

    name: str
    classes: list[str]  # or labels, or the name of the number; none where the images have captions
    train: Dataset
    val: Dataset
    test: Dataset | None
    notes: list[str] = field(default_factory=list)  # what a user should know, but need not change

    @property
    def captioned(self) -> bool:
        return isinstance(self.train, Captioned)

    @property
    def annotated(self) -> bool:
        """Whether the images have masks or boxes."""
        return isinstance(self.train, Annotated)

    @property
    def kind(self) -> TargetKind:
        """What is learned of an image: its class, several labels, or a number."""
        return target_kind(self.train.labels)


def open_data(
    source: str,
    *,
    path: str | None = None,
    seed: int = 0,
    val_fraction: float = 0.1,
    per_class: int | None = None,
    fraction: float | None = None,
    captions: bool = False,
    columns: TargetColumns | None = None,
    download: bool = True,
    allow_cut: bool = False,
    allow_outside: bool = False,
    apply: str | None = None,
    files: FileOptions | None = None,
) -> Data:
    """Open a source by name (`path`: where its files are) or by path; or several, with commas between.

    A missing val is a stratified `val_fraction` of train, by seed; `per_class` or `fraction` then keep part of train.
    `captions`: read texts as captions and not as class names, where a source allows both. `columns`: of a table, which
    say what is learned.
    `allow_cut`: use the intact part of truncated tar files. `allow_outside`: a table may name files outside its own
    folder. Without them both are errors. `files`: how image files are read, and which belong together. `apply`: a
    table of corrections (sources/corrections.py).
    """
    _check_numbers(val_fraction, per_class, fraction)
    allow, files = Allow(cut=allow_cut, outside=allow_outside), files or FileOptions()
    reading = SourceReading(captions, columns or TargetColumns(), allow, files)
    name, splits = open_splits(source, reading, path=path, download=download)
    splits = _with_groups(name, splits, files.group)
    if apply is not None:
        splits = apply_corrections(splits, Path(apply).expanduser(), source_folder(source))
    return _finish(name, splits, seed, val_fraction, per_class, fraction)


@dataclass(frozen=True)
class SourceReading:
    """How a source is read: the options of `open_data` that concern its files."""

    captions: bool = False
    columns: TargetColumns = field(default_factory=TargetColumns)
    allow: Allow = field(default_factory=Allow)
    files: FileOptions = field(default_factory=FileOptions)


def open_splits(
    source: str, reading: SourceReading, *, path: str | None = None, download: bool = True
) -> tuple[str, Splits]:
    """The source's name and its splits as published."""
    columns, parts = reading.columns, sources_of(source)
    if columns.settings and not is_table(source):
        raise UsageError(f"{columns.settings[0]} names a column of a table (CSV or JSON), and {source} is none.")
    if len(parts) > 1:
        if path is not None:
            raise UsageError(f"{source}: a path belongs to one of {', '.join(SOURCES)} alone.")
        check_apart(parts)
        opened = {part: _open_path(part, reading) for part in parts}
        for part, splits in opened.items():
            if (kind := target_kind(splits.train.labels)) != "class":
                raise DataError(f"{part} has {KIND_NAMES[kind]}: only sources with classes can be joined.")
        return source, _as_stored(join_splits(opened), reading.files)
    names = {_normalised_name(name): name for name in SOURCES}
    name = names.get(_normalised_name(source), source) if not _looks_like_path(source) else source
    if name in SOURCES:
        file, _, function = SOURCES[name].partition(".")
        open_source = getattr(import_module(f"vitlab.images.sources.{file}"), function)
        return name, open_source(name, None if path is None else Path(path).expanduser(), download)
    if path is not None:
        raise UsageError(f"{source}: a path belongs to one of {', '.join(SOURCES)}. Pass source={path!r} alone.")
    return name, _as_stored(_open_path(source, reading), reading.files)


def is_table(source: str) -> bool:
    """A file with columns, which say what is learned."""
    path = Path(source).expanduser()
    return path.suffix.lower() in ENDINGS and path.is_file()


def kind_of(source: str, columns: TargetColumns) -> TargetKind:
    """What is learned of each image of a source, without opening all of it."""
    path = Path(source).expanduser()
    if not is_table(source) or (not columns.settings and captioned.is_table(path)):
        return "class"
    return table_kind(path, columns)


def _open_path(source: str, reading: SourceReading) -> Splits:
    captions, columns, allow = reading.captions, reading.columns, reading.allow
    path = Path(source).expanduser()
    refuse_special(path)
    if path.is_dir():
        return _open_folder(source, path, reading)
    if path.is_file():
        if path.suffix.lower() == ".json" and holds_marks(path):
            return _open_marks(path, reading)
        if kind := re.match(r"cifar-(100?)-", path.name):
            return cifar.open_cifar(f"cifar{kind[1]}", path, download=False)
        if is_table(source):
            if not columns.settings and (captioned.is_table(path, captions) or not is_target_table(path)):
                return captioned.open_table(path, allow)
            return open_target_table(path, columns, allow, reading.files.group)
        if path.suffix.lower() == ".txt" and is_list(path):
            return open_table(path, allow, reading.files.group)
        if path.name.endswith((".tar", ".tar.gz", ".tgz")):
            indexed = any(stored_index(path, kind) for kind in (False, True))  # then it is not scanned
            return (None if indexed else captioned.open_tar(path, allow)) or open_shards(source, captions, allow)
        what = (
            "one image; pass the folder above its class folder" if is_image_name(path.name) else "no kind of data known"
        )
        raise DataError(f"{source}: {what}. {ACCEPTED}")
    if re.search(SHARD_PATTERN, source):
        return open_shards(source, captions, allow)
    if _looks_like_path(source):
        raise DataError(f"{source}: no such file or folder (from {Path.cwd()}). {ACCEPTED}")
    near = difflib.get_close_matches(source.lower(), SOURCES, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise DataError(f"unknown data source {source!r}, and no such file or folder.{hint} {ACCEPTED}")


def _open_marks(path: Path, reading: SourceReading) -> Splits:
    return open_annotated(path, reading.files.marks, reading.files.max_bad_annotations, reading.allow)


def _open_folder(source: str, path: Path, reading: SourceReading) -> Splits:
    captions, allow = reading.captions, reading.allow
    for name in cifar.KINDS:
        if cifar.locate(name, path):
            return cifar.open_cifar(name, path, download=False)
    if idx.folder_files("mnist", path):
        raise DataError(
            f"{path}: holds IDX files. Say which set they are: name it, mnist or fashion-mnist, with "
            f"{option_or_setting('data.path', str(path))}."
        )
    if holds_marks(path):
        return _open_marks(path, reading)
    if table := captioned.table_in(path):
        return captioned.open_table(table, allow)
    folders = subfolders(path)
    in_splits = [folder for name, folder in folders.items() if name.lower() in SPLIT_NAMES and not subfolders(folder)]
    if len(in_splits) == len(folders) and any(any(folder.glob("*.tar")) for folder in [path, *in_splits]):
        return open_shards(source, captions, allow)  # a .tar beside class folders is somebody's archive
    return captioned.open_texts(path) if captioned.has_texts(path) else open_folder(path)


def _as_stored(splits: Splits, files: FileOptions) -> Splits:
    """The splits, their files read as stored where they hold more than photos do."""
    train = splits.train.dataset if isinstance(splits.train, Captioned | Annotated) else splits.train
    if files.pixels == "photo" or not isinstance(train, FileDataset):
        return splits
    stored, notes = _find_stored(train, files)
    if stored is not None:
        notes.append(f"the images are not photos: {stored} are read, as stored in the files.")
        for dataset in (splits.train, splits.val, splits.test):
            if isinstance(dataset, Captioned | Annotated):
                dataset.stored, dataset.channels = stored, stored.channels
                dataset = dataset.dataset
            if isinstance(dataset, FileDataset):
                dataset.stored = stored
    return replace(splits, notes=[*splits.notes, *notes])


def _find_stored(train: FileDataset, files: FileOptions) -> tuple[StoredPixels | None, list[str]]:
    """What the files hold, where that is to be read as it is; None: photos. A few files tell."""
    endings = {Path(path).suffix.lower() for path in train.paths}
    arrays = ARRAY_EXTENSION in endings
    if files.pixels == "auto":
        if arrays and not endings <= set(DEEP_EXTENSIONS):
            other = sorted(endings - set(DEEP_EXTENSIONS))[0]
            raise DataError(
                f"there are {ARRAY_EXTENSION} and {other} files among the images, whose values do not compare. Convert "
                "them all to one kind."
            )
        if not endings <= set(DEEP_EXTENSIONS):
            return None, []
    chosen = np.unique(np.linspace(0, len(train) - 1, min(len(train), PROBED)).astype(int))
    examples: dict[StoredPixels | None, list[str]] = {}  # None: photos
    broken: ImageError | None = None
    for path in (train.paths[int(i)] for i in chosen):
        try:
            photo = files.pixels == "auto" and is_photo(path)
            examples.setdefault(None if photo else stored_pixels(path, files.channels), []).append(path)
        except ImageError as error:  # reading all of them will count the damaged ones
            broken = error
    if not examples and broken is not None:
        raise broken
    if None in examples and not arrays:
        more = sum(len(paths) for kind, paths in examples.items() if kind is not None)
        note = (
            f"{more} of {len(chosen)} images that were looked at hold more than 8-bit colours; all are read as 8-bit "
        )
        return None, [f"{note}photos. data.pixels=stored reads them as stored."] if more else []
    if len(examples) > 1:
        first, second = [f"{paths[0]} {kind or '8-bit colours'}" for kind, paths in examples.items()][:2]
        raise DataError(
            f"the images hold different things: {first}, {second}. Convert them all to one kind, or read all as "
            "photos: data.pixels=photo"
        )
    return next(iter(examples)), []


def _with_groups(name: str, splits: Splits, rule: str | None) -> Splits:
    """The splits, each image with its group."""
    if rule is None:
        return splits
    by_split = {"train": splits.train, "val": splits.val, "test": splits.test}
    datasets = {split: dataset for split, dataset in by_split.items() if dataset is not None}
    numbers = number_groups(rule, name, splits.groups or path_groups(rule, datasets))
    for split, dataset in datasets.items():
        dataset.groups = numbers[split]
    train = splits.train
    if target_kind(train.labels) != "class":
        return splits
    if len(splits.classes) > 1 and len(np.unique(numbers["train"])) == len(np.unique(train.labels)):
        pairs = np.unique(np.stack([numbers["train"], train.labels]), axis=1)
        if pairs.shape[1] == len(np.unique(train.labels)):
            raise DataError(
                f"{name}: data.group={rule} gives one group for each class, so that no class could be on both sides of "
                "a split. Name what lies between: the patient, the camera, the day."
            )
    return splits


def _split_off(splits: Splits, name: str, seed: int, val_fraction: float) -> Splits:
    """The splits with a val, which is taken from train where there is none."""
    train = splits.train
    if splits.val is not None:
        return splits
    single = "each class has a single image, so none is left for val"
    if train.groups is not None:
        kept, split_off = group_split(strata(train.labels), train.groups, (1 - val_fraction, val_fraction), seed)
    elif isinstance(train, Captioned | Annotated):  # at random: there are no classes of images to balance
        order, held = permutation(len(train), seed, SPLIT), max(1, round(len(train) * val_fraction))
        kept, split_off = np.sort(order[held:]), np.sort(order[:held])
        single = f"{len(train)} images are too few to keep some for val"
    else:
        kept, split_off = stratified_split(strata(train.labels), (1 - val_fraction, val_fraction), seed)
    if not len(kept) or not len(split_off):
        raise DataError(f"{name}: {single}. Add images, or a val split.")
    return replace(splits, train=subset(train, kept), val=subset(train, split_off))


def _finish(
    name: str, splits: Splits, seed: int, val_fraction: float, per_class: int | None, fraction: float | None
) -> Data:
    """Split off val if there is none, note missing classes, and keep few labels if set."""
    classes, notes = splits.classes, list(splits.notes)
    by_class = not isinstance(splits.train, Captioned | Annotated)
    kind = target_kind(splits.train.labels)
    if kind != "class" and per_class is not None:
        raise UsageError(
            f"per_class={per_class}: {name} has {KIND_NAMES[kind]} and no classes. Use fraction, e.g. 0.1."
        )
    if not by_class and per_class is not None:
        has = "captions" if isinstance(splits.train, Captioned) else "masks or boxes"
        raise UsageError(f"per_class={per_class}: {name} has {has} and no classes of images. Use fraction, e.g. 0.1.")
    if by_class and kind == "class":
        _check_classes(name, splits)
    splits = _split_off(splits, name, seed, val_fraction)
    train, val = splits.train, splits.val
    assert val is not None
    if not by_class and fraction is not None and train.groups is None:
        few = permutation(len(train), seed, FEW)[: max(1, round(len(train) * fraction))]
        train = subset(train, np.sort(few))
    elif per_class is not None or fraction is not None:
        labels = strata(train.labels)
        few = few_labels(labels, classes, seed, per_class=per_class, fraction=fraction, groups=train.groups)
        train = subset(train, few)
    for split, dataset in (("train", train), ("val", val), ("test", splits.test)):
        if dataset is not None and by_class:
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
    kind = target_kind(dataset.labels)
    if kind == "number":
        return []
    missing = np.flatnonzero(images_per_class(dataset) == 0)
    if not len(missing):
        return []
    names, what = _first_names(dataset.classes, missing), "classes" if kind == "class" else "labels"
    return [f"{split} has no images of {len(missing)} of the {len(dataset.classes)} {what}: {names}."]


def label_text(dataset: Dataset, index: int) -> str:
    """What is known of an image, in words: its class, its labels, its number, or its first caption."""
    if isinstance(dataset, Captioned):
        return dataset.captions[index][0]
    if isinstance(dataset, Annotated):
        return ""
    label, kind = dataset.labels[index], target_kind(dataset.labels)
    if kind == "number":
        return f"{label:.6g}"
    if kind == "labels":
        return ", ".join(dataset.classes[k] for k in np.flatnonzero(label)) or "none"
    return dataset.classes[int(label)]


def images_per_class(dataset: Dataset) -> np.ndarray:
    """(K,); of several labels an image, the images that have each."""
    if target_kind(dataset.labels) == "labels":
        return dataset.labels.sum(axis=0)
    return np.bincount(dataset.labels, minlength=len(dataset.classes))


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
