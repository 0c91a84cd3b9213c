"""Train the runs of a study one by one, each in its own folder. Finished runs are read, interrupted ones resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from vitlab.checkpoints.native import on_meta
from vitlab.errors import UsageError
from vitlab.study.grid import GridCell
from vitlab.training.finetune import build_model
from vitlab.training.job import data_of
from vitlab.training.loop import Show, fit
from vitlab.training.objectives import objective_class
from vitlab.training.processes import pick_device
from vitlab.training.recipe import DataRecipe, Recipe, difference, read_recipe
from vitlab.training.runs import RECIPE, read_run


@dataclass(frozen=True)
class Outcome:
    """Result of a cell."""

    cell: GridCell
    result: dict[str, Any] = field(default_factory=dict)  # from result.json; empty if the run failed
    failed: str = ""  # why


def check_cells(cells: list[GridCell], folder: Path) -> list[str]:
    """Refuse what would fail later: runs of another recipe in the folder, missing data, models that cannot be built.

    Returns notes on data and models. New models are built on the meta device.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("a study runs in one process: start it without torchrun, or train the cells one by one.")
    notes: dict[str, None] = {}  # ordered, without duplicates
    opened: dict[DataRecipe, tuple[list[str], int]] = {}
    built: list[tuple[Any, ...]] = []
    for cell in cells:
        data, model = cell.recipe.data, cell.recipe.model
        if _is_finished(cell, folder / cell.name):
            continue
        try:
            pick_device(cell.recipe.run.device)
            objective_class(cell.recipe.objective.name).check(cell.recipe)
            if data not in opened:
                source = data_of(cell.recipe)
                opened[data] = source.classes, source.train.channels
                notes |= dict.fromkeys(source.notes)
            key = (model, cell.recipe.objective.name, opened[data])
            if key not in built:
                notes |= dict.fromkeys(_build(cell.recipe, *opened[data]))
                built.append(key)
        except (ValueError, OSError) as error:
            raise UsageError(f"{cell.name}: {error}") from None
    return list(notes)


def run_cells(cells: list[GridCell], folder: Path, show: Show, *, before: int = 0, total: int = 0) -> Iterator[Outcome]:
    """Finished cells first, then the others as they are trained. After a run that fails the others continue.

    `before` and `total`: position of these cells in a study with more of them.
    """
    total = total or len(cells)
    done = {cell.name: _read(folder / cell.name) for cell in cells if _is_finished(cell, folder / cell.name)}
    if done:
        names = f"{len(done)} of {total} runs are" if total == len(cells) else f"{', '.join(done)}:"
        show.note(f"{names} finished already.")
    yield from (Outcome(cell, done[cell.name]) for cell in cells if cell.name in done)
    seconds = [result["seconds"] for result in done.values()]
    waiting = [(number, cell) for number, cell in enumerate(cells, 1 + before) if cell.name not in done]
    for position, (number, cell) in enumerate(waiting):
        left = f" ({_format_duration(fmean(seconds) * (len(waiting) - position))} left)" if seconds else ""
        show.note(f"run {number} of {total}: {cell.name}{left}")
        run = folder / cell.name
        try:
            result = fit(cell.recipe, run, resume=(run / RECIPE).is_file(), show=StepsOnly(show))
        except (ValueError, torch.OutOfMemoryError) as error:
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
        self.start, self.step = show.start, show.step

    def note(self, text: str) -> None: ...


def _is_finished(cell: GridCell, run: Path) -> bool:
    """Whether a run is finished. A run of another recipe is refused."""
    if not (run / RECIPE).is_file():
        return False
    saved = read_recipe(run / RECIPE)
    if saved != cell.recipe:
        lines = "\n  ".join(difference(saved, cell.recipe))
        raise UsageError(f"{run} was made by another recipe:\n  {lines}\nUse another folder: --dir studies/NAME.")
    return bool(_read(run))


def _read(run: Path) -> dict[str, Any]:
    return read_run(run).result


def _build(recipe: Recipe, classes: list[str], channels: int) -> list[str]:
    notes: list[str] = []

    def build() -> Any:
        model, more = build_model(recipe, classes, channels)
        objective_class(recipe.objective.name).check_model(recipe, model)
        notes.extend(more)
        return model

    if recipe.model.init_from is None:
        on_meta(build)
    else:  # pretrained weights need memory
        build()
    return notes


def _format_duration(seconds: float) -> str:
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"
