"""Perception Encoders by timm's names: folders of its hub and bare files of PE-Core, PE-Lang and PE-Spatial."""

from __future__ import annotations

import re
from dataclasses import replace

from vitlab.checkpoints import plain
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, layers, shape_of
from vitlab.checkpoints.vit import grid_options
from vitlab.errors import CheckpointError
from vitlab.models.pe import PREPROCESS, SIZES, PEConfig

HEADS = {options["width"]: options["heads"] for options in SIZES.values()}
POOLING = {"map": "attention", "avg": "mean", "token": "class"}


def _infer_options(renamed: Renamed, facts: Options) -> Options:
    state = renamed.tensors
    options = plain.encoder_options(state, facts, HEADS, "Perception Encoder")
    if options.pop("mlp") != "mlp":
        raise CheckpointError("its MLP has a gate, which no Perception Encoder has.")
    has_pool = "pool.query" in state
    options |= {
        "class_token": "class_token" in state,
        "final_norm": "norm.weight" in state,
        "pooling": "attention" if has_pool else facts.get("pooling", "mean"),
        "qkv_bias": plain.qkv_bias(state),
        "layer_scale": 0.1 if "blocks.0.scale1.gamma" in state else 0.0,
    }
    if has_pool:
        hidden, _ = shape_of(state, "pool.mlp.fc1.weight", 2, "Perception Encoder")
        options["pool_ratio"] = hidden / options["width"]
    P = options["patch_size"]
    prefix = {"class_token": options["class_token"], "distill_token": False, "registers": 0, "patch_size": P}
    grid = grid_options(state, prefix, {**facts, "prefix_positions": "class", "positions": "learned"})
    options["image_size"] = height, width = grid["image_size"]
    if facts.get("rotary_grid") is None:  # all released ones were trained at the size of their table
        options["rotary_grid"] = (height // P, width // P)
    return options


def _timm_options(architecture: str, pool: Options) -> Options | None:
    match = re.fullmatch(r"vit_pe_(core|lang|spatial)_([a-z]+)_patch(\d+)_(\d+)(\..*)?", architecture)
    if match is None or match[2] not in SIZES:
        return None
    kind = pool.get("global_pool", "map" if match[1] == "core" else "avg")
    if kind not in POOLING:
        raise CheckpointError(f"config.json has global_pool {kind!r}; known are {', '.join(POOLING)}.")
    side = int(match[4]) // int(match[3])
    size = {name: SIZES[match[2]][name] for name in ("width", "heads")}
    return {**size, "eps": 1e-5, "pooling": POOLING[kind], "rotary_grid": (side, side), "pool_heads": 8}


def _is_core(keys: set[str]) -> bool:
    return {"norm_pre.weight", "attn_pool.latent", "blocks.0.attn.qkv.weight"} <= keys


TOKENS = Dialect(
    name="timm",
    rules=(
        *plain.TIMM_RULES,
        Rule("pool.query", "attn_pool.latent"),
        *layers("pool.", "attn_pool.", ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")),
    ),
    recognise=lambda keys: (
        {"norm_pre.weight", "pos_embed", "blocks.0.attn.qkv.weight"} <= keys
        and not keys & {"norm.weight", "fc_norm.weight", "attn_pool.latent"}
    ),
    assumed={"eps": 1e-5, "rotary_grid": None},
    preprocess=PREPROCESS,
    read_stated=plain.timm_reader(
        "PE's (vit_pe_core_base_patch16_224, ...)",
        _timm_options,
        {
            **plain.ARGUMENTS,
            "ref_feat_shape": "rotary_grid",
            "rope_temperature": "rotary_base",
            "attn_pool_num_heads": "pool_heads",
        },
    ),
)
CORE = replace(
    TOKENS,
    recognise=_is_core,
    assumed={**TOKENS.assumed, "pool_heads": 8},
)

FAMILY = plain.family(
    "pe",
    PEConfig,
    (CORE, TOKENS),
    _infer_options,
    bare_options=("heads", "eps", "rotary_grid", "pool_heads", "pooling", "image_size"),
)
