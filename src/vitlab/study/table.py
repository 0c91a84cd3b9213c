"""The results of a study as a table: a row for each combination of values, over its seeds.

The row with the best validation accuracy is marked, not that with the best test accuracy: who chooses by the test split
has no test left.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from vitlab.checkpoints.native import write_together
from vitlab.study.grid import as_typed, label
from vitlab.study.runner import Outcome
from vitlab.training.runs import shown, to_csv, to_markdown

SEED = "run.seed"
NUMBERS = ("top1", "val_top1", "loss", "params", "seconds", "images_per_second")
BEST = "best on val"


@dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seed."""

    values: dict[str, Any]
    outcomes: list[Outcome]

    def numbers(self, key: str) -> list[float]:
        """One number of every finished run."""
        return [outcome.result[key] for outcome in self.outcomes if outcome.result]

    def mean(self, key: str) -> float | None:
        found = self.numbers(key)
        if len(set(found)) == 1:  # parameters stay a whole number
            return found[0]
        return fmean(found) if found else None

    def note(self) -> str:
        reasons = [outcome.failed for outcome in self.outcomes if outcome.failed]
        if not reasons:
            return ""
        how_many = f"{len(reasons)} of {len(self.outcomes)} " if len(self.outcomes) > 1 else ""
        return f"{how_many}failed: {reasons[0].splitlines()[0].split('. ')[0].removesuffix('.')}"


def group(outcomes: list[Outcome]) -> list[Group]:
    """In the order they come."""
    groups: dict[str, Group] = {}
    for outcome in outcomes:
        values = {key: value for key, value in outcome.cell.values.items() if key != SEED}
        groups.setdefault(label(values), Group(values, [])).outcomes.append(outcome)
    return list(groups.values())


def rows(groups: list[Group]) -> list[dict[str, Any]]:
    """Exact values: means over the seeds, and the least and greatest top-1."""
    best = max((mean for g in groups if (mean := g.mean("val_top1")) is not None), default=None)
    found = []
    for g in groups:
        row: dict[str, Any] = {**g.values, "n": len(g.numbers("top1"))}
        row |= {key: g.mean(key) for key in NUMBERS}
        row |= {"top1_min": min(g.numbers("top1"), default=None), "top1_max": max(g.numbers("top1"), default=None)}
        notes = [BEST] if best is not None and row["val_top1"] == best and len(groups) > 1 else []
        row["note"] = "; ".join([*notes, *filter(None, [g.note()])])
        found.append(row)
    return found


def for_people(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the spread in one column, and only the columns that say something."""
    found = []
    for row in rows:
        low, high = row["top1_min"], row["top1_max"]
        spread = f"{100 * low:.2f} .. {shown('top1', high)}" if row["n"] > 1 else ""
        values = {key: as_typed(value) if value is None else value for key, value in row.items() if "." in key}
        numbers = {key: row[key] for key in NUMBERS if key != "top1"}
        found.append({**values, "n": row["n"], "top1": row["top1"], "spread": spread, **numbers, "note": row["note"]})
    empty = [key for key in ("spread", "note") if not any(row[key] for row in found)]
    return [{key: value for key, value in row.items() if key not in empty} for row in found]


def write_tables(folder: Path, outcomes: list[Outcome]) -> None:
    """results.csv has a row for every run, table.md one for every combination of values."""
    runs = []
    for outcome in outcomes:
        row = {"run": outcome.cell.name, **{key: as_typed(value) for key, value in outcome.cell.values.items()}}
        row |= {"status": "failed" if outcome.failed else "finished"}
        row |= {key: outcome.result.get(key) for key in NUMBERS}
        runs.append({**row, "reason": outcome.failed})
    texts = {"results.csv": to_csv(runs), "table.md": to_markdown(for_people(rows(group(outcomes))))}
    write_together({folder / name: _writer(text) for name, text in texts.items()})


def _writer(text: str) -> Any:
    return lambda path: path.write_text(text, encoding="utf-8")
