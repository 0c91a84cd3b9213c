"""AIMv2: transformers' Aimv2VisionModel (read and written), and timm's networks (read)."""

from __future__ import annotations

import math

from vitlab.checkpoints import hf, keymap, schema, staged
from vitlab.checkpoints.family import ModelType, Writer, Written
from vitlab.checkpoints.keymap import JOIN, TOKENS, Codec, Dialect, Options, Renamed, Rule, State, layers
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.aimv2 import CROP, SIZES, AIMv2Config
from vitlab.models.base import Network

TABLE = Codec(TOKENS.read, lambda t, n, h: [t[0]])  # (N, D) <-> (1, N, D)
FIELDS: hf.Fields = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 14),
    "channels": ("num_channels", 3),
    "width": ("hidden_size", 1024),
    "depth": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 8),
    "hidden": ("intermediate_size", 2816),
    "eps": ("rms_norm_eps", 1e-5),
    "qkv_bias": ("qkv_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "attention_dropout": ("attention_dropout", 0.0),
}
MODEL_TYPES = {"aimv2_vision_model": ModelType("CLIP", "transformers reads other sizes by native networks only", CROP)}
KINDS: schema.Kinds = {
    **schema.HF,
    **dict.fromkeys(("patch_size", "intermediate_size"), schema.POSITIVE),
    "rms_norm_eps": schema.EPS,
    **dict.fromkeys(("mlp_bias", "use_head", "is_native"), schema.FLAG),
}


def _hf_options(config: Options) -> Options:
    schema.check(config, KINDS, "config.json")
    if config["model_type"] not in MODEL_TYPES:
        raise CheckpointError(f"config.json has model_type {config['model_type']!r} beside the weights of an AIMv2.")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config.json has hidden_act {config['hidden_act']!r}; an AIMv2 has silu.")
    positions = "sincos" if config.get("is_native") else "learned"
    return {**hf.read_fields(config, FIELDS), "positions": positions}


def _timm_options(config: Options) -> Options:
    sizes = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "class_token", "fc_norm")
    args = staged.check_arguments(config, (*sizes, "proj_bias", "global_pool"))
    staged.check_pooling(config, ("avg",))
    heads = {"heads": args["num_heads"]} if "num_heads" in args else {}
    return {"eps": 1e-5, **heads}


def _infer_options(renamed: Renamed, stated: Options) -> Options:
    state = renamed.tensors
    width, channels, patch, _ = keymap.shape_of(state, "patch_embed.proj.weight", 4, "AIMv2")
    numbers = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    if numbers != set(range(len(numbers))) or not numbers:
        raise CheckpointError(f"the blocks are not numbered from 0 without gaps: {sorted(numbers)[-3:]} are there.")
    heads = stated.get("heads", {width: heads for width, _, heads, _ in SIZES.values()}.get(width))
    if heads is None:
        raise CheckpointError(f"the heads of a width of {width} are not known: vitlab.load(path, heads=...).")
    table = state.get("positions.table")
    side = 0 if table is None else math.isqrt(table.shape[1])
    size = {} if "image_size" in stated or table is None else {"image_size": (side * patch, side * patch)}
    return {
        "width": width,
        "channels": channels,
        "patch_size": patch,
        "depth": len(numbers),
        "heads": heads,
        "hidden": keymap.shape_of(state, "blocks.0.mlp.fc2.weight", 2, "AIMv2")[1],
        "classes": keymap.shape_of(state, "head.weight", 2)[0] if "head.weight" in state else 0,
        "qkv_bias": "blocks.0.attention.qkv.bias" in state,
        "mlp_bias": "blocks.0.mlp.fc1.bias" in state,
        "positions": "sincos" if table is None else "learned",
        "pooling": "attention" if "pool.query" in state else "mean",
        **size,
    }


