"""EVA-02 by timm's names: its hub's folders and bare files. Queries, keys and values are one matrix in Ti and S, and
three in B and L; the gates likewise.
"""

from __future__ import annotations

import re

from vitlab.checkpoints import plain
from vitlab.checkpoints.keymap import Dialect, Options, Renamed
from vitlab.checkpoints.vit import grid_options
from vitlab.errors import CheckpointError
from vitlab.models.entry import CLIP_CROP
from vitlab.models.eva02 import SIZES, EVA02Config

HEADS = {options["width"]: options["heads"] for options in SIZES.values()}


def _infer_options(renamed: Renamed, facts: Options) -> Options:
    state = renamed.tensors
    options = plain.encoder_options(state, facts, HEADS, "EVA-02")
    if options.pop("mlp") == "mlp":
        raise CheckpointError(
            "its MLP has no gate, so this is an EVA (eva_giant_patch14_*) or the enormous EVA-02-CLIP, which are not "
            "read here. EVA-02 is: eva02_tiny to eva02_large."
        )
    options |= {
        "mlp_norm": "blocks.0.mlp.norm.weight" in state,
        "attention_norm": "blocks.0.attention.inner_norm.weight" in state,
        "qkv_bias": plain.qkv_bias(state),
        "pooling": "mean_norm" if "head_norm.weight" in state else "class",
    }
    prefix = {"class_token": True, "distill_token": False, "registers": 0, "patch_size": options["patch_size"]}
    grid = grid_options(state, prefix, {**facts, "prefix_positions": "class", "positions": "learned"})
    return options | {"image_size": grid["image_size"]}


def _timm_options(architecture: str, pool: Options) -> Options | None:
    match = re.fullmatch(r"eva02_(tiny|small|base|large)_patch\d+_(clip_)?\d+(\..*)?", architecture)
    if match is None:
        return None
    kind = pool.get("global_pool", "token" if match[2] else "avg")
    if kind not in ("avg", "token"):
        raise CheckpointError(f"config.json has global_pool {kind!r}; known are avg and token.")
    pooling = "mean_norm" if kind == "avg" else "class"
    size = {name: SIZES[match[1]][name] for name in ("width", "heads")}
    return {**size, "eps": 1e-6, "rotary_grid": (16, 16), "pooling": pooling}


def _recognise(keys: set[str]) -> bool:
    bias = keys & {"blocks.0.attn.q_bias", "blocks.0.attn.q_proj.bias"}
    others = keys & {"blocks.0.gamma_1", "reg_token", "blocks.0.attn.relative_position_bias_table"}
    others |= keys & {"rel_pos_bias.relative_position_bias_table", "norm_pre.weight", "blocks.0.attn.k_proj.bias"}
    return bool(bias) and not others and {"pos_embed", "cls_token", "blocks.0.mlp.fc2.weight"} <= keys


TIMM = Dialect(
    name="timm",
    rules=plain.TIMM_RULES,
    recognise=_recognise,
    assumed={"eps": 1e-6, "rotary_grid": (16, 16)},
    preprocess=CLIP_CROP,
    read_stated=plain.timm_reader(
        "EVA-02's (eva02_tiny to eva02_large)",
        _timm_options,
        {**plain.ARGUMENTS, "ref_feat_shape": "rotary_grid", "rope_temperature": "rotary_base"},
    ),
)

FAMILY = plain.family(
    "eva02",
    EVA02Config,
    (TIMM,),
    _infer_options,
    bare_options=("heads", "eps", "rotary_grid", "image_size"),
)
