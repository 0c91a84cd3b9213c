"""How much data does each network need? Accuracy over the number of training images, each network from scratch.

    study = study_data_efficiency(DataRecipe("cifar10"), "vit,deit,swin,resnet", [0.01, 0.1, 1], seeds=3)
    studies/data-efficiency-cifar10/{study.json, results.csv, table.md, plot.png}
    studies/data-efficiency-cifar10/vit,fraction=0.1,seed=0/      a run folder for each cell, as `vitlab train` makes it

Equal for all: every run takes as many optimiser steps as run.epochs over the largest fraction, with the same batch
size, augmentation and schedule. With equal epochs instead, a small fraction would also be trained less. The price is
that few images are seen often. Smaller fractions are subsets of larger ones; a seed sets them and the initial weights.
The last model is evaluated: choosing one by validation would use labels that a small fraction does not have.

Different: the optimiser is the usual one of each kind, AdamW or, for a CNN, SGD. The teacher of a DeiT is the ResNet of
this study that was trained on the same images, so that it sees no other labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError
from vitlab.images.datasets import Data
from vitlab.images.sources.splits import few_labels
from vitlab.study.families import StudyModel, resolve_model
from vitlab.study.grid import GridCell, file_safe
from vitlab.study.model_spec import ModelSpec, parse_models
from vitlab.study.runner import SEED, Group, RunsStudy, check_cells
from vitlab.study.ssl import AUGMENT, AUGMENT_FOLDER
from vitlab.study.study import Row, read_study_json, write_study_json
from vitlab.training.batches import Plan
from vitlab.training.job import data_of
from vitlab.training.loop import Show, Silent
from vitlab.training.recipe import DataRecipe, Recipe, from_tables, with_settings, with_value

MODELS, FRACTIONS = "vit,deit,swin,resnet", [0.01, 0.1, 1.0]
TEACHER = "resnet"  # of a DeiT, if no CNN is compared
WARMUP = 0.1  # of the steps
SAVES = 10  # in a run
BATCH = 128  # of small images; half for others, with half the learning rate
BASE: dict[str, Any] = {"augment": {"smoothing": 0.1}, "run": {"epochs": 30}}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "clip": 1.0}
RESERVED = {  # settings that the study decides -> what to use instead
    "data.fraction": "--fractions",
    "data.per_class": "--fractions",
    "data.source": "the first argument",
    "model.name": "--models",
    "objective.teacher": "--models, which has the teacher",
    "run.seed": "--seeds",
    "run.dir": "--dir",
    "run.eval_every": "nothing: the last model is evaluated",
    "run.minutes": "run.epochs: a time limit would give a slower network fewer steps",
}


@dataclass
class EfficiencyStudy(RunsStudy):
    images: dict[float, int] = field(default_factory=dict)  # number of training images by fraction

    @property
    def rows(self) -> list[Row]:
        rows = []
        for g in self.groups:
            fraction = g.values["data.fraction"]
            row = {"model": g.values["model"], "fraction": fraction, "pictures": self.images[fraction]}
            rows.append({**row, **g.row(("top1", "steps", "params", "seconds")), "note": g.note()})
        return rows

    def tables(self) -> list[list[Row]]:
        """The spread over seeds in one cell; a column of notes only if there are any."""
        rows, table = self.rows, []
        for row in rows:
            spread = f" ({100 * row['top1_min']:.2f} .. {100 * row['top1_max']:.2f})" if row["n"] > 1 else ""
            shown = {"model": row["model"], "fraction": f"{row['fraction']:g}", "images": f"{row['pictures']:,}"}
            shown |= {"seeds": str(row["n"]), "top-1": f"{100 * row['top1']:.2f} %{spread}" if row["n"] else ""}
            for title, key in {"steps": "steps", "parameters": "params", "seconds": "seconds"}.items():
                shown[title] = f"{row[key]:,.0f}" if row["n"] else ""
            table.append({**shown, "note": row["note"]} if any(r["note"] for r in rows) else shown)
        return [table]

    def csv_rows(self) -> list[Row]:
        """A row per run."""
        runs = []
        for outcome in self.outcomes:
            values, result = outcome.cell.values, outcome.result
            row = {"run": outcome.cell.name, "model": values["model"], "fraction": values["data.fraction"]}
            row |= {"pictures": self.images[values["data.fraction"]], "seed": values[SEED]}
            row |= {key: result.get(key) for key in ("top1", "top5", "loss", "steps", "params", "seconds")}
            runs.append({**row, "reason": outcome.failed})
        return runs

    def plotted_groups(self) -> list[Group]:
        return [
            Group({"training images": self.images[g.values["data.fraction"]], "model": g.values["model"]}, g.outcomes)
            for g in self.groups
        ]


def study_data_efficiency(
    data: DataRecipe,
    models: str = MODELS,
    fractions: list[float] | None = None,
    *,
    seeds: int = 1,
    settings: list[str] | None = None,
    folder: Path | None = None,
    command: str = "",
    show: Show | None = None,
) -> EfficiencyStudy:
    """`settings` are those of `vitlab train`, for all models, or for one: "resnet:optim.lr=0.05". run.epochs counts
    epochs of the largest fraction. The batch size of `data` is set by the study.
    """
    show = show or Silent()
    fractions = sorted(set(fractions or FRACTIONS))
    if not 0 < fractions[0] <= fractions[-1] <= 1:
        raise UsageError(f"fractions={fractions} must be above 0 and at most 1: 0.01,0.1,1, for instance.")
    specs = parse_models(models)
    common, own = _split_settings(settings or [], [*specs, TEACHER])
    base = _base_recipe(data)
    opened = data_of(with_settings(base, common))
    side = max(opened.train.read(0).shape[:2])
    networks, notes = _networks(specs, side)
    folder = folder or Path("studies") / file_safe(f"data-efficiency-{Path(data.source).name or 'pictures'}")
    images = {f: len(few_labels(opened.train.labels, opened.classes, 0, fraction=f)) for f in fractions}
    design = Design(base, networks, folder, images, {n.label: [*common, *own.get(n.label, [])] for n in networks})
    ordered = sorted(networks, key=lambda network: not network.is_cnn)  # teachers before students
    cells = [design.cell(network, f, seed) for f in fractions for seed in range(seeds) for network in ordered]
    order = [_name(network, f, seed) for network in networks for f in fractions for seed in range(seeds)]
    read_study_json(folder, "data-efficiency")
    for note in check_cells(cells, folder):
        show.note(note)
    about = {"source": data.source, "models": [n.label for n in networks], "fractions": fractions, "seeds": seeds}
    write_study_json(folder, "data-efficiency", {**about, "settings": settings or []}, command)
    notes += _table_notes(networks, cells)
    study = EfficiencyStudy(folder, _title(data.source, opened, cells), order, images=images, notes=notes)
    study.train(cells, show)
    return study


def _base_recipe(data: DataRecipe) -> Recipe:
    tables = {**BASE, "augment": {**AUGMENT.get(data.source, AUGMENT_FOLDER), **BASE["augment"]}}
    return replace(from_tables(tables), data=replace(data, batch_size=BATCH if data.source in AUGMENT else BATCH // 2))


def _split_settings(settings: list[str], models: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Common settings, and those of one model. Settings that the study decides are refused."""
    common: list[str] = []
    own: dict[str, list[str]] = {}
    for setting in settings:
        key = setting.partition("=")[0]
        model, colon, rest = key.rpartition(":")
        if rest.strip() in RESERVED:
            raise UsageError(f"{rest.strip()} is decided by the study: use {RESERVED[rest.strip()]}.")
        if not colon:
            common.append(setting)
        elif model in models:
            own.setdefault(model, []).append(setting.removeprefix(f"{model}:"))
        else:
            raise UsageError(f"{setting!r} is for {model}, which is not compared. Compared: {', '.join(models)}.")
    return common, own


