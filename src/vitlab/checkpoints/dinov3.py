"""DINOv3 by other libraries' names: transformers' folders (read and written), timm's, and Meta's own .pth files.

Meta's files hold the periods of the rotary positions, rounded to bfloat16, and use them so; transformers and timm
compute them in float32. The convolutional variants are refused.
"""

from __future__ import annotations

import re
from typing import NoReturn

import torch
from torch import Tensor

from vitlab.checkpoints import hf, keymap, plain, schema
from vitlab.checkpoints.family import ModelType, Writer, Written
from vitlab.checkpoints.keymap import (
    JOIN,
    ONE_ROW,
    Codec,
    Dialect,
    Options,
    Renamed,
    Rule,
    State,
    layers,
)
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.dinov3 import VARIANTS, DINOv3Config, rotary_periods
from vitlab.models.entry import IMAGENET

HEADS = {options["width"]: options["heads"] for _, options in VARIANTS.values()} | {192: 3, 1536: 24}
HF_MASK = Codec(ONE_ROW.read, lambda t, n, h: [t[None]])  # (1, 1, D) <-> (1, D)


def _infer_options(renamed: Renamed, facts: Options) -> Options:
    registers = renamed.tensors.get("register_tokens")
    if registers is not None and not registers.numel():
        renamed.leave_out("register_tokens", "holds no tokens")
        registers = None
    _split_biases(renamed)
    state = renamed.tensors
    options = plain.encoder_options(state, facts, HEADS, "DINOv3")
    options |= {
        "registers": 0 if registers is None else registers.shape[1],
        "mask_token": "mask_token" in state,
        "qkv_bias": plain.qkv_bias(state),
        "proj_bias": "blocks.0.attention.proj.bias" in state,
        "mlp_bias": "blocks.0.mlp.fc1.bias" in state,
    }
    if options["classes"] and state["head.weight"].shape[1] == 2 * options["width"]:
        options["pooling"] = "class_mean"
    if options["mlp"] == "swiglu" and "activation" not in facts:
        options["activation"] = "silu"
    return options


# ------------------------------------------------------------------------------------------------------- transformers

FIELDS: hf.Fields = {
    "channels": ("num_channels", 3),
    "width": ("hidden_size", 384),
    "depth": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 6),
    "registers": ("num_register_tokens", 0),
    "eps": ("layer_norm_eps", 1e-5),
    "rotary_base": ("rope_theta", 100.0),
    "proj_bias": ("proj_bias", True),
    "mlp_bias": ("mlp_bias", True),
    "attention_dropout": ("attention_dropout", 0.0),
    "stochastic_depth": ("drop_path_rate", 0.0),
}
JITTER = {  # option -> transformers' name, their default, and the value that changes nothing, which is null there
    "position_shift": ("pos_embed_shift", None, 0.0),
    "position_jitter": ("pos_embed_jitter", None, 1.0),
    "position_rescale": ("pos_embed_rescale", 2.0, 1.0),
}
BIASES = {"qv": (True, False, True), True: (True, True, True), False: (False, False, False)}  # of q, k, v


