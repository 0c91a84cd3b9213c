"""PVT and PVT v2 by other libraries' names: transformers' folders (read and written), and timm's PVT v2 (read).

transformers has one eps in all norms of a network; timm has 1e-5 in patch embeddings and at reduced keys, and 1e-6 in
the others.
"""

from __future__ import annotations

import math
from typing import Any

from vitlab.checkpoints import hf, staged
from vitlab.checkpoints.keymap import JOIN, Dialect, Renamed, Rule, State
from vitlab.checkpoints.keymap import write as rename
from vitlab.checkpoints.staged import IMAGENET, STAGES, Family
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.pvt import PVTConfig, PVTv2Config

HEADS: dict[tuple[int, ...], tuple[int, ...]] = dict.fromkeys(
    [(32, 64, 160, 256), (64, 128, 320, 512)], (1, 2, 5, 8)
)  # of the published widths
ASSUMED = {"eps": 1e-6, "merge_eps": 1e-6, "reduction_eps": 1e-6, "activation": "gelu"}


def _pairs(ours: str, theirs: str, names: dict[str, str]) -> tuple[Rule, ...]:
    return tuple(Rule(f"{ours}{our}.*", f"{theirs}{their}.*") for our, their in names.items())


def _hf(stage: int) -> tuple[Rule, ...]:
    ours, theirs = f"stages.{stage}.{{i}}.", f"{{p}}encoder.block.{stage}.{{i}}."
    embed, around = f"embeds.{stage}.", f"{{p}}encoder.patch_embeddings.{stage}."
    inside = theirs + "attention.self."
    return (
        *_pairs(embed, around, {"proj": "projection", "norm": "layer_norm"}),
        Rule(embed + "positions.table", around + "position_embeddings"),
        Rule(embed + "class_token", around + "cls_token"),
        *_pairs(ours, theirs, {"norm1": "layer_norm_1", "norm2": "layer_norm_2"}),
        *_pairs(ours, theirs, {"mlp.fc1": "mlp.dense1", "mlp.fc2": "mlp.dense2"}),
        *_pairs(ours + "attention.", inside, {"q": "query", "reduction": "sequence_reduction", "norm": "layer_norm"}),
        Rule(ours + "attention.kv.*", (inside + "key.*", inside + "value.*"), JOIN),
        Rule(ours + "attention.proj.*", theirs + "attention.output.dense.*"),
    )


def _hf_v2(stage: int) -> tuple[Rule, ...]:
    around = f"{{p}}encoder.layers.{stage}."
    ours, theirs = f"stages.{stage}.{{i}}.", around + "blocks.{i}."
    inside = theirs + "attention."
    return (
        *_pairs(f"embeds.{stage}.", around + "patch_embedding.", {"proj": "proj", "norm": "layer_norm"}),
        *_pairs(ours, theirs, {"norm1": "layer_norm_1", "norm2": "layer_norm_2"}),
        *_pairs(ours, theirs, {"mlp.fc1": "mlp.dense1", "mlp.conv": "mlp.dwconv.dwconv", "mlp.fc2": "mlp.dense2"}),
        *_pairs(ours + "attention.", inside, {"q": "query", "reduction": "spatial_reduction", "norm": "layer_norm"}),
        Rule(ours + "attention.kv.*", (inside + "key.*", inside + "value.*"), JOIN),
        Rule(ours + "attention.proj.*", inside + "proj.*"),
        Rule(f"norms.{stage}.*", around + "layer_norm.*"),
    )


def _timm_v2(stage: int) -> tuple[Rule, ...]:
    around = f"stages.{stage}."
    ours, theirs = around + "{i}.", around + "blocks.{i}."
    embed = around + "downsample." if stage else "patch_embed."
    inside = {"q": "q", "kv": "kv", "reduction": "sr", "norm": "norm", "proj": "proj"}
    return (
        *_pairs(f"embeds.{stage}.", embed, {"proj": "proj", "norm": "norm"}),
        *_pairs(ours, theirs, {"norm1": "norm1", "norm2": "norm2"}),
        *_pairs(ours + "attention.", theirs + "attn.", inside),
        *_pairs(ours + "mlp.", theirs + "mlp.", {"fc1": "fc1", "conv": "dwconv", "fc2": "fc2"}),
        Rule(f"norms.{stage}.*", around + "norm.*"),
    )


