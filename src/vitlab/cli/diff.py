"""vitlab diff."""

from __future__ import annotations

import warnings
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.console import by, console, parse_size, print_json, say_notes, table
from vitlab.cli.options import AllBlocks, Heads, Json, OptionalImages, Size, checkpoint_argument

if TYPE_CHECKING:
    from vitlab.explain.diff import Difference, StepDifference


def diff(
    a: Annotated[str, checkpoint_argument("A", "A checkpoint; transformers:FOLDER is run by that library.")],
    b: Annotated[str, checkpoint_argument("B", "Another copy of the same network.")],
    more: OptionalImages = None,
    images: Annotated[list[str] | None, typer.Option("--images", metavar="IMAGE", help="Image (repeatable).")] = None,
    tolerance: Annotated[float, typer.Option(help="Share of a step's largest value that may differ.")] = 1e-5,
    image_size: Size = None,
    heads: Heads = None,
    all_blocks: AllBlocks = False,
    json: Json = False,
) -> None:
    """Show where and why two checkpoints differ, step by step.

    Without images both get the same noise. With images each preprocesses them itself, which is compared; then both
    networks get the same tensor. Exit code 1: they differ.
    """
    from vitlab.explain.diff import diff

    files = [*(images or []), *(more or [])]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other library's; ours are in the notes
        difference = diff(a, b, files or None, tolerance, image_size=parse_size(image_size), heads=heads)
    say_notes(dict.fromkeys(difference.notes))
    if json:
        print_json(difference.to_dict())
    else:
        _show(difference, all_blocks)
    if not difference.equal:
        raise SystemExit(1)


def _show(difference: Difference, all_blocks: bool) -> None:
    from rich.text import Text

    out = console()
    out.print(Text.assemble(("A", "bold"), f": {difference.a}"))
    out.print(Text.assemble(("B", "bold"), f": {difference.b}"))
    images = difference.images
    inputs = f"{images} image{'s' if images > 1 else ''}" if images else "one fixed input"
    size = by(difference.image_size)
    out.print(f"on {inputs}, {size}; a step differs above {difference.tolerance:g} of its largest value")
    numbers = ("largest |A - B|", "relative", "cosine")
    grid = table("step", "shape", *numbers, "", right=numbers, no_wrap=("shape",))
    lines = [(row.step, row) for row in difference.rows] if all_blocks else _fold(difference)
    for name, row in lines:
        same_shape = row.shape == row.other_shape
        shape = by(row.shape) if same_shape else f"{by(row.shape)} | {by(row.other_shape)}"
        cells = (f"{row.largest:.1e}", f"{row.relative:.1e}", f"{row.cosine:.6f}") if same_shape else ("-", "-", "-")
        remark = "<- first difference" if row.step == difference.first else "differs" if row.differs else ""
        grid.add_row(name, shape, *cells, remark, style="red" if row.differs else None)
    out.print(grid)
    if difference.own is not None:
        same = f"; the same class in {difference.same_class} of {images}" if difference.same_class is not None else ""
        own = difference.own
        out.print(f"each with its own preprocess: {own.step} differs by {own.relative:.1e}{same}")
    out.print(difference.verdict, style="green" if difference.equal else "bold")


def _fold(difference: Difference) -> list[tuple[str, StepDifference]]:
    """One line for consecutive blocks that agree; of later blocks that differ only the last step."""
    lines: list[tuple[str, StepDifference]] = []
    agreeing: list[list[StepDifference]] = []

    def flush() -> None:
        if agreeing:
            first, last = (block[0].step.split(".")[1] for block in (agreeing[0], agreeing[-1]))
            name = f"blocks.{first}" if first == last else f"blocks.{first} to {last}"
            worst = max((row for block in agreeing for row in block), key=lambda row: row.relative)
            lines.append((f"{name}, at most in {worst.step}", worst))
        agreeing.clear()

    for block, group in groupby(difference.rows, key=_block):
        rows = list(group)
        if block and not any(row.differs for row in rows):
            agreeing.append(rows)
            continue
        flush()
        every_step = not block or any(row.step == difference.first for row in rows)
        lines += [(row.step, row) for row in (rows if every_step else rows[-1:])]
    flush()
    return lines


def _block(row: StepDifference) -> str:
    parts = row.step.split(".")
    return parts[1] if parts[0] == "blocks" else ""