def options_from(config: Options) -> Options:
    """config.json -> options for our config."""
    schema.check(config, schema.HF_DINOV3, "config.json")
    if config.get("model_type") != "dinov3_vit":
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r} beside the weights of a DINOv3."
        )
    patch_size = config.get("patch_size", 16)
    sides = {patch_size} if isinstance(patch_size, int) else set(patch_size)
    if len(sides) > 1:
        raise CheckpointError(f"config.json has patch_size {patch_size}; only square patches are known.")
    options = hf.read_fields(config, FIELDS)
    options["patch_size"] = P = sides.pop()
    size = config.get("image_size", 224)
    pair = (size, size) if isinstance(size, int) else tuple(size)
    options["image_size"] = tuple(max(side // P, 1) * P for side in pair)  # no weight belongs to it
    biases = {f"{part}_bias": config.get(f"{part}_bias", part != "key") for part in ("query", "key", "value")}
    if tuple(biases.values()) not in BIASES.values():
        given = ", ".join(f"{name} {str(value).lower()}" for name, value in biases.items())
        raise CheckpointError(f"config.json has {given}; known are all of them, none, or all but the keys'.")
    options["qkv_bias"] = next(ours for ours, theirs in BIASES.items() if theirs == tuple(biases.values()))
    options["mlp"] = "swiglu" if config.get("use_gated_mlp", False) else "mlp"
    options["mlp_ratio"] = config.get("intermediate_size", 1536) / options["width"]
    options["activation"] = hf.activation_of(config)
    options["layer_scale"] = float(config.get("layerscale_value", 1.0)) or 1.0  # a start value
    for ours, (theirs, default, nothing) in JITTER.items():
        value = config.get(theirs, default)
        options[ours] = nothing if value is None else float(value)
    return options


LAYER = "{p}layer.{i}."
COMMON = (
    Rule("class_token", "embeddings.cls_token"),
    Rule("register_tokens", "embeddings.register_tokens"),
    Rule("mask_token", "embeddings.mask_token", HF_MASK),
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.*"),
    *plain.separate_qkv("blocks.{i}.attention.", LAYER + "attention."),
    Rule("blocks.{i}.attention.proj.*", LAYER + "attention.o_proj.*"),
    *layers("blocks.{i}.", LAYER, ("norm1", "norm2")),
    Rule("blocks.{i}.scale1.gamma", LAYER + "layer_scale1.lambda1"),
    Rule("blocks.{i}.scale2.gamma", LAYER + "layer_scale2.lambda1"),
    Rule("blocks.{i}.mlp.fc2.*", LAYER + "mlp.down_proj.*"),
    Rule("norm.*", "norm.*"),
)
GATED = Rule("blocks.{i}.mlp.fc1.*", (LAYER + "mlp.gate_proj.*", LAYER + "mlp.up_proj.*"), JOIN)
PLAIN = Rule("blocks.{i}.mlp.fc1.*", LAYER + "mlp.up_proj.*")
PREPROCESS: Options = {**IMAGENET, "interpolation": "bilinear", "how": "stretch"}
MODEL_TYPES = {"dinov3_vit": ModelType("DINOv3ViT", preprocess=PREPROCESS)}
HF = Dialect(
    name="hf",
    rules=(*COMMON, GATED, PLAIN),
    recognise=lambda keys: (
        "embeddings.patch_embeddings.weight" in keys
        and any(key.endswith("layer.0.layer_scale1.lambda1") for key in keys)
    ),
    assumed={"eps": 1e-5},
    preprocess=PREPROCESS,
    prefixes=("", "model."),  # version 5 has a model. in memory, which it does not save
    read_stated=hf.reader(options_from, MODEL_TYPES),
)


def config_for(c: DINOv3Config) -> Options:
    """config.json."""
    query, key, value = BIASES[c.qkv_bias]
    return {
        **hf.write_fields(c, FIELDS),
        "architectures": ["DINOv3ViTModel"],
        "model_type": "dinov3_vit",
        "image_size": c.image_size[0] if c.image_size[0] == c.image_size[1] else list(c.image_size),
        "patch_size": c.patch_size,
        "intermediate_size": c.mlp_hidden,
        "use_gated_mlp": c.mlp == "swiglu",
        "hidden_act": hf.activation_for(c.activation),
        "layerscale_value": c.layer_scale,
        "query_bias": query,
        "key_bias": key,
        "value_bias": value,
        **{t: None if c.option(ours) == nothing else c.option(ours) for ours, (t, _, nothing) in JITTER.items()},
        "dtype": "float32",
    }


def _write(model: Network, state: State) -> Written:
    """transformers' DINOv3ViTModel."""
    c: DINOv3Config = model.config
    reasons = {
        f"classes={c.classes} (it has no classifier: load it with classes=0)": bool(c.classes),
        f"pooling={c.pooling}": c.pooling != "class",
        "rotary_dtype=bfloat16 (load it with rotary_dtype='float32', which changes the numbers a little)": (
            c.rotary_dtype != "float32"
        ),
    }
    if wrong := [reason for reason, has_it in reasons.items() if has_it]:
        raise UsageError(f"transformers' dinov3_vit cannot express {', '.join(wrong)}. Use --to native.")
    like = state["class_token"]
    state = {"mask_token": like.new_zeros(1, c.width), "register_tokens": like.new_zeros(1, 0, c.width), **state}
    rules = (*COMMON, GATED if c.mlp == "swiglu" else PLAIN)
    tensors = keymap.write("transformers", rules, state, heads=c.heads)
    stretches = model.preprocess is not None and model.preprocess.how == "stretch"
    return hf.folder(tensors, config_for(c), model.preprocess, "DINOv3ViTImageProcessorFast" if stretches else "")


# ---------------------------------------------------------------------------------------------------------------- timm

TIMM_SIZES = {"tiny": {"width": 192, "heads": 3}} | {
    timm: {name: options[name] for name in ("width", "heads")} for timm, options in VARIANTS.values()
}
POOLING = {"avg": "mean", "token": "class"}


def _timm_options(architecture: str, pool: Options) -> Options | None:
    """timm pools the patches where the authors read the class token, unless global_pool says otherwise."""
    match = re.fullmatch(r"vit_(\w+)_patch16_dinov3(_qkvb)?(\..*)?", architecture)
    if match is None or match[1] not in TIMM_SIZES:
        return None
    kind = pool.get("global_pool", "avg")
    if kind not in POOLING:
        raise CheckpointError(f"config.json has global_pool {kind!r}; known are {', '.join(POOLING)}.")
    return {**TIMM_SIZES[match[1]], "eps": 1e-5, "pooling": POOLING[kind]}


CROP: Options = {**IMAGENET, "interpolation": "bicubic", "how": "crop"}
TIMM = Dialect(
    name="timm",
    rules=plain.TIMM_RULES,
    recognise=lambda keys: (
        {"blocks.0.gamma_1", "blocks.0.gamma_2", "blocks.0.attn.qkv.weight", "cls_token", "reg_token"} <= keys
        and "pos_embed" not in keys
    ),
    assumed={"eps": 1e-5, "pooling": "mean"},
    preprocess=CROP,
    options={"layer_scale": 1e-5},
    read_stated=plain.timm_reader("DINOv3's (vit_small_patch16_dinov3, ...)", _timm_options),
)


# --------------------------------------------------------------------------------------------------------- Meta's .pth


def _masked(parts: list[Tensor]) -> Tensor:
    """The bias of queries, keys and values, without what its mask of zeros and ones takes out."""
    bias, mask = parts
    return torch.where(mask == 0, torch.zeros_like(bias), bias * mask)


def _split_biases(renamed: Renamed) -> None:
    """A bias whose part for keys is masked is one of queries and values."""
    for key in [key for key in renamed.tensors if re.fullmatch(r"blocks\.\d+\.attention\.qkv\.bias", key)]:
        origin = renamed.origin[key]
        if not origin[-1].endswith("bias_mask"):
            continue
        q, k, v = renamed.tensors.pop(key).chunk(3)
        if k.any():
            raise CheckpointError(f"{origin[-1]} leaves the keys a bias, which no DINOv3 of Meta's has.")
        del renamed.origin[key]
        for name, value in (("q_bias", q), ("v_bias", v)):
            renamed.tensors[key.replace("bias", name)] = value.contiguous()
            renamed.origin[key.replace("bias", name)] = origin


def _periods(state: State) -> Options:
    """What `rope_embed.periods` shows: the heads, and whether they are rounded."""
    periods = state.get("rope_embed.periods")
    if periods is None or periods.ndim != 1:
        return {}
    width = state["patch_embed.proj.weight"].shape[0]
    expected = rotary_periods(4 * len(periods), 100.0)
    stored = periods.float()
    if torch.allclose(stored, expected, rtol=1e-5):
        dtype = "float32"
    elif torch.allclose(stored, expected.bfloat16().float(), rtol=1e-5):
        dtype = "bfloat16"
    else:
        raise CheckpointError(
            f"rope_embed.periods go up to {stored.max().item():g}; known are those of base 100, up to "
            f"{expected.max().item():g}."
        )
    return {"heads": width // (4 * len(periods)), "rotary_dtype": dtype}


FACEBOOK = Dialect(
    name="facebook",
    rules=(
        Rule("patch_embed.proj.*", "patch_embed.proj.*"),
        Rule("class_token", "cls_token"),
        Rule("register_tokens", "storage_tokens"),
        Rule("mask_token", "mask_token", ONE_ROW),
        *layers("blocks.{i}.", "blocks.{i}.", {"norm1": "norm1", "norm2": "norm2", "attention.proj": "attn.proj"}),
        Rule("blocks.{i}.attention.qkv.weight", "blocks.{i}.attn.qkv.weight"),
        Rule(
            "blocks.{i}.attention.qkv.bias",
            ("blocks.{i}.attn.qkv.bias", "blocks.{i}.attn.qkv.bias_mask"),
            Codec(_masked),
        ),
        Rule("blocks.{i}.scale1.gamma", "blocks.{i}.ls1.gamma"),
        Rule("blocks.{i}.scale2.gamma", "blocks.{i}.ls2.gamma"),
        Rule("blocks.{i}.mlp.fc1.*", ("blocks.{i}.mlp.w1.*", "blocks.{i}.mlp.w2.*"), JOIN),
        Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.w3.*"),
        *layers("blocks.{i}.mlp.", "blocks.{i}.mlp.", ("fc1", "fc2")),
        Rule("norm.*", "norm.*"),
    ),
    recognise=lambda keys: "blocks.0.attn.qkv.weight" in keys and bool(keys & {"storage_tokens", "rope_embed.periods"}),
    assumed={"eps": 1e-5},
    preprocess=PREPROCESS,
    options={"layer_scale": 1e-5},
    hints=_periods,
    ignored={
        r"rope_embed\.periods": "computed from their base",
        r"local_cls_norm\..*": "for the small crops of the pre-training",
    },
)


# ------------------------------------------------------------------------------------------------------------ ConvNeXt


def _refuse(state: State) -> NoReturn:
    raise CheckpointError(
        "a ConvNeXt, as DINOv3's convolutional variants are: it has no patches and no attention, and is not read here. "
        "Take a Vision Transformer of DINOv3, e.g. hf-hub:facebook/dinov3-vits16-pretrain-lvd1689m."
    )


MARKS = ("stages.0.layers.0.depthwise_conv.weight", "stages.0.blocks.0.conv_dw.weight", "stages.0.0.dwconv.weight")
CONVNEXT = Dialect(  # of bare files: a folder's config.json says what it is
    name="convnext",
    rules=(),
    recognise=lambda keys: any(key.endswith(MARKS) for key in keys),
    assumed={},
    preprocess={},
    ignored={".*": ""},
    hints=_refuse,
)

FAMILY = plain.family(
    "dinov3",
    DINOv3Config,
    (HF, TIMM, FACEBOOK, CONVNEXT),
    _infer_options,
    bare_options=("heads", "eps", "pooling", "image_size"),
    model_types=MODEL_TYPES,
    writers={"hf": Writer(_write, any_size=lambda config: True)},
)
