"""What happened to every key: matched, resized, new, missing, unused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["matched", "resized", "new", "missing", "unused"]
STATUSES: tuple[Status, ...] = ("matched", "resized", "new", "missing", "unused")


@dataclass(frozen=True)
class Row:
    status: Status
    ours: str | None
    theirs: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    note: str = ""


@dataclass
class Report:
    source: str
    dialect: str
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])  # what was assumed

    def counts(self) -> dict[Status, int]:
        counts = Counter(row.status for row in self.rows)
        return {status: counts[status] for status in STATUSES}

    def to_dict(self) -> dict[str, Any]:
        rows = [
            dict(status=r.status, ours=r.ours, theirs=list(r.theirs), shape=list(r.shape), note=r.note)
            for r in self.rows
        ]
        return dict(source=self.source, dialect=self.dialect, counts=self.counts(), notes=self.notes, rows=rows)
