"""vitlab inspect, vitlab models."""

from __future__ import annotations

from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.console import load_options, print_json, print_table
from vitlab.cli.options import AllBlocks, BatchSize, Heads, Json, NameOrCheckpoint, Size, argument
from vitlab.errors import UsageError


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
    from vitlab.checkpoints.hub_models import list_hub_models
    from vitlab.explain.sizes import list_sizes

    listed = list_hub_models(pattern) if hub else list_sizes(pattern)
    if not listed:
        raise UsageError(f"no model's name matches {pattern!r}. `vitlab models{' --hub' * hub}` lists all.")
    if json:
        print_json([model.to_dict() for model in listed])
    else:
        print_table(listed.table(), no_wrap=("name", "image", "family"))
