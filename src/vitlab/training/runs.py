"""Compares runs: their settings, their results, and the recipe keys in which they differ.

rows = table(list_runs(Path("runs")).runs)       # one dict a run, newest first; the same columns in each
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitlab.errors import TrainingError, UsageError, VitlabError
from vitlab.models.config import nearest
from vitlab.parsing import flat, parse_toml
from vitlab.printable import csv_cell
from vitlab.tables import Table, Tabular
from vitlab.training.run_lock import Holder, lock_holder
from vitlab.training.runlog import from_json, read_log

RECIPE, RESULT = "recipe.toml", "result.json"
COLUMNS = (
    "name", "data", "model", "params", "epochs", "top1", "val_top1", "loss", "seconds", "images_per_second", "seed",
    "status",
)  # fmt: skip
SHOWN_AS_COLUMN = {"data.source", "model.name", "run.epochs", "run.seed", "run.note"}
ALWAYS_DIFFER = {"run.dir", "run.name"}
TARGETS = ("map", "val_map", "r2", "val_r2", "miou", "val_miou", "ap", "val_ap")  # of runs that learn no classes
MAIN = (
    "name",
    "data",
    "model",
    "rung",
    "top1",
    "val_top1",
    *TARGETS,
    "seconds",
    "status",
    "note",
)  # what a terminal shows
TITLES = {"val_top1": "best val", "images_per_second": "images/s"}  # of columns, where not the key itself
MORE_IS_BETTER = {"top1", "val_top1", *TARGETS, "images_per_second", "started"}
NAMED = 3  # runs with the same value of a setting that are named
SHARES = {"top1", "val_top1", *(key for key in TARGETS if "r2" not in key)}  # shown in percent


@dataclass(frozen=True)
class Run(Tabular):
    """One run folder, read."""

    folder: Path
    recipe: dict[str, Any]  # by dotted key
    result: dict[str, Any]  # empty until the run is finished
    log: list[dict[str, Any]] = field(repr=False)
    saved: bool  # there is a checkpoint to resume from
    holder: Holder | None = None  # the process that writes it now

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @cached_property
    def started(self) -> float:
        """When it began, in seconds since 1970."""
        times = [line["time"] for line in self.log if isinstance(line.get("time"), int | float)]
        return times[0] if times else (self.folder / RECIPE).stat().st_mtime

    @cached_property
    def val_curve(self) -> list[tuple[int, float]]:
        """(step, validation accuracy)"""
        points = [(line["step"], line.get("top1")) for line in self.log if line["kind"] == "val"]
        return [(step, top1) for step, top1 in points if isinstance(top1, int | float) and math.isfinite(top1)]

    @property
    def rung(self) -> str | None:
        """Of a run that climbs the ladder: the rung that was chosen, so far."""
        kept = [line["name"] for line in self.log if line["kind"] == "rung" and line.get("kept") and "name" in line]
        return self.result.get("rung") or (kept[-1] if kept else None)

    @property
    def status(self) -> str:
        if self.result:
            return "finished"
        if self.recipe.get("run.ladder"):
            where = f"after {self.rung}" if self.rung else "before the first rung"
            return f"running, {where} ({self.holder})" if self.holder is not None else f"stopped {where}"
        step = max((line["step"] for line in self.log), default=0)
        totals = [line["steps"] for line in self.log if line["kind"] == "start" and "steps" in line]
        where = f"step {step} of {totals[-1]}" if totals else f"step {step}"
        if self.holder is not None:
            return f"running at {where} ({self.holder})"
        return f"stopped at {where}" if self.saved else f"never saved, at {where}"

    @property
    def note(self) -> str | None:
        """run.note of its recipe."""
        return self.recipe.get("run.note") or None

    @property
    def targets(self) -> dict[str, Any]:
        """Scores of a run that learns several labels, or a number; empty for others."""
        return {key: self.result[key] for key in TARGETS if key in self.result}

    def row(self) -> dict[str, Any]:
        values = {
            **{key: self.result.get(key) for key in ("params", "top1", "loss", "seconds", "images_per_second")},
            "name": self.name,
            "data": self.recipe.get("data.source"),
            "model": self.recipe.get("model.name"),
            "epochs": self.result.get("epochs", self.recipe.get("run.epochs")),
            "val_top1": max((top1 for _, top1 in self.val_curve), default=self.result.get("val_top1")),
            "seed": self.result.get("seed", self.recipe.get("run.seed")),
            "status": self.status,
        }
        return {key: values[key] for key in COLUMNS}

    def table(self) -> Table:
        return runs_table([self])

    def main_row(self) -> dict[str, Any]:
        """The few columns that fit a terminal; with the weights that the run started from, where there are some."""
        weights = self.recipe.get("model.init_from")
        values = {**self.row(), **{key: self.targets.get(key) for key in TARGETS}, "rung": self.rung, "note": self.note}
        values |= {"data": _last_part(values["data"]), "model": _last_part(weights or values["model"])}
        return {key: values[key] for key in MAIN}


def _last_part(name: str | None) -> str | None:
    """images/photos -> photos, runs/photos/best -> photos/best, hf-hub:facebook/dinov2-small stays."""
    if name is None or ":" in name:
        return name
    parts = [part for part in re.split(r"[/\\]", name) if part]
    return "/".join(parts[-2:] if parts[-1:] in (["best"], ["last"]) else parts[-1:])


@dataclass(frozen=True)
class RunList(Tabular):
    runs: list[Run]
    skipped: list[str]  # folders that are no runs, and why

    def table(self) -> Table:
        return runs_table(self.runs, self.skipped)


def list_runs(folder: Path) -> RunList:
    """Every run in a folder, newest first; a folder that is itself a run counts as one."""
    if not folder.is_dir():
        raise TrainingError(
            f"{folder}: no such folder. `vitlab train` makes a first run in ./runs; or name the folder."
        )
    inside = [path for path in sorted(folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    places = [folder] if (folder / RECIPE).is_file() else inside
    runs, skipped = [], []
    for place in places:
        try:
            runs.append(read_run(place))
        except (VitlabError, OSError) as error:
            skipped.append(str(error) if str(place) in str(error) else f"{place}: {error}")
    return RunList(sorted(runs, key=lambda run: -run.started), skipped)


def read_run(folder: Path) -> Run:
    if not (folder / RECIPE).is_file():
        raise TrainingError(f"{folder}: is not a run, for it holds no {RECIPE}.")
    try:
        recipe = parse_toml((folder / RECIPE).read_text(encoding="utf-8"))
    except ValueError as error:  # bad TOML, NaN, nested too deep, or not UTF-8
        raise TrainingError(f"{folder / RECIPE}: cannot be read ({error}).") from None
    result = read_result(folder) if (folder / RESULT).is_file() else {}
    saved = any(folder.glob("last")) or any(folder.glob(".last.old")) or any(folder.glob("last-[0-9]*"))
    return Run(folder, flat(recipe), result, read_log(folder), saved, lock_holder(folder))


def read_result(folder: Path) -> dict[str, Any]:
    """What a finished run's result.json holds."""
    path = folder / RESULT
    if not path.is_file():
        raise TrainingError(f"{path}: the run is finished, but its result is missing, or is no regular file.")
    try:
        result = from_json(path.read_bytes())
    except ValueError as error:
        raise TrainingError(f"{path}: cannot be read ({error}).") from None
    if not isinstance(result, dict):
        raise TrainingError(f"{path}: holds no table of results but {type(result).__name__}.")
    return result


