"""How much does each network need? Accuracy against the number of training pictures, each network from scratch.

    study = study_data_efficiency("cifar10", "vit,deit,swin,resnet", [0.01, 0.1, 1], seeds=3)
    studies/data-efficiency-cifar10/{study.json, results.csv, table.md, plot.png}
    studies/data-efficiency-cifar10/vit,fraction=0.1,seed=0/      a run folder for each cell, as `vitlab train` makes it

What is held equal: every run takes as many optimiser steps as the largest share needs for run.epochs, with the same
pictures in each batch, the same augmentation and the same schedule. With equal epochs instead, a hundredth of the
pictures would come with a hundredth of the training, and nobody could tell which of the two was missing. The price is
that few pictures are seen often. The pictures of a smaller share are among those of a larger one; a seed decides them
and the first weights. The model that is judged is the last one: choosing it by val would use labels that a small share
does not have.

What differs: the optimiser is the one each kind is usually taught by, AdamW or, for a CNN, SGD. A DeiT has a teacher:
the ResNet of this study that learned from the same pictures, so that no label comes in by the back door.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlab.images.datasets import Data
from vitlab.images.sources.splits import few_labels
from vitlab.study.families import Network, resolve
from vitlab.study.folder import PLOT, read_about, without_matplotlib, write_about, write_texts
from vitlab.study.grid import Cell, file_safe
from vitlab.study.model_spec import Named, read_models
from vitlab.study.runner import Outcome, check_cells, run_cells
from vitlab.study.ssl import OF_FOLDERS, PLAIN
from vitlab.study.table import SEED, Group, group
from vitlab.training.batches import Plan
from vitlab.training.job import data_of
from vitlab.training.loop import Show, Silent
from vitlab.training.recipe import Recipe, from_tables, with_settings, with_value
from vitlab.training.runs import to_csv, to_markdown

MODELS, FRACTIONS = "vit,deit,swin,resnet", [0.01, 0.1, 1.0]
TEACHER = "resnet"  # of a DeiT, where no CNN is asked for
WARMUP = 0.1  # of the steps
SAVES = 10  # in a run
BATCH = 128  # of small pictures; half of it of others, with half the rates
BASE: dict[str, Any] = {"augment": {"smoothing": 0.1}, "run": {"epochs": 30}}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
ADAMW = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.05, "clip": 1.0}
OWN = {  # what the study decides, and the way to say it
    "data.fraction": "--fractions",
    "data.per_class": "--fractions",
    "data.source": "the first argument",
    "model.name": "--models",
    "objective.teacher": "--models, which has the teacher",
    "run.seed": "--seeds",
    "run.dir": "--dir",
    "run.eval_every": "nothing: the last model is judged",
    "run.minutes": "run.epochs: a time limit would give a slower network fewer steps",
}


@dataclass
class EfficiencyStudy:
    folder: Path
    title: str
    pictures: dict[float, int]  # in each share
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        """A model and a share, over its seeds; models in the order asked for."""
        return group(self.outcomes)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [_row(g, self.pictures) for g in self.groups]

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]


def study_data_efficiency(
    source: str,
    models: str = MODELS,
    fractions: list[float] | None = None,
    *,
    path: str | None = None,
    seeds: int = 1,
    settings: list[str] | None = None,
    folder: Path | None = None,
    command: str = "",
    show: Show | None = None,
) -> EfficiencyStudy:
    """`settings` are those of `vitlab train`, for all models, or for one: "resnet:optim.lr=0.05". run.epochs are those
    of the largest share.
    """
    show = show or Silent()
    shares = sorted(set(fractions or FRACTIONS))
    if not 0 < shares[0] <= shares[-1] <= 1:
        raise ValueError(f"fractions={shares} must be above 0 and at most 1: 0.01,0.1,1, for instance.")
    named = read_models(models)
    common, own = _split(settings or [], [*named, TEACHER])
    base = _base(source, path)
    data = data_of(with_settings(base, common))
    side = max(data.train.read(0).shape[:2])
    networks, notes = _networks(named, side)
    folder = folder or Path("studies") / file_safe(f"data-efficiency-{Path(source).name or 'pictures'}")
    pictures = {share: len(few_labels(data.train.labels, data.classes, 0, fraction=share)) for share in shares}
    design = Design(base, networks, folder, pictures, {n.called: [*common, *own.get(n.called, [])] for n in networks})
    first = sorted(networks, key=lambda network: not network.convolves)  # teachers before students
    cells = [design.cell(network, share, seed) for share in shares for seed in range(seeds) for network in first]
    read_about(folder, "data-efficiency")
    for note in check_cells(cells, folder):
        show.note(note)
    about = {"source": source, "models": [n.called for n in networks], "fractions": shares, "seeds": seeds}
    write_about(folder, "data-efficiency", {**about, "settings": settings or []}, command)
    study = EfficiencyStudy(folder, _title(source, data, cells), pictures, notes=[*notes, *_words(networks, cells)])
    order = {network.called: number for number, network in enumerate(networks)}
    for outcome in run_cells(cells, folder, show):
        found = [*study.outcomes, outcome]
        study.outcomes = sorted(found, key=lambda o: (order[o.cell.values["model"]], *_place(o)))
        _write(study)  # after each run, so that a long study can be looked at
    for note in without_matplotlib(lambda: _draw(study)):
        show.note(note)
    return study


def _base(source: str, path: str | None) -> Recipe:
    tables = {**BASE, "augment": {**PLAIN.get(source, OF_FOLDERS), **BASE["augment"]}}
    tables["data"] = {"source": source, "path": path, "batch_size": BATCH if source in PLAIN else BATCH // 2}
    return from_tables(tables)


def _split(settings: list[str], models: list[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Settings of all, and those of one model; what the study itself decides is refused."""
    common: list[str] = []
    own: dict[str, list[str]] = {}
    for setting in settings:
        key = setting.partition("=")[0]
        model, colon, rest = key.rpartition(":")
        if rest.strip() in OWN:
            raise ValueError(f"{rest.strip()} is decided by the study: use {OWN[rest.strip()]}.")
        if not colon:
            common.append(setting)
        elif model in models:
            own.setdefault(model, []).append(setting.removeprefix(f"{model}:"))
        else:
            raise ValueError(f"{setting!r} is for {model}, which is not compared. Compared: {', '.join(models)}.")
    return common, own


