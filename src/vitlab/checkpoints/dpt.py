"""Depth Anything V2 by transformers' names: DepthAnythingForDepthEstimation around a DINOv2, read."""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints import hf, schema, vit
from vitlab.checkpoints.dense import encoder_clues, encoder_rules
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, check_agreement
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, layers, shape_of
from vitlab.errors import CheckpointError
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import STRETCH, backbone
from vitlab.models.dpt import DPTConfig

NECK, FUSION = "neck.reassemble_stage.layers.{i}.", "neck.fusion_stage.layers.{i}."
UNITS = {"unit": "residual_layer1", "refine": "residual_layer2"}
RULES = (
    *encoder_rules((*hf.COMMON, *hf.DINOV2_BLOCK, *hf.DINOV2_SWIGLU_BLOCK, *hf.new_names(hf.LAYER))),
    *layers("reassemble.{i}.", NECK, {"project": "projection", "resize": "resize"}),
    Rule("reassemble.{i}.to_fusion.weight", "neck.convs.{i}.weight"),
    Rule("fusion.{i}.project.*", FUSION + "projection.*"),
    *(
        rule
        for ours, theirs in UNITS.items()
        for rule in layers(
            "fusion.{i}." + ours + ".", FUSION + theirs + ".", {"conv1": "convolution1", "conv2": "convolution2"}
        )
    ),
    *layers("head.", "head.", ("conv1", "conv2", "conv3")),
)
FACTORS = [4, 2, 1, 0.5]
FIELDS: hf.Fields = {
    "widths": ("neck_hidden_sizes", [48, 96, 192, 384]),
    "fusion_width": ("fusion_hidden_size", 64),
    "head_width": ("head_hidden_size", 32),
    "depth_kind": ("depth_estimation_type", "relative"),
    "max_depth": ("max_depth", 1),
}
SCHEMA: schema.Kinds = {
    **schema.HF,
    "neck_hidden_sizes": schema.WHOLES,
    **dict.fromkeys(("fusion_hidden_size", "head_hidden_size"), schema.POSITIVE),
    "depth_estimation_type": schema.TEXT,
    "max_depth": schema.ABOVE_ZERO | schema.NULL,
    "backbone_config": schema.TABLE,
}
BACKBONE: schema.Kinds = {
    **schema.HF,
    "out_indices": schema.WHOLES | schema.NULL,
    "apply_layernorm": schema.FLAG,
    "use_swiglu_ffn": schema.FLAG,
}
MODEL_TYPES = {"depth_anything": ModelType("DPT", preprocess={**STRETCH, "interpolation": "bicubic"})}


def _options(config: Options) -> Options:
    schema.check(config, SCHEMA, "config.json")
    inner: Options = config.get("backbone_config") or {}
    schema.check(inner, BACKBONE, "config.json's backbone_config")
    if inner.get("model_type") != "dinov2":
        raise CheckpointError(f"config.json has a backbone of model_type {inner.get('model_type')!r}; known is dinov2.")
    factors, place = list(config.get("reassemble_factors", FACTORS)), config.get("head_in_index", -1)
    if factors != FACTORS or place not in (-1, 3):
        raise CheckpointError(
            f"config.json has reassemble_factors {factors} and head_in_index {place}; known are {FACTORS} and -1."
        )
    own = hf.read_fields(config, FIELDS)
    own["max_depth"] = float(own["max_depth"] or 1.0)
    own["layers"] = tuple(number - 1 for number in inner.get("out_indices") or (9, 10, 11, 12))
    own["normed"] = inner.get("apply_layernorm", True)
    encoder = hf.options_from({"patch_size": 14, **inner})
    if "image_size" not in inner:
        del encoder["image_size"]  # the positions show it
    return {**own, **encoder}


HF = Dialect(
    name="hf",
    rules=RULES,
    recognise=lambda keys: (
        {"neck.fusion_stage.layers.0.projection.weight", "head.conv1.weight"} <= keys
        and "backbone.embeddings.patch_embeddings.projection.weight" in keys
    ),
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess=MODEL_TYPES["depth_anything"].preprocess,
    options={"resize_rule": "bicubic", "crop": True},
    prefixes=("backbone.",),
    read_stated=hf.reader(_options, MODEL_TYPES),
)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    state = renamed.tensors
    for key in [key for key in state if key.startswith("fusion.0.unit.")]:
        renamed.leave_out(key, "the first fusion has nothing to add")
    stated = clues.stated.options
    own = {name: stated[name] for name in (*FIELDS, "layers", "normed") if name in stated}
    inside = encoder_clues(clues, own)
    encoder = vit.infer_config(renamed.part("encoder."), inside)
    seen: Options = {
        "widths": tuple(shape_of(state, f"reassemble.{i}.project.weight", 4, "DPT")[0] for i in range(4)),
        "fusion_width": shape_of(state, "fusion.0.project.weight", 4, "DPT")[0],
        "head_width": shape_of(state, "head.conv2.weight", 4, "DPT")[0],
    }
    check_agreement(own, seen)
    usual: Any = {"layers": _usual_layers(encoder.depth)}
    config = DPTConfig(image_size=encoder.image_size, backbone=backbone("vit", encoder), **{**usual, **own, **seen})
    assumed = vit.assumed_options(encoder, inside)
    return Reading(config, assumed if "layers" in own else {**assumed, **usual})


def _usual_layers(depth: int) -> tuple[int, ...]:
    """Of the released models, by their depth."""
    return (4, 11, 17, 23) if depth == 24 else tuple(depth * part // 4 - 1 for part in (1, 2, 3, 4))


FAMILY = Family(
    "dpt",
    DPTConfig,
    (HF,),
    _infer,
    bare_options=("heads", "eps", "activation", "image_size", "layers", "depth_kind", "max_depth"),
    model_types=MODEL_TYPES,
    check_theirs=lambda theirs: DenseOutput(depth=theirs.predicted_depth),
)
