"""vitlab runs, vitlab doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, print_json_text, print_plain, print_table, print_tables, say
from vitlab.cli.options import Format, Json, argument
from vitlab.errors import UsageError

FORMATS = ("table", "markdown", "csv")
MARKS = {True: "ok ", False: "BAD", None: "   "}


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of runs; or one run.")] = Path("runs"),
    format: Format = "table",
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            "--plot",
            metavar="FILE",
            help="The table as .md or .csv; or the curves: .png, .svg, .pdf.",
        ),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option("--sort", metavar="KEY", help="Column or recipe key to sort by, best first; -KEY: best last."),
    ] = None,
    json: Json = False,
    all_columns: Annotated[
        bool, typer.Option("--all", help="Show all columns, and one for each setting that differs.")
    ] = False,
) -> None:
    """List and compare runs, newest first.

    Below the table: the settings in which the runs differ.
    """
    from vitlab.training.report import plot as draw_curves
    from vitlab.training.runlog import to_json
    from vitlab.training.runs import list_runs, main_table, rows_table, table, to_csv, to_markdown, variations_table

    check_format(format)
    writers = {".md": to_markdown, ".csv": to_csv}
    listed = list_runs(folder)
    rows = table(listed.runs, sort)
    for line in listed.skipped:
        say(f"skipped: {line}")
    if json:
        print_json_text(to_json(rows))
    elif format == "csv":
        print_plain(to_csv(rows), end="")
    elif format == "markdown":
        print_plain(to_markdown(rows), end="")
    elif rows and all_columns:
        print_table(rows_table(rows))
    elif rows:
        tables = rows_table(main_table(listed.runs, sort)), variations_table(listed.runs)
        print_tables(table for table in tables if table.rows)
    if not rows:
        say(f"no runs in {folder}. `vitlab train` makes one.")
    elif out is not None and out.suffix.lower() in writers:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(writers[out.suffix.lower()](rows), encoding="utf-8")
        say(f"table: {out}")
    elif out is not None:
        without = draw_curves(listed.runs, out)
        say(f"plot: {out}" + (f" (without a curve: {', '.join(without)})" if without else ""))


def check_format(format: str) -> None:
    if format not in FORMATS:
        raise UsageError(f"--format {format!r} is not known: use {', '.join(FORMATS)}.")


def doctor(
    run: Annotated[Path | None, argument("RUN", "A run's folder. Default: the installation.", complete.runs)] = None,
    json: Json = False,
) -> None:
    """Diagnose a run, or the installation.

    Exit code 1: something is wrong.
    """
    from vitlab.training.doctor import check_installation, check_run

    if run is not None:
        rows: list[dict[str, Any]] = [{"ok": ok, "says": says} for ok, says in check_run(run)]
    else:
        rows = [{"what": what, "ok": ok, "says": says} for what, ok, says in check_installation()]
    if json:
        print_json(rows)
    else:
        for row in rows:
            what = f"{row['what']:16s} " if "what" in row else ""
            console().print(f"{MARKS[row['ok']]} {what}{row['says']}")
    if any(row["ok"] is False for row in rows):
        raise SystemExit(1)
