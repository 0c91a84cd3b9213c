"""What network do these tensors belong to? Shapes and names tell most of it; the rest is asked for by name."""

from __future__ import annotations

import math
from typing import Any

from vitlab.checkpoints.keymap import State
from vitlab.errors import CheckpointError
from vitlab.layers.block import swiglu_hidden

HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16, 1536: 24}  # the published widths; others must be told


def infer_options(state: State, told: dict[str, Any]) -> dict[str, Any]:
    """Options for ViTConfig from tensors under our names. `told`: what the caller or the file's config says."""
    _check_shapes(state)
    _check_told(told)
    width, channels, patch_size, _ = state["patch_embed.proj.weight"].shape
    numbers = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    depth = len(numbers)
    if numbers != set(range(depth)):
        raise CheckpointError(f"the blocks are not numbered 0 to {depth - 1}: blocks.{max(numbers)} is there.")
    classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    found: dict[str, Any] = {
        "width": width,
        "channels": channels,
        "patch_size": patch_size,
        "depth": depth,
        "classes": classes,
        "patch_bias": _patch_bias(state, told),
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
    if found["distill_token"] and (("head_distill.weight" in state) != bool(classes) or found["head_hidden"]):
        raise CheckpointError(
            "a distillation token needs two plain heads, or none: a network with one head beside it, or with a pooler "
            "(transformers' DeiTForImageClassification, DeiTModel), is not known."
        )
    if "blocks.0.scale1.gamma" in state:
        found["layer_scale"] = told.get("layer_scale") or 1e-5
    found |= _mlp(state, width) | _heads(state, width, told) | _pooling(state, width)
    found["final_norm"] = _final_norm(state, found["pooling"], told)
    return found | _grid(state, found, told)


AXES = {  # of the tensors that tell the sizes; True: they must be there
    "patch_embed.proj.weight": (4, True),
    "blocks.0.attention.qkv.weight": (2, True),
    "blocks.0.mlp.fc1.weight": (2, True),
    "blocks.0.mlp.fc2.weight": (2, True),
    "positions.table": (3, False),
    "register_tokens": (3, False),
    "pre_logits.weight": (2, False),
    "head.weight": (2, False),
}


def _check_shapes(state: State) -> None:
    for key, (axes, needed) in AXES.items():
        if key not in state and needed:
            raise CheckpointError(f"{key} is missing, so this is not a whole ViT.")
        if key in state and state[key].ndim != axes:
            raise CheckpointError(f"{key} has the shape {tuple(state[key].shape)}, expected {axes} axes.")


def _check_told(told: dict[str, Any]) -> None:
    heads = told.get("heads", 1)
    if not isinstance(heads, int) or heads < 1:
        raise CheckpointError(f"heads={heads!r} must be a whole number of at least 1.")
    for name in ("image_size", "grid"):
        value = told.get(name, (1, 1))
        pair = [value] if isinstance(value, int) and name == "image_size" else value
        if not isinstance(pair, list | tuple) or not 1 <= len(pair) <= 2 or not all(isinstance(n, int) for n in pair):
            raise CheckpointError(f"{name}={value!r} must be (height, width) in whole numbers.")


def _mlp(state: State, width: int) -> dict[str, Any]:
    hidden = state["blocks.0.mlp.fc2.weight"].shape[1]
    if state["blocks.0.mlp.fc1.weight"].shape[0] == hidden:
        return {"mlp": "mlp", "mlp_ratio": hidden / width}
    for ratio in (4.0, hidden * 1.5 / width):
        if swiglu_hidden(width, ratio) == hidden:
            return {"mlp": "swiglu", "mlp_ratio": ratio}
    raise CheckpointError(f"an MLP of {hidden} hidden channels at width {width} is neither plain nor a known SwiGLU.")


def _patch_bias(state: State, told: dict[str, Any]) -> bool:
    """Only networks with a norm before the blocks do without; elsewhere a missing bias is a missing tensor."""
    has = "patch_embed.proj.bias" in state
    if not has and "norm_pre.weight" not in state and told.get("patch_bias", True):
        raise CheckpointError("patch_embed.proj.bias is missing. If the network has none, pass patch_bias=False.")
    return has


def _heads(state: State, width: int, told: dict[str, Any]) -> dict[str, Any]:
    inner = state["blocks.0.attention.qkv.weight"].shape[0] // 3
    heads = told.get("heads")
    if heads is None and "blocks.0.attention.q_norm.weight" in state:
        heads = inner // state["blocks.0.attention.q_norm.weight"].shape[0]
    if heads is None and inner == width:
        heads = HEADS.get(width)
    if heads is None:
        guess = next((h for h in (inner // 64, 8, 6, 4, 3) if h > 1 and inner % h == 0), 1)
        raise CheckpointError(
            f"the number of heads cannot be read from weights of width {width}. "
            f"Say it: vitlab.load(path, heads={guess}), or --heads {guess}."
        )
    if inner % heads:
        raise CheckpointError(f"heads={heads} does not divide the attention width {inner}.")
    return {"heads": heads, "head_dim": None if inner == width and width % heads == 0 else inner // heads}


def _pooling(state: State, width: int) -> dict[str, Any]:
    if "head_norm.weight" in state:
        return {"pooling": "mean_norm"}
    if "head.weight" in state and state["head.weight"].shape[1] == 2 * width:
        return {"pooling": "class_mean"}
    return {"pooling": "class" if "class_token" in state else "mean"}


def _final_norm(state: State, pooling: str, told: dict[str, Any]) -> str:
    """A norm after the blocks shows in the weights; where one is usual, its absence must be told."""
    said = told.get("final_norm", told.get("norm.final_norm", "auto"))
    if said != "auto":
        return said
    norm = told.get("norm", told.get("norm.kind", "pre"))
    kind = norm.get("kind", "pre") if isinstance(norm, dict) else norm
    usual = kind != "post" and pooling != "mean_norm"
    return "yes" if "norm.weight" in state and not usual else "auto"


def _grid(state: State, found: dict[str, Any], told: dict[str, Any]) -> dict[str, Any]:
    """The stored grid, and which prefix tokens have a position. Grids are compared, not counts: 196 = 14x14 = 7x28."""
    if "positions.table" not in state:
        if told.get("positions", "learned") == "learned":
            raise CheckpointError(
                "positions.table is missing. If the network has no position table, pass positions='none'."
            )
        return {"positions": told["positions"], "image_size": told.get("image_size", 224)}
    count = state["positions.table"].shape[1]
    special = found["class_token"] + found["distill_token"]
    prefixes = {"class": special, "none": 0, "all": special + found["registers"]}
    if told.get("prefix_positions") in prefixes:
        prefixes = {told["prefix_positions"]: prefixes[told["prefix_positions"]]}
    stated, asked = _stated_grid(told, found["patch_size"])
    for grid in (g for g in (stated, asked) if g is not None):
        for which, n in prefixes.items():
            if count - n == grid[0] * grid[1]:
                return _positions(which, grid, found["patch_size"])
    if stated is not None:
        raise CheckpointError(f"{count} positions do not fit a grid of {stated[0]}x{stated[1]} patches.")
    squares = {which: math.isqrt(max(count - n, 0)) for which, n in prefixes.items()}
    squares = {which: side for which, side in squares.items() if side > 0 and side**2 == count - prefixes[which]}
    first = next(iter(prefixes))
    if first in squares:  # the usual reading: a square grid, and a position for the class token
        return _positions(first, (squares[first], squares[first]), found["patch_size"])
    raise CheckpointError(_ask_for_grid(count, prefixes[first], squares, found["patch_size"]))


def _stated_grid(told: dict[str, Any], P: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The grid that is known to be the stored one, and one that may be: the asked image size can also mean a resize."""
    size = told.get("image_size")
    size = (size, size) if isinstance(size, int) else size
    asked = None if size is None else (-(-size[0] // P), -(-size[1] // P))
    if told.get("size_is_stored"):
        return asked, None
    if told.get("grid") is not None:
        return tuple(told["grid"]), None
    if asked is not None and asked[0] != asked[1] and math.isqrt(asked[0] * asked[1]) ** 2 == asked[0] * asked[1]:
        asked = None  # 7 x 28 has as many patches as 14 x 14, which is the usual one: it is resized
    return None, asked


def _positions(which: str, grid: tuple[int, int], P: int) -> dict[str, Any]:
    return {"positions": "learned", "prefix_positions": which, "image_size": (grid[0] * P, grid[1] * P)}


def _ask_for_grid(count: int, special: int, squares: dict[str, int], P: int) -> str:
    patches = count - special
    rows = max((r for r in range(1, math.isqrt(max(patches, 1)) + 1) if patches % r == 0), default=1)
    size = (rows * P, patches // rows * P)
    text = (
        f"{patches} patch positions are no square, so the grid must be told. If the images were {size[0]}x{size[1]}: "
        f"vitlab.load(path, image_size={size}), or --image-size {size[0]}x{size[1]}."
    )
    for which, side in squares.items():
        text += f' If they were {side * P}x{side * P}, pass prefix_positions="{which}".'
    return text
