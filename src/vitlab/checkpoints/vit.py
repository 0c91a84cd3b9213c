"""Vision Transformers of every library: what network do these tensors belong to?

Names and shapes tell most of it; the rest stands in a config beside them, or a caller passes it.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.advice import to_type
from vitlab.checkpoints import clip_image, facebook, hf, jax, lucidrains, siglip_tower, timm, tips_tower, torchvision
from vitlab.checkpoints.family import Clues, Family, Reading, Writer, Written, check_agreement
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, State, shape_of
from vitlab.errors import CheckpointError
from vitlab.layers.block import swiglu_hidden
from vitlab.layers.pooling import NORM_AFTER
from vitlab.layers.positions import sincos_2d
from vitlab.models.base import Network
from vitlab.models.vit_config import ViTConfig
from vitlab.parsing import is_object, is_sequence

ENCODER_ALONE = (
    "holds an encoder and no decoder, as most released MAE files do: it gives features and can be fine-tuned, but it "
    "cannot reconstruct images."
)
ONE_HEAD = (
    "has a distillation token that no head reads, as transformers' DeiTForImageClassification and DeiTModel do: it is "
    "kept as a register."
)
SAME_WEIGHTS = (("class", "mean"), ("class_norm", "mean_norm"))  # ways of pooling that weights do not tell apart
TOLERANCE = 1e-5  # of a stored table from sin-cos positions, which others compute in float32


def infer_config(renamed: Renamed, clues: Clues) -> ViTConfig:
    """The config of tensors under our names."""
    dialect, stated = clues.dialect, clues.stated.options
    certain = {**dialect.options, **clues.hints, **stated}
    facts = {**clues.given, **certain, "size_is_stored": "image_size" in stated}
    inferred = infer_options(renamed.tensors, facts)
    if same_weights := next((both for both in SAME_WEIGHTS if inferred["pooling"] in both), None):
        pooling = certain.get("pooling", inferred["pooling"])
        inferred["pooling"] = pooling if pooling in same_weights else inferred["pooling"]
    check_agreement(stated, inferred)
    return ViTConfig().with_options(**{**dialect.assumed, **certain, **inferred})


def assumed_options(config: ViTConfig, clues: Clues) -> Options:
    """Options that neither file nor caller states."""
    stated = {*clues.dialect.options, *clues.hints, *clues.stated.options, *clues.given}
    assumed = {name: value for name, value in clues.dialect.assumed.items() if name not in stated}
    if assumed and "heads" not in stated and not config.attention.qk_norm:
        assumed["heads"] = config.heads
    return assumed


def resize_notes(config: ViTConfig, clues: Clues) -> list[str]:
    """As many patches in another grid: was it the stored one, or shall it be resized?"""
    size = clues.given.get("image_size")
    if not size or "grid" in clues.given or "image_size" in {**clues.hints, **clues.stated.options}:
        return []
    wanted, stored = config.with_options(image_size=size).grid, config.grid
    if wanted == stored or wanted[0] * wanted[1] != stored[0] * stored[1]:
        return []
    text = f"positions were taken as {stored[0]}x{stored[1]} and resized to {wanted[0]}x{wanted[1]}"
    return [f"{text}; if {wanted[0]}x{wanted[1]} is what they were made for, pass grid={wanted}."]


def is_sincos(table: Tensor, grid: tuple[int, int]) -> bool:
    """Whether a stored table, (1, 1 + N, D), is the fixed positions: zeros for the class token, sin-cos for patches."""
    if table.ndim != 3 or table.shape[1] != 1 + grid[0] * grid[1] or table.shape[2] % 4:
        return False
    return torch.allclose(table.float(), F.pad(sincos_2d(grid, table.shape[2]), (0, 0, 1, 0)), rtol=0, atol=TOLERANCE)


def leave_out_sincos(renamed: Renamed, key: str, grid: tuple[int, int]) -> bool:
    """Whether a table was sin-cos, which is computed and not stored."""
    table = renamed.tensors.get(key)
    if table is None or not is_sincos(table, grid):
        return False
    renamed.leave_out(key, "equals the fixed sin-cos positions, which are computed")
    return True


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    if clues.dialect.name == "hf" and "head.weight" in renamed.tensors:  # transformers' classifiers do not read it
        for key in [key for key in renamed.tensors if key.startswith(("pre_logits.", "pool."))]:
            renamed.leave_out(key, "a pooler, which the classifier does not read")
    if clues.stated.model_type == "ijepa":
        for key in {"pre_logits.weight", "pre_logits.bias"} & renamed.tensors.keys():
            renamed.leave_out(key, "a pooler of the first patch: the mean of all patches is read instead")
    one_head = _is_deit_with_one_head(renamed.tensors)
    if one_head:
        renamed.rename("distill_token", "register_tokens")
        clues = replace(clues, hints={**clues.hints, "prefix_positions": "all"})
    config = infer_config(renamed, clues)
    notes = [ONE_HEAD, *resize_notes(config, clues)] if one_head else resize_notes(config, clues)
    assumed = assumed_options(config, clues)
    features = not config.classes  # a classifier's table is kept: it may have been trained
    if features and leave_out_sincos(renamed, "positions.table", config.grid):
        config = config.with_options(positions="sincos")
    from_mae = clues.stated.model_type == "vit_mae" or (features and config.positions.kind == "sincos")
    if from_mae and hf.NO_DECODER not in renamed.unused.values():
        notes = [ENCODER_ALONE, *notes]
    return Reading(config, assumed, notes=tuple(notes))


def _is_deit_with_one_head(state: State) -> bool:
    """transformers' DeiTForImageClassification and DeiTModel: the second token is there, and nothing reads it."""
    return "distill_token" in state and (
        ("head.weight" in state and "head_distill.weight" not in state) or "pre_logits.weight" in state
    )


