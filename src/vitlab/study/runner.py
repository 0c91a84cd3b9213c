"""Studies of training runs: each cell of a grid is trained in its own folder, and aggregated over seeds.

Finished runs are read, interrupted ones resume.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from vitlab.checkpoints.native import on_meta
from vitlab.device import pick_device
from vitlab.errors import UsageError, VitlabError
from vitlab.models.base import Network
from vitlab.study.grid import GridCell, label
from vitlab.study.study import OTHER_FOLDER, Row, Study
from vitlab.training.finetune import build_model
from vitlab.training.job import data_of
from vitlab.training.loop import Show, fit
from vitlab.training.objectives import objective_class
from vitlab.training.recipe import DataRecipe, Recipe, difference, read_recipe
from vitlab.training.runs import RECIPE, read_run

SEED = "run.seed"
OTHER_TARGETS = {"labels": "several labels an image", "number": "a number for each image"}


@dataclass(frozen=True)
class Outcome:
    """Result of a cell."""

    cell: GridCell
    result: dict[str, Any] = field(default_factory=dict)  # from result.json; empty if the run failed
    failed: str = ""  # why


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed."""

    values: dict[str, Any]
    outcomes: list[Outcome]

    def numbers(self, key: str) -> list[float]:
        """One number of every finished run."""
        return [outcome.result[key] for outcome in self.outcomes if outcome.result]

    def mean(self, key: str) -> float | None:
        numbers = self.numbers(key)
        if len(set(numbers)) == 1:  # keeps parameter counts integers
            return numbers[0]
        return fmean(numbers) if numbers else None

    def row(self, keys: Sequence[str]) -> Row:
        """Number of finished runs, means over seeds, and the lowest and highest top-1."""
        tops = self.numbers("top1")
        means = {key: self.mean(key) for key in keys}
        return {"n": len(tops), **means, "top1_min": min(tops, default=None), "top1_max": max(tops, default=None)}

    def note(self) -> str:
        reasons = [outcome.failed for outcome in self.outcomes if outcome.failed]
        if not reasons:
            return ""
        how_many = f"{len(reasons)} of {len(self.outcomes)} " if len(self.outcomes) > 1 else ""
        return f"{how_many}failed: {reasons[0].splitlines()[0].split('. ')[0].removesuffix('.')}"


@dataclass
class RunsStudy(Study):
    """A study of training runs. A row of its table is a group of them."""

    title: str
    order: list[str]  # names of the cells, as in the table
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def groups(self) -> list[Group]:
        """Runs by their values without the seed, in the order of their first run."""
        groups: dict[str, Group] = {}
        for outcome in self.outcomes:
            values = {key: value for key, value in outcome.cell.values.items() if key != SEED}
            groups.setdefault(label(values), Group(values, [])).outcomes.append(outcome)
        return list(groups.values())

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]

    def failures(self) -> list[str]:
        if not self.failed:
            return []
        total = len(self.outcomes)
        return [f"{len(self.failed)} of {total} runs failed: the reasons are in {self.folder}/results.csv."]

    def plotted_groups(self) -> list[Group]:
        """Groups whose values are the axes of the plot."""
        return self.groups

    def draw(self, path: Path) -> None:
        from vitlab.study.plot import draw_groups

        if any(outcome.result for outcome in self.outcomes):
            draw_groups(self.plotted_groups(), path, self.title)

    def train(self, cells: list[GridCell], show: Show) -> None:
        for outcome in run_cells(cells, self.folder, show):
            self.outcomes = sorted([*self.outcomes, outcome], key=lambda o: self.order.index(o.cell.name))
            self.write()  # after each run, so that an unfinished study can be read
        for note in self.write_plot():
            show.note(note)


