"""YOLOS by transformers' names: YolosForObjectDetection, read and written.

Its position tables hold class token, patches and detection tokens in a row; here the latter stand by themselves.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from vitlab.checkpoints import hf, keymap, schema, vit
from vitlab.checkpoints.dense import encoder_clues, encoder_rules, whole_image
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, Written, check_agreement
from vitlab.checkpoints.keymap import Dialect, Options, Renamed, Rule, State
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import STRETCH
from vitlab.models.vit_config import ViTConfig
from vitlab.models.yolos import YOLOS, YOLOSConfig

PARTS = ("positions.table", "detection")  # of what is added between blocks
TABLE, BETWEEN = "encoder.positions.table", "between"  # as transformers has them, before they are split
RULES = (
    *encoder_rules((*hf.COMMON, *hf.VIT_BLOCK)),
    Rule("queries", "{p}embeddings.detection_tokens"),
    Rule(BETWEEN, "{p}encoder.mid_position_embeddings"),
    Rule(BETWEEN, "{p}encoder.interpolation.mid_position_embeddings"),  # in memory
    *(
        Rule(f"{ours}.fc{number + 1}.*", f"{theirs}.layers.{number}.*")
        for ours, theirs in (("head", "class_labels_classifier"), ("box_head", "bbox_predictor"))
        for number in range(3)
    ),
)
FIELDS: hf.Fields = {"queries": ("num_detection_tokens", 100), "between": ("use_mid_position_embeddings", True)}
ENCODER: hf.Fields = {**hf.FIELDS, "image_size": ("image_size", [512, 864]), "eps": ("layer_norm_eps", 1e-12)}
SCHEMA: schema.Kinds = {
    **schema.HF,
    "num_detection_tokens": schema.POSITIVE,
    "use_mid_position_embeddings": schema.FLAG,
}
MODEL_TYPES = {"yolos": ModelType("Yolos", preprocess=STRETCH)}


def _options(config: Options) -> Options:
    schema.check(config, SCHEMA, "config.json")
    fields = hf.read_fields(config, {**FIELDS, **ENCODER})
    return {**fields, "activation": hf.activation_of(config)}


HF = Dialect(
    name="hf",
    rules=RULES,
    recognise=lambda keys: any(key.endswith("embeddings.detection_tokens") for key in keys),
    assumed={"eps": 1e-12, "activation": "gelu"},
    preprocess=STRETCH,
    options={"resize_rule": "bicubic", "crop": True},
    prefixes=("vit.", ""),
    read_stated=hf.reader(_options, MODEL_TYPES),
)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    state = renamed.tensors
    queries = keymap.shape_of(state, "queries", 3, "YOLOS")[1]
    if keymap.shape_of(state, TABLE, 3, "YOLOS")[1] <= queries:
        raise CheckpointError(f"{TABLE} has no positions beside those of {queries} detection tokens.")
    _split(renamed, TABLE, TABLE, "query_positions", queries)
    if BETWEEN in state:
        for layer in range(keymap.shape_of(state, BETWEEN, 4, "YOLOS")[0]):
            renamed.tensors[f"between.{layer}"] = state[BETWEEN][layer]
            renamed.origin[f"between.{layer}"] = renamed.origin[BETWEEN]
            place = f"between.{layer}."
            _split(renamed, place[:-1], f"{place}positions.table", f"{place}detection", queries)
        del renamed.tensors[BETWEEN], renamed.origin[BETWEEN]
    own = {name: value for name, value in clues.stated.options.items() if name in FIELDS}
    inside = encoder_clues(clues, own)
    encoder = vit.infer_config(renamed.part("encoder."), inside)
    seen: Options = {"queries": queries, "between": any(key.startswith("between.") for key in state)}
    check_agreement(own, seen)
    classes = keymap.shape_of(state, "head.fc3.weight", 2, "YOLOS")[0] - 1
    config = YOLOSConfig(classes=classes, queries=queries).with_encoder("vit", encoder)
    return Reading(config.with_options(between=seen["between"]), vit.assumed_options(encoder, inside))


def _split(renamed: Renamed, key: str, patches: str, detection: str, queries: int) -> None:
    """A table (1, 1 + N + Q, D) -> those of class token and patches, and of detection tokens."""
    table, origin = renamed.tensors.pop(key), renamed.origin.pop(key)
    for name, value in ((patches, table[:, :-queries]), (detection, table[:, -queries:])):
        renamed.tensors[name], renamed.origin[name] = value.contiguous(), origin


def _write(model: Network, state: State) -> Written:
    c: YOLOSConfig = model.config
    encoder = c.encoder
    if not isinstance(encoder, ViTConfig):
        raise UsageError(f"transformers' YOLOS is a ViT, and this one is around {c.backbone['family']}: --to native.")
    features = (
        "positions",
        "class_token",
        "registers",
        "distill_token",
        "mask_token",
        "norm",
        "norm_pre",
        "final_norm",
    )
    features += ("qk_norm", "layer_scale", "mlp", "stem", "head_dim", "patch_norms", "patch_bias")
    others = {f"prefix_positions={encoder.positions.prefix_positions}": encoder.positioned_prefix != 1}
    check_vit("transformers' YOLOS", encoder, features, others)
    between = {key: value for key, value in state.items() if key.startswith("between.")}
    state = {key: value for key, value in state.items() if key not in between}
    state[TABLE] = torch.cat([state[TABLE], state.pop("query_positions")], dim=1)
    if between:
        parts = [[between[f"between.{i}.{part}"] for part in PARTS] for i in range(encoder.depth - 1)]
        state[BETWEEN] = torch.stack([torch.cat(tables, dim=1) for tables in parts])
    assert isinstance(model, YOLOS)
    weights = asdict(model.loss_weights)
    config: Options = {
        **hf.write_fields(c, {**FIELDS, **ENCODER}),
        "architectures": ["YolosForObjectDetection"],
        "model_type": "yolos",
        "image_size": list(c.image_size),
        "hidden_act": hf.activation_for(encoder.mlp.activation),
        "intermediate_size": encoder.mlp_hidden,
        "auxiliary_loss": False,
        "class_cost": weights["classes"],
        "bbox_cost": weights["boxes"],
        "giou_cost": weights["giou"],
        "bbox_loss_coefficient": weights["boxes"],
        "giou_loss_coefficient": weights["giou"],
        "eos_coefficient": weights["no_object"],
        **hf.class_fields(c.classes, model.labels),
        "dtype": "float32",
    }
    tensors = keymap.write("transformers", RULES, state, prefix="vit.", heads=encoder.heads)
    return whole_image(tensors, config, model.preprocess, "YolosImageProcessor", {})


FAMILY = Family(
    "yolos",
    YOLOSConfig,
    (HF,),
    _infer,
    {"hf": Writer(_write, any_size=lambda config: True)},
    bare_options=("heads", "eps", "activation", "image_size"),
    model_types=MODEL_TYPES,
    check_theirs=lambda theirs: DenseOutput(theirs.logits, boxes=theirs.pred_boxes),
)
