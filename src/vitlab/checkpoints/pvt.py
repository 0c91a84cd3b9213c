"""PVT and PVT v2 by other libraries' names: transformers' folders (read and written), and timm's PVT v2 (read).

transformers has one eps in all norms of a network; timm has 1e-5 in patch embeddings and at reduced keys, and 1e-6 in
the others.
"""

from __future__ import annotations

import math

from vitlab.advice import to_type
from vitlab.checkpoints import hf, keymap, staged
from vitlab.checkpoints.family import ModelType, Writer, Written
from vitlab.checkpoints.keymap import JOIN, Dialect, Options, Renamed, Rule, State, layers
from vitlab.checkpoints.staged import STAGES
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.entry import IMAGENET_CROP
from vitlab.models.pvt import PVTConfig, PVTv2Config
from vitlab.parsing import is_object

HEADS: dict[tuple[int, ...], tuple[int, ...]] = dict.fromkeys(
    [(32, 64, 160, 256), (64, 128, 320, 512)], (1, 2, 5, 8)
)  # of the published widths
ASSUMED = {"eps": 1e-6, "merge_eps": 1e-6, "reduction_eps": 1e-6, "activation": "gelu"}
TIMM_ASSUMED = ASSUMED | {"merge_eps": 1e-5, "reduction_eps": 1e-5}
MODEL_TYPES = {"pvt": ModelType("Pvt", "transformers' PVT cannot do that")}
MODEL_TYPES_V2 = {"pvt_v2": ModelType("Pvt")}


