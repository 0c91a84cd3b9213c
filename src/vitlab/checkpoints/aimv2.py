"""AIMv2: transformers' Aimv2VisionModel and Aimv2Model, which has a text tower too (read and written), timm's networks
and Apple's own files (read).

Apple's text tower is causal, and so is ours. transformers' is too where the attention_mask has padding in it or
attention is "eager"; otherwise (5.22) every token sees every other there, and texts without padding differ.
"""

from __future__ import annotations

import math
from dataclasses import replace

from vitlab.advice import to_type
from vitlab.checkpoints import hf, keymap, schema, staged
from vitlab.checkpoints.clip import hf_tokenizer
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import JOIN, TABLE, Dialect, Options, Renamed, Rule, Source, State, Stated, layers
from vitlab.checkpoints.two_towers import (
    TEXT_FIELDS,
    by_path,
    check_stated,
    infer_around,
    read_tokenizer,
    three_texts,
    with_defaults,
)
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.aimv2 import CROP, SIZES, AIMv2Config, AIMv2LiTConfig, AIMv2TextConfig
from vitlab.models.base import Network
from vitlab.models.clip import MAX_SCALE

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


def _hf_options(config: Options, where: str = "config.json") -> Options:
    schema.check(config, KINDS, where)
    if config.get("model_type", "aimv2_vision_model") not in MODEL_TYPES:
        raise CheckpointError(f"{where} has model_type {config['model_type']!r} beside the weights of an AIMv2.")
    if config.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where} has hidden_act {config['hidden_act']!r}; an AIMv2 has silu.")
    positions = "sincos" if config.get("is_native") else "learned"
    return {**hf.read_fields(config, FIELDS), "positions": positions}


APPLE_FIELDS: hf.Fields = {name: FIELDS[name] for name in FIELDS if name not in ("qkv_bias", "mlp_bias")}


def _apple_options(config: Options) -> Options:
    """The config.json beside Apple's own code; the weights show whether there are biases and a table."""
    schema.check(config, KINDS, "config.json")
    if config.get("projection_dropout"):
        raise CheckpointError("config.json has projection_dropout, which is not known here: set it to 0.")
    return hf.read_fields(config, APPLE_FIELDS)


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
        say = to_type("vitlab.load(path, heads=...)", "--heads NUMBER")
        raise CheckpointError(f"the heads of a width of {width} are not known: {say}.")
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


def _hf_blocks(ours: str, theirs: str) -> tuple[Rule, ...]:
    """The blocks of either tower, and the norm after them."""
    block, layer = ours + "blocks.{i}.", theirs + "encoder.layers.{i}."
    return (
        Rule(f"{block}norm1.weight", f"{layer}rms_norm1.weight"),
        Rule(f"{block}attention.qkv.*", tuple(f"{layer}attention.{part}_proj.*" for part in "qkv"), JOIN),
        Rule(f"{block}attention.proj.*", f"{layer}attention.out_proj.*"),
        Rule(f"{block}norm2.weight", f"{layer}rms_norm2.weight"),
        Rule(f"{block}mlp.fc1.*", (f"{layer}ffn.gate_proj.*", f"{layer}ffn.up_proj.*"), JOIN),
        Rule(f"{block}mlp.fc2.*", f"{layer}ffn.down_proj.*"),
        Rule(f"{ours}norm.weight", f"{theirs}rms_norm.weight"),
    )


def _hf_image(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{ours}patch_embed.proj.*", f"{theirs}embeddings.patch_embed.*"),
        Rule(f"{ours}patch_embed.norm_out.weight", f"{theirs}embeddings.rms_norm.weight"),
        Rule(f"{ours}positions.table", f"{theirs}embeddings.position_embedding.weight", TABLE),
        *_hf_blocks(ours, theirs),
        Rule(f"{ours}pool.query", f"{theirs}head.cls_token"),
        Rule(f"{ours}pool.kv.*", (f"{theirs}head.k_proj.*", f"{theirs}head.v_proj.*"), JOIN),
        Rule(f"{ours}pool.proj.*", f"{theirs}head.output_proj.*"),
    )


def _apple_blocks(ours: str, theirs: str) -> tuple[Rule, ...]:
    block, layer = ours + "blocks.{i}.", theirs + "trunk.blocks.{i}."
    return (
        Rule(f"{block}norm1.weight", f"{layer}norm_1.weight"),
        *layers(f"{block}attention.", f"{layer}attn.", ("qkv", "proj")),
        Rule(f"{block}norm2.weight", f"{layer}norm_2.weight"),
        Rule(f"{block}mlp.fc1.*", (f"{layer}mlp.fc1.*", f"{layer}mlp.fc3.*"), JOIN),
        Rule(f"{block}mlp.fc2.*", f"{layer}mlp.fc2.*"),
        Rule(f"{ours}norm.weight", f"{theirs}trunk.post_trunk_norm.weight"),
    )


