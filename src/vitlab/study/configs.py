"""Which settings are best? Every combination of values is trained; the results are one table and one plot.

    studies/digits-depth-positions/{study.json, results.csv, table.md, plot.png}
    studies/digits-depth-positions/depth=4,positions=learned/     a run folder for each cell, as `vitlab train` makes it

The same command again resumes an interrupted study; with more values it trains only the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.errors import UsageError, VitlabError
from vitlab.study.grid import Grid, file_safe, format_value, read_grid
from vitlab.study.runner import RunsStudy, check_cells
from vitlab.study.study import BEST, OTHER_FOLDER, STUDY_JSON, Row, read_study_json, write_study_json
from vitlab.training.loop import Show, Silent
from vitlab.training.recipe import Recipe, difference, from_tables, to_tables
from vitlab.training.runs import shown

NUMBERS = ("top1", "val_top1", "loss", "params", "seconds", "images_per_second")


@dataclass
class ConfigsStudy(RunsStudy):
    """The row with the best validation accuracy is marked: choosing by test accuracy would bias the test."""

    @property
    def rows(self) -> list[Row]:
        groups = self.groups
        best = max((mean for g in groups if (mean := g.mean("val_top1")) is not None), default=None)
        table = []
        for g in groups:
            row = {**g.values, **g.row(NUMBERS)}
            notes = [BEST] if best is not None and row["val_top1"] == best and len(groups) > 1 else []
            table.append({**row, "note": "; ".join([*notes, *filter(None, [g.note()])])})
        return table

    def tables(self) -> list[list[Row]]:
        """The spread in one column, without empty columns."""
        table = []
        for row in self.rows:
            spread = f"{100 * row['top1_min']:.2f} .. {shown('top1', row['top1_max'])}" if row["n"] > 1 else ""
            values = {key: format_value(value) if value is None else value for key, value in row.items() if "." in key}
            numbers = {key: row[key] for key in NUMBERS if key != "top1"}
            counted = {"n": row["n"], "top1": row["top1"], "spread": spread}
            table.append({**values, **counted, **numbers, "note": row["note"]})
        empty = [key for key in ("spread", "note") if not any(row[key] for row in table)]
        return [[{key: value for key, value in row.items() if key not in empty} for row in table]]

    def csv_rows(self) -> list[Row]:
        """A row per run."""
        runs = []
        for outcome in self.outcomes:
            values = {key: format_value(value) for key, value in outcome.cell.values.items()}
            row = {"run": outcome.cell.name, **values, "status": "failed" if outcome.failed else "finished"}
            row |= {key: outcome.result.get(key) for key in NUMBERS}
            runs.append({**row, "reason": outcome.failed})
        return runs


def study_configs(
    name: str,
    recipe: Recipe,
    settings: list[str],
    folder: Path | None = None,
    *,
    command: str = "",
    show: Show | None = None,
) -> ConfigsStudy:
    """Train the grid of settings over a recipe. Invalid cells are refused before training starts."""
    show = show or Silent()
    grid = read_grid(recipe, settings)
    folder = folder or Path("studies") / f"{file_safe(name)}-{grid.name}"
    _check_folder(folder, grid)
    for note in check_cells(grid.cells, folder):
        show.note(note)
    write_study_json(folder, "configs", {"recipe": name, "axes": grid.axes, "base": to_tables(grid.base)}, command)
    study = ConfigsStudy(folder, name, [cell.name for cell in grid.cells])
    study.train(grid.cells, show)
    return study


def _check_folder(folder: Path, grid: Grid) -> None:
    """Refuse a folder of another study. Values may be added to the same study."""
    old = read_study_json(folder, "configs")
    if not old:
        return
    try:
        axes: dict[str, list[Any]] = {key: list(values) for key, values in old["axes"].items()}
        lines = difference(from_tables(old["base"]), grid.base)
    except (KeyError, TypeError, AttributeError, VitlabError) as error:
        raise UsageError(f"{folder / STUDY_JSON}: cannot be understood ({error}). {OTHER_FOLDER}") from None
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
