"""vitlab.check: the state of a dataset, before and after training. The command `vitlab check` calls it.

result = vitlab.check("photos/", out="checks/photos")      # writes check.html and cleaned.csv there
result.leaks, result.suspects, result.corrections()
vitlab.train("photos/", {"data.apply": "checks/photos/cleaned.csv"})

Images are compared by the features of a trained encoder, which are kept: training on the same images uses them again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import TypedDict, Unpack

import numpy as np
from torch import nn

from vitlab.checkpoints.load import ModelOrName
from vitlab.data_check.duplicates import Copies, find_copies
from vitlab.data_check.outliers import find_outliers
from vitlab.data_check.page import write_check
from vitlab.data_check.reading import ImageContents, Joined, read_contents
from vitlab.data_check.result import CheckMethod, CheckResult, DoubtfulLabel, odd_sizes
from vitlab.device import pick_device
from vitlab.errors import DataError, UsageError
from vitlab.export.loader import is_export
from vitlab.images.datasets import SourceReading, TargetColumns, first_few, open_splits
from vitlab.images.listing import ImageInfo
from vitlab.images.sources.corrections import apply_corrections, path_in, read_corrections, source_folder
from vitlab.images.sources.dataset import Allow, Splits, label_text, subset, target_kind
from vitlab.images.sources.folder import open_unlabelled
from vitlab.inference import open_model
from vitlab.models.base import Network
from vitlab.models.task import LabelTask
from vitlab.training.batches import ImageSet
from vitlab.training.features import Count, FeatureSet, adding, dataset_features, joined_features
from vitlab.training.label_issues import FEWEST, find_label_issues
from vitlab.training.probe import fit_probe
from vitlab.training.starting_points import BUNDLED, Need, find_start
from vitlab.training.targets import fit_target_probe
from vitlab.training.train import run_name
from vitlab.training.unreadable import none_readable

AUTO = "auto"
TABLE, PAGE = "cleaned.csv", "check.html"
PLAUSIBLE = 0.2  # share of wrong labels; more says that the features are weak, not that the labels are bad
BLANK = 2.0  # grey levels: an image that varies less shows nothing


class SourceSettings(TypedDict, total=False):
    """How a data source is opened, as in images.datasets.open_data."""

    path: str | None
    allow_cut: bool
    allow_outside: bool


def check(
    data: str | PathLike[str],
    *,
    model: ModelOrName = AUTO,
    out: str | PathLike[str] | None = None,
    overwrite: bool = False,
    apply: str | PathLike[str] | None = None,
    columns: TargetColumns | None = None,
    device: str | None = None,
    progress: Count | None = None,
    **source: Unpack[SourceSettings],
) -> CheckResult:
    """Look for leaks between splits, copies, likely wrong labels, outliers, unreadable and odd images.

    `data`: a folder of images, with or without class folders and splits, or any data source. `model`: whose features
    are compared; auto: that which vitlab.train would start from. `out`: a folder for the page and the table of
    corrections; one that it holds already is only replaced with `overwrite`. `apply`: check the data as corrected; the
    new table has these corrections too. `columns`: of a table, which one to learn (images.datasets.TargetColumns).

    Where images have several labels, each label is examined by itself. Numbers are not examined, only the images.
    """
    began, name = time.perf_counter(), fspath(data)
    place = None if out is None else _check_place(Path(out), overwrite)
    splits = _open(name, source, columns or TargetColumns())
    folder, applied = source_folder(name), []
    if apply is not None:
        corrections = Path(apply).expanduser()
        splits = apply_corrections(splits, corrections, folder)
        applied = [row for _, row in read_corrections(corrections) if row.action != "keep"]
    joined = Joined({split: part for split, part in splits.parts.items() if part is not None and len(part)})
    contents = read_contents(joined, adding(progress, "images", len(joined)))
    if not contents.readable.any():
        raise none_readable({joined.name_of(i): error for i, error in contents.unreadable.items()})
    network, chosen, why = _encoder(model, len(joined), device)
    features = _features(network, joined, contents, progress)
    infos = [_info(joined, i, folder) for i in range(len(joined))]
    result = CheckResult(run_name(name), name, splits.classes, infos, CheckMethod(chosen, why), contents.unreadable)
    result.notes, result.applied = list(splits.notes), applied
    result.kind, result.columns = target_kind(joined.labels), columns or TargetColumns()
    _look_at_sizes(result, contents)
    copies = _look_for_copies(result, contents, features, progress)
    _look_at_classes(result, joined)
    _look_at_labels(result, features, copies)
    _look_for_outliers(result, features, copies)
    result.method = CheckMethod(chosen, why, copies.threshold, time.perf_counter() - began)
    if place is not None:
        write_check(result, joined, place / PAGE, place / TABLE)
    return result


def new_folder(data: str) -> Path:
    """checks/photos, or checks/photos-2, ... where that is taken."""
    folder, number = Path("checks") / run_name(data), 1
    free = folder
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")
    return free


def _check_place(folder: Path, overwrite: bool) -> Path:
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder}: is a file; name a folder for the page and the table.")
    if (folder / TABLE).exists() and not overwrite:
        raise UsageError(
            f"{folder / TABLE}: is there already, and may hold what you wrote into it. Name another folder, or pass "
            "--overwrite."
        )
    return folder


def _open(name: str, source: SourceSettings, columns: TargetColumns) -> Splits:
    """The splits; those of a folder without classes, or with one, are images without labels."""
    allow = Allow(cut=source.get("allow_cut", False), outside=source.get("allow_outside", False))
    try:
        splits = open_splits(name, SourceReading(columns=columns, allow=allow), path=source.get("path"))[1]
    except DataError:
        folder = Path(name).expanduser()
        splits = open_unlabelled(folder) if folder.is_dir() else None
        if splits is None:
            raise
    if splits.train.stored is not None:
        raise UsageError(f"{name} holds {splits.train.stored}: vitlab check looks at photos.")
    return splits


def _info(joined: Joined, index: int, folder: Path | None) -> ImageInfo:
    label = label_text(joined, index) if joined.classes else None
    return ImageInfo(path_in(joined.name_of(index), folder), joined.split_of(index), label)


def _encoder(model: ModelOrName, images: int, device: str | None) -> tuple[Network, str, str]:
    """The model, its name, and why it was chosen."""
    why = "you named it"
    if isinstance(model, str) and model == AUTO:
        start = find_start(Need(images, None, pick_device(device or "auto").type))
        model, why = start.name or BUNDLED, start.why
    if isinstance(model, nn.Module):
        network = open_model(model, device)
        return network.encoder, (network.card.name if network.card is not None else None) or network.family, why
    if is_export(model):
        raise UsageError(f"{model}: an exported file gives no features: name the checkpoint that it is made of.")
    return open_model(model, device, encoder=True).encoder, fspath(model), why


def _features(network: Network, joined: Joined, contents: ImageContents, progress: Count | None) -> FeatureSet:
    """Of the readable images, numbered as in `joined`; a split is read as in training, which shares its features."""
    readable, pre = np.flatnonzero(contents.readable), network.require_preprocess()
    count, parts = adding(progress, "features", len(readable)), []
    for name, first, last in zip(joined.names, joined.starts[:-1], joined.starts[1:], strict=True):
        numbers = readable[(readable >= first) & (readable < last)]
        if len(numbers):
            image_set = ImageSet(subset(joined, numbers), pre, "fast" if name == "train" else "exact")
            features = dataset_features(network, image_set, progress=count)
            features.indices = numbers[features.indices]
            parts.append(features)
    return joined_features(parts)


def _look_at_sizes(result: CheckResult, contents: ImageContents) -> None:
    tiny, extreme = odd_sizes(contents.sizes, contents.readable)
    sizes = [(int(height), int(width)) for height, width in contents.sizes]
    result.tiny, result.extreme = ({i: sizes[i] for i in images} for images in (tiny, extreme))
    spread = contents.thumbnails.reshape(len(sizes), -1).std(axis=1)
    result.blank = np.flatnonzero(contents.readable & (spread < BLANK)).tolist()


def _look_for_copies(
    result: CheckResult, contents: ImageContents, features: FeatureSet, progress: Count | None
) -> Copies:
    def count(done: int, total: int) -> None:
        if progress is not None:  # in images, as the other steps are
            progress("copies", len(result.images) * done // total, len(result.images))

    copies = find_copies(contents, features.vectors, features.indices, count)
    splits = [info.split or "train" for info in result.images]
    result.leaks, result.duplicates = copies.leaks(splits), copies.within(splits)
    if result.classes:
        result.conflicts = copies.conflicts([info.label for info in result.images])
        if result.kind == "number":  # of two crops of a photo it may differ
            result.conflicts = [copy for copy in result.conflicts if copy.kind != "near"]
    if copies.threshold > 1:
        result.notes.append("the images are too alike to tell near copies apart: only exact copies are listed.")
    if "val" not in splits and result.duplicates:
        result.notes.append("there is no val split: training draws one from train, and copies would be on both sides.")
    return copies


def _look_at_classes(result: CheckResult, joined: Joined) -> None:
    if not result.classes or result.kind == "number":
        return
    for split, dataset in zip(joined.names, joined.datasets, strict=True):
        several = result.kind == "labels"
        counts = dataset.labels.sum(axis=0) if several else np.bincount(dataset.labels, minlength=len(result.classes))
        result.counts[split] = counts.tolist()


def _look_at_labels(result: CheckResult, features: FeatureSet, copies: Copies) -> None:
    """Over all splits together: wrong labels in val and test make every result wrong."""
    if result.kind == "number":
        result.notes.append("numbers are not examined: whether one is wrong is not checked, only the images are.")
        return
    if result.kind == "labels":
        _look_at_each_label(result, features, copies)
        return
    labels = features.labels.numpy()
    counts = np.bincount(labels, minlength=max(len(result.classes), 1))
    judged = counts >= FEWEST
    if not result.classes:
        result.notes.append("there are no labels, so labels and classes are not checked.")
        return
    if judged.sum() < 2:
        result.notes.append(f"fewer than two classes have {FEWEST} images or more, so labels are not checked.")
        return
    if few := [result.classes[i] for i in np.flatnonzero((counts > 0) & ~judged)]:
        result.notes.append(f"labels of classes with fewer than {FEWEST} images are not checked: {first_few(few)}.")
    groups = copies.groups[features.indices]
    if len(np.unique(groups)) < 2:
        result.notes.append("all images are copies of one, so labels are not checked.")
        return
    probe = fit_probe(features.vectors, features.labels, len(result.classes), groups=groups)
    issues = find_label_issues(probe.held_out.exp().numpy(), labels, judged)
    result.suspects = [replace(suspect, image=int(features.indices[suspect.image])) for suspect in issues.suspects]
    if issues.estimated <= PLAUSIBLE:
        result.wrong_labels = issues.estimated
    else:
        result.notes.append(_too_weak(result, issues.estimated))


def _too_weak(result: CheckResult, share: float) -> str:
    return (
        f"by the features of {result.method.model}, {share:.0%} of the labels look wrong: they tell "
        "these classes apart poorly, and many of the suspects are right. Name a stronger --model."
    )


def _look_at_each_label(result: CheckResult, features: FeatureSet, copies: Copies) -> None:
    """Each label by itself: an image has it or not, and a probe that has not seen the image says which is likelier."""
    truth, groups = features.labels.numpy() > 0, copies.groups[features.indices]  # (n, K), (n,)
    has = truth.sum(axis=0)
    judged = np.minimum(has, len(truth) - has) >= FEWEST
    if few := [result.classes[k] for k in np.flatnonzero(~judged)]:
        result.notes.append(f"labels that fewer than {FEWEST} images have, or lack, are not checked: {first_few(few)}.")
    if not judged.any() or len(np.unique(groups)) < 2:
        return
    probe = fit_target_probe(features.vectors, features.labels, LabelTask(), groups=groups)
    chances = probe.held_out.sigmoid().numpy()  # (n, K)
    suspects, wrong = [], 0.0
    for k in np.flatnonzero(judged):
        issues = find_label_issues(np.stack([1 - chances[:, k], chances[:, k]], axis=1), truth[:, k].astype(np.int64))
        wrong += issues.estimated * len(truth)
        for s in issues.suspects:
            image = int(features.indices[s.image])
            suspects.append(DoubtfulLabel(image, int(k), bool(s.given), s.confidence, s.margin))
    result.doubtful = sorted(suspects, key=lambda s: s.margin)
    share = wrong / (len(truth) * judged.sum())
    if share <= PLAUSIBLE:
        result.wrong_labels = share
    else:
        result.notes.append(_too_weak(result, share))


def _look_for_outliers(result: CheckResult, features: FeatureSet, copies: Copies) -> None:
    """Among images of which there is one: a copy is no evidence that an image is usual. Without classes, among all."""
    first = np.flatnonzero(copies.groups[features.indices] == features.indices)
    labels = features.labels.numpy()[first] if result.kind == "class" else np.zeros(len(first), dtype=np.int64)
    outliers = find_outliers(features.vectors[first], labels)
    result.outliers = [replace(o, image=int(features.indices[first[o.image]])) for o in outliers]
