"""What each step of a network in stages (Swin, PVT, Twins) does, in words; other networks are in step_meanings.py."""

from __future__ import annotations

from typing import Any

from vitlab.layers.positions import LearnedPositions
from vitlab.layers.reduced import Merge, Pool, Reduced
from vitlab.layers.windows import Windows
from vitlab.models.hierarchy import Hierarchy

MEANINGS: dict[str, str] = {
    "patch_embed": "patches become tokens of {width} numbers, then LayerNorm",
    "merge": "{merging}: {grid} tokens of {width} numbers",
    "positions": "+ {positions}",
    "norm1": "LayerNorm",
    "qkv": "queries, keys, values: 3 x {heads} heads x {head_dim}{where}",
    "q": "queries: {heads} heads x {head_dim}",
    "reduced": "{reducing}: {keys} keys{after_reducing}",
    "kv": "keys, values: 2 x {heads} heads x {head_dim}",
    "heads": "softmax(q k^T / sqrt({head_dim}){bias}) v{where}; {heads} heads side by side",
    "proj": "heads mixed",
    "after_attention": "+ residual",
    "norm2": "LayerNorm",
    "fc1": "{mlp}: {width} to {hidden} channels",
    "mlp_conv": "3 x 3 convolution of each channel, {activation}",
    "fc2": "{mlp}: back to {width}",
    "tokens": "+ residual",
    "stage_norm": "LayerNorm at the end of the stage",
    "norm": "final LayerNorm",
    "pool": "{pooling}: one vector per image",
    "head": "one score for each of {classes} classes",
}


def stage_meaning(model: Hierarchy, kind: str, layer: int | None, size: tuple[int, int]) -> str:
    """What the step of this kind does at this layer, for images of this size; a paper's own words come first."""
    return {**MEANINGS, **model.meanings}[kind].format(**_details(model, size, layer))


def _details(model: Hierarchy, size: tuple[int, int], layer: int | None) -> dict[str, Any]:
    """Values of the placeholders in MEANINGS."""
    config = model.config
    layer = layer or 0
    stage, at = config.stage_of(layer), model.places(*size)[layer]
    rows, columns = at.grid
    width, heads = config.widths[stage], config.heads[stage]
    block: Any = model.blocks[layer]
    return {
        "width": width,
        "heads": heads,
        "head_dim": width // heads,
        "hidden": block.mlp.fc1.out_features,
        "grid": f"{rows} x {columns}",
        "where": _where(at),
        "bias": " + B" if block.attention.biased else "",
        "mlp": f"MLP, {config.activation}",
        "activation": config.activation,
        "merging": _merging(config.merges[stage]),
        "positions": _positions(model, stage, (rows, columns)),
        **_reducing(at),
        "pooling": "the class token" if model.prefix else "mean over all tokens",
        "classes": config.classes,
    }


def _merging(merge: Merge) -> str:
    overlapping = ", overlapping" if merge.kernel > merge.stride else ""
    return f"{merge.kernel} x {merge.kernel} tokens become one{overlapping}"


def _reducing(at: Windows | Reduced) -> dict[str, str]:
    if not isinstance(at, Reduced):
        return {}
    rows, columns = at.keys
    keys = {"keys": f"{rows} x {columns}"}
    if isinstance(at.merge, Pool):
        return {**keys, "reducing": "means of equal shares, by a matrix", "after_reducing": ", then LayerNorm, GELU"}
    R = at.merge.kernel
    return {**keys, "reducing": f"{R} x {R} tokens become one", "after_reducing": ", then LayerNorm"}


def _positions(model: Hierarchy, stage: int, grid: tuple[int, int]) -> str:
    table = dict(model.named_modules()).get(f"embeds.{stage}.positions")
    if not isinstance(table, LearnedPositions):
        return "3 x 3 convolution of each channel: where a token stands"
    resized = "" if table.grid == grid else f", resized from {table.grid[0]} x {table.grid[1]}"
    return f"learned positions{resized}{'; a class token is first' if table.prefix else ''}"


def _where(at: Windows | Reduced) -> str:
    if isinstance(at, Windows):
        (high, wide), (down, right) = at.window, at.shift
        moved = f", shifted by {down}, {right}" if down or right else ""
        return f" in {at.count} window{'s' if at.count > 1 else ''} of {high} x {wide}{moved}"
    rows, columns = at.keys
    return f" at {at.prefix + rows * columns} keys"
