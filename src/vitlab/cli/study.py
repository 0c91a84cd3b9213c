"""vitlab study: runs a study and prints its tables."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from vitlab.cli.console import out, print_json_text, print_plain, say
from vitlab.cli.progress import following_downloads
from vitlab.cli.runs import FORMATS, TITLES
from vitlab.cli.train import Bar, Beside
from vitlab.errors import UsageError
from vitlab.study.configs import BEST
from vitlab.study.grid import short_keys
from vitlab.study.study import PLOT, Row, Study
from vitlab.training.loop import Show, Stopped
from vitlab.training.runlog import to_json
from vitlab.training.runs import shown, to_csv, to_markdown

# Columns to leave out, in this order, where there is no room.
SPARED = ("images_per_second", "loss", "params", "seconds", "encoder", "pre-training")


def run(study: Callable[[str, Show], Study], json: bool, format: str = "table", resumable: bool = True) -> None:
    """`study` is called with the command line and what shows its progress."""
    if format not in FORMATS:
        raise UsageError(f"--format {format!r} is not known: use {', '.join(FORMATS)}.")
    command = shlex.join(["vitlab", *sys.argv[1:]])
    on_screen = sys.stdout.isatty() and format == "table" and not json
    try:
        with following_downloads(), OneBar() if on_screen else Beside() as show:
            finished = study(command, show)
    except (Stopped, KeyboardInterrupt):
        if not resumable:
            raise
        say(f"vitlab: stopped, and saved. The same command goes on: {command}")
        raise SystemExit(130) from None
    _print(finished, "json" if json else format)
    if failures := finished.failures():
        for line in failures:
            say(line)
        raise SystemExit(1)


def _print(study: Study, format: str) -> None:
    if format == "json":
        print_json_text(to_json(study.to_json()))
    elif format == "csv":
        print_plain(to_csv(study.rows), end="")
    elif format == "markdown":
        print_plain("\n".join(map(to_markdown, study.tables())), end="")
    else:
        for number, table in enumerate(study.tables()):
            print_plain("\n" * (number > 0), end="")
            print_table(table)
    for note in study.notes:
        say(f"note: {note}")
    plot = study.folder / PLOT
    say(f"table: {study.folder / 'table.md'}" + (f"\nplot:  {plot}" if plot.is_file() else ""))


def print_table(rows: list[Row]) -> None:
    """The best in bold; a narrow terminal gets fewer columns, because table.md has them all."""
    console = out()
    titles = {**TITLES, **short_keys([key for key in rows[0] if "." in key])}
    columns = {key: [titles.get(key, key), *[shown(key, row[key]) for row in rows]] for key in rows[0]}
    widths = {key: max(map(cell_len, texts)) + 2 for key, texts in columns.items()}
    widths["note"] = min(widths.get("note", 0), 20)  # it may be folded
    for key in SPARED:
        if sum(widths.values()) > console.width:
            widths[key] = 0
    grid = Table(box=None, pad_edge=False, header_style="bold")
    kept = [key for key in columns if widths[key]]
    for key in kept:
        numeric = all(text[:1] in ("", *"+-0123456789") for text in columns[key][1:])
        grid.add_column(Text(columns[key][0]), justify="right" if numeric else "left", overflow="fold")
    for number, row in enumerate(rows, 1):
        style = "bold" if BEST in row.get("note", "") else ""
        grid.add_row(*[Text(columns[key][number]) for key in kept], style=style)
    console.print(grid)


class OneBar(Bar):
    """For a terminal: the bar of the run that is going on; earlier runs are lines of text."""

    def start(self, done: int, total: int) -> None:
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        super().start(done, total)
