"""Networks in stages (Swin, PVT, Twins): what their steps mean, which changes from stage to stage, and their size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.layers.reduced import Merge, Pool, Reduced
from vitlab.layers.windows import Windows

MEANINGS: dict[str, str] = {
    "patch_embed": "patches become tokens of {width} numbers{after_embed}",
    "merge": "{merging}: {grid} tokens of {width} numbers",
    "positions": "+ {positions}",
    "qkv": "queries, keys, values: 3 x {heads} heads x {head_dim}{where}",
    "q": "queries: {heads} heads x {head_dim}",
    "reduced": "{reducing}: {keys} keys{after_reducing}",
    "kv": "keys, values: 2 x {heads} heads x {head_dim}",
    "heads": "softmax(q k^T / sqrt({head_dim}){bias}) v{where}; {heads} heads side by side",
    "after_attention": "+ residual",
    "mlp_conv": "3 x 3 convolution of each channel, {activation}",
    "stage_norm": "LayerNorm at the end of the stage",
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
        "activation": config.activation,
        "after_embed": ", then LayerNorm",
        "merging": _merging(config.merges[stage]),
        "positions": _positions(model, stage, (rows, columns)),
        **_reducing(at),
        "pooling": "the class token" if model.prefix else "mean over all tokens",
        "classes": config.classes,
    }


def _merging(merge: Merge) -> str:
    overlapping = ", overlapping" if merge.kernel > merge.stride else ""
    return f"{merge.kernel} x {merge.kernel} tokens become one{overlapping}"


def _reducing(at: Any) -> dict[str, str]:
    if not isinstance(at, Reduced):
        return {}
    rows, columns = at.keys
    keys = {"keys": f"{rows} x {columns}"}
    if isinstance(at.merge, Pool):
        return {**keys, "reducing": "means of equal shares, by a matrix", "after_reducing": ", then LayerNorm, GELU"}
    R = at.merge.kernel
    return {**keys, "reducing": f"{R} x {R} tokens become one", "after_reducing": ", then LayerNorm"}


def _positions(model: Any, stage: int, grid: tuple[int, int]) -> str:
    table = getattr(model.embeds[stage], "positions", None)
    if table is None:
        return "3 x 3 convolution of each channel: where a token stands"
    resized = "" if table.grid == grid else f", resized from {table.grid[0]} x {table.grid[1]}"
    return f"learned positions{resized}{'; a class token is first' if table.prefix else ''}"


def _where(at: Any) -> str:
    if isinstance(at, Windows):
        (high, wide), (down, right) = at.window, at.shift
        moved = f", shifted by {down}, {right}" if down or right else ""
        return f" in {at.count} window{'s' if at.count > 1 else ''} of {high} x {wide}{moved}"
    rows, columns = at.keys
    return f" at {at.prefix + rows * columns} keys"


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
