"""vitlab check."""

from __future__ import annotations

import shlex
from collections.abc import Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, say_notes, table
from vitlab.cli.options import Data, Device, Json, SourceOptions, option
from vitlab.cli.progress import Meter, following_downloads
from vitlab.tables import count

if TYPE_CHECKING:
    from vitlab.data_check import CheckResult

SHOWN = 5  # of each kind of problem; the page shows more, --json all


@dataclass(frozen=True)
class CheckOutput:
    """Where the page and the table go."""

    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", metavar="FOLDER", help="For check.html and cleaned.csv. Default: checks/NAME."),
    ] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page and table in FOLDER.")] = False


def check(
    data: Data,
    source: SourceOptions,
    output: CheckOutput,
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

    with following_downloads(), Meter("images") as meter:
        result = check(
            data,
            model=model,
            out=output.out or new_folder(data),
            overwrite=output.overwrite,
            apply=apply,
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
    from vitlab.data_check.result import shown_kind

    out, images = console(), result.images
    splits = ", ".join(f"{split} {count(n)}" for split, n in result.splits.items())
    out.print(f"{result.name}: {count(len(images))} images ({splits}), {len(result.classes) or 'no'} classes")
    for title, pairs in (("in two splits", result.leaks), ("copies with different labels", result.conflicts)):
        if pairs:
            out.print(f"\n{title.upper()}: {count(len(pairs))}")
            for copy in pairs[:SHOWN]:
                a, b = images[copy.image], images[copy.of]
                out.print(f"  {a.path} ({a.label})  =  {b.path} ({b.label})  {shown_kind(copy)}")
            _rest(pairs)
    if result.unreadable:
        out.print(f"\nUNREADABLE: {count(len(result.unreadable))}")
        for error in list(result.unreadable.values())[:SHOWN]:
            out.print(f"  {error}")
        _rest(result.unreadable)
    if result.suspects:
        about = "" if result.wrong_labels is None else f" (about {result.wrong_labels:.1%} of all labels may be wrong)"
        out.print(f"\nlikely wrong labels: {count(len(result.suspects))}{about}")
        grid = table("image", "label", "suggested", "confidence", right=("confidence",))
        for s in result.suspects[:SHOWN]:
            names = result.classes[s.given], result.classes[s.suggested]
            grid.add_row(images[s.image].path, *names, f"{s.confidence:.2f}")
        out.print(grid)
        _rest(result.suspects)
    out.print()
    rows = {
        "copies within a split": result.duplicates,
        "unlike their class": result.outliers,
        "tiny": result.tiny,
        "extreme shape": result.extreme,
        "blank": result.blank,
    }
    for title, problems in rows.items():
        out.print(f"{title:24s}{count(len(problems))}")
    if result.imbalance is not None:
        out.print(f"{'largest class':24s}{result.imbalance:.1f} times the smallest")
    out.print(f"{'features':24s}{result.method.model}")
    say_notes(result.notes)
    out.print(f"\npage:  {result.page}\ntable: {result.table}")
    if result.classes and len(result.classes) > 1:
        command = shlex.join(["vitlab", "train", result.source, "--apply", str(result.table)])
        out.print(f"next:  edit its column action, then: {command}")


def _rest(items: Sized) -> None:
    left = len(items) - SHOWN
    if left > 0:
        console().print(f"  and {count(left)} more")