def _apple_image(ours: str, theirs: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{ours}patch_embed.proj.*", f"{theirs}preprocessor.patchifier.proj.*"),
        Rule(f"{ours}patch_embed.norm_out.weight", f"{theirs}preprocessor.patchifier.norm.weight"),
        Rule(f"{ours}positions.table", f"{theirs}preprocessor.pos_embed", TABLE),
        *_apple_blocks(ours, theirs),
        Rule(f"{ours}pool.query", f"{theirs}head.cls_token"),
        Rule(f"{ours}pool.kv.*", (f"{theirs}head.k.*", f"{theirs}head.v.*"), JOIN),
        Rule(f"{ours}pool.proj.*", f"{theirs}head.linear.*"),
    )


HF = Dialect(
    name="hf",
    rules=_hf_image("", "{p}"),
    recognise=lambda keys: {"encoder.layers.0.ffn.gate_proj.weight", "embeddings.patch_embed.weight"} <= keys,
    assumed={"eps": 1e-5},
    preprocess={**CROP, "size": (224, 224)},
    read_stated=hf.reader(_hf_options, MODEL_TYPES),
)
APPLE = Dialect(
    name="apple",
    rules=_apple_image("", ""),
    recognise=lambda keys: {"preprocessor.patchifier.proj.weight", "trunk.blocks.0.mlp.fc3.weight"} <= keys,
    assumed={"eps": 1e-5},
    preprocess={**CROP, "size": (224, 224)},
    read_stated=hf.reader(_apple_options, {"aimv2": MODEL_TYPES["aimv2_vision_model"]}),
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


def _vision_config(c: AIMv2Config) -> Options:
    """vision_config, or config.json of a vision model."""
    height, width = c.image_size
    if height != width:
        raise UsageError(f"transformers' AIMv2 cannot express images of {height}x{width}, which are no square.")
    return hf.write_fields(c, FIELDS) | {
        "model_type": "aimv2_vision_model",
        "hidden_act": "silu",
        "use_head": c.pooling == "attention",
        "is_native": c.positions == "sincos",
    }


def _write(model: Network, state: State) -> Written:
    c: AIMv2Config = model.config
    if c.classes:
        raise UsageError("transformers' aimv2_vision_model cannot express a classifier: load it with classes=0.")
    config = {"architectures": ["Aimv2VisionModel"], **_vision_config(c), "dtype": "float32"}
    return hf.folder(keymap.write("transformers", HF.rules, state, heads=c.heads), config, model.preprocess)


FAMILY = staged.family(
    "aimv2",
    AIMv2Config,
    (HF, TIMM, APPLE),
    _infer_options,
    bare_options=("eps", "image_size", "heads"),
    model_types=MODEL_TYPES,
    writers={"hf": Writer(_write, any_size=lambda config: config.positions == "sincos")},
)


# -------------------------------------------------------------------------------------------------- with a text tower

LIT_TYPES = {"aimv2": ModelType("CLIP", MODEL_TYPES["aimv2_vision_model"].size_note, CROP)}
LIT_KINDS: schema.Kinds = {**KINDS, "max_logit_scale": schema.ABOVE_ZERO}
TEXT_HEADS = {768: 6}  # of the one that is released
HF_TEXT: hf.Fields = {
    **with_defaults(TEXT_FIELDS, {"hidden_size": 768, "num_attention_heads": 6}),
    "text.eps": ("rms_norm_eps", 1e-5),
    "text.qkv_bias": ("qkv_bias", False),
    "text.mlp_bias": ("mlp_bias", False),
}


def _read_lit(source: Source) -> Stated:
    path = source.path / "config.json"
    if not path.is_file():
        return Stated(tokenizer=read_tokenizer(source))
    config = schema.check(read_json(path), LIT_KINDS, "config.json")
    if config.get("model_type") != "aimv2":
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r}, the weights are an Aimv2Model's."
        )
    if config.get("max_logit_scale", MAX_SCALE) != MAX_SCALE:
        raise CheckpointError(f"config.json has max_logit_scale {config['max_logit_scale']}; known is {MAX_SCALE:g}.")
    text, vision = hf.tower_config(config, "text"), hf.tower_config(config, "vision")
    schema.check(text, KINDS, "config.json's text_config")
    tokenizer = read_tokenizer(source)
    options = {f"image.{name}": value for name, value in _lit_vision(source.dialect, vision).items()}
    options |= hf.read_fields(text, HF_TEXT)
    if "max_context_length" in text:  # Apple's name for it
        options["text.context"] = text["max_context_length"]
    options["text.activation"] = hf.activation_of(text, "silu")
    options["text.end_id"] = end = text.get("eos_token_id", 49407)
    options["text.pad_id"] = tokenizer.pad_id if tokenizer is not None else end
    options["embed_dim"] = config.get("projection_dim", 512 if source.dialect.name == "hf" else 768)
    return hf.with_processor(Stated(options, tokenizer=tokenizer), source.path, LIT_TYPES["aimv2"])