HF = Dialect(
    name="hf",
    rules=(
        *(rule for stage in range(STAGES) for rule in _hf(stage)),
        Rule("norm.*", "{p}encoder.layer_norm.*"),
        Rule("head.*", "classifier.*"),
    ),
    recognise=lambda keys: any(key.endswith("encoder.patch_embeddings.0.position_embeddings") for key in keys),
    assumed=ASSUMED,
    preprocess=IMAGENET,
    prefixes=("", "pvt."),
)
HF_V2 = Dialect(
    name="hf",
    rules=(*(rule for stage in range(STAGES) for rule in _hf_v2(stage)), Rule("head.*", "classifier.*")),
    recognise=lambda keys: any(key.endswith("encoder.layers.0.patch_embedding.proj.weight") for key in keys),
    assumed=ASSUMED,
    preprocess=IMAGENET,
    prefixes=("", "pvt_v2."),
)
TIMM_V2 = Dialect(
    name="timm",
    rules=(*(rule for stage in range(STAGES) for rule in _timm_v2(stage)), Rule("head.*", "head.*")),
    recognise=lambda keys: "stages.0.blocks.0.mlp.dwconv.weight" in keys,
    assumed=ASSUMED | {"merge_eps": 1e-5, "reduction_eps": 1e-5},
    preprocess=IMAGENET,
)


def common_options(
    renamed: Renamed, told: dict[str, Any], known: dict[tuple[int, ...], tuple[int, ...]] = HEADS, block: int = 0
) -> dict[str, Any]:
    """What the weights of PVT, PVT v2 and Twins show; `known`: heads by widths; `block`: which one of a stage has
    reduced keys.
    """
    state = renamed.tensors
    found = staged.common_options(state)
    found["widths"] = staged.widths_of(state, found["depths"])
    found |= staged.told_heads(found["widths"], told, known)
    ratios = [staged.mlp_ratio(state, stage, width) for stage, width in enumerate(found["widths"])]
    if any(ratio != int(ratio) for ratio in ratios):
        raise CheckpointError(f"MLPs {ratios} times as wide as their stages: only whole numbers are known.")
    found["mlp_ratios"] = tuple(map(int, ratios))
    kernels = [state.get(f"stages.{n}.{block}.attention.reduction.weight") for n in range(len(found["depths"]))]
    found["reductions"] = tuple(1 if kernel is None else kernel.shape[-1] for kernel in kernels)
    first = "stages.0.0.attention."
    found["qkv_bias"] = any(first + name in state for name in ("q.bias", "qkv.bias"))
    return found