def _networks(named: dict[str, Named], side: int) -> tuple[list[Network], list[str]]:
    """As asked for; a teacher is added where a student has none."""
    networks, notes = [resolve(called, asked, side) for called, asked in named.items()], []
    students = [n.called for n in networks if n.distilled]
    if students and not any(n.convolves for n in networks):
        networks.append(resolve(TEACHER, (TEACHER, {}), side))
        notes.append(f"{' and '.join(students)} learn from a teacher: {TEACHER} is trained, too.")
    return networks, notes


@dataclass(frozen=True)
class Design:
    """What every run of the study is made from."""

    base: Recipe
    networks: list[Network]
    folder: Path
    pictures: dict[float, int]
    settings: dict[str, list[str]]  # of each model

    def cell(self, network: Network, fraction: float, seed: int) -> Cell:
        """Settings come after what is usual for the network; what the study decides comes last."""
        usual = {f"optim.{key}": value for key, value in (SGD if network.convolves else ADAMW).items()}
        if self.base.data.batch_size < BATCH:
            usual["optim.lr"] *= self.base.data.batch_size / BATCH
        usual |= {"model.name": network.name, **{f"model.{key}": value for key, value in network.options.items()}}
        if network.distilled:
            teacher = _name(next(n for n in self.networks if n.convolves), fraction, seed)
            usual |= {"objective.name": "distill", "objective.teacher": str(self.folder / teacher / "best")}
        recipe = with_settings(_with(self.base, usual), self.settings[network.called])
        steps = _steps(recipe, max(self.pictures.values()), recipe.run.epochs)
        epochs = max(1, round(steps / _steps(recipe, self.pictures[fraction], 1)))
        decided = {"data.fraction": fraction, "run.seed": seed, "run.epochs": epochs, "run.eval_every": epochs}
        if not recipe.run.save_every:
            decided["run.save_every"] = max(1, steps // SAVES)  # epochs of few pictures are short
        if not recipe.optim.warmup_steps and not recipe.optim.warmup_epochs:
            decided["optim.warmup_steps"] = max(1, round(WARMUP * steps))
        values = {"model": network.called, "data.fraction": fraction, SEED: seed}
        return Cell(_name(network, fraction, seed), _with(recipe, decided), values)


def _with(recipe: Recipe, values: dict[str, Any]) -> Recipe:
    for key, value in values.items():
        recipe = with_value(recipe, key, value)
    return recipe


def _name(network: Network, fraction: float, seed: int) -> str:
    return file_safe(f"{network.called},fraction={fraction:g},seed={seed}")


def _steps(recipe: Recipe, pictures: int, epochs: int) -> int:
    return Plan(pictures, recipe.data.batch_size, epochs, 0, accumulate=recipe.optim.accumulate).total


def _title(source: str, data: Data, cells: list[Cell]) -> str:
    largest = max(cells, key=lambda cell: cell.values["data.fraction"]).recipe
    epochs = "1 epoch" if largest.run.epochs == 1 else f"{largest.run.epochs} epochs"
    return f"{Path(source).name}, {len(data.classes)} classes, {epochs} of the largest share"


def _words(networks: list[Network], cells: list[Cell]) -> list[str]:
    """What stands below the table."""
    found = ["Every run has the same number of steps, so few pictures are seen often. The last model is judged."]
    for network in networks:
        recipe = next(cell.recipe for cell in cells if cell.values["model"] == network.called)
        options = "".join(f", {key}={value}" for key, value in network.options.items())
        taught = f"{network.called}: {network.name}{options}; {recipe.optim.name}, lr {recipe.optim.lr:g}"
        if network.distilled:
            teacher = next(n.called for n in networks if n.convolves)
            taught += f"; taught by labels and by {teacher}, which learned from the same pictures"
        found.append(f"{taught}.")
    return found


def _place(outcome: Outcome) -> tuple[float, int]:
    return outcome.cell.values["data.fraction"], outcome.cell.values[SEED]


def _row(g: Group, pictures: dict[float, int]) -> dict[str, Any]:
    share = g.values["data.fraction"]
    row = {"model": g.values["model"], "fraction": share, "pictures": pictures[share], "n": len(g.numbers("top1"))}
    row |= {key: g.mean(key) for key in ("top1", "steps", "params", "seconds")}
    tops = g.numbers("top1")
    return {**row, "top1_min": min(tops, default=None), "top1_max": max(tops, default=None), "note": g.note()}


def table_for_people(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    """With units, and the spread over seeds in one cell; notes only where there is one."""
    found = []
    for row in rows:
        spread = f" ({100 * row['top1_min']:.2f} .. {100 * row['top1_max']:.2f})" if row["n"] > 1 else ""
        shown = {"model": row["model"], "share": f"{row['fraction']:g}", "pictures": f"{row['pictures']:,}"}
        shown |= {"seeds": str(row["n"]), "top-1": f"{100 * row['top1']:.2f} %{spread}" if row["n"] else ""}
        for title, key in {"steps": "steps", "parameters": "params", "seconds": "seconds"}.items():
            shown[title] = f"{row[key]:,.0f}" if row["n"] else ""
        found.append({**shown, "note": row["note"]} if any(r["note"] for r in rows) else shown)
    return found


def _write(study: EfficiencyStudy) -> None:
    """results.csv has a row for every run, table.md one for every model and share."""
    runs = []
    for outcome in study.outcomes:
        values, result = outcome.cell.values, outcome.result
        row = {"run": outcome.cell.name, "model": values["model"], "fraction": values["data.fraction"]}
        row |= {"pictures": study.pictures[values["data.fraction"]], "seed": values[SEED]}
        row |= {key: result.get(key) for key in ("top1", "top5", "loss", "steps", "params", "seconds")}
        runs.append({**row, "reason": outcome.failed})
    table = to_markdown(table_for_people(study.rows)) + "".join(f"\n{note}\n" for note in study.notes)
    write_texts(study.folder, {"results.csv": to_csv(runs), "table.md": table})


def _draw(study: EfficiencyStudy) -> None:
    from vitlab.study.plot import draw

    found = [
        Group({"training pictures": study.pictures[g.values["data.fraction"]], "model": g.values["model"]}, g.outcomes)
        for g in study.groups
        if g.numbers("top1")
    ]
    if found:
        draw(found, study.folder / PLOT, study.title)
