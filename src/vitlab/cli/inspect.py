"""vitlab inspect, vitlab models."""

from __future__ import annotations

from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, load_options, print_json, print_table, table
from vitlab.cli.options import AllBlocks, BatchSize, Heads, Json, NameOrCheckpoint, Size, argument
from vitlab.errors import UsageError
from vitlab.tables import by, count, short


def inspect(
    what: NameOrCheckpoint,
    image_size: Size = None,
    batch: BatchSize = 1,
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
    print_table(inspection.table(depth, all_blocks), no_wrap=("shape",))
    if norms is not None:
        print_table(norms.table())


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