def check_cells(cells: list[GridCell], folder: Path) -> list[str]:
    """Refuse what would fail later: runs of another recipe in the folder, missing data, models that cannot be built.

    Returns notes on data and models. New models are built on the meta device.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("a study runs in one process: start it without torchrun, or train the cells one by one.")
    notes: dict[str, None] = {}  # ordered, without duplicates
    opened: dict[DataRecipe, tuple[list[str], int]] = {}
    built: list[tuple[object, ...]] = []
    for cell in cells:
        data, model = cell.recipe.data, cell.recipe.model
        if _is_finished(cell, folder / cell.name):
            continue
        try:
            pick_device(cell.recipe.run.device)
            objective_class(cell.recipe.objective.name).check(cell.recipe)
            if data not in opened:
                source = data_of(cell.recipe)
                if source.kind != "class":
                    raise UsageError(
                        f"a study compares accuracies, and {source.name} has {OTHER_TARGETS[source.kind]}. Train with "
                        "`vitlab train` for each setting, and compare with `vitlab runs`."
                    )
                opened[data] = source.classes, source.train.channels
                notes |= dict.fromkeys(source.notes)
            key = (model, cell.recipe.objective.name, opened[data])
            if key not in built:
                notes |= dict.fromkeys(_build(cell.recipe, *opened[data]))
                built.append(key)
        except (VitlabError, OSError) as error:
            raise UsageError(f"{cell.name}: {error}") from None
    return list(notes)


def run_cells(cells: list[GridCell], folder: Path, show: Show, *, before: int = 0, total: int = 0) -> Iterator[Outcome]:
    """Finished cells first, then the others as they are trained. After a run that fails the others continue.

    `before` and `total`: position of these cells in a study with more of them.
    """
    total = total or len(cells)
    done = {cell.name: read_run(folder / cell.name).result for cell in cells if _is_finished(cell, folder / cell.name)}
    if done:
        names = f"{len(done)} of {total} runs are" if total == len(cells) else f"{', '.join(done)}:"
        show.note(f"{names} finished already.")
    yield from (Outcome(cell, done[cell.name]) for cell in cells if cell.name in done)
    seconds = [result["seconds"] for result in done.values()]
    waiting = [(number, cell) for number, cell in enumerate(cells, 1 + before) if cell.name not in done]
    for position, (number, cell) in enumerate(waiting):
        left = f" ({format_duration(fmean(seconds) * (len(waiting) - position))} left)" if seconds else ""
        show.note(f"run {number} of {total}: {cell.name}{left}")
        run = folder / cell.name
        try:
            result = fit(cell.recipe, run, resume=(run / RECIPE).is_file(), show=StepsOnly(show))
        except (VitlabError, torch.OutOfMemoryError) as error:
            show.note(f"  failed: {error}")
            yield Outcome(cell, failed=str(error))
        else:
            score = f"{result['split']} {result.get('judged_by', 'top-1')} {result['top1']:.2%}"
            show.note(f"  {score} after {result['seconds']:.0f} s")
            seconds.append(result["seconds"])
            yield Outcome(cell, result)


class StepsOnly:
    """Shows the steps of one run of a study. Its notes stay in its own log."""

    def __init__(self, show: Show):
        self.start, self.step, self.count = show.start, show.step, show.count

    def note(self, text: str) -> None: ...


def _is_finished(cell: GridCell, run: Path) -> bool:
    """Whether a run is finished. A run of another recipe is refused."""
    if not (run / RECIPE).is_file():
        return False
    saved = read_recipe(run / RECIPE)
    if saved != cell.recipe:
        lines = "\n  ".join(difference(saved, cell.recipe))
        raise UsageError(f"{run} was made by another recipe:\n  {lines}\n{OTHER_FOLDER}")
    return bool(read_run(run).result)


def _build(recipe: Recipe, classes: list[str], channels: int) -> list[str]:
    notes: list[str] = []

    def build() -> Network:
        model, more = build_model(recipe, classes, channels)
        objective_class(recipe.objective.name).check_model(recipe, model)
        notes.extend(more)
        return model

    if recipe.model.init_from is None:
        on_meta(build)
    else:  # pretrained weights need memory
        build()
    return notes


def format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"
