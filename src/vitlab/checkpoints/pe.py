"""Perception Encoders: PE-Core, PE-Lang and PE-Spatial by timm's names (folders of its hub, bare files) and by Meta's
own; PE-Core with its text tower by Meta's and open_clip's.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from vitlab.checkpoints import clip_around, keymap, plain, timm
from vitlab.checkpoints.clip_image import CLASS, openai_blocks
from vitlab.checkpoints.family import Family, Writer, Written
from vitlab.checkpoints.keymap import (
    FIRST_THIRD,
    LAST_THIRDS,
    TABLE,
    TRANSPOSE,
    Dialect,
    Options,
    Renamed,
    Rule,
    State,
    layers,
    shape_of,
)
from vitlab.checkpoints.two_towers import by_path, three_texts
from vitlab.checkpoints.vit import grid_options
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.pe import CORE as CORE_SIZES
from vitlab.models.pe import MODELS, PREPROCESS, SIZES, SPATIAL, SQUASH, PECLIPConfig, PEConfig
from vitlab.models.plain import PlainConfig
from vitlab.models.two_towers import TextConfig

HEADS = {options["width"]: options["heads"] for options in SIZES.values()}
POOLING = {"map": "attention", "avg": "mean", "token": "class"}


def _infer_options(renamed: Renamed, facts: Options) -> Options:
    state = renamed.tensors
    if "head.weight" in state:  # Meta's projection has no bias
        state.setdefault("head.bias", torch.zeros(len(state["head.weight"])))
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
    rules=(*plain.TIMM_RULES, *timm.ATTENTION_POOL),
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

# ---------------------------------------------------------------------------------------------------- Meta's .pt files


def _metas(ours: str, theirs: str, projection: str) -> tuple[Rule, ...]:
    """The image tower, under our and their prefix."""
    pool, their_pool = f"{ours}pool.", f"{theirs}attn_pool."
    block, their_block = f"{ours}blocks.{{i}}.", f"{theirs}transformer.resblocks.{{i}}."
    parts = ("weight", "bias")
    return (
        Rule(f"{ours}patch_embed.proj.weight", f"{theirs}conv1.weight"),
        Rule(f"{ours}class_token", f"{theirs}class_embedding", CLASS),
        Rule(f"{ours}positions.table", f"{theirs}positional_embedding", TABLE),
        *layers(ours, theirs, {"norm_pre": "ln_pre", "norm": "ln_post"}),
        *openai_blocks(block, their_block),
        *(Rule(f"{block}scale{n}.gamma", f"{their_block}ls_{n}.gamma") for n in (1, 2)),
        Rule(f"{pool}query", f"{their_pool}probe"),
        *(Rule(f"{pool}q.{part}", f"{their_pool}attn.in_proj_{part}", FIRST_THIRD) for part in parts),
        *(Rule(f"{pool}kv.{part}", f"{their_pool}attn.in_proj_{part}", LAST_THIRDS) for part in parts),
        *layers(pool, their_pool, {"proj": "attn.out_proj", "norm": "layernorm"}),
        *layers(f"{pool}mlp.", f"{their_pool}mlp.", {"fc1": "c_fc", "fc2": "c_proj"}),
        Rule(projection, f"{theirs}proj", TRANSPOSE),
    )


def _is_metas(keys: set[str]) -> bool:
    """CLIP's image tower has the same names, but a norm at the end and no pooling by attention."""
    prefix = "visual." if "visual.conv1.weight" in keys else ""
    blocks = {f"{prefix}conv1.weight", f"{prefix}ln_pre.weight", f"{prefix}transformer.resblocks.0.ln_1.weight"} <= keys
    own = f"{prefix}attn_pool.probe" in keys or f"{prefix}ln_post.weight" not in keys
    return blocks and own and not clip_around.has_text(keys)


CERTAIN: Options = {"eps": 1e-5, "pool_heads": 8, "rotary_stretch": False, "resize_rule": "bilinear"}
FACEBOOK = Dialect(
    name="facebook",
    rules=_metas("", "{p}", "head.weight"),
    recognise=_is_metas,
    assumed={},
    preprocess=SQUASH,
    options=CERTAIN,
    prefixes=("", "visual."),
)

# ------------------------------------------------------------------------------------------------------------ writing


