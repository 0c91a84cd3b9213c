"""Runs of a study, one after another in folders of their own: finished ones are read, an interrupted one goes on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from vitlab.checkpoints.native import on_meta
from vitlab.study.grid import Cell
from vitlab.training.checks import check_objective, check_reducer
from vitlab.training.finetune import build_model
from vitlab.training.job import data_of
from vitlab.training.loop import Show, fit
from vitlab.training.objectives import mix_of
from vitlab.training.processes import pick_device
from vitlab.training.recipe import DataRecipe, Recipe, difference, read_recipe
from vitlab.training.runs import RECIPE, read_run


@dataclass(frozen=True)
class Outcome:
    """What came of a cell."""

    cell: Cell
    result: dict[str, Any] = field(default_factory=dict)  # of result.json; empty where the run failed
    failed: str = ""  # why


def check_cells(cells: list[Cell], folder: Path) -> list[str]:
    """Refuse now what would fail later: foreign runs in the folder, no such data, a model that cannot be built.

    Returns what there is to know about data and models. A new model stands on the meta device, where it takes no room.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError("a study runs in one process: start it without torchrun, or train the cells one by one.")
    notes: dict[str, None] = {}  # in order, each once
    opened: dict[DataRecipe, tuple[list[str], int]] = {}
    built: list[tuple[Any, ...]] = []
    for cell in cells:
        data, model = cell.recipe.data, cell.recipe.model
        if _is_finished(cell, folder / cell.name):
            continue
        try:
            pick_device(cell.recipe.run.device)
            mix_of(cell.recipe)
            check_objective(cell.recipe)
            if data not in opened:
                source = data_of(cell.recipe)
                opened[data] = source.classes, source.train.channels
                notes |= dict.fromkeys(source.notes)
            network = (model, cell.recipe.objective.name, opened[data])
            if network not in built:
                notes |= dict.fromkeys(_build(cell.recipe, *opened[data]))
                built.append(network)
        except (ValueError, OSError) as error:
            raise ValueError(f"{cell.name}: {error}") from None
    return list(notes)


def run_cells(cells: list[Cell], folder: Path, show: Show, *, before: int = 0, total: int = 0) -> Iterator[Outcome]:
    """Finished cells come first; the others are trained. A run that fails is told of, and the rest goes on.

    `before` and `total`: where they are some of a study's cells, so many came before these.
    """
    total = total or len(cells)
    done = {cell.name: _read(folder / cell.name) for cell in cells if _is_finished(cell, folder / cell.name)}
    if done:
        whole = total == len(cells)
        few = f"{len(done)} of {total} runs are finished already." if whole else f"{', '.join(done)}: finished already."
        show.note(few)
    yield from (Outcome(cell, done[cell.name]) for cell in cells if cell.name in done)
    seconds = [result["seconds"] for result in done.values()]
    waiting = [(number, cell) for number, cell in enumerate(cells, 1 + before) if cell.name not in done]
    for position, (number, cell) in enumerate(waiting):
        left = f" ({_in_words(fmean(seconds) * (len(waiting) - position))} left)" if seconds else ""
        show.note(f"run {number} of {total}: {cell.name}{left}")
        run = folder / cell.name
        try:
            result = fit(cell.recipe, run, resume=(run / RECIPE).is_file(), show=Steps(show))
        except (ValueError, torch.OutOfMemoryError) as error:
            show.note(f"  failed: {error}")
            yield Outcome(cell, failed=str(error))
        else:
            answer = f"{result['split']} {result.get('judged_by', 'top-1')} {result['top1']:.2%}"
            show.note(f"  {answer} after {result['seconds']:.0f} s")
            seconds.append(result["seconds"])
            yield Outcome(cell, result)


class Steps:
    """What is shown of one run among many: its steps. What it says at each epoch stays in its own log."""

    def __init__(self, show: Show):
        self.start, self.step = show.start, show.step

    def note(self, text: str) -> None: ...


def _is_finished(cell: Cell, run: Path) -> bool:
    """Whether a run has come to its end; one of another recipe is refused."""
    if not (run / RECIPE).is_file():
        return False
    saved = read_recipe(run / RECIPE)
    if saved != cell.recipe:
        lines = "\n  ".join(difference(saved, cell.recipe))
        raise ValueError(f"{run} was made by another recipe:\n  {lines}\nTake another folder: --dir studies/NAME.")
    return bool(_read(run))


def _read(run: Path) -> dict[str, Any]:
    return read_run(run).result


def _build(recipe: Recipe, classes: list[str], channels: int) -> list[str]:
    notes: list[str] = []

    def build() -> Any:
        model, told = build_model(recipe.model, classes, channels, recipe.objective)
        check_reducer(recipe, model)
        notes.extend(told)
        return model

    if recipe.model.init_from is None:
        on_meta(build)
    else:  # weights from a file have values, and so a place in memory
        build()
    return notes


def _in_words(seconds: float) -> str:
    if seconds < 100:
        return f"about {seconds:.0f} s"
    return f"about {seconds / 60:.0f} min" if seconds < 6000 else f"about {seconds / 3600:.1f} h"
