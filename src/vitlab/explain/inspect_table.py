"""The table of `inspect`: a row for each step; blocks that are equal to the one before share a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

from vitlab.tables import Table, by, count, short

if TYPE_CHECKING:
    from vitlab.explain.inspect import Inspection, Step

COSTS = ("parameters", "MACs", "kept for backward")


def inspection_table(inspection: Inspection, depth: int = 4, all_blocks: bool = False) -> Table:
    """`depth` as in Inspection.at_depth; `all_blocks`: a row for every block."""
    images = f"{inspection.batch} image{'s' if inspection.batch > 1 else ''} of {by(inspection.image_size)}"
    heading = [f"{inspection.name} on {images}"]
    if inspection.tokens != "none":
        heading += [f"tokens: {inspection.tokens}", f"attention: {inspection.backend}"]
    notes = [
        "1 MAC = 1 multiply and add = 2 FLOPs; counted are matrix products and convolutions. Total: "
        f"{short(inspection.macs)} MACs = {short(2 * inspection.macs)} FLOPs. Memory: float32, one training step."
    ]
    if inspection.unused:
        notes.append(f"not read by any step: {', '.join(inspection.unused)}")
    steps = inspection.at_depth(depth)
    rows = [
        [step.name, by(step.shape), *_costs(step.parameters, step.macs, step.memory), step.meaning]
        for step in (steps if all_blocks else folded(steps))
    ]
    total = ["total", "", *_costs(inspection.parameters, inspection.macs, inspection.memory), ""]
    return Table(["step", "shape", *COSTS, "meaning"], rows, COSTS, heading, total, notes, prose=["meaning"])


def _costs(parameters: int, macs: int, memory: int) -> list[str]:
    return [
        count(parameters) if parameters else "-",
        short(macs) if macs else "-",
        f"{short(memory)}B" if memory else "-",
    ]


def folded(steps: Sequence[Step]) -> list[Step]:
    """One step for all blocks that are equal to the one before them."""
    rows: list[Step] = []
    first: list[Step] = []
    equal: list[list[Step]] = []
    for block, group in groupby(steps, key=_block):
        members = list(group)
        if block and first and _signature(members) == _signature(first):
            equal.append(members)
            continue
        rows += [*_joined(first, equal), *members]
        first, equal = members if block else [], []
    return rows + _joined(first, equal)


def _joined(first: list[Step], blocks: list[list[Step]]) -> list[Step]:
    """One step for blocks that equal the first, if there are any."""
    if not blocks:
        return []
    names = [_block(block[0]) for block in blocks]
    steps = [step for block in blocks for step in block]
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].split('.')[-1]}"
    meaning = f"{len(blocks)} x the same as {_block(first[0])}"
    costs = {cost: sum(getattr(step, cost) for step in steps) for cost in ("parameters", "macs", "memory")}
    return [replace(steps[-1], name=name, meaning=meaning, **costs)]


def _block(step: Step) -> str:
    """blocks.3, stages.0.1 in a network of stages, or decoder.blocks.3; "" outside of blocks."""
    parts = step.name.split(".")
    n = {"blocks": 2, "stages": 3}.get(parts[0], 0)
    n = 3 if parts[:2] in (["decoder", "blocks"], ["text", "blocks"]) else n
    return ".".join(parts[:n]) if len(parts) >= n else ""


def _signature(block: list[Step]) -> list[tuple[object, ...]]:
    return [(s.name.removeprefix(_block(s)), s.shape, s.parameters, s.macs, s.memory) for s in block]