def _write(model: Network, state: State) -> Written:
    """timm's: PE-Core where attention pools, otherwise PE-Spatial."""
    c: PEConfig = model.config
    core = c.pooling == "attention"
    reasons = {
        f"pooling={c.pooling} {'after' if c.final_norm else 'without'} the last norm": core != c.final_norm,
        f"activation={c.activation}": c.activation != "gelu",
    }
    timm.check_expressible("timm's Perception Encoder", reasons)
    args = plain.timm_arguments(c) | {
        "qkv_fused": True,
        "class_token": c.class_token,
        "init_values": c.layer_scale or None,
        "use_post_transformer_norm": c.final_norm,
        "global_pool": next(theirs for theirs, ours in POOLING.items() if ours == c.pooling),
    }
    if core:
        args |= {
            "attn_pool_num_heads": c.pool_heads,
            "attn_pool_mlp_ratio": timm.ratio(c.width, c.pool_ratio, c.pool_hidden),
        }
    size = next((name for name, options in SIZES.items() if options["width"] == c.width), "tiny")
    size = size if c.class_token else "gigantic"  # the only one that counts patches from 0
    size = "tiny" if c.class_token and size == "gigantic" else size
    patch, side = CORE_SIZES[size][:2] if core else SPATIAL[size]
    kind = "core" if core else "spatial"
    config = timm.hub_config(c, model.preprocess, f"vit_pe_{kind}_{size}_patch{patch}_{side}", args)
    rules = (*plain.write_rules(separate=False), *timm.ATTENTION_POOL)
    notes = timm.eps_note("timm's Perception Encoder", c.eps, 1e-5)
    if not c.rotary_stretch:
        notes.append("at other image sizes timm stretches positions, so its numbers will differ from Meta's there.")
    bare = (
        [] if HEADS.get(c.width) == c.heads else [f"a bare file does not say its heads: load it with heads={c.heads}."]
    )
    return Written(keymap.write("timm", rules, state, heads=c.heads), {"config.json": config}, notes, bare)


FAMILY = plain.family(
    "pe",
    PEConfig,
    (CORE, TOKENS, FACEBOOK),
    _infer_options,
    bare_options=("heads", "eps", "rotary_grid", "pool_heads", "pooling", "image_size"),
    writers={"timm": Writer(_write)},
)


# ------------------------------------------------------------------------------------------------- with a text tower

CLIP_FACEBOOK = Dialect(
    name="facebook",
    rules=(*_metas("image.", "visual.", "image_projection.weight"), *clip_around.TEXT_RULES),
    recognise=lambda keys: "visual.attn_pool.probe" in keys and clip_around.has_text(keys),
    assumed={},
    preprocess=SQUASH,
    options={**{f"image.{name}": value for name, value in CERTAIN.items()}, **clip_around.TEXT_OPTIONS},
    prefixes=clip_around.TEXT_PREFIXES,
)


def _is_trunk(keys: set[str]) -> bool:
    return clip_around.has_text(keys) and _is_core(
        {key.removeprefix(clip_around.TRUNK) for key in keys if clip_around.TRUNK in key}
    )


CLIP_OPEN_CLIP = Dialect(
    name="open_clip",
    rules=(*clip_around.below(TOKENS.rules, "image.", clip_around.TRUNK), *clip_around.TEXT_RULES),
    recognise=_is_trunk,
    assumed={"image.pool_heads": 8},
    preprocess=PREPROCESS,
    options={"image.eps": 1e-5, **clip_around.TEXT_OPTIONS},
    prefixes=clip_around.TEXT_PREFIXES,
    read_stated=clip_around.open_clip_reader(_timm_options, "map"),
)


def _clip_config(renamed: Renamed, image: PlainConfig, text: TextConfig, embed_dim: int) -> PECLIPConfig:
    assert isinstance(image, PEConfig)
    return PECLIPConfig(image, text, embed_dim, projection_bias="image_projection.bias" in renamed.tensors)


def _write_open_clip(model: Network, state: State) -> Written:
    cores = {name: config for name, config in MODELS.items() if name.startswith("pe_core_")}
    trunks = {f"vit_{name}_{config.image_size[0]}": config for name, config in cores.items()}
    return clip_around.write_open_clip(
        model, state, (*plain.write_rules(separate=False), *timm.ATTENTION_POOL), trunks, "map"
    )


CLIP = Family(
    "pe_clip",
    PECLIPConfig,
    (CLIP_FACEBOOK, CLIP_OPEN_CLIP),
    clip_around.reader(PEConfig, _infer_options, _clip_config),
    {"open_clip": Writer(_write_open_clip)},
    bare_options=("image.heads", "image.rotary_grid", "image.pool_heads", "text.heads", "image_size"),
    by_path=by_path,
    check_inputs=three_texts,
    check_output=lambda output: output.logits_per_image,
)
