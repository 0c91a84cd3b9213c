"""Which settings are best? Every combination of values is trained; the results are one table and one plot.

    studies/digits-depth-positions/{study.json, results.csv, table.md, plot.png}
    studies/digits-depth-positions/depth=4,positions=learned/     a run folder for each cell, as `vitlab train` makes it

The same command again resumes an interrupted study; with more values it trains only the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError
from vitlab.study.folder import PLOT, STUDY_JSON, read_study_json, try_draw, write_study_json
from vitlab.study.grid import Grid, file_safe, format_value, read_grid
from vitlab.study.runner import Outcome, check_cells, run_cells
from vitlab.study.table import group, rows, write_tables
from vitlab.training.loop import Show, Silent
from vitlab.training.recipe import Recipe, difference, from_tables, to_tables


@dataclass(frozen=True)
class Study:
    """A finished study."""

    folder: Path
    outcomes: list[Outcome]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return rows(group(self.outcomes))

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.failed]


def study_configs(
    name: str,
    recipe: Recipe,
    settings: list[str],
    folder: Path | None = None,
    *,
    command: str = "",
    show: Show | None = None,
) -> Study:
    """Train the grid of settings over a recipe. Invalid cells are refused before training starts."""
    show = show or Silent()
    grid = read_grid(recipe, settings)
    folder = folder or default_folder(name, grid)
    _check_folder(folder, grid)
    for note in check_cells(grid.cells, folder):
        show.note(note)
    write_study_json(folder, "configs", {"recipe": name, "axes": grid.axes, "base": to_tables(grid.base)}, command)
    order = {cell.name: number for number, cell in enumerate(grid.cells)}
    outcomes: list[Outcome] = []
    for outcome in run_cells(grid.cells, folder, show):
        outcomes = sorted([*outcomes, outcome], key=lambda outcome: order[outcome.cell.name])
        write_tables(folder, outcomes)  # after each run, so that an unfinished study can be read
    for note in try_draw(lambda: _draw(folder, name, outcomes)):
        show.note(note)
    return Study(folder, outcomes)


def default_folder(name: str, grid: Grid) -> Path:
    return Path("studies") / f"{file_safe(name)}-{grid.name}"


def _check_folder(folder: Path, grid: Grid) -> None:
    """Refuse a folder of another study. Values may be added to the same study."""
    old = read_study_json(folder, "configs")
    if not old:
        return
    try:
        axes: dict[str, list[Any]] = {key: list(values) for key, values in old["axes"].items()}
        lines = difference(from_tables(old["base"]), grid.base)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(
            f"{folder / STUDY_JSON}: cannot be understood ({error}). Use another folder: --dir studies/NAME."
        ) from None
    if list(axes) != list(grid.axes):
        lines.append(f"axes: {', '.join(axes)} -> {', '.join(grid.axes)}")
    else:
        for key, values in axes.items():
            typed = [format_value(value) for value in grid.axes[key]]
            lines += [f"{key}: {text} is left out" for text in map(format_value, values) if text not in typed]
    if lines:
        differs = "\n  ".join(lines)
        raise UsageError(
            f"{folder} holds another study:\n  {differs}\nOnly values can be added to it. "
            "For a new study: --dir studies/NAME."
        )


def _draw(folder: Path, name: str, outcomes: list[Outcome]) -> None:
    from vitlab.study.plot import draw

    if any(outcome.result for outcome in outcomes):
        draw(group(outcomes), folder / PLOT, name)