def _lit_vision(dialect: Dialect, vision: Options) -> Options:
    if dialect.name == "hf":
        return _hf_options(vision, "config.json's vision_config")
    return _apple_options(vision)


def _is_apples(keys: set[str]) -> bool:
    return {"text_encoder.preprocessor.text_embedding.weight", "image_projector.weight"} <= keys


LIT_HF = Dialect(
    name="hf",
    rules=(
        *_hf_image("image.", "vision_model."),
        Rule("text.embed.weight", "text_model.embeddings.token_embedding.weight"),
        Rule("text.positions", "text_model.embeddings.position_embedding.weight"),
        *_hf_blocks("text.", "text_model."),
        Rule("image_projection.weight", "visual_projection.weight"),
        Rule("text_projection.weight", "text_projection.weight"),
        Rule("log_scale", "logit_scale"),
    ),
    recognise=lambda keys: (
        {f"{tower}_model.encoder.layers.0.ffn.gate_proj.weight" for tower in ("vision", "text")} <= keys
    ),
    assumed={"image.eps": 1e-5, "text.eps": 1e-5},
    preprocess=CROP,
    read_stated=_read_lit,
)
LIT_APPLE = replace(
    LIT_HF,
    name="apple",
    rules=(
        *_apple_image("image.", "image_encoder."),
        Rule("text.embed.weight", "text_encoder.preprocessor.text_embedding.weight"),
        Rule("text.positions", "text_encoder.preprocessor.positional_embedding"),
        *_apple_blocks("text.", "text_encoder."),
        Rule("image_projection.weight", "image_projector.weight"),
        Rule("text_projection.weight", "text_projector.weight"),
        Rule("log_scale", "log_logit_scale"),
    ),
    recognise=_is_apples,
)


def _infer_lit(renamed: Renamed, clues: Clues) -> Reading:
    state = renamed.tensors
    embed_dim, _ = keymap.shape_of(state, "image_projection.weight", 2, "AIMv2")
    image, text, assumed = infer_around(renamed, clues, AIMv2Config, _infer_options, TEXT_HEADS)
    text |= {
        "qkv_bias": "text.blocks.0.attention.qkv.bias" in state,
        "mlp_bias": "text.blocks.0.mlp.fc1.bias" in state,
    }
    end = text.get("end_id", text["vocab"] - 1)
    text = {"end_id": end, "pad_id": end, **text}
    config = AIMv2LiTConfig(image, AIMv2TextConfig(**text), embed_dim)
    check_stated(config, embed_dim, clues.stated.options)
    return Reading(config, assumed)


def _write_lit(model: Network, state: State) -> Written:
    c: AIMv2LiTConfig = model.config
    if c.image.pooling != "attention" or c.loss == "sigmoid":
        what = "loss=sigmoid" if c.loss == "sigmoid" else f"pooling={c.image.pooling}"
        raise UsageError(f"transformers' Aimv2Model cannot express {what}. Use --to native.")
    text = {
        **hf.write_fields(c, HF_TEXT),
        "model_type": "aimv2_text_model",
        "intermediate_size": c.text.mlp_hidden,
        "hidden_act": hf.activation_for(c.text.activation),
        "eos_token_id": c.text.end_id,
    }
    config = {
        "architectures": ["Aimv2Model"],
        "model_type": "aimv2",
        "projection_dim": c.embed_dim,
        "text_config": text,
        "vision_config": _vision_config(c.image),
        "dtype": "float32",
    }
    tensors = keymap.write("transformers", LIT_HF.rules, state, heads=c.image.heads)
    written = hf.folder(tensors, config, model.preprocess, processor="CLIPImageProcessor")
    if model.tokenizer is None:
        note = "the model has no tokenizer, so none was written: transformers needs vocab.json and merges.txt."
        return replace(written, notes=[note, *written.notes])
    return replace(written, files={**hf_tokenizer(model.tokenizer), **written.files})


LIT = Family(
    "aimv2_lit",
    AIMv2LiTConfig,
    (LIT_HF, LIT_APPLE),
    _infer_lit,
    {"hf": Writer(_write_lit, any_size=lambda config: config.image.positions == "sincos")},
    bare_options=("image.heads", "image.eps", "text.heads", "text.eps", "text.activation", "image_size"),
    model_types=LIT_TYPES,
    by_path=by_path,
    check_inputs=three_texts,
    check_output=lambda output: output.logits_per_image,
)
