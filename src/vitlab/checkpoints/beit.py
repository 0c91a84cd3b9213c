"""BEiT, BEiT v2 and data2vec's vision network: transformers' folders (read and written) and timm's (read).

transformers 5 renamed its keys in memory but still saves the names of version 4: both are read, version 4 is written.
"""

from __future__ import annotations

import math
import re

from torch import Tensor

from vitlab.advice import to_type
from vitlab.checkpoints import hf, keymap, plain, schema, staged
from vitlab.checkpoints.family import ModelType, Writer, Written
from vitlab.checkpoints.keymap import JOIN, Dialect, Options, Renamed, Rule, State, layers
from vitlab.errors import CheckpointError, UsageError
from vitlab.layers.patches import grid_of
from vitlab.models.base import Network
from vitlab.models.beit import BEiTConfig
from vitlab.models.entry import HALF

TABLE = "relative_position_bias_table"


def _hf_block() -> tuple[Rule, ...]:
    ours, theirs = "blocks.{i}.", "{p}encoder.layer.{i}."
    inside = theirs + "attention.attention."
    return (
        Rule(ours + "attention.qkv.weight", tuple(f"{inside}{n}.weight" for n in ("query", "key", "value")), JOIN),
        Rule(ours + "attention.qkv.q_bias", inside + "query.bias"),
        Rule(ours + "attention.qkv.v_bias", inside + "value.bias"),
        Rule(ours + "attention.relative.table", f"{inside}relative_position_bias.{TABLE}"),
        *layers(ours, theirs, {"norm1": "layernorm_before", "norm2": "layernorm_after"}),
        *layers(ours, theirs, {"attention.proj": "attention.output.dense"}),
        *layers(ours, theirs, {"mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}),
        Rule(ours + "scale1.gamma", theirs + "lambda_1"),
        Rule(ours + "scale2.gamma", theirs + "lambda_2"),
    )


def _new_names() -> tuple[Rule, ...]:
    """Version 5's names, in memory only."""
    ours, theirs = "blocks.{i}.", "{p}layers.{i}."
    names = {"attention.proj": "attention.o_proj", "norm1": "layernorm_before", "norm2": "layernorm_after"}
    return (
        *plain.separate_qkv(ours + "attention.", theirs + "attention."),
        *layers(ours, theirs, names | {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}),
        Rule(ours + "scale1.gamma", theirs + "lambda_1"),
        Rule(ours + "scale2.gamma", theirs + "lambda_2"),
        Rule(ours + "attention.relative.table", f"{theirs}relative_position_bias.{TABLE}"),
        Rule("relative.table", f"{{p}}shared_position_bias.{TABLE}"),
    )


FIELDS: hf.Fields = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "channels": ("num_channels", 3),
    "width": ("hidden_size", 768),
    "depth": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "eps": ("layer_norm_eps", 1e-12),
    "layer_scale": ("layer_scale_init_value", 0.1),
    "layer_bias": ("use_relative_position_bias", False),
    "shared_bias": ("use_shared_relative_position_bias", False),
    "absolute_positions": ("use_absolute_position_embeddings", False),
    "mask_token": ("use_mask_token", False),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "stochastic_depth": ("drop_path_rate", 0.1),
}
MODEL_TYPES = {"beit": ModelType("Beit", "", HALF), "data2vec-vision": ModelType("Beit", "", HALF)}


def _hf_options(config: Options) -> Options:
    schema.check(config, {**schema.HF, "patch_size": schema.POSITIVE}, "config.json")
    if config["model_type"] not in MODEL_TYPES:
        raise CheckpointError(f"config.json has model_type {config['model_type']!r} beside the weights of a BEiT.")
    options: Options = hf.read_fields(config, FIELDS) | {"activation": hf.activation_of(config)}
    size = options["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    rows, columns = grid_of(height, width, options["patch_size"])
    biased = bool(options["layer_bias"] or options["shared_bias"])
    return options | {"layer_scale": float(options["layer_scale"]), "swapped_bias": biased and rows != columns}


def _timm_options(config: Options) -> Options:
    sizes = ("patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "qkv_bias", "init_values")
    biases = ("use_abs_pos_emb", "use_rel_pos_bias", "use_shared_rel_pos_bias")  # the weights show them
    args = staged.check_arguments(config, (*sizes, *biases, "global_pool"))
    pooled = args.get("global_pool", config.get("global_pool", "avg"))
    if pooled not in ("avg", "token"):
        raise CheckpointError(f"timm's global_pool={pooled!r} is not known for a BEiT; known are avg and token.")
    return {"eps": 1e-6, "activation": "gelu"}


def _infer_options(renamed: Renamed, stated: Options) -> Options:
    state = renamed.tensors
    width, channels, patch, _ = keymap.shape_of(state, "patch_embed.proj.weight", 4, "BEiT")
    numbers = {int(key.split(".")[1]) for key in state if key.startswith("blocks.")}
    if numbers != set(range(len(numbers))) or not numbers:
        raise CheckpointError(f"the blocks are not numbered from 0 without gaps: {sorted(numbers)[-3:]} are there.")
    table = state.get("relative.table", state.get("blocks.0.attention.relative.table"))
    mean = "mean_norm" if "head_norm.weight" in state else "mean"
    return {
        "width": width,
        "channels": channels,
        "patch_size": patch,
        "depth": len(numbers),
        "classes": keymap.shape_of(state, "head.weight", 2)[0] if "head.weight" in state else 0,
        "mlp_ratio": keymap.shape_of(state, "blocks.0.mlp.fc1.weight", 2, "BEiT")[0] / width,
        "layer_scale": (stated.get("layer_scale") or 0.1) if "blocks.0.scale1.gamma" in state else 0.0,
        "layer_bias": "blocks.0.attention.relative.table" in state,
        "shared_bias": "relative.table" in state,
        "absolute_positions": "positions.table" in state,
        "mask_token": "mask_token" in state,
        "pooling": "class" if "norm.weight" in state else mean,
        **({} if "heads" in stated else {"heads": _heads(table)}),
        **({} if "image_size" in stated else {"image_size": _size(table, patch)}),
    }


def _heads(table: Tensor | None) -> int:
    if table is None:
        raise CheckpointError(
            "without bias tables these weights do not show the number of heads: load the folder with its config.json."
        )
    return table.shape[1]


def _size(table: Tensor | None, patch: int) -> tuple[int, int]:
    """A table has (2 rows - 1)(2 columns - 1) offsets and three entries for the class token."""
    offsets = 0 if table is None else table.shape[0] - 3
    side = math.isqrt(max(offsets, 0))
    if side**2 != offsets or side % 2 == 0:
        say = to_type("vitlab.load(path, image_size=224)", "--image-size 224")
        raise CheckpointError(f"the image size cannot be read from these weights: {say}.")
    size = (side + 1) // 2 * patch
    return size, size


def _recognise(keys: set[str]) -> bool:
    """transformers' ViTs have a bias of the keys, or none at all."""
    old = {key for key in keys if key.endswith("encoder.layer.0.attention.attention.query.bias")}
    new = {key for key in keys if re.fullmatch(r"(beit\.)?layers\.0\.attention\.q_proj\.bias", key)}
    without = {key.replace("query", "key").replace("q_proj", "k_proj") for key in old | new} - keys
    return bool(without)


HEAD_OF_PRETRAINING = "predicts visual tokens in pre-training: only the encoder is loaded"
HF = Dialect(
    name="hf",
    rules=(
        Rule("class_token", "{p}embeddings.cls_token"),
        Rule("mask_token", "{p}embeddings.mask_token"),
        Rule("positions.table", "{p}embeddings.position_embeddings"),
        Rule("patch_embed.proj.*", "{p}embeddings.patch_embeddings.projection.*"),
        Rule("relative.table", f"{{p}}encoder.relative_position_bias.{TABLE}"),
        *_hf_block(),
        *_new_names(),
        Rule("norm.*", "{p}layernorm.*"),
        Rule("head_norm.*", "{p}pooler.layernorm.*"),
        Rule("head.*", "classifier.*"),
    ),
    recognise=_recognise,
    assumed={"eps": 1e-12, "activation": "gelu"},
    preprocess={**HALF, "size": (224, 224)},
    options={"bias_resize": "bilinear"},
    prefixes=("", "beit.", "data2vec_vision."),
    read_stated=hf.reader(_hf_options, MODEL_TYPES),
    ignored={
        r".*relative_position_index": "computed from the grid",
        r"lm_head\..*|layernorm\..*": HEAD_OF_PRETRAINING,
    },
)
TIMM = Dialect(
    name="timm",
    rules=(
        Rule("class_token", "cls_token"),
        Rule("mask_token", "mask_token"),
        Rule("positions.table", "pos_embed"),
        Rule("patch_embed.proj.*", "patch_embed.proj.*"),
        Rule("relative.table", f"rel_pos_bias.{TABLE}"),
        Rule("blocks.{i}.attention.qkv.weight", "blocks.{i}.attn.qkv.weight"),
        Rule("blocks.{i}.attention.qkv.q_bias", "blocks.{i}.attn.q_bias"),
        Rule("blocks.{i}.attention.qkv.v_bias", "blocks.{i}.attn.v_bias"),
        Rule("blocks.{i}.attention.relative.table", f"blocks.{{i}}.attn.{TABLE}"),
        *layers("blocks.{i}.", "blocks.{i}.", ("norm1", "norm2", "mlp.fc1", "mlp.fc2")),
        *layers("blocks.{i}.", "blocks.{i}.", {"attention.proj": "attn.proj"}),
        Rule("blocks.{i}.scale1.gamma", "blocks.{i}.gamma_1"),
        Rule("blocks.{i}.scale2.gamma", "blocks.{i}.gamma_2"),
        Rule("norm.*", "norm.*"),
        Rule("head_norm.*", "fc_norm.*"),
        Rule("head.*", "head.*"),
    ),
    recognise=lambda keys: (
        {"blocks.0.attn.q_bias", "blocks.0.attn.qkv.weight"} <= keys
        and any(re.search(r"relative_position_bias_table$|^pos_embed$", key) for key in keys)
        and "blocks.0.mlp.fc1.weight" in keys
    ),
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess={**HALF, "interpolation": "bicubic", "how": "crop", "size": (224, 224)},
    ignored={r".*relative_position_index": "computed from the grid", r"lm_head\..*": HEAD_OF_PRETRAINING},
    read_stated=staged.timm_reader(_timm_options),
)


def _write(model: Network, state: State) -> Written:
    c: BEiTConfig = model.config
    rows, columns = c.grid
    bias = c.layer_bias or c.shared_bias
    if bias and (rows != columns) != c.swapped_bias:
        raise UsageError(
            f"transformers reads the bias table of a grid of {rows} x {columns} with rows as columns, so it would be "
            "another network there: use square images."
        )
    if c.pooling == "mean" and c.classes:
        raise UsageError('transformers\' beit cannot express pooling="mean" with classes: use "mean_norm".')
    config = hf.write_fields(c, FIELDS) | {
        "intermediate_size": c.mlp_hidden,
        "hidden_act": hf.activation_for(c.activation),
        "use_mean_pooling": c.pooling != "class",
    }
    return hf.classifier(model, state, HF.rules, "Beit", config)


FAMILY = staged.family(
    "beit",
    BEiTConfig,
    (HF, TIMM),
    _infer_options,
    bare_options=("eps", "activation", "image_size"),
    model_types=MODEL_TYPES,
    writers={"hf": Writer(_write, any_size=lambda config: True)},
)