def infer_options(renamed: Renamed, told: dict[str, Any]) -> dict[str, Any]:
    found = common_options(renamed, told)
    found["patch_size"] = P = found.pop("kernel")
    places = staged.shape(renamed.tensors, "embeds.0.positions.table", 3)[1]
    if "image_size" in told:
        size = told["image_size"]
        high, wide = (size, size) if isinstance(size, int) else size
        if (high // P) * (wide // P) == places:
            return found  # it is what the table was made for; otherwise what it shall be resized to
    side = math.isqrt(places)
    if side**2 != places:
        raise CheckpointError(
            f"positions of {places} places are no square: say what image size they were made for, e.g. "
            "vitlab.load(path, image_size=(224, 320))."
        )
    return found | {"image_size": (side * P, side * P)}


def infer_options_v2(renamed: Renamed, told: dict[str, Any]) -> dict[str, Any]:
    found = common_options(renamed, told)
    kernel = found.pop("kernel")
    if kernel % 2 == 0:
        raise CheckpointError(
            f"patches of {kernel} x {kernel}: those of PVT v2 overlap, 2S - 1 pixels by a stride of S."
        )
    found["patch_size"] = (kernel + 1) // 2
    found["linear"] = found["reductions"][0] == 1 and "stages.0.0.attention.reduction.weight" in renamed.tensors
    if found["linear"] and "reductions" in told:
        found["reductions"] = told["reductions"]  # which then mean nothing
    return found


def _hf_options(config: dict[str, Any], reductions: str) -> dict[str, Any]:
    """What both config.json have; what they leave out has transformers' own default."""
    eps = config.get("layer_norm_eps", 1e-6)
    return {
        "image_size": config.get("image_size", 224),
        "channels": config.get("num_channels", 3),
        "depths": tuple(config.get("depths", (2, 2, 2, 2))),
        "heads": tuple(config.get("num_attention_heads", (1, 2, 5, 8))),
        "reductions": tuple(config.get(reductions, (8, 4, 2, 1))),
        "mlp_ratios": tuple(config.get("mlp_ratios", (8, 8, 4, 4))),
        "qkv_bias": config.get("qkv_bias", True),
        "activation": staged.activation_of(config),
        **dict.fromkeys(("eps", "merge_eps", "reduction_eps"), eps),
        "dropout": float(config.get("hidden_dropout_prob", 0.0)),
        "attention_dropout": float(config.get("attention_probs_dropout_prob", 0.0)),
        "stochastic_depth": float(config.get("drop_path_rate", 0.0)),
    }


def hf_options(config: dict[str, Any]) -> dict[str, Any]:
    staged.check_type(config, "pvt")
    patches, strides = (list(config.get(name, (4, 2, 2, 2))) for name in ("patch_sizes", "strides"))
    if patches != strides or any(stride != 2 for stride in strides[1:]):
        raise CheckpointError(
            f"config.json has patch_sizes {patches} and strides {strides}: known are equal ones, 2 after the first."
        )
    widths = tuple(config.get("hidden_sizes", (64, 128, 320, 512)))
    return {**_hf_options(config, "sequence_reduction_ratios"), "patch_size": strides[0], "widths": widths}


def hf_options_v2(config: dict[str, Any]) -> dict[str, Any]:
    staged.check_type(config, "pvt_v2")
    patches, strides = list(config.get("patch_sizes", (7, 3, 3, 3))), list(config.get("strides", (4, 2, 2, 2)))
    if patches != [2 * stride - 1 for stride in strides] or any(stride != 2 for stride in strides[1:]):
        raise CheckpointError(
            f"config.json has patch_sizes {patches} and strides {strides}: known are patches of 2S - 1 by strides of "
            "S, 2 after the first."
        )
    widths, size = tuple(config.get("hidden_sizes", (32, 64, 160, 256))), config.get("image_size", 224)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    found = {**_hf_options(config, "sr_ratios"), "patch_size": strides[0], "widths": widths}
    return {**found, "image_size": size, "linear": config.get("linear_attention", False)}


def timm_options_v2(config: dict[str, Any]) -> dict[str, Any]:
    """The weights tell the sizes but for the heads; model_args may only repeat them."""
    known = ("embed_dims", "depths", "num_heads", "mlp_ratios", "sr_ratios", "qkv_bias", "linear")
    heads = staged.check_arguments(config, known).get("num_heads")
    return {**TIMM_V2.assumed, **({"heads": tuple(heads)} if heads else {})}


TELLABLE = ("eps", "merge_eps", "reduction_eps", "activation", "image_size", "heads")
PVT = Family("pvt", PVTConfig, (HF,), infer_options, hf_options, None, TELLABLE)
PVT_V2 = Family(
    "pvt_v2", PVTv2Config, (HF_V2, TIMM_V2), infer_options_v2, hf_options_v2, timm_options_v2, tellable=TELLABLE
)


def config_for(c: PVTConfig, labels: list[str] | None) -> dict[str, Any]:
    """config.json for transformers."""
    second = isinstance(c, PVTv2Config)
    kind = "pvt_v2" if second else "pvt"
    if {c.merge_eps, c.reduction_eps} != {c.eps}:
        raise CheckpointError(
            f"transformers' {kind} cannot express eps={c.eps:g} beside merge_eps={c.merge_eps:g} and "
            f"reduction_eps={c.reduction_eps:g}: it has one in all norms."
        )
    square = c.image_size[0] == c.image_size[1]
    if not second and not (square and c.patch_size == 4):
        raise CheckpointError(
            "transformers' pvt has positions for square images and a first patch of 4 alone: this network has "
            f"image_size={c.image_size} and patch_size={c.patch_size}."
        )
    name = "PvtV2" if second else "Pvt"
    own: dict[str, Any] = {
        "patch_sizes": [merge.kernel for merge in c.merges],
        "strides": [merge.stride for merge in c.merges],
        "sr_ratios" if second else "sequence_reduction_ratios": list(c.reductions),
        **({"linear_attention": c.linear} if isinstance(c, PVTv2Config) else {"num_labels": c.classes}),
    }
    config: dict[str, Any] = {
        "architectures": [f"{name}ForImageClassification" if c.classes else f"{name}Model"],
        "model_type": kind,
        "image_size": c.image_size[0] if square else list(c.image_size),
        "num_channels": c.channels,
        "num_encoder_blocks": len(c.depths),
        "depths": list(c.depths),
        "hidden_sizes": list(c.widths),
        "num_attention_heads": list(c.heads),
        "mlp_ratios": list(c.mlp_ratios),
        **own,
        "qkv_bias": c.qkv_bias,
        "hidden_act": staged.theirs_of_activation(c.activation),
        "layer_norm_eps": c.eps,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": c.attention_dropout,
        "drop_path_rate": c.stochastic_depth,
        "dtype": "float32",
    }
    return config | hf.named_classes(c.classes, labels)


def write(model: Network, state: State, to: str) -> tuple[State, dict[str, Any]]:
    """Tensors and config.json as transformers has them."""
    if to != "hf":
        raise CheckpointError(f"a {type(model).__name__} is not written as {to}: use --to hf or native.")
    config = config_for(model.config, model.labels)
    rules = HF_V2.rules if model.family == "pvt_v2" else HF.rules
    prefix = f"{model.family}." if model.config.classes else ""
    return rename("transformers", rules, state, prefix=prefix, heads=1), config