def infer_options(state: State, facts: Options) -> Options:
    """Options for ViTConfig from tensors under our names. `facts`: what the caller or the file's config states."""
    for key, (axes, needed) in AXES.items():
        if needed or key in state:
            shape_of(state, key, axes, "ViT")
    _check_facts(facts)
    width, channels, patch_size, _ = state["patch_embed.proj.weight"].shape
    numbers = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    depth = len(numbers)
    if numbers != set(range(depth)):
        raise CheckpointError(f"the blocks are not numbered 0 to {depth - 1}: blocks.{max(numbers)} is there.")
    classes = state["head.weight"].shape[0] if "head.weight" in state else 0
    options: Options = {
        "width": width,
        "channels": channels,
        "patch_size": patch_size,
        "depth": depth,
        "classes": classes,
        "patch_bias": _patch_bias(state, facts),
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
    if options["distill_token"] and (("head_distill.weight" in state) != bool(classes) or options["head_hidden"]):
        raise CheckpointError(
            "a distillation token needs two plain heads, or none: head_distill.weight is there alone."
        )
    if "blocks.0.scale1.gamma" in state:
        options["layer_scale"] = facts.get("layer_scale") or 1e-5
    options |= _mlp(state, width) | _heads(state, width, facts) | _pooling(state, width)
    options["final_norm"] = _final_norm(state, options["pooling"], facts)
    return options | grid_options(state, options, facts)


AXES = {  # of the tensors that show the sizes; True: they must be there
    "patch_embed.proj.weight": (4, True),
    "blocks.0.attention.qkv.weight": (2, True),
    "blocks.0.mlp.fc1.weight": (2, True),
    "blocks.0.mlp.fc2.weight": (2, True),
    "positions.table": (3, False),
    "register_tokens": (3, False),
    "pre_logits.weight": (2, False),
    "head.weight": (2, False),
}


def _check_facts(facts: Options) -> None:
    heads = facts.get("heads", 1)
    if not isinstance(heads, int) or heads < 1:
        raise CheckpointError(f"heads={heads!r} must be a whole number of at least 1.")
    for name in ("image_size", "grid"):
        value = facts.get(name, (1, 1))
        pair: object = [value] if isinstance(value, int) and name == "image_size" else value
        if not is_sequence(pair) or not 1 <= len(pair) <= 2 or not all(isinstance(n, int) for n in pair):
            raise CheckpointError(f"{name}={value!r} must be (height, width) in whole numbers.")


def _mlp(state: State, width: int) -> Options:
    hidden = state["blocks.0.mlp.fc2.weight"].shape[1]
    if state["blocks.0.mlp.fc1.weight"].shape[0] == hidden:
        return {"mlp": "mlp", "mlp_ratio": hidden / width}
    for ratio in (4.0, hidden * 1.5 / width):
        if swiglu_hidden(width, ratio) == hidden:
            return {"mlp": "swiglu", "mlp_ratio": ratio}
    raise CheckpointError(f"an MLP of {hidden} hidden channels at width {width} is neither plain nor a known SwiGLU.")


def _patch_bias(state: State, facts: Options) -> bool:
    """Only networks with a norm before the blocks do without; elsewhere a missing bias is a missing tensor."""
    has = "patch_embed.proj.bias" in state
    if not has and "norm_pre.weight" not in state and facts.get("patch_bias", True):
        raise CheckpointError("patch_embed.proj.bias is missing. If the network has none, pass patch_bias=False.")
    return has


def _heads(state: State, width: int, facts: Options) -> Options:
    inner = state["blocks.0.attention.qkv.weight"].shape[0] // 3
    heads = facts.get("heads")
    if heads is None and "blocks.0.attention.q_norm.weight" in state:
        heads = inner // state["blocks.0.attention.q_norm.weight"].shape[0]
    if heads is None and inner == width:
        heads = timm.HEADS.get(width)
    if heads is None:
        guess = next((h for h in (inner // 64, 8, 6, 4, 3) if h > 1 and inner % h == 0), 1)
        raise CheckpointError(
            f"the number of heads cannot be read from weights of width {width}. "
            f"Say it: {to_type(f'vitlab.load(path, heads={guess})', f'--heads {guess}')}."
        )
    if inner % heads:
        raise CheckpointError(f"heads={heads} does not divide the attention width {inner}.")
    return {"heads": heads, "head_dim": None if inner == width and width % heads == 0 else inner // heads}


def _pooling(state: State, width: int) -> Options:
    if "head_norm.weight" in state:
        return {"pooling": "mean_norm"}
    if "pool.query" in state:
        return {"pooling": "attention"}
    if "head.weight" in state and state["head.weight"].shape[1] == 2 * width:
        return {"pooling": "class_mean"}
    return {"pooling": "class" if "class_token" in state else "mean"}


def _final_norm(state: State, pooling: str, facts: Options) -> str:
    """A norm after the blocks shows in the weights; where one is usual, its absence must be stated."""
    final_norm = facts.get("final_norm", facts.get("norm.final_norm", "auto"))
    if final_norm != "auto":
        return final_norm
    norm = facts.get("norm", facts.get("norm.kind", "pre"))
    kind = norm.get("kind", "pre") if is_object(norm) else norm
    usual = kind != "post" and pooling not in NORM_AFTER
    return "yes" if "norm.weight" in state and not usual else "auto"


def grid_options(state: State, options: Options, facts: Options) -> Options:
    """The stored grid, and which prefix tokens have a position. Grids are compared, not counts: 196 = 14x14 = 7x28."""
    if "positions.table" not in state:
        if facts.get("positions", "learned") == "learned":
            raise CheckpointError(
                "positions.table is missing. If the network has no position table, pass positions='none'."
            )
        return {"positions": facts["positions"], "image_size": facts.get("image_size", 224)}
    count = state["positions.table"].shape[1]
    special = options["class_token"] + options["distill_token"]
    prefixes = {"class": special, "none": 0, "all": special + options["registers"]}
    if (only := facts.get("prefix_positions")) in tuple(prefixes):  # ViTConfig refuses any other value
        prefixes = {only: prefixes[only]}
    stored, possible = _stated_grid(facts, options["patch_size"])
    for grid in (g for g in (stored, possible) if g is not None):
        for which, n in prefixes.items():
            if count - n == grid[0] * grid[1]:
                return _positions(which, grid, options["patch_size"])
    if stored is not None:
        if cropped := _cropped(count, prefixes, options["patch_size"], facts):
            return cropped
        raise CheckpointError(f"{count} positions do not fit a grid of {stored[0]}x{stored[1]} patches.")
    squares = {which: math.isqrt(max(count - n, 0)) for which, n in prefixes.items()}
    squares = {which: side for which, side in squares.items() if side > 0 and side**2 == count - prefixes[which]}
    first = next(iter(prefixes))
    if first in squares:  # the usual reading: a square grid, and a position for the class token
        return _positions(first, (squares[first], squares[first]), options["patch_size"])
    raise CheckpointError(_ask_for_grid(count, prefixes[first], squares, options["patch_size"]))


def _stated_grid(facts: Options, P: int) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """The grid that is the stored one, and one that may be: an image size that is passed can also mean a resize."""
    size = facts.get("image_size")
    size = (size, size) if isinstance(size, int) else size
    possible = None if size is None else (-(-size[0] // P), -(-size[1] // P))
    if facts.get("size_is_stored"):
        return possible, None
    if facts.get("grid") is not None:
        return tuple(facts["grid"]), None
    if (
        possible is not None
        and possible[0] != possible[1]
        and math.isqrt(possible[0] * possible[1]) ** 2 == possible[0] * possible[1]
    ):
        possible = None  # 7 x 28 has as many patches as 14 x 14, which is the usual one: it is resized
    return None, possible


def _cropped(count: int, prefixes: dict[str, int], P: int, facts: Options) -> Options | None:
    """384 pixels at patch 14: 27 patches, and the convolution does not read the last 6 pixels."""
    size = facts.get("image_size")
    height, width = (size, size) if isinstance(size, int) else size or (0, 0)
    grid = height // P, width // P
    which = next((which for which, n in prefixes.items() if count - n == grid[0] * grid[1]), None)
    if which is None or not facts.get("size_is_stored"):
        return None
    return _positions(which, grid, P) | {"image_size": (height, width), "crop": True}


def _positions(which: str, grid: tuple[int, int], P: int) -> Options:
    return {"positions": "learned", "prefix_positions": which, "image_size": (grid[0] * P, grid[1] * P)}


def _ask_for_grid(count: int, special: int, squares: dict[str, int], P: int) -> str:
    patches = count - special
    rows = max((r for r in range(1, math.isqrt(max(patches, 1)) + 1) if patches % r == 0), default=1)
    size = (rows * P, patches // rows * P)
    text = (
        f"{patches} patch positions are no square, so the grid must be passed. If the images were {size[0]}x{size[1]}: "
        + to_type(f"vitlab.load(path, image_size={size}).", f"--image-size {size[0]}x{size[1]}.")
    )
    for which, side in squares.items():
        text += f' If they were {side * P}x{side * P}, pass prefix_positions="{which}".'
    return text


def _writer(writer: Writer) -> Writer:
    """No other library computes sin-cos positions: they become a table."""

    def write(model: Network, state: State) -> Written:
        c: ViTConfig = model.config
        if c.positions.kind == "sincos":
            positions = model.get_submodule("positions")
            state = {**state, "positions.table": positions(c.grid, like=next(iter(state.values()))).cpu()}
            model = copy.copy(model)
            model.config = c.with_options(positions="learned")
        return writer.write(model, state)

    return replace(writer, write=write)


def _write_hf(model: Network, state: State) -> Written:
    """In transformers only CLIP's towers have a norm before the blocks, only TIPSv2 resizes positions so, and only
    SigLIP's towers pool by attention.
    """
    c: ViTConfig = model.config
    if c.positions.resize_rule == tips_tower.RESIZE_RULE:
        return tips_tower.write(model, state)
    if c.head.pooling == "attention":
        return siglip_tower.write(model, state)
    return (clip_image.write if c.norm.norm_pre else hf.WRITER.write)(model, state)


def _any_size(c: ViTConfig) -> bool:
    if c.positions.resize_rule == tips_tower.RESIZE_RULE:
        return True
    return c.head.pooling != "attention" and not c.norm.norm_pre and hf.WRITER.any_size(c)


HF_WRITER = Writer(_write_hf, any_size=_any_size)
FAMILY = Family(
    "vit",
    ViTConfig,
    (
        *(clip_image.DIALECT, clip_image.CLASSIFIER, siglip_tower.DIALECT, tips_tower.DIALECT),
        *(hf.DIALECT, facebook.MAE_ENCODER, facebook.DIALECT, timm.DIALECT),
        *(jax.DIALECT, torchvision.DIALECT, lucidrains.DIALECT),
    ),
    _infer,
    {"timm": _writer(timm.WRITER), "hf": _writer(HF_WRITER), "jax": _writer(jax.WRITER)},
    bare_options=("heads", "image_size", "eps", "activation", "final_norm"),
    model_types=hf.MODEL_TYPES | hf.VIT_MSN | siglip_tower.ALONE | tips_tower.ALONE,
    map_template=Dialect(
        name="",
        rules=(),
        recognise=lambda names: True,
        assumed={"eps": 1e-6, "activation": "gelu"},
        preprocess={},
    ),
)