def differences(runs: list[Run]) -> list[str]:
    """The recipe keys that are not the same in all runs, without those that have a column anyway."""
    keys = sorted({key for run in runs for key in run.recipe} - SHOWN_AS_COLUMN - ALWAYS_DIFFER)
    return [key for key in keys if any(run.recipe.get(key) != runs[0].recipe.get(key) for run in runs)]


def table(runs: list[Run], sort: str | None = None) -> list[dict[str, Any]]:
    """A row for each run, with a column for every recipe key that varies. Newest first, or the best by `sort` first.

    `sort` is a column or any recipe key; with - before it, the other way round. Runs without the value come last.
    Scores of several labels or of a number, and notes, have columns where a run has them.
    """
    varying, runs = differences(runs), sorted_runs(runs, sort)
    scores = [key for key in TARGETS if any(key in run.targets for run in runs)]
    noted = any(run.note for run in runs)
    return [
        {
            **run.row(),
            **{key: run.targets.get(key) for key in scores},
            **{key: run.recipe.get(key) for key in varying},
            **({"note": run.note} if noted else {}),
        }
        for run in runs
    ]


def main_table(runs: list[Run], sort: str | None = None) -> list[dict[str, Any]]:
    """Like `table`, with MAIN for columns; one that is empty in all rows is left out."""
    rows = [run.main_row() for run in sorted_runs(runs, sort)]
    empty = {key for key in MAIN if all(row[key] is None for row in rows)}
    return [{key: value for key, value in row.items() if key not in empty} for row in rows]