def _hf(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"{{p}}encoder.block.{stage}.{{i}}."
    embed, stage_key = f"embeds.{stage}.", f"{{p}}encoder.patch_embeddings.{stage}."
    inside = theirs + "attention.self."
    return (
        *layers(embed, stage_key, {"proj": "projection", "norm": "layer_norm"}),
        Rule(embed + "positions.table", stage_key + "position_embeddings"),
        Rule(embed + "class_token", stage_key + "cls_token"),
        *layers(ours, theirs, {"norm1": "layer_norm_1", "norm2": "layer_norm_2"}),
        *layers(ours, theirs, {"mlp.fc1": "mlp.dense1", "mlp.fc2": "mlp.dense2"}),
        *layers(ours + "attention.", inside, {"q": "query", "reduction": "sequence_reduction", "norm": "layer_norm"}),
        Rule(ours + "attention.kv.*", (inside + "key.*", inside + "value.*"), JOIN),
        Rule(ours + "attention.proj.*", theirs + "attention.output.dense.*"),
    )


def _hf_v2(stage: int) -> tuple[Rule, ...]:
    stage_key = f"{{p}}encoder.layers.{stage}."
    ours, theirs = f"stages.{stage}.{{i}}.", stage_key + "blocks.{i}."
    inside = theirs + "attention."
    return (
        *layers(f"embeds.{stage}.", stage_key + "patch_embedding.", {"proj": "proj", "norm": "layer_norm"}),
        *layers(ours, theirs, {"norm1": "layer_norm_1", "norm2": "layer_norm_2"}),
        *layers(ours, theirs, {"mlp.fc1": "mlp.dense1", "mlp.conv": "mlp.dwconv.dwconv", "mlp.fc2": "mlp.dense2"}),
        *layers(ours + "attention.", inside, {"q": "query", "reduction": "spatial_reduction", "norm": "layer_norm"}),
        Rule(ours + "attention.kv.*", (inside + "key.*", inside + "value.*"), JOIN),
        Rule(ours + "attention.proj.*", inside + "proj.*"),
        Rule(f"norms.{stage}.*", stage_key + "layer_norm.*"),
    )


def _timm_v2(stage: int) -> tuple[Rule, ...]:
    stage_key = f"stages.{stage}."
    ours, theirs = stage_key + "{i}.", stage_key + "blocks.{i}."
    embed = stage_key + "downsample." if stage else "patch_embed."
    inside = {"q": "q", "kv": "kv", "reduction": "sr", "norm": "norm", "proj": "proj"}
    return (
        *layers(f"embeds.{stage}.", embed, ("proj", "norm")),
        *layers(ours, theirs, ("norm1", "norm2")),
        *layers(ours + "attention.", theirs + "attn.", inside),
        *layers(ours + "mlp.", theirs + "mlp.", {"fc1": "fc1", "conv": "dwconv", "fc2": "fc2"}),
        Rule(f"norms.{stage}.*", stage_key + "norm.*"),
    )


def common_options(
    renamed: Renamed, stated: Options, published: dict[tuple[int, ...], tuple[int, ...]] = HEADS, block: int = 0
) -> Options:
    """Options that PVT, PVT v2 and Twins show; `published`: heads by widths; `block`: the one with reduced keys."""
    state = renamed.tensors
    options = staged.common_options(state)
    options["widths"] = staged.widths_of(state, options["depths"])
    options |= staged.heads_of(options["widths"], stated, published)
    ratios = [staged.mlp_ratio(state, stage, width) for stage, width in enumerate(options["widths"])]
    if any(ratio != int(ratio) for ratio in ratios):
        raise CheckpointError(f"MLPs {ratios} times as wide as their stages: only whole numbers are known.")
    options["mlp_ratios"] = tuple(map(int, ratios))
    kernels = [f"stages.{n}.{block}.attention.reduction.weight" for n in range(len(options["depths"]))]
    options["reductions"] = tuple(keymap.shape_of(state, key, 4)[-1] if key in state else 1 for key in kernels)
    first = "stages.0.0.attention."
    options["qkv_bias"] = any(first + name in state for name in ("q.bias", "qkv.bias"))
    return options


def _infer_options(renamed: Renamed, stated: Options) -> Options:
    options = common_options(renamed, stated)
    options["patch_size"] = P = options.pop("kernel")
    places = keymap.shape_of(renamed.tensors, "embeds.0.positions.table", 3)[1]
    if "image_size" in stated:
        size = stated["image_size"]
        high, wide = (size, size) if isinstance(size, int) else size
        if (high // P) * (wide // P) == places:
            return options  # it is what the table was made for; otherwise what it shall be resized to
    side = math.isqrt(places)
    if side**2 != places:
        raise CheckpointError(
            f"positions of {places} places are no square: say what image size they were made for, e.g. "
            + to_type("vitlab.load(path, image_size=(224, 320)).", "--image-size 224x320.")
        )
    return options | {"image_size": (side * P, side * P)}


def _infer_options_v2(renamed: Renamed, stated: Options) -> Options:
    options = common_options(renamed, stated)
    kernel = options.pop("kernel")
    if kernel % 2 == 0:
        raise CheckpointError(
            f"patches of {kernel} x {kernel}: those of PVT v2 overlap, 2S - 1 pixels by a stride of S."
        )
    options["patch_size"] = (kernel + 1) // 2
    options["linear"] = options["reductions"][0] == 1 and "stages.0.0.attention.reduction.weight" in renamed.tensors
    if options["linear"] and "reductions" in stated:
        options["reductions"] = stated["reductions"]  # which then mean nothing
    return options


FIELDS: hf.Fields = {  # of both
    "image_size": ("image_size", 224),
    "channels": ("num_channels", 3),
    "depths": ("depths", (2, 2, 2, 2)),
    "heads": ("num_attention_heads", (1, 2, 5, 8)),
    "mlp_ratios": ("mlp_ratios", (8, 8, 4, 4)),
    "qkv_bias": ("qkv_bias", True),
    "eps": ("layer_norm_eps", 1e-6),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
    "stochastic_depth": ("drop_path_rate", 0.0),
}
FIELDS_V1: hf.Fields = {
    **FIELDS,
    "widths": ("hidden_sizes", (64, 128, 320, 512)),
    "reductions": ("sequence_reduction_ratios", (8, 4, 2, 1)),
}
FIELDS_V2: hf.Fields = {
    **FIELDS,
    "widths": ("hidden_sizes", (32, 64, 160, 256)),
    "reductions": ("sr_ratios", (8, 4, 2, 1)),
    "linear": ("linear_attention", False),
}


def _hf_options(config: Options, fields: hf.Fields, patch_size: int) -> Options:
    options = hf.read_fields(config, fields)
    options |= dict.fromkeys(("merge_eps", "reduction_eps"), options["eps"])
    return {**options, "patch_size": patch_size, "activation": hf.activation_of(config)}


def _hf_options_v1(config: Options) -> Options:
    staged.check_type(config, "pvt")
    patches, strides = (list(config.get(name, (4, 2, 2, 2))) for name in ("patch_sizes", "strides"))
    if patches != strides or any(stride != 2 for stride in strides[1:]):
        raise CheckpointError(
            f"config.json has patch_sizes {patches} and strides {strides}: known are equal ones, 2 after the first."
        )
    return _hf_options(config, FIELDS_V1, strides[0])


def _hf_options_v2(config: Options) -> Options:
    staged.check_type(config, "pvt_v2")
    patches, strides = list(config.get("patch_sizes", (7, 3, 3, 3))), list(config.get("strides", (4, 2, 2, 2)))
    if patches != [2 * stride - 1 for stride in strides] or any(stride != 2 for stride in strides[1:]):
        raise CheckpointError(
            f"config.json has patch_sizes {patches} and strides {strides}: known are patches of 2S - 1 by strides of "
            "S, 2 after the first."
        )
    options = _hf_options(config, FIELDS_V2, strides[0])
    if is_object(size := options["image_size"]):
        options["image_size"] = (size["height"], size["width"])
    return options


def _timm_options_v2(config: Options) -> Options:
    """The weights tell the sizes but for the heads; model_args may only repeat them."""
    sizes = ("embed_dims", "depths", "num_heads", "mlp_ratios", "sr_ratios", "qkv_bias", "linear")
    heads = staged.check_arguments(config, sizes).get("num_heads")
    return {**TIMM_ASSUMED, **({"heads": tuple(heads)} if heads else {})}


HF = Dialect(
    name="hf",
    rules=(
        *(rule for stage in range(STAGES) for rule in _hf(stage)),
        Rule("norm.*", "{p}encoder.layer_norm.*"),
        Rule("head.*", "classifier.*"),
    ),
    recognise=lambda keys: any(key.endswith("encoder.patch_embeddings.0.position_embeddings") for key in keys),
    assumed=ASSUMED,
    preprocess=IMAGENET_CROP,
    prefixes=("", "pvt."),
    read_stated=hf.reader(_hf_options_v1, MODEL_TYPES),
)
HF_V2 = Dialect(
    name="hf",
    rules=(*(rule for stage in range(STAGES) for rule in _hf_v2(stage)), Rule("head.*", "classifier.*")),
    recognise=lambda keys: any(key.endswith("encoder.layers.0.patch_embedding.proj.weight") for key in keys),
    assumed=ASSUMED,
    preprocess=IMAGENET_CROP,
    prefixes=("", "pvt_v2."),
    read_stated=hf.reader(_hf_options_v2, MODEL_TYPES_V2),
)
TIMM_V2 = Dialect(
    name="timm",
    rules=(*(rule for stage in range(STAGES) for rule in _timm_v2(stage)), Rule("head.*", "head.*")),
    recognise=lambda keys: "stages.0.blocks.0.mlp.dwconv.weight" in keys,
    assumed=TIMM_ASSUMED,
    preprocess=IMAGENET_CROP,
    read_stated=staged.timm_reader(_timm_options_v2),
)


# ------------------------------------------------------------------------------------------------------------ writing


def _write(model: Network, state: State) -> Written:
    c: PVTConfig = model.config
    second = isinstance(c, PVTv2Config)
    if {c.merge_eps, c.reduction_eps} != {c.eps}:
        raise UsageError(
            f"transformers' {model.family} cannot express eps={c.eps:g} beside merge_eps={c.merge_eps:g} and "
            f"reduction_eps={c.reduction_eps:g}: it has one in all norms."
        )
    square = c.image_size[0] == c.image_size[1]
    if not second and not (square and c.patch_size == 4):
        raise UsageError(
            "transformers' pvt has positions for square images and a first patch of 4 alone: this network has "
            f"image_size={c.image_size} and patch_size={c.patch_size}."
        )
    config: Options = {
        **hf.write_fields(c, FIELDS_V2 if second else FIELDS_V1),
        "num_encoder_blocks": len(c.depths),
        "patch_sizes": [merge.kernel for merge in c.merges],
        "strides": [merge.stride for merge in c.merges],
        "hidden_act": hf.activation_for(c.activation),
        **({} if second else {"num_labels": c.classes}),
    }
    rules, name = (HF_V2.rules, "PvtV2") if second else (HF.rules, "Pvt")
    return hf.classifier(model, state, rules, name, config)


BARE = ("eps", "merge_eps", "reduction_eps", "activation", "image_size", "heads")
PVT = staged.family(
    "pvt", PVTConfig, (HF,), _infer_options, bare_options=BARE, model_types=MODEL_TYPES, writers={"hf": Writer(_write)}
)
PVT_V2 = staged.family(
    "pvt_v2",
    PVTv2Config,
    (HF_V2, TIMM_V2),
    _infer_options_v2,
    bare_options=BARE,
    model_types=MODEL_TYPES_V2,
    writers={"hf": Writer(_write, any_size=lambda config: True)},
)
