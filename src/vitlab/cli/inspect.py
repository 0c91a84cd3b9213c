"""vitlab inspect."""

from __future__ import annotations

import warnings
from itertools import groupby
from typing import Any

from vitlab.cli.console import count, out, parse_size, print_json, say, short
from vitlab.explain.gradients import Gradient, gradients
from vitlab.explain.inspect import Inspection, Step, inspect


def run(
    what: str, size: str | None, batch: int, depth: int, all_blocks: bool, grads: bool, heads: int | None, json: bool
) -> None:
    image_size = parse_size(size)
    options: dict[str, Any] = {} if heads is None else {"heads": heads}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # whoever left a file open, it is no note on the model
        found = inspect(what, image_size=image_size, batch=batch, **options)
        slopes = gradients(what, image_size=image_size, batch=max(batch, 2), **options) if grads else None
    for note in dict.fromkeys(str(warning.message) for warning in caught):
        say(f"note: {note}")
    if json:
        value = {**found.to_dict(), "steps": [vars(step) for step in found.at_depth(depth)]}
        print_json(value if slopes is None else {**value, "gradients": [vars(g) for g in slopes]})
        return
    _show(found, depth, all_blocks)
    if slopes is not None:
        _show_gradients(slopes)


def _show(found: Inspection, depth: int, all_blocks: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out(markup=False)
    h, w = found.image_size
    images = f" on {found.batch} image{'s' if found.batch > 1 else ''} of {h} x {w}"
    console.print(Text.assemble((found.name, "bold"), images))
    if found.tokens != "none":
        console.print(f"tokens: {found.tokens}")
        console.print(f"attention: {found.backend}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("step")
    table.add_column("shape", no_wrap=True)
    for column in ("parameters", "MACs", "kept for backward"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("meaning")
    for step in _fold(found.at_depth(depth), all_blocks):
        table.add_row(
            step.name,
            " x ".join(map(str, step.shape)),
            count(step.parameters) if step.parameters else "-",
            short(step.macs) if step.macs else "-",
            f"{short(step.memory)}B" if step.memory else "-",
            step.meaning,
        )
    table.add_section()
    total = (count(found.parameters), short(found.macs), f"{short(found.memory)}B")
    table.add_row("total", "", *total, "", style="bold")
    console.print(table)
    console.print(
        "1 MAC = 1 multiply and add = 2 FLOPs; counted are matrix products and convolutions. "
        f"Total: {short(found.macs)} MACs = {short(2 * found.macs)} FLOPs. Memory: float32, one training step."
    )
    if found.unused:
        console.print(f"not read by any step: {', '.join(found.unused)}", style="yellow")


def _fold(steps: list[Step], all_blocks: bool) -> list[Step]:
    """Blocks that are equal to the one before stand in one line."""
    if all_blocks:
        return steps

    rows: list[Step] = []
    first: list[Step] = []
    same: list[list[Step]] = []

    def flush() -> None:
        if same:
            names = [_block_of(block[0]) for block in same]
            name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].split('.')[-1]}"
            every = [step for block in same for step in block]
            rows.append(
                Step(
                    name,
                    every[-1].shape,
                    f"{len(same)} x the same as {_block_of(first[0])}",
                    sum(s.parameters for s in every),
                    sum(s.macs for s in every),
                    sum(s.memory for s in every),
                )
            )
        same.clear()

    for block, group in groupby(steps, key=_block_of):
        members = list(group)
        if block and first and _signature(members) == _signature(first):
            same.append(members)
            continue
        flush()
        rows += members
        first = members if block else []
    flush()
    return rows


def _block_of(step: Step) -> str:
    """blocks.3, of a network in stages stages.0.1, of its second part decoder.blocks.3; "" for what is in no block."""
    parts = step.name.split(".")
    n = {"blocks": 2, "stages": 3}.get(parts[0], 0)
    n = 3 if parts[:2] in (["decoder", "blocks"], ["text", "blocks"]) else n
    return ".".join(parts[:n]) if len(parts) >= n else ""


def _signature(block: list[Step]) -> list[tuple[Any, ...]]:
    return [(s.name.removeprefix(_block_of(s)), s.shape, s.parameters, s.macs, s.memory) for s in block]


def _show_gradients(found: list[Gradient]) -> None:
    from rich.table import Table

    console = out(markup=False)
    table = Table(
        box=None, pad_edge=False, header_style="bold", title="gradient norms, one batch of noise", title_justify="left"
    )
    table.add_column("parameter")
    table.add_column("norm", justify="right")
    table.add_column("")
    for g in found:
        style = {"": None, "frozen": "dim"}.get(g.verdict, "red")
        table.add_row(g.name, f"{g.norm:.3e}", g.verdict, style=style)
    console.print(table)
    trained = [g for g in found if g.verdict != "frozen"]
    wrong = [g for g in trained if g.verdict]
    if wrong:
        named = ", ".join(f"{g.name} ({g.verdict})" for g in wrong[:8])
        console.print(f"{len(wrong)} of {len(trained)} look wrong: {named}", style="red")
    else:
        console.print(f"all {len(trained)} parameters have a finite gradient that is not zero.")
