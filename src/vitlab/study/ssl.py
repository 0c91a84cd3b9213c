"""Does self-supervised pre-training pay? Each method is pretrained on all images of a source without labels. Then few
labels are used: frozen features are evaluated, the encoder is fine-tuned, and the same network trains from scratch.

    studies/ssl-cifar10/{study.json, results.csv, table.md, plot.png}
    studies/ssl-cifar10/mae-pretrained/     a run folder for each step, as `vitlab train` makes it
    studies/ssl-cifar10/mae-fine-tuned/     mae-from-scratch/ ...
    studies/ssl-cifar10/mae-frozen.json     k-NN and linear probe on the encoder's features

An existing encoder (`--pretrained mae=bundled:mae`) is evaluated in the same way, without the first step. Fine-tuning
and training from scratch differ only in the initial weights: network, images, steps and learning rates are the same.
The same command again resumes an interrupted study.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.load import load_with_report
from vitlab.errors import UsageError
from vitlab.images.datasets import Data
from vitlab.images.preprocess import Preprocess
from vitlab.models.config import nearest
from vitlab.models.registry import find
from vitlab.study.encoders import Encoder, read_encoders, recipe_encoder
from vitlab.study.grid import GridCell, file_safe
from vitlab.study.runner import Outcome, check_cells, run_cells
from vitlab.study.study import OTHER_FOLDER, Row, Study, read_study_json, write_json, write_study_json
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import Features, features, knn_accuracy, probe_accuracy
from vitlab.training.job import data_of
from vitlab.training.loop import Show, Silent
from vitlab.training.presets import find_recipe
from vitlab.training.presets import recipes as bundled_recipes
from vitlab.training.recipe import DataRecipe, ModelRecipe, Recipe, from_tables, with_settings, with_value

METHODS = ("mae", "dino")
PRETRAINED, TUNED, SCRATCH = "pretrained", "fine-tuned", "from-scratch"
HERE = "pre-trained here"
COLOURS = {"k-NN": "0.75", "linear probe": "0.55", "fine-tuned": "C0", "from scratch": "C1"}
LABELS = {"pixels": "pixels themselves", "mae": "MAE", "dino": "DINO"}
BY_SOURCE = {"cifar100": "cifar10"}  # source -> source whose recipe is used
AUGMENT = {  # of the few labelled images, by source
    "digits": {"crop": "padded", "padding": 1, "border": "zeros"},
    "mnist": {"crop": "padded", "padding": 2, "border": "zeros"},
    "fashion-mnist": {"crop": "padded", "padding": 2, "border": "zeros", "flip": True},
    "cifar10": {"crop": "padded", "padding": 4, "flip": True},
    "cifar100": {"crop": "padded", "padding": 4, "flip": True},
}
AUGMENT_FOLDER = {"crop": "resized", "scale": [0.3, 1.0], "flip": True}
FEW_BATCH = 64
FEW = {
    "augment": {"smoothing": 0.1},
    "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "warmup_epochs": 3.0, "clip": 1.0},
    "run": {"epochs": 30},
}


@dataclass
class Method:
    """Results of one method; an accuracy is None until it is measured, or if its run failed."""

    name: str
    encoder: str = ""  # its origin
    knn: float | None = None
    probe: float | None = None
    fine_tuned: float | None = None
    from_scratch: float | None = None
    seconds: float | None = None  # of pre-training
    note: str = ""

    @property
    def gain(self) -> float | None:
        if self.fine_tuned is None or self.from_scratch is None:
            return None
        return self.fine_tuned - self.from_scratch

    def accuracies(self) -> dict[str, float | None]:
        """By the name that people read."""
        tuned = {"fine-tuned": self.fine_tuned, "from scratch": self.from_scratch}
        return {"k-NN": self.knn, "linear probe": self.probe, **tuned}

    def record(self, outcome: Outcome) -> None:
        step, result = outcome.cell.values["step"], outcome.result
        if outcome.failed:
            self.note = f"{step} failed: {outcome.failed.splitlines()[0]}"
        elif step == PRETRAINED:
            self.seconds = result["seconds"]
        elif step == TUNED:
            self.fine_tuned = result["top1"]
        else:
            self.from_scratch = result["top1"]


@dataclass
class SSLStudy(Study):
    source: str
    labels: int  # images whose labels are used
    methods: list[Method] = field(default_factory=list)

    @property
    def rows(self) -> list[Row]:
        return [
            {
                "method": method.name,
                "encoder": method.encoder,
                "knn": method.knn,
                "linear_probe": method.probe,
                "fine_tuned": method.fine_tuned,
                "from_scratch": method.from_scratch,
                "gain": method.gain,
                "pretraining_seconds": method.seconds,
                "note": method.note,
            }
            for method in self.methods
        ]

    def tables(self) -> list[list[Row]]:
        """Empty cells where nothing was measured."""
        table = []
        for method in self.methods:
            shown = {f"{self.labels:,} labels": method.name, "encoder": method.encoder}
            shown |= {k: "" if value is None else f"{value:.2%}" for k, value in method.accuracies().items()}
            shown["gain"] = "" if method.gain is None else f"{100 * method.gain:+.2f} points"
            shown["pre-training"] = "" if method.seconds is None else f"{method.seconds:.0f} s"
            table.append(shown)
        return [table]

    def failures(self) -> list[str]:
        return [f"{method.name}: {method.note}" for method in self.methods if method.note]

    def draw(self, path: Path) -> None:
        """Bars of each method: frozen features, fine-tuned, from scratch."""
        from vitlab.study.plot import legend_beside, percent, plot_file, shorten

        with plot_file(path, (8, 4.2), f"{Path(self.source).name}, {self.labels:,} labels") as axes:
            for place, method in enumerate(self.methods):
                bars = {name: value for name, value in method.accuracies().items() if value is not None}
                for number, (name, value) in enumerate(bars.items()):
                    x = place + 0.2 * (number - (len(bars) - 1) / 2)
                    axes.bar(x, value, width=0.18, color=COLOURS[name], label=name)
                    offset = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 8}
                    axes.annotate(f"{100 * value:.1f}", (x, value), **offset)
            origins = ["" if m.encoder in ("", HERE) else f"\n{shorten(m.encoder, 28)}" for m in self.methods]
            labels = [LABELS[m.name] + origin for m, origin in zip(self.methods, origins, strict=True)]
            axes.set_xticks(range(len(self.methods)), labels)
            axes.set_ylabel("test accuracy")
            percent(axes.yaxis)
            legend_beside(axes, list(COLOURS))
            axes.grid(axis="y", alpha=0.25)
            axes.set_axisbelow(True)


def study_ssl(
    data: DataRecipe,
    methods: list[str] | None = None,
    *,
    pretrain: list[str] | None = None,
    few: list[str] | None = None,
    pretrained: list[str] | None = None,
    folder: Path | None = None,
    command: str = "",
    show: Show | None = None,
) -> SSLStudy:
    """`data`: a tenth of its labels is used unless it sets `per_class` or `fraction`; the study sets its batch size.
    `pretrain` and `few` are settings of `vitlab train` for the two parts. `pretrained`: METHOD=CHECKPOINT, an existing
    encoder.
    """
    show = show or Silent()
    methods = [method.strip() for method in methods or METHODS if method.strip()]
    for method in methods:
        if method not in METHODS:
            raise UsageError(f"{method!r} is no method.{nearest(method, list(METHODS))} Methods: {', '.join(METHODS)}.")
    if data.per_class is not None and data.fraction is not None:
        raise UsageError("--per-class and --fraction both set the number of labels: give one of them.")
    folder = folder or Path("studies") / file_safe(f"ssl-{Path(data.source).name or 'pictures'}")
    given = read_encoders(pretrained or [], methods)
    if pretrain and len(given) == len(methods):
        raise UsageError("--pretrain changes nothing: --pretrained gives an encoder for every method.")
    recipes = {method: _pretraining(method, data, pretrain or []) for method in methods if method not in given}
    few_recipe = _few_labels(data, few or [])
    cells = {m: _cells(m, folder, given.get(m) or recipes[m], few_recipe) for m in methods}
    origins = {m: str(given[m].checkpoint) if m in given else HERE for m in methods}
    _check_folder(folder, origins)
    about = {"source": data.source, "cells": {c.name: c.values for m in methods for c in cells[m]}}
    older = read_study_json(folder, "ssl").get("encoders", {})
    write_study_json(folder, "ssl", {**about, "encoders": {**older, **origins}}, command)
    checkable = [c for m in methods for c in cells[m] if m in given or c.values["step"] != TUNED]
    for note in check_cells(checkable, folder):
        show.note(note)
    labelled = data_of(few_recipe)
    study = SSLStudy(folder, data.source, len(labelled.train))
    study.notes = [f"{method}: {note}" for method in given for note in given[method].notes()]
    study.methods.append(_pixel_baseline(folder, labelled, _image_size(cells[methods[0]][-1]), show))
    order = [cell.name for method in methods for cell in cells[method]]
    for method in methods:
        result = Method(method, origins[method])
        study.methods.append(result)
        for cell in cells[method]:
            if cell.values["step"] == TUNED:
                checkpoint = str(cell.recipe.model.init_from)
                result.knn, result.probe = _frozen(folder, method, checkpoint, labelled, show)
            position = dict(before=order.index(cell.name), total=len(order))
            outcome = next(iter(run_cells([cell], folder, show, **position)))
            result.record(outcome)
            study.write()
            if outcome.failed:
                break
    for note in study.write_plot():
        show.note(note)
    return study


def _pretraining(method: str, data: DataRecipe, settings: list[str]) -> Recipe:
    """The bundled recipe for this source, or the one for folders."""
    name = f"{method}_{BY_SOURCE.get(data.source, data.source)}"
    recipe = find_recipe(name if name in bundled_recipes() else f"{method}_folder")[1]
    recipe = with_value(recipe, "data.source", data.source)
    recipe = with_value(recipe, "data.path", data.path) if data.path is not None else recipe
    return with_settings(recipe, settings)


def _few_labels(data: DataRecipe, settings: list[str]) -> Recipe:
    fraction = (data.fraction or 0.1) if data.per_class is None else None
    tables = {**FEW, "augment": {**AUGMENT.get(data.source, AUGMENT_FOLDER), **FEW["augment"]}}
    recipe = replace(from_tables(tables), data=replace(data, batch_size=FEW_BATCH, fraction=fraction))
    recipe = with_settings(recipe, settings)
    return with_value(recipe, "run.eval_every", recipe.run.epochs)  # no model is chosen by validation


def _cells(method: str, folder: Path, start: Encoder | Recipe, few: Recipe) -> list[GridCell]:
    """Pre-training, unless an encoder is given; then fine-tuning and training from scratch on the few labels."""
    encoder = start if isinstance(start, Encoder) else recipe_encoder(start.model)
    scratch = replace(encoder.network(few.model.options), reducer=few.model.reducer)  # options: e.g. pooling
    best = encoder.checkpoint or str(folder / f"{method}-{PRETRAINED}" / "best")
    tuned = ModelRecipe(scratch.name, init_from=best, reducer=scratch.reducer, options=few.model.options)
    steps = {PRETRAINED: start} if isinstance(start, Recipe) else {}
    if isinstance(start, Recipe):  # the name of the pre-training run
        tuned = replace(tuned, name=start.model.name)
    steps |= {TUNED: replace(few, model=tuned), SCRATCH: replace(few, model=scratch)}
    return [GridCell(f"{method}-{step}", recipe, {"method": method, "step": step}) for step, recipe in steps.items()]


def _image_size(scratch: GridCell) -> tuple[int, int]:
    size = scratch.recipe.model.options.get("image_size", find(scratch.recipe.model.name)[0].config.image_size)
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _frozen(folder: Path, method: str, checkpoint: str, data: Data, show: Show) -> tuple[float, float]:
    """k-NN and linear probe accuracy on frozen features with the few labels."""

    def compute() -> tuple[Features, Features]:
        model, _ = load_with_report(checkpoint, encoder=True)
        train, test = (ImageSet(split, model.preprocess) for split in (data.train, data.test or data.val))
        return features(model, train), features(model, test)

    return _evaluate_once(folder / f"{method}-frozen.json", method, compute, show)


def _pixel_baseline(folder: Path, data: Data, size: tuple[int, int], show: Show) -> Method:
    """Baseline: the pixels as features."""
    half = [0.5] * (1 if data.train.channels == 1 else 3)
    preprocess = Preprocess.from_dict({"size": size, "mean": half, "std": half})

    def compute() -> tuple[Features, Features]:
        return _pixels(ImageSet(data.train, preprocess)), _pixels(ImageSet(data.test or data.val, preprocess))

    knn, probe = _evaluate_once(folder / "pixels-frozen.json", "pixels", compute, show)
    return Method("pixels", knn=knn, probe=probe)


def _pixels(image_set: ImageSet) -> Features:
    vectors: list[Tensor] = []
    labels: list[Tensor] = []
    for part in np.array_split(np.arange(len(image_set)), -(-len(image_set) // 1024)):
        pixels, kept, _ = image_set.take(part)
        vectors.append(image_set.normalise(pixels).flatten(1))
        labels.append(image_set.labels[torch.from_numpy(part[kept])])
    return F.normalize(torch.cat(vectors), dim=1), torch.cat(labels)


def _evaluate_once(
    path: Path, name: str, compute: Callable[[], tuple[Features, Features]], show: Show
) -> tuple[float, float]:
    """k-NN and linear probe accuracy, stored in `path`."""
    if not path.is_file():
        show.note(f"{name}: k-NN and linear probe on frozen features")
        train, test = compute()
        scores = {"knn": knn_accuracy(train, test), "linear_probe": probe_accuracy(train, test)}
        write_json(path, scores)
    values = read_json(path)
    return values["knn"], values["linear_probe"]


def _check_folder(folder: Path, origins: dict[str, str]) -> None:
    """Refuse a folder with another encoder of the same method."""
    old = read_study_json(folder, "ssl").get("encoders", {})
    for method, new in origins.items():
        before = old.get(method, HERE if (folder / f"{method}-{PRETRAINED}").exists() else new)
        if before != new:
            raise UsageError(f"{folder}: has another encoder of {method} ({before}, not {new}). {OTHER_FOLDER}")
