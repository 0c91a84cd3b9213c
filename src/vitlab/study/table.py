"""Results of a study as a table: a row for each combination of values, aggregated over seeds.

The row with the best validation accuracy is marked, because choosing by test accuracy would bias the test.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from vitlab.study.folder import write_texts
from vitlab.study.grid import format_value, label
from vitlab.study.runner import Outcome
from vitlab.training.runs import shown, to_csv, to_markdown

SEED = "run.seed"
NUMBERS = ("top1", "val_top1", "loss", "params", "seconds", "images_per_second")
BEST = "best on val"


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

    def note(self) -> str:
        reasons = [outcome.failed for outcome in self.outcomes if outcome.failed]
        if not reasons:
            return ""
        how_many = f"{len(reasons)} of {len(self.outcomes)} " if len(self.outcomes) > 1 else ""
        return f"{how_many}failed: {reasons[0].splitlines()[0].split('. ')[0].removesuffix('.')}"


def group(outcomes: list[Outcome]) -> list[Group]:
    """Groups in the order of their first run."""
    groups: dict[str, Group] = {}
    for outcome in outcomes:
        values = {key: value for key, value in outcome.cell.values.items() if key != SEED}
        groups.setdefault(label(values), Group(values, [])).outcomes.append(outcome)
    return list(groups.values())


def rows(groups: list[Group]) -> list[dict[str, Any]]:
    """Exact values: means over seeds, and the lowest and highest top-1."""
    best = max((mean for g in groups if (mean := g.mean("val_top1")) is not None), default=None)
    table = []
    for g in groups:
        row: dict[str, Any] = {**g.values, "n": len(g.numbers("top1"))}
        row |= {key: g.mean(key) for key in NUMBERS}
        row |= {"top1_min": min(g.numbers("top1"), default=None), "top1_max": max(g.numbers("top1"), default=None)}
        notes = [BEST] if best is not None and row["val_top1"] == best and len(groups) > 1 else []
        row["note"] = "; ".join([*notes, *filter(None, [g.note()])])
        table.append(row)
    return table


def display_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the spread in one column, without empty columns."""
    table = []
    for row in rows:
        low, high = row["top1_min"], row["top1_max"]
        spread = f"{100 * low:.2f} .. {shown('top1', high)}" if row["n"] > 1 else ""
        values = {key: format_value(value) if value is None else value for key, value in row.items() if "." in key}
        numbers = {key: row[key] for key in NUMBERS if key != "top1"}
        table.append({**values, "n": row["n"], "top1": row["top1"], "spread": spread, **numbers, "note": row["note"]})
    empty = [key for key in ("spread", "note") if not any(row[key] for row in table)]
    return [{key: value for key, value in row.items() if key not in empty} for row in table]


def write_tables(folder: Path, outcomes: list[Outcome]) -> None:
    """results.csv has a row per run, table.md one per combination of values."""
    runs = []
    for outcome in outcomes:
        row = {"run": outcome.cell.name, **{key: format_value(value) for key, value in outcome.cell.values.items()}}
        row |= {"status": "failed" if outcome.failed else "finished"}
        row |= {key: outcome.result.get(key) for key in NUMBERS}
        runs.append({**row, "reason": outcome.failed})
    texts = {"results.csv": to_csv(runs), "table.md": to_markdown(display_rows(rows(group(outcomes))))}
    write_texts(folder, texts)
