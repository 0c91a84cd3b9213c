"""vitlab check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, print_tables, say_notes
from vitlab.cli.options import Data, Device, Json, SourceOptions, option
from vitlab.cli.progress import Meter, following_downloads

if TYPE_CHECKING:
    from vitlab.data_check import CheckResult


@dataclass(frozen=True)
class CheckOutput:
    """Where the page and the table go."""

    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="For check.html and cleaned.csv. Default: checks/NAME."),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page and table in FOLDER.")] = False


@dataclass(frozen=True)
class ColumnOptions:
    """Which column of a table is learned."""

    label: Annotated[
        str | None, typer.Option("--label", metavar="COLUMN", help="Column of class names, in a table.")
    ] = None
    labels: Annotated[
        str | None, typer.Option("--labels", metavar="COLUMN", help="Column of several labels, or A,B of 0 and 1.")
    ] = None
    target: Annotated[str | None, typer.Option("--target", metavar="COLUMN", help="Column of numbers.")] = None


def check(
    data: Data,
    source: SourceOptions,
    output: CheckOutput,
    columns: ColumnOptions,
    model: Annotated[
        str, option("--model", "CHECKPOINT", "Whose features compare the images.", complete.checkpoints)
    ] = "auto",
    apply: Annotated[
        Path | None, typer.Option("--apply", metavar="CSV", help="Check the data as this table corrects them.")
    ] = None,
    device: Device = "auto",
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit code 1 at leaks, copies with different labels, or unreadable images."),
    ] = False,
    json: Json = False,
) -> None:
    """Find leaks, copies, wrong labels and odd images in a folder.

    Writes a page that shows them, and a table to edit for vitlab train --apply.
    """
    from vitlab.data_check import check, new_folder
    from vitlab.images.datasets import TargetColumns

    with following_downloads(), Meter("images") as meter:
        result = check(
            data,
            model=model,
            out=output.out or new_folder(data),
            overwrite=output.overwrite,
            apply=apply,
            columns=TargetColumns(**vars(columns)),
            device=device,
            progress=meter.update,
            **vars(source),
        )
    if json:
        print_json(result.to_dict())
    else:
        _show(result)
    if strict and result.serious:
        raise SystemExit(1)


def _show(result: CheckResult) -> None:
    from vitlab.data_check.tables import check_tables

    print_tables(check_tables(result))
    say_notes(result.notes)
    console().print(f"\npage:  {result.page}\ntable: {result.table}")
    if len(result.classes) > 1 or (result.classes and result.kind != "class"):
        console().print(f"next:  edit its column action, then: {result.train_command()}")
