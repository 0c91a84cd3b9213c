"""The table of `diff`: a row for each step; consecutive blocks that agree share a row."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from vitlab.tables import Table, by

if TYPE_CHECKING:
    from vitlab.explain.diff.compare import Difference
    from vitlab.explain.diff.steps import StepDifference

NUMBERS = ("largest |A - B|", "relative", "cosine")


def difference_table(difference: Difference, all_blocks: bool = False) -> Table:
    """`all_blocks`: a row for every step."""
    images = difference.images
    inputs = f"{images} image{'s' if images > 1 else ''}" if images else "one fixed input"
    heading = [
        f"A: {difference.a}",
        f"B: {difference.b}",
        f"on {inputs}, {by(difference.image_size)}; a step differs above {difference.tolerance:g} of its largest value",
    ]
    lines = [(row.step, row) for row in difference.rows] if all_blocks else _folded(difference)
    rows = []
    for name, row in lines:
        same_shape = row.shape == row.other_shape
        shape = by(row.shape) if same_shape else f"{by(row.shape)} | {by(row.other_shape)}"
        cells = [f"{row.largest:.1e}", f"{row.relative:.1e}", f"{row.cosine:.6f}"] if same_shape else ["-", "-", "-"]
        remark = "<- first difference" if row.step == difference.first else "differs" if row.differs else ""
        rows.append([name, shape, *cells, remark])
    notes = []
    if difference.own is not None:
        same = f"; the same class in {difference.same_class} of {images}" if difference.same_class is not None else ""
        own = difference.own
        notes.append(f"each with its own preprocess: {own.step} differs by {own.relative:.1e}{same}")
    return Table(
        ["step", "shape", *NUMBERS, ""], rows, NUMBERS, heading, notes=[*notes, *difference.verdict.split("\n")]
    )


def _folded(difference: Difference) -> list[tuple[str, StepDifference]]:
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