def _networks(specs: dict[str, ModelSpec], side: int) -> tuple[list[StudyModel], list[str]]:
    """The requested models; a teacher is added if a student has none."""
    networks, notes = [resolve_model(label, spec, side) for label, spec in specs.items()], []
    students = [n.label for n in networks if n.distilled]
    if students and not any(n.is_cnn for n in networks):
        networks.append(resolve_model(TEACHER, (TEACHER, {}), side))
        notes.append(f"{' and '.join(students)} learn from a teacher: {TEACHER} is trained, too.")
    return networks, notes


@dataclass(frozen=True)
class Design:
    """Makes the cells of the study."""

    base: Recipe
    networks: list[StudyModel]
    folder: Path
    images: dict[float, int]
    settings: dict[str, list[str]]  # by model

    def cell(self, network: StudyModel, fraction: float, seed: int) -> GridCell:
        """Defaults of the network, then settings, then what the study decides."""
        defaults = {f"optim.{key}": value for key, value in (SGD if network.is_cnn else ADAMW).items()}
        if self.base.data.batch_size < BATCH:
            defaults["optim.lr"] *= self.base.data.batch_size / BATCH
        defaults |= {"model.name": network.name, **{f"model.{key}": value for key, value in network.options.items()}}
        if network.distilled:
            teacher = _name(next(n for n in self.networks if n.is_cnn), fraction, seed)
            defaults |= {"objective.name": "distill", "objective.teacher": str(self.folder / teacher / "best")}
        recipe = with_settings(_with(self.base, defaults), self.settings[network.label])
        steps = _steps(recipe, max(self.images.values()), recipe.run.epochs)
        epochs = max(1, round(steps / _steps(recipe, self.images[fraction], 1)))
        decided = {"data.fraction": fraction, "run.seed": seed, "run.epochs": epochs, "run.eval_every": epochs}
        if not recipe.run.save_every:
            decided["run.save_every"] = max(1, steps // SAVES)  # epochs of few images are short
        if not recipe.optim.warmup_steps and not recipe.optim.warmup_epochs:
            decided["optim.warmup_steps"] = max(1, round(WARMUP * steps))
        values = {"model": network.label, "data.fraction": fraction, SEED: seed}
        return GridCell(_name(network, fraction, seed), _with(recipe, decided), values)


def _with(recipe: Recipe, values: Mapping[str, object]) -> Recipe:
    for key, value in values.items():
        recipe = with_value(recipe, key, value)
    return recipe


def _name(network: StudyModel, fraction: float, seed: int) -> str:
    return file_safe(f"{network.label},fraction={fraction:g},seed={seed}")


def _steps(recipe: Recipe, images: int, epochs: int) -> int:
    return Plan(images, recipe.data.batch_size, epochs, 0, accumulate=recipe.optim.accumulate).total


def _title(source: str, data: Data, cells: list[GridCell]) -> str:
    largest = max(cells, key=lambda cell: cell.values["data.fraction"]).recipe
    epochs = "1 epoch" if largest.run.epochs == 1 else f"{largest.run.epochs} epochs"
    return f"{Path(source).name}, {len(data.classes)} classes, {epochs} of the largest fraction"


def _table_notes(networks: list[StudyModel], cells: list[GridCell]) -> list[str]:
    """Notes below the table."""
    notes = ["Every run has the same number of steps, so few images are seen often. The last model is evaluated."]
    for network in networks:
        recipe = next(cell.recipe for cell in cells if cell.values["model"] == network.label)
        options = "".join(f", {key}={value}" for key, value in network.options.items())
        line = f"{network.label}: {network.name}{options}; {recipe.optim.name}, lr {recipe.optim.lr:g}"
        if network.distilled:
            teacher = next(n.label for n in networks if n.is_cnn)
            line += f"; taught by labels and by {teacher}, which learned from the same images"
        notes.append(f"{line}.")
    return notes
