"""Which settings are best? Every combination of values is trained; the results stand in one table and one picture.

    studies/digits-depth-positions/{study.json, results.csv, table.md, plot.png}
    studies/digits-depth-positions/depth=4,positions=learned/     a run folder for each cell, as `vitlab train` makes it

The same command again goes on where it was stopped; with more values it trains the new ones only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.study.folder import ABOUT, PLOT, read_about, without_matplotlib, write_about
from vitlab.study.grid import Grid, as_typed, file_safe, read_grid
from vitlab.study.runner import Outcome, check_cells, run_cells
from vitlab.study.table import group, rows, write_tables
from vitlab.training.loop import Show, Silent
from vitlab.training.recipe import Recipe, difference, from_tables, to_tables


@dataclass(frozen=True)
class Study:
    """A study that has come to its end."""

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
    """Train the grid that the settings span over a recipe. Everything that cannot work is refused before it begins."""
    show = show or Silent()
    grid = read_grid(recipe, settings)
    folder = folder or default_folder(name, grid)
    _check_folder(folder, grid)
    for note in check_cells(grid.cells, folder):
        show.note(note)
    write_about(folder, "configs", {"recipe": name, "axes": grid.axes, "base": to_tables(grid.base)}, command)
    order = {cell.name: number for number, cell in enumerate(grid.cells)}
    outcomes: list[Outcome] = []
    for outcome in run_cells(grid.cells, folder, show):
        outcomes = sorted([*outcomes, outcome], key=lambda outcome: order[outcome.cell.name])
        write_tables(folder, outcomes)  # after each run, so that a long study can be looked at
    for note in without_matplotlib(lambda: _draw(folder, name, outcomes)):
        show.note(note)
    return Study(folder, outcomes)


def default_folder(name: str, grid: Grid) -> Path:
    return Path("studies") / f"{file_safe(name)}-{grid.name}"


def _check_folder(folder: Path, grid: Grid) -> None:
    """A folder belongs to one study, which may grow."""
    old = read_about(folder, "configs")
    if not old:
        return
    try:
        axes: dict[str, list[Any]] = {key: list(values) for key, values in old["axes"].items()}
        lines = difference(from_tables(old["base"]), grid.base)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{folder / ABOUT}: cannot be understood ({error}). Take another folder: --dir studies/NAME."
        ) from None
    if list(axes) != list(grid.axes):
        lines.append(f"axes: {', '.join(axes)} -> {', '.join(grid.axes)}")
    else:
        for key, values in axes.items():
            typed = [as_typed(value) for value in grid.axes[key]]
            lines += [f"{key}: {text} is left out" for text in map(as_typed, values) if text not in typed]
    if lines:
        differs = "\n  ".join(lines)
        raise ValueError(
            f"{folder} holds another study:\n  {differs}\nValues can be added to it, and nothing else changed. "
            "For a study of its own: --dir studies/NAME."
        )


def _draw(folder: Path, name: str, outcomes: list[Outcome]) -> None:
    from vitlab.study.plot import draw

    if any(outcome.result for outcome in outcomes):
        draw(group(outcomes), folder / PLOT, name)
