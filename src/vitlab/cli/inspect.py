"""vitlab inspect, vitlab models."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import by, console, count, load_options, print_json, short, table
from vitlab.cli.options import AllBlocks, Heads, Json, NameOrCheckpoint, Size, argument
from vitlab.errors import UsageError

if TYPE_CHECKING:
    from vitlab.explain.gradients import Gradient
    from vitlab.explain.inspect import Inspection, Step


def inspect(
    what: NameOrCheckpoint,
    image_size: Size = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Images per batch.", min=1)] = 1,
    depth: Annotated[int, typer.Option(help="Detail: 1 model, 2 blocks, 3 their parts, 4 every step.", min=1)] = 4,
    all_blocks: AllBlocks = False,
    grads: Annotated[bool, typer.Option("--grads", help="Run one backward pass and list gradient norms.")] = False,
    heads: Heads = None,
    json: Json = False,
) -> None:
    """Show every step of a forward pass, with shapes and costs."""
    from vitlab.explain.gradients import gradients
    from vitlab.explain.inspect import inspect

    options = load_options(image_size, heads)
    inspection = inspect(what, batch=batch, **options)
    norms = gradients(what, batch=max(batch, 2), **options) if grads else None
    if json:
        value = {**inspection.to_dict(), "steps": [vars(step) for step in inspection.at_depth(depth)]}
        print_json(value if norms is None else {**value, "gradients": [vars(norm) for norm in norms]})
        return
    _show(inspection, depth, all_blocks)
    if norms is not None:
        _show_gradients(norms)


def _show(inspection: Inspection, depth: int, all_blocks: bool) -> None:
    from rich.text import Text

    out = console()
    images = f" on {inspection.batch} image{'s' if inspection.batch > 1 else ''} of {by(inspection.image_size)}"
    out.print(Text.assemble((inspection.name, "bold"), images))
    if inspection.tokens != "none":
        out.print(f"tokens: {inspection.tokens}")
        out.print(f"attention: {inspection.backend}")
    costs = ("parameters", "MACs", "kept for backward")
    grid = table("step", "shape", *costs, "meaning", right=costs, no_wrap=("shape",))
    steps = inspection.at_depth(depth)
    for step in steps if all_blocks else _fold(steps):
        grid.add_row(
            step.name,
            by(step.shape),
            count(step.parameters) if step.parameters else "-",
            short(step.macs) if step.macs else "-",
            f"{short(step.memory)}B" if step.memory else "-",
            step.meaning,
        )
    grid.add_section()
    total = (count(inspection.parameters), short(inspection.macs), f"{short(inspection.memory)}B")
    grid.add_row("total", "", *total, "", style="bold")
    out.print(grid)
    out.print(
        "1 MAC = 1 multiply and add = 2 FLOPs; counted are matrix products and convolutions. Total: "
        f"{short(inspection.macs)} MACs = {short(2 * inspection.macs)} FLOPs. Memory: float32, one training step."
    )
    if inspection.unused:
        out.print(f"not read by any step: {', '.join(inspection.unused)}", style="yellow")


def _fold(steps: list[Step]) -> list[Step]:
    """Show blocks that are equal to the one before in one line."""
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
    """One line for blocks that equal the first, if there are any."""
    from vitlab.explain.inspect import Step

    if not blocks:
        return []
    names = [_block(block[0]) for block in blocks]
    steps = [step for block in blocks for step in block]
    name = names[0] if len(names) == 1 else f"{names[0]} to {names[-1].split('.')[-1]}"
    meaning = f"{len(blocks)} x the same as {_block(first[0])}"
    costs = (sum(getattr(step, cost) for step in steps) for cost in ("parameters", "macs", "memory"))
    return [Step(name, steps[-1].shape, meaning, *costs)]


def _block(step: Step) -> str:
    """blocks.3, stages.0.1 in a network of stages, or decoder.blocks.3; "" outside of blocks."""
    parts = step.name.split(".")
    n = {"blocks": 2, "stages": 3}.get(parts[0], 0)
    n = 3 if parts[:2] in (["decoder", "blocks"], ["text", "blocks"]) else n
    return ".".join(parts[:n]) if len(parts) >= n else ""


def _signature(block: list[Step]) -> list[tuple[object, ...]]:
    return [(s.name.removeprefix(_block(s)), s.shape, s.parameters, s.macs, s.memory) for s in block]


def _show_gradients(gradients: list[Gradient]) -> None:
    grid = table("parameter", "norm", "", right=("norm",))
    grid.title, grid.title_justify = "gradient norms, one batch of noise", "left"
    for gradient in gradients:
        style = {"": None, "frozen": "dim"}.get(gradient.verdict, "red")
        grid.add_row(gradient.name, f"{gradient.norm:.3e}", gradient.verdict, style=style)
    console().print(grid)
    trained = [gradient for gradient in gradients if gradient.verdict != "frozen"]
    wrong = [f"{gradient.name} ({gradient.verdict})" for gradient in trained if gradient.verdict]
    if wrong:
        console().print(f"{len(wrong)} of {len(trained)} look wrong: {', '.join(wrong[:8])}", style="red")
    else:
        console().print(f"all {len(trained)} parameters have a finite gradient that is not zero.")


def models(
    pattern: Annotated[str, argument("PATTERN", "Part of a name, or a pattern with * and ?.", complete.models)] = "*",
    hub: Annotated[bool, typer.Option("--hub", help="List well-known models of the Hugging Face hub instead.")] = False,
    json: Json = False,
) -> None:
    """List the models by name, with parameters and MACs."""
    if hub:
        _show_hub_models(pattern, json)
        return
    from vitlab.explain.sizes import size_of
    from vitlab.models.registry import MODELS, list_models

    names = list_models(pattern)
    if not names:
        raise UsageError(f"no model's name matches {pattern!r}. `vitlab models` lists all.")
    rows = []
    for name in names:
        parameters, macs = size_of(name)
        size = list(MODELS[name].config.image_size)  # type: ignore[attr-defined]
        row = {"name": name, "aliases": list(MODELS[name].aliases), "image_size": size}
        rows.append({**row, "parameters": parameters, "macs": macs})
    if json:
        print_json(rows)
        return
    costs = ("parameters", "MACs")
    grid = table("name", "image", *costs, "also called", right=costs, no_wrap=("name", "image"))
    for row in rows:
        aliases = ", ".join(row["aliases"])
        grid.add_row(row["name"], by(row["image_size"]), count(row["parameters"]), short(row["macs"]), aliases)
    console().print(grid)
    console().print(
        "MACs for one image (for a CLIP also one text); 1 MAC = 2 FLOPs. timm's names work too: vit_base_patch16_384."
    )


def _show_hub_models(pattern: str, json: bool) -> None:
    from vitlab.checkpoints.hub_models import list_hub_models

    models = list_hub_models(pattern)
    if not models:
        raise UsageError(f"no model's name matches {pattern!r}. `vitlab models --hub` lists all.")
    if json:
        counts = [None if model.parameters is None else round(model.parameters * 1e6) for model in models]
        print_json([{**vars(m), "parameters": n, "loads": m.loads} for m, n in zip(models, counts, strict=True)])
        return
    right = ("parameters", "image")
    grid = table("name", "family", *right, "licence", "gated", "loads", "", right=right, no_wrap=("name", "family"))
    for model in models:
        parameters = f"{model.parameters:,.1f}M" if model.parameters else "-"
        gated, loads = "yes" if model.gated else "no", "yes" if model.loads else "no"
        size = str(model.image_size or "-")
        grid.add_row(model.name, model.family, parameters, size, model.licence, gated, loads, model.note)
    console().print(grid)
    console().print(
        'Load one by vitlab.load("hf-hub:NAME"). Others of these families load too. Gated: accept the licence on the '
        "model's page at huggingface.co first, then `hf auth login`."
    )