def runs_table(runs: list[Run], skipped: Sequence[str] = ()) -> Table:
    """`main_table` as people read it."""
    rows = main_table(runs)
    notes = [] if rows else ["no runs. `vitlab train` makes one."]
    return replace(rows_table(rows), notes=[*notes, *(f"skipped: {reason}" for reason in skipped)])


def rows_table(rows: Sequence[Mapping[str, object]]) -> Table:
    """The rows of `table` or `main_table` as people read them."""
    titles = [TITLES.get(key, key) for key in (rows[0] if rows else MAIN)]
    right = [TITLES.get(key, key) for key in keys_of_numbers(rows)]
    return Table(titles, [[shown(key, value) for key, value in row.items()] for row in rows], right)


def keys_of_numbers(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The keys whose values are all numbers."""
    return [key for key in (rows[0] if rows else ()) if all(isinstance(row[key], int | float | None) for row in rows)]


def variations(runs: list[Run]) -> dict[str, dict[str, list[str]]]:
    """Recipe key that varies -> value, as text -> the runs that have it."""
    table: dict[str, dict[str, list[str]]] = {}
    for key in differences(runs):
        values = table.setdefault(key, {})
        for run in runs:
            values.setdefault(shown(key, run.recipe.get(key)) or "-", []).append(run.name)
    return table


def variations_table(runs: list[Run]) -> Table:
    """A row for each setting that differs: its values, and the runs that have them, those of most runs last."""
    rows = []
    for key, values in variations(runs).items():
        *few, (most, names) = sorted(values.items(), key=lambda value: len(value[1]))
        cells = [f"{value} ({_names(own)})" for value, own in few]
        cells.append(f"{most} ({'the others' if len(names) > NAMED else _names(names)})")
        rows.append([key, ", ".join(cells)])
    return Table(["what differs", ""], rows)


def _names(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def sorted_runs(runs: list[Run], sort: str | None) -> list[Run]:
    return runs if sort is None else _sorted(runs, sort)


def _sorted(runs: list[Run], sort: str) -> list[Run]:
    key = sort.removeprefix("-")
    values = [{"started": run.started, **run.recipe, **run.row(), **run.targets} for run in runs]
    columns = list(dict.fromkeys(name for value in values for name in value)) or ["started", *COLUMNS]
    if key not in columns:
        raise UsageError(f"--sort {sort}: no run has {key!r}.{nearest(key, columns)} Columns: {', '.join(COLUMNS)}.")
    numbers = [isinstance(value.get(key), int | float) and math.isfinite(value[key]) for value in values]
    numeric = any(numbers)
    has = [i for i in range(len(runs)) if (numbers[i] if numeric else values[i].get(key) is not None)]
    backwards = (key in MORE_IS_BETTER) != sort.startswith("-")
    has.sort(key=lambda i: values[i][key] if numeric else str(values[i][key]), reverse=backwards)
    return [runs[i] for i in has] + [run for i, run in enumerate(runs) if i not in has]


# ------------------------------------------------------------------------------------------------------------ as text


def shown(key: str, value: object) -> str:
    """A cell as people read it."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if not math.isfinite(value):
        return str(value)
    if key in SHARES:
        return f"{100 * value:.2f} %"
    if key in ("params", "epochs"):
        return f"{value:,}"
    digits = {"loss": 4, "r2": 4, "val_r2": 4, "seconds": 1, "images_per_second": 0}.get(key)
    return f"{value}" if digits is None else f"{value:.{digits}f}"


def to_markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """A GitHub table; numbers to the right."""
    if not rows:
        return ""
    keys = list(rows[0])
    right = keys_of_numbers(rows)
    lines = [keys, ["---:" if key in right else "---" for key in keys]]
    lines += [[_in_markdown(shown(key, row[key])) for key in keys] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _in_markdown(text: str) -> str:
    text = re.sub(r"([\\`*{}\[\]<>|~&$#])", r"\\\1", " ".join(text.split()))
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", text)  # between letters _ is only itself


def to_csv(rows: Sequence[Mapping[str, object]]) -> str:
    """Exact values; an empty cell where there is none."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(list(rows[0]) if rows else COLUMNS)
    writer.writerows([_in_csv(value) for value in row.values()] for row in rows)
    return buffer.getvalue()


def _in_csv(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        return json.dumps(value, ensure_ascii=False)
    return csv_cell(value)
