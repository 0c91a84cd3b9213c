"""Does learning without labels pay? Each method learns from all pictures of a source without their labels. Then a few
labels come: its features are judged frozen, its encoder is fine-tuned, and the same network learns from scratch.

    studies/ssl-cifar10/{study.json, results.csv, table.md, plot.png}
    studies/ssl-cifar10/mae-pretrained/     a run folder for each step, as `vitlab train` makes it
    studies/ssl-cifar10/mae-fine-tuned/     mae-from-scratch/ ...
    studies/ssl-cifar10/mae-frozen.json     k-NN and linear probe on the encoder's features

An encoder that is there already (`--pretrained mae=bundled:mae`) is judged in the same way, without the first step.
Fine-tuning and learning from scratch differ in nothing but the first weights: network, pictures, steps, rates are the
same. The same command again goes on where it was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.native import write_whole
from vitlab.images.datasets import Data
from vitlab.images.preprocess import Preprocess
from vitlab.models.config import nearest
from vitlab.models.registry import find
from vitlab.study.encoders import Encoder, encoder_of, read_encoders
from vitlab.study.folder import ANOTHER, PLOT, read_about, without_matplotlib, write_about, write_texts
from vitlab.study.grid import Cell, file_safe
from vitlab.study.runner import Outcome, check_cells, run_cells
from vitlab.training.batches import Pictures
from vitlab.training.evaluate import Features, features, knn_accuracy, probe_accuracy
from vitlab.training.job import data_of
from vitlab.training.loop import Show, Silent
from vitlab.training.presets import find_recipe, recipes
from vitlab.training.recipe import ModelRecipe, Recipe, from_tables, with_settings, with_value
from vitlab.training.runs import to_csv, to_markdown

METHODS = ("mae", "dino")
PRETRAINED, TUNED, SCRATCH = "pretrained", "fine-tuned", "from-scratch"
HERE = "pre-trained here"
BY_SOURCE = {"cifar100": "cifar10"}  # whose recipe serves; a folder has its own
PLAIN = {  # augmentation of the few labelled pictures
    "digits": {"crop": "padded", "padding": 1, "border": "zeros"},
    "mnist": {"crop": "padded", "padding": 2, "border": "zeros"},
    "fashion-mnist": {"crop": "padded", "padding": 2, "border": "zeros", "flip": True},
    "cifar10": {"crop": "padded", "padding": 4, "flip": True},
    "cifar100": {"crop": "padded", "padding": 4, "flip": True},
}
OF_FOLDERS = {"crop": "resized", "scale": [0.3, 1.0], "flip": True}
FEW = {
    "data": {"batch_size": 64},
    "augment": {"smoothing": 0.1},
    "optim": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "warmup_epochs": 3.0, "clip": 1.0},
    "run": {"epochs": 30},
}


@dataclass
class Method:
    """What came of one method; an accuracy is None until it is measured, or where its run failed."""

    name: str
    encoder: str = ""  # where it comes from
    knn: float | None = None
    probe: float | None = None
    fine_tuned: float | None = None
    from_scratch: float | None = None
    seconds: float | None = None  # of pre-training
    note: str = ""

    @property
    def gain(self) -> float | None:
        both = self.fine_tuned, self.from_scratch
        return None if None in both else both[0] - both[1]  # type: ignore[operator]

    def row(self) -> dict[str, Any]:
        return {
            "method": self.name,
            "encoder": self.encoder,
            "knn": self.knn,
            "linear_probe": self.probe,
            "fine_tuned": self.fine_tuned,
            "from_scratch": self.from_scratch,
            "gain": self.gain,
            "pretraining_seconds": self.seconds,
            "note": self.note,
        }


@dataclass
class SSLStudy:
    folder: Path
    source: str
    labels: int  # pictures whose labels are used
    methods: list[Method] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what a reader of the table must know

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [method.row() for method in self.methods]

    @property
    def failed(self) -> list[Method]:
        return [method for method in self.methods if method.note]


def study_ssl(
    source: str,
    methods: list[str] | None = None,
    *,
    path: str | None = None,
    per_class: int | None = None,
    fraction: float | None = None,
    pretrain: list[str] | None = None,
    few: list[str] | None = None,
    pretrained: list[str] | None = None,
    folder: Path | None = None,
    command: str = "",
    show: Show | None = None,
) -> SSLStudy:
    """`pretrain` and `few` are settings, as `vitlab train` takes them, of the two parts; few labels are a tenth unless
    `per_class` or `fraction` says otherwise. `pretrained`: METHOD=CHECKPOINT, an encoder that need not be taught.
    """
    show = show or Silent()
    methods = methods or list(METHODS)
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"{method!r} is no method.{nearest(method, list(METHODS))} Methods: {', '.join(METHODS)}.")
    if per_class is not None and fraction is not None:
        raise ValueError("--per-class and --fraction both say how many labels there are: give one of them.")
    folder = folder or Path("studies") / file_safe(f"ssl-{Path(source).name or 'pictures'}")
    there = read_encoders(pretrained or [], methods)
    if pretrain and len(there) == len(methods):
        raise ValueError("--pretrain changes nothing: every method has its encoder by --pretrained.")
    learning = {method: _pretraining(method, source, path, pretrain or []) for method in methods if method not in there}
    labelled = {"per_class": per_class, "fraction": (fraction or 0.1) if per_class is None else None}
    asked = _few(source, path, labelled, few or [])
    cells = {m: _cells(m, folder, there.get(m) or learning[m], asked) for m in methods}
    taken = {m: str(there[m].checkpoint) if m in there else HERE for m in methods}
    about = {"source": source, "cells": {c.name: c.values for m in methods for c in cells[m]}, "encoders": taken}
    _keep(folder, about, command)
    checkable = [c for m in methods for c in cells[m] if m in there or c.values["step"] != TUNED]
    for note in check_cells(checkable, folder):
        show.note(note)
    known = data_of(asked)
    study = SSLStudy(folder, source, len(known.train))
    study.notes = [f"{method}: {note}" for method in there for note in there[method].notes()]
    study.methods.append(_on_pixels(folder, known, _image_size(cells[methods[0]][-1]), show))
    order = [cell.name for method in methods for cell in cells[method]]
    for method in methods:
        found = Method(method, taken[method])
        study.methods.append(found)
        for cell in cells[method]:
            if cell.values["step"] == TUNED:
                found.knn, found.probe = _frozen(folder, method, str(cell.recipe.model.init_from), known, show)
            here = dict(before=order.index(cell.name), total=len(order))
            outcome = next(iter(run_cells([cell], folder, show, **here)))
            _note(found, outcome)
            if outcome.failed:
                break
            _write(study)
    _write(study)
    for note in without_matplotlib(lambda: _draw(study)):
        show.note(note)
    return study


def _pretraining(method: str, source: str, path: str | None, settings: list[str]) -> Recipe:
    """The shipped recipe for this source, or the one for folders."""
    shipped = recipes()
    named = f"{method}_{BY_SOURCE.get(source, source)}"
    recipe = find_recipe(named if named in shipped else f"{method}_folder")[1]
    recipe = with_value(recipe, "data.source", source)
    recipe = with_value(recipe, "data.path", path) if path is not None else recipe
    return with_settings(recipe, settings)


def _few(source: str, path: str | None, labelled: dict[str, Any], settings: list[str]) -> Recipe:
    tables = {**FEW, "augment": {**PLAIN.get(source, OF_FOLDERS), **FEW["augment"]}}
    tables["data"] = {**FEW["data"], "source": source, "path": path, **labelled}
    recipe = with_settings(from_tables(tables), settings)
    return with_value(recipe, "run.eval_every", recipe.run.epochs)  # nothing is chosen by validation


def _cells(method: str, folder: Path, start: Encoder | Recipe, few: Recipe) -> list[Cell]:
    """Pre-training, unless an encoder is there; then the few labels, twice."""
    encoder = start if isinstance(start, Encoder) else encoder_of(start.model)
    scratch = replace(encoder.network(few.model.options), reducer=few.model.reducer)  # options: e.g. pooling
    best = encoder.checkpoint or str(folder / f"{method}-{PRETRAINED}" / "best")
    tuned = ModelRecipe(scratch.name, init_from=best, reducer=scratch.reducer, options=few.model.options)
    steps = {PRETRAINED: start} if isinstance(start, Recipe) else {}
    if isinstance(start, Recipe):  # as the run was named before it had a classifier
        tuned = replace(tuned, name=start.model.name)
    steps |= {TUNED: replace(few, model=tuned), SCRATCH: replace(few, model=scratch)}
    return [Cell(f"{method}-{step}", recipe, {"method": method, "step": step}) for step, recipe in steps.items()]


def _image_size(scratch: Cell) -> tuple[int, int]:
    config: Any = find(scratch.recipe.model.name)[0].config
    size = scratch.recipe.model.options.get("image_size", config.image_size)
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _note(found: Method, outcome: Outcome) -> None:
    step, result = outcome.cell.values["step"], outcome.result
    if outcome.failed:
        found.note = f"{step} failed: {outcome.failed.splitlines()[0]}"
    elif step == PRETRAINED:
        found.seconds = result["seconds"]
    elif step == TUNED:
        found.fine_tuned = result["top1"]
    else:
        found.from_scratch = result["top1"]


def _frozen(folder: Path, method: str, checkpoint: str, known: Data, show: Show) -> tuple[float, float]:
    """k-NN and linear probe on the features of the frozen encoder, by the few labels."""

    def look() -> tuple[Features, Features]:
        model, _ = load_with_report(checkpoint, encoder=True)
        asked = known.test or known.val
        return tuple(features(model, Pictures(part, model.preprocess)) for part in (known.train, asked))  # type: ignore

    return _judge(folder / f"{method}-frozen.json", method, look, show)


def _on_pixels(folder: Path, known: Data, size: tuple[int, int], show: Show) -> Method:
    """The yardstick: pixels themselves as features."""
    grey = known.train.channels == 1
    plain = Preprocess.from_dict({"size": size, "mean": [0.5] * (1 if grey else 3), "std": [0.5] * (1 if grey else 3)})

    def look() -> tuple[Features, Features]:
        return tuple(_pixels(Pictures(part, plain)) for part in (known.train, known.test or known.val))  # type: ignore

    knn, probe = _judge(folder / "pixels-frozen.json", "pixels", look, show)
    return Method("pixels", knn=knn, probe=probe)


def _pixels(pictures: Pictures) -> Features:
    found: list[Tensor] = []
    labels: list[Tensor] = []
    for part in np.array_split(np.arange(len(pictures)), -(-len(pictures) // 1024)):
        pixels, kept, _ = pictures.take(part)
        found.append(pictures.normalise(pixels).flatten(1))
        labels.append(pictures.labels[torch.from_numpy(part[kept])])
    return F.normalize(torch.cat(found), dim=1), torch.cat(labels)


def _judge(path: Path, name: str, look: Callable[[], tuple[Features, Features]], show: Show) -> tuple[float, float]:
    """Measured once, then read."""
    if not path.is_file():
        show.note(f"{name}: k-NN and linear probe on frozen features")
        known, asked = look()
        found = {"knn": knn_accuracy(known, asked), "linear_probe": probe_accuracy(known, asked)}
        text = json.dumps(found) + "\n"
        write_whole(path, lambda place: place.write_text(text, encoding="utf-8"))
    values = read_json(path)
    return values["knn"], values["linear_probe"]


def _keep(folder: Path, about: dict[str, Any], command: str) -> None:
    """A folder belongs to one study; its runs themselves refuse another recipe."""
    old = read_about(folder, "ssl").get("encoders", {})
    for method, asked in about["encoders"].items():
        before = old.get(method, HERE if (folder / f"{method}-{PRETRAINED}").exists() else asked)
        if before != asked:
            raise ValueError(
                f"{folder}: the encoder of {method} is there ({before}), and another is asked for ({asked}). {ANOTHER}"
            )
    write_about(folder, "ssl", {**about, "encoders": {**old, **about["encoders"]}}, command)


def _write(study: SSLStudy) -> None:
    table = to_markdown([_for_people(row) for row in study.rows]) + "".join(f"\n{note}\n" for note in study.notes)
    write_texts(study.folder, {"results.csv": to_csv(study.rows), "table.md": table})


def _for_people(row: dict[str, Any]) -> dict[str, str]:
    """Percents, points and seconds; empty where nothing was measured."""
    forms = {"gain": "{:+.2f} points", "pretraining_seconds": "{:.0f} s"}
    shown = {}
    for key, value in row.items():
        if isinstance(value, float):
            form = forms.get(key, "{:.2f} %")
            value = form.format(value if key == "pretraining_seconds" else 100 * value)
        shown[key.removesuffix("_seconds").replace("_", " ")] = value or ""
    return shown


def _draw(study: SSLStudy) -> None:
    from vitlab.study.plot import draw_ssl

    draw_ssl(study, study.folder / PLOT)
