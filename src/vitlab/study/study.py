"""Base class of all studies: a folder with study.json, results.csv, table.md and plot.png.

A new study is one file with a subclass of Study, and its command in cli/study.py. A folder belongs to one study,
which study.json describes and a later command may resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.native import write_text, write_together
from vitlab.errors import UsageError
from vitlab.optional import require
from vitlab.study.grid import short_keys
from vitlab.tables import Table
from vitlab.training.runs import TITLES, shown, to_csv, to_markdown
from vitlab.version import __version__

STUDY_JSON, PLOT = "study.json", "plot.png"
BEST = "best on val"  # the note of the row in bold
# Columns to leave out of a narrow terminal, in this order; table.md has them all.
DROPPABLE = ("images_per_second", "loss", "params", "seconds", "encoder", "pre-training")
OTHER_FOLDER = "Use another folder: --dir studies/NAME."

Row = dict[str, Any]  # column -> value


@dataclass
class Study:
    """Results of a study, and how they are shown."""

    folder: Path
    notes: list[str] = field(default_factory=list, kw_only=True)  # shown below the tables

    @property
    def rows(self) -> list[Row]:
        """Exact values: for JSON and CSV."""
        raise NotImplementedError

    def tables(self) -> list[list[Row]]:
        """Rows with units, as people read them."""
        raise NotImplementedError

    def draw(self, path: Path) -> None:
        """Draw the plot as PNG."""
        raise NotImplementedError

    def csv_rows(self) -> list[Row]:
        return self.rows

    def to_json(self) -> object:
        return self.rows

    def failures(self) -> list[str]:
        """What failed, one line each."""
        return []

    def write(self) -> None:
        """Write results.csv and table.md in one step, so that they always belong together."""

        def writer(text: str) -> Callable[[Path], object]:
            return lambda path: path.write_text(text, encoding="utf-8")

        table = "\n".join(map(to_markdown, self.tables())) + "".join(f"\n{note}\n" for note in self.notes)
        texts = {"results.csv": to_csv(self.csv_rows()), "table.md": table}
        write_together({self.folder / name: writer(text) for name, text in texts.items()})

    def write_plot(self) -> list[str]:
        """Draw the plot; returns a note if matplotlib is missing."""
        try:
            require(PLOT, "matplotlib")
        except UsageError as error:
            return [f"{error} It is not drawn."]
        self.draw(self.folder / PLOT)
        return []


def as_table(rows: Sequence[Row]) -> Table:
    """Rows of a study as people read them in a terminal."""
    titles = {**TITLES, **short_keys([key for key in rows[0] if "." in key])}
    title = lambda key: str(titles.get(key, key))
    columns = {key: [shown(key, row[key]) for row in rows] for key in rows[0]}
    numeric = [key for key, cells in columns.items() if all(cell[:1] in ("", *"+-0123456789") for cell in cells)]
    return Table(
        [title(key) for key in columns],
        list(zip(*columns.values(), strict=True)),
        right=[title(key) for key in numeric],
        prose=("note",),
        strong=[number for number, row in enumerate(rows) if BEST in row.get("note", "")],
        droppable=[title(key) for key in DROPPABLE],
    )


def read_study_json(folder: Path, kind: str) -> dict[str, Any]:
    """Contents of study.json, empty for a new folder. A folder with anything else in it is refused."""
    if not (folder / STUDY_JSON).is_file():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder} exists already and holds no study. Use another: --dir studies/NAME.")
        return {}
    old = read_json(folder / STUDY_JSON)
    if old.get("study", kind) != kind:
        raise UsageError(f"{folder} holds another study ({old.get('study')}). {OTHER_FOLDER}")
    return old


def write_study_json(folder: Path, kind: str, about: Mapping[str, object], command: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / STUDY_JSON, {"study": kind, "command": command, "vitlab": __version__, **about}, indent=2)


def write_json(path: Path, contents: object, indent: int | None = None) -> None:
    write_text(path, json.dumps(contents, indent=indent, ensure_ascii=False) + "\n")
