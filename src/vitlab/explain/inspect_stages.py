"""Networks in stages (Swin, PVT, Twins): what their steps mean, which changes from stage to stage, and their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.layers.windows import Windows

MEANINGS: dict[str, str] = {
    "patch_embed": "patches become tokens of {width} numbers{after_embed}",
    "merge": "{merging}: {grid} tokens of {width} numbers",
    "qkv": "queries, keys, values: 3 x {heads} heads x {head_dim}{where}",
    "heads": "softmax(q k^T / sqrt({head_dim}){bias}) v{where}; {heads} heads side by side",
    "after_attention": "+ residual",
    "tokens": "+ residual",
    "norm": "final LayerNorm",
    "pool": "{pooling}: one vector per image",
}


def stage_words(model: Any, size: tuple[int, int], layer: int | None) -> dict[str, Any]:
    """What the meanings are filled with at this layer."""
    config: Any = model.config
    layer = layer or 0
    stage, at = config.stage_of(layer), model.places(*size)[layer]
    rows, columns = at.grid
    width, heads = config.widths[stage], config.heads[stage]
    block = model.blocks[layer]
    return {
        "width": width,
        "heads": heads,
        "head_dim": width // heads,
        "hidden": block.mlp.fc1.out_features,
        "grid": f"{rows} x {columns}",
        "where": _where(at),
        "bias": " + B" if getattr(block.attention, "relative", None) is not None else "",
        "mlp": f"MLP, {config.activation}",
        "after_embed": ", then LayerNorm",
        "merging": "2 x 2 tokens become one",
        "pooling": "the class token" if model.prefix else "mean over all tokens",
        "classes": config.classes,
    }


def _where(at: Any) -> str:
    if isinstance(at, Windows):
        (high, wide), (down, right) = at.window, at.shift
        moved = f", shifted by {down}, {right}" if down or right else ""
        return f" in {at.count} window{'s' if at.count > 1 else ''} of {high} x {wide}{moved}"
    return ""


def count_stages(build: Callable[[Any], Any], config: Any) -> tuple[int, int]:
    """Parameters and MACs, of two blocks in each stage and as often again as there are more: every second is alike."""
    shallow = config.with_options(depths=tuple(min(depth, 2) for depth in config.depths))
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as flops:
        model = build(shallow).eval().requires_grad_(False)
        model(torch.empty(1, config.channels, *config.image_size))
    parameters, twice = sum(p.numel() for p in model.parameters()), flops.get_total_flops()
    for stage, depth in enumerate(config.depths):
        for number in range(2, depth):
            parameters += sum(p.numel() for p in model.stages[stage][number % 2].parameters())
            inside = flops.get_flop_counts()[f"{type(model).__name__}.stages.{stage}.{number % 2}"]
            twice += sum(inside.values())
    return parameters, twice // 2
