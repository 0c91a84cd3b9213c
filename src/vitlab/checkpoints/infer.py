"""What network do these tensors belong to? Shapes and names tell most of it; the rest is asked for by name."""

from __future__ import annotations

import math
from typing import Any

from vitlab.checkpoints.files import CheckpointError
from vitlab.checkpoints.keymap import State
from vitlab.layers.block import swiglu_hidden

HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16, 1536: 24}  # the published widths; others must be told


def infer_options(state: State, told: dict[str, Any], path: object) -> dict[str, Any]:
    """Options for ViTConfig from tensors under our names. `told`: what the caller or the file's config says."""
    for needed in ("patch_embed.proj.weight", "blocks.0.attention.qkv.weight", "blocks.0.mlp.fc2.weight"):
        if needed not in state:
            raise CheckpointError(f"{path}: {needed} is missing, so this is not a whole ViT.")
    width, channels, patch_size, _ = state["patch_embed.proj.weight"].shape
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    found: dict[str, Any] = {
        "width": width,
        "channels": channels,
        "patch_size": patch_size,
        "depth": depth,
        "classes": classes,
        "patch_bias": "patch_embed.proj.bias" in state,
        "patch_norms": "patch_embed.norm_in.weight" in state,
        "class_token": "class_token" in state,
        "distill_token": "distill_token" in state,
        "registers": state["register_tokens"].shape[1] if "register_tokens" in state else 0,
        "mask_token": "mask_token" in state,
        "norm_pre": "norm_pre.weight" in state,
        "qkv_bias": "blocks.0.attention.qkv.bias" in state,
        "qk_norm": "blocks.0.attention.q_norm.weight" in state,
        "head_hidden": state["pre_logits.weight"].shape[0] if "pre_logits.weight" in state else 0,
    }
    if "blocks.0.scale1.gamma" in state:
        found["layer_scale"] = told.get("layer_scale") or 1e-5
    found |= _mlp(state, width, path) | _heads(state, width, told, path) | _pooling(state, width)
    return found | _grid(state, found, told, path)


def _mlp(state: State, width: int, path: object) -> dict[str, Any]:
    hidden = state["blocks.0.mlp.fc2.weight"].shape[1]
    if state["blocks.0.mlp.fc1.weight"].shape[0] == hidden:
        return {"mlp": "mlp", "mlp_ratio": hidden / width}
    for ratio in (4.0, hidden * 1.5 / width):
        if swiglu_hidden(width, ratio) == hidden:
            return {"mlp": "swiglu", "mlp_ratio": ratio}
    raise CheckpointError(
        f"{path}: an MLP of {hidden} hidden channels at width {width} is neither plain nor a known SwiGLU."
    )


def _heads(state: State, width: int, told: dict[str, Any], path: object) -> dict[str, Any]:
    inner = state["blocks.0.attention.qkv.weight"].shape[0] // 3
    heads = told.get("heads")
    if heads is None and "blocks.0.attention.q_norm.weight" in state:
        heads = inner // state["blocks.0.attention.q_norm.weight"].shape[0]
    if heads is None and inner == width:
        heads = HEADS.get(width)
    if heads is None:
        guess = next((h for h in (inner // 64, 8, 6, 4, 3) if h > 1 and inner % h == 0), 1)
        raise CheckpointError(
            f"{path}: the number of heads cannot be read from weights of width {width}. "
            f"Say it: vitlab.load(path, heads={guess}), or --heads {guess}."
        )
    if inner % heads:
        raise CheckpointError(f"{path}: heads={heads} does not divide the attention width {inner}.")
    return {"heads": heads, "head_dim": None if inner == width and width % heads == 0 else inner // heads}


def _pooling(state: State, width: int) -> dict[str, Any]:
    if "head_norm.weight" in state and "norm.weight" not in state:
        return {"pooling": "mean_norm"}
    if "head.weight" in state and state["head.weight"].shape[1] == 2 * width:
        return {"pooling": "class_mean"}
    return {"pooling": "class" if "class_token" in state else "mean"}


def _grid(state: State, found: dict[str, Any], told: dict[str, Any], path: object) -> dict[str, Any]:
    """The stored grid, and which prefix tokens have a position. Grids are compared, not counts: 196 = 14x14 = 7x28."""
    if "positions.table" not in state:
        size = told.get("image_size", 224)
        return {"positions": "none", "image_size": size}
    count = state["positions.table"].shape[1]
    special = found["class_token"] + found["distill_token"]
    prefixes = {"class": special, "none": 0, "all": special + found["registers"]}
    P = found["patch_size"]
    stated = told.get("grid")
    asked = told.get("image_size")
    if stated is None and asked is not None:
        asked = (asked, asked) if isinstance(asked, int) else tuple(asked)
        candidate = tuple(-(-side // P) for side in asked)
        if math.isqrt(candidate[0] * candidate[1]) ** 2 != candidate[0] * candidate[1] or told.get("size_is_stored"):
            stated = candidate  # counts that are no square can only be the stored grid; a square one may be a resize
    if stated is not None:
        for which, n in prefixes.items():
            if count - n == stated[0] * stated[1]:
                return {"positions": "learned", "prefix_positions": which, "image_size": (stated[0] * P, stated[1] * P)}
        if told.get("grid") is not None:
            raise CheckpointError(f"{path}: {count} positions do not fit a grid of {stated[0]}x{stated[1]} patches.")
    for which, n in prefixes.items():
        side = math.isqrt(max(count - n, 0))
        if side > 0 and side * side == count - n:
            return {"positions": "learned", "prefix_positions": which, "image_size": (side * P, side * P)}
    example = next(((r, (count - special) // r) for r in range(2, 64) if (count - special) % r == 0), (1, count))
    raise CheckpointError(
        f"{path}: {count - special} patch positions are no square, so the grid must be told. If the images were "
        f"{example[0] * P}x{example[1] * P}: vitlab.load(path, image_size=({example[0] * P}, {example[1] * P})), "
        f"or --image-size {example[0] * P}x{example[1] * P}."
    )
