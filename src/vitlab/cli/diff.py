"""vitlab diff."""

from __future__ import annotations

import warnings
from itertools import groupby

from vitlab.cli.console import out, parse_size, print_json, say
from vitlab.explain.diff import Difference, StepDifference, diff
from vitlab.images.samples import is_sample, open_sample


def run(
    a: str,
    b: str,
    images: list[str],
    tolerance: float,
    size: str | None,
    heads: int | None,
    all_blocks: bool,
    json: bool,
) -> None:
    pictures = [open_sample(text).picture if is_sample(text) else text for text in images]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other library's; ours come as notes
        found = diff(a, b, pictures or None, tolerance, image_size=parse_size(size), heads=heads)
    for note in dict.fromkeys(found.notes):
        say(f"note: {note}")
    if json:
        print_json(found.to_dict())
    else:
        _show(found, all_blocks)
    if not found.equal:
        raise SystemExit(1)


def _show(found: Difference, all_blocks: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out(markup=False)
    console.print(Text.assemble(("A", "bold"), f": {found.a}"))
    console.print(Text.assemble(("B", "bold"), f": {found.b}"))
    h, w = found.image_size
    what = f"{found.images} picture{'s' if found.images > 1 else ''}" if found.images else "one fixed input"
    console.print(f"on {what}, {h} x {w}; a step differs above {found.tolerance:g} of its largest value")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step")
    table.add_column("shape", no_wrap=True)
    for column in ("largest |A - B|", "relative", "cosine"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("")
    for name, row in _fold(found, all_blocks):
        shapes = [" x ".join(map(str, shape)) for shape in (row.shape, row.other_shape)]
        numbers = (f"{row.largest:.1e}", f"{row.relative:.1e}", f"{row.cosine:.6f}")
        remark = "<- first difference" if row.step == found.first else "differs" if row.differs else ""
        table.add_row(
            name,
            shapes[0] if shapes[0] == shapes[1] else " | ".join(shapes),
            *(numbers if shapes[0] == shapes[1] else ("-", "-", "-")),
            remark,
            style="red" if row.differs else None,
        )
    console.print(table)
    if found.own is not None:
        classes = f"; the same class in {found.same_class} of {found.images}" if found.same_class is not None else ""
        console.print(f"each with its own preprocess: {found.own.step} differs by {found.own.relative:.1e}{classes}")
    console.print(found.verdict, style="green" if found.equal else "bold")


def _fold(found: Difference, all_blocks: bool) -> list[tuple[str, StepDifference]]:
    """Blocks without the first difference stand in one line: all that agree together, later ones by their last step."""
    if all_blocks:
        return [(row.step, row) for row in found.rows]
    lines: list[tuple[str, StepDifference]] = []
    agreeing: list[list[StepDifference]] = []

    def flush() -> None:
        if agreeing:
            first, last = (block[0].step.split(".")[1] for block in (agreeing[0], agreeing[-1]))
            name = f"blocks.{first}" if first == last else f"blocks.{first} to {last}"
            worst = max((row for block in agreeing for row in block), key=lambda row: row.relative)
            lines.append((f"{name}, at most in {worst.step}", worst))
        agreeing.clear()

    for block, group in groupby(found.rows, key=_block):
        rows = list(group)
        if block and not any(row.differs for row in rows):
            agreeing.append(rows)
            continue
        flush()
        whole = not block or any(row.step == found.first for row in rows)
        lines += [(row.step, row) for row in (rows if whole else rows[-1:])]
    flush()
    return lines


def _block(row: StepDifference) -> str:
    parts = row.step.split(".")
    return parts[1] if parts[0] == "blocks" else ""