_LAYER = "{p}encoder.layers.{i}."
HF = Dialect(
    name="hf",
    rules=(
        Rule("patch_embed.proj.*", "{p}embeddings.patch_embed.*"),
        Rule("patch_embed.norm_out.weight", "{p}embeddings.rms_norm.weight"),
        Rule("positions.table", "{p}embeddings.position_embedding.weight", TABLE),
        Rule("blocks.{i}.norm1.weight", _LAYER + "rms_norm1.weight"),
        Rule("blocks.{i}.attention.qkv.*", tuple(f"{_LAYER}attention.{part}_proj.*" for part in "qkv"), JOIN),
        Rule("blocks.{i}.attention.proj.*", _LAYER + "attention.out_proj.*"),
        Rule("blocks.{i}.norm2.weight", _LAYER + "rms_norm2.weight"),
        Rule("blocks.{i}.mlp.fc1.*", (_LAYER + "ffn.gate_proj.*", _LAYER + "ffn.up_proj.*"), JOIN),
        Rule("blocks.{i}.mlp.fc2.*", _LAYER + "ffn.down_proj.*"),
        Rule("norm.weight", "{p}rms_norm.weight"),
        Rule("pool.query", "{p}head.cls_token"),
        Rule("pool.kv.*", ("{p}head.k_proj.*", "{p}head.v_proj.*"), JOIN),
        Rule("pool.proj.*", "{p}head.output_proj.*"),
    ),
    recognise=lambda keys: any(key.endswith("encoder.layers.0.ffn.gate_proj.weight") for key in keys),
    assumed={"eps": 1e-5},
    preprocess={**CROP, "size": (224, 224)},
    read_stated=hf.reader(_hf_options, MODEL_TYPES),
)
TIMM = Dialect(
    name="timm",
    rules=(
        Rule("patch_embed.proj.*", "patch_embed.proj.*"),
        Rule("patch_embed.norm_out.weight", "patch_embed.norm.weight"),
        Rule("positions.table", "pos_embed"),
        Rule("blocks.{i}.norm1.weight", "blocks.{i}.norm1.weight"),
        *layers("blocks.{i}.attention.", "blocks.{i}.attn.", ("qkv", "proj")),
        Rule("blocks.{i}.norm2.weight", "blocks.{i}.norm2.weight"),
        Rule("blocks.{i}.mlp.fc1.*", ("blocks.{i}.mlp.fc1_g.*", "blocks.{i}.mlp.fc1_x.*"), JOIN),
        Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.fc2.*"),
        Rule("norm.weight", "norm.weight"),
        Rule("head.*", "head.*"),
    ),
    recognise=lambda keys: {"patch_embed.norm.weight", "blocks.0.mlp.fc1_g.weight"} <= keys and "norm.bias" not in keys,
    assumed={"eps": 1e-5},
    preprocess={**CROP, "size": (224, 224)},
    read_stated=staged.timm_reader(_timm_options),
)


def _write(model: Network, state: State) -> Written:
    c: AIMv2Config = model.config
    height, width = c.image_size
    if c.classes or height != width:
        what = "a classifier" if c.classes else f"images of {height}x{width}, which are no square"
        raise UsageError(f"transformers' aimv2_vision_model cannot express {what}: load it with classes=0.")
    config = hf.write_fields(c, FIELDS) | {
        "architectures": ["Aimv2VisionModel"],
        "model_type": "aimv2_vision_model",
        "hidden_act": "silu",
        "use_head": c.pooling == "attention",
        "is_native": c.positions == "sincos",
        "dtype": "float32",
    }
    return hf.folder(keymap.write("transformers", HF.rules, state, heads=c.heads), config, model.preprocess)


FAMILY = staged.family(
    "aimv2",
    AIMv2Config,
    (HF, TIMM),
    _infer_options,
    bare_options=("eps", "image_size", "heads"),
    model_types=MODEL_TYPES,
    writers={"hf": Writer(_write, any_size=lambda config: config.positions == "sincos")},
)
