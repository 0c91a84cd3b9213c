"""vitlab runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitlab.cli.console import out, print_json_text, print_plain, say
from vitlab.errors import UsageError
from vitlab.training.report import plot
from vitlab.training.runlog import to_json
from vitlab.training.runs import list_runs, shown, table, to_csv, to_markdown

FORMATS = ("table", "markdown", "csv")
TITLES = {"val_top1": "best val", "images_per_second": "images/s"}


def run(folder: Path, format: str, plot_to: Path | None, sort: str | None, json: bool) -> None:
    if format not in FORMATS:
        raise UsageError(f"--format {format!r} is not known: use {', '.join(FORMATS)}.")
    found = list_runs(folder)
    rows = table(found.runs, sort)
    for line in found.skipped:
        say(f"skipped: {line}")
    if json:
        print_json_text(to_json(rows))
    elif format == "csv":
        print_plain(to_csv(rows), end="")
    elif format == "markdown":
        print_plain(to_markdown(rows), end="")
    elif rows:
        _show(rows)
    if not rows:
        say(f"no runs in {folder}. `vitlab train` makes one.")
    elif plot_to is not None:
        without = plot(found.runs, plot_to)
        say(f"plot: {plot_to}" + (f" (without a curve: {', '.join(without)})" if without else ""))


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for key in rows[0]:
        numeric = all(isinstance(row[key], int | float | None) for row in rows)
        grid.add_column(Text(TITLES.get(key, key)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        grid.add_row(*[Text(shown(key, value)) for key, value in row.items()])  # Text: [brackets] stay as they are
    out().print(grid)
