"""EoMT by transformers' names: EomtForUniversalSegmentation (around DINOv2) and EomtDinov3ForUniversalSegmentation.

Both are read and written. Loss weights in their config are not the network's: they are written as the paper has them.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from vitlab.checkpoints import dinov3, hf, keymap, schema, vit
from vitlab.checkpoints.dense import count_numbered, encoder_clues, encoder_rules, whole_image
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, Written, check_agreement
from vitlab.checkpoints.keymap import JOIN, TABLE, Dialect, Options, Renamed, Rule, State, layers
from vitlab.checkpoints.plain import separate_qkv
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import STRETCH
from vitlab.models.dinov3 import DINOv3Config
from vitlab.models.eomt import EoMT, EoMTConfig
from vitlab.models.vit_config import ViTConfig

LAYER = "layers.{i}."
HEAD = (
    Rule("queries", "query.weight", TABLE),
    Rule("head.*", "class_predictor.*"),
    *layers("mask_head.", "mask_head.", ("fc1", "fc2", "fc3")),
    Rule("upscale.{i}.finer.*", "upscale_block.block.{i}.conv1.*"),
    Rule("upscale.{i}.depthwise.weight", "upscale_block.block.{i}.conv2.weight"),
    Rule("upscale.{i}.norm.*", "upscale_block.block.{i}.layernorm2d.*"),
    Rule("masking", "attn_mask_probs"),
)
BLOCK = (
    *separate_qkv("blocks.{i}.attention.", LAYER + "attention."),
    *layers("blocks.{i}.", LAYER, ("norm1", "norm2")),
    Rule("blocks.{i}.scale1.gamma", LAYER + "layer_scale1.lambda1"),
    Rule("blocks.{i}.scale2.gamma", LAYER + "layer_scale2.lambda1"),
)
TOKENS = (
    Rule("class_token", "embeddings.cls_token"),
    Rule("register_tokens", "embeddings.register_tokens"),
    Rule("norm.*", "layernorm.*"),
)
GATED = (
    Rule("blocks.{i}.mlp.fc1.*", (LAYER + "mlp.gate_proj.*", LAYER + "mlp.up_proj.*"), JOIN),
    Rule("blocks.{i}.mlp.fc2.*", LAYER + "mlp.down_proj.*"),
)
VIT_COMMON = (
    *TOKENS,
    *BLOCK,
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.projection.*"),
    Rule("positions.table", "embeddings.position_embeddings.weight", TABLE),
    Rule("blocks.{i}.attention.proj.*", LAYER + "attention.out_proj.*"),
)
VIT_PLAIN = layers("blocks.{i}.mlp.", LAYER + "mlp.", ("fc1", "fc2"))
OLD_GATED = layers("blocks.{i}.mlp.", LAYER + "mlp.", {"fc1": "weights_in", "fc2": "weights_out"})
DINOV3_COMMON = (
    *TOKENS,
    *BLOCK,
    Rule("patch_embed.proj.*", "embeddings.patch_embeddings.*"),
    Rule("blocks.{i}.attention.proj.*", LAYER + "attention.o_proj.*"),
)
DINOV3_PLAIN = (
    Rule("blocks.{i}.mlp.fc1.*", LAYER + "mlp.up_proj.*"),
    Rule("blocks.{i}.mlp.fc2.*", LAYER + "mlp.down_proj.*"),
)

FIELDS: hf.Fields = {"queries": ("num_queries", 200), "joined": ("num_blocks", 4), "upscale": ("num_upscale_blocks", 2)}
ENCODER: hf.Fields = {
    "image_size": ("image_size", 640),
    "patch_size": ("patch_size", 16),
    "channels": ("num_channels", 3),
    "width": ("hidden_size", 1024),
    "depth": ("num_hidden_layers", 24),
    "heads": ("num_attention_heads", 16),
    "registers": ("num_register_tokens", 4),
    "eps": ("layer_norm_eps", 1e-6),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "stochastic_depth": ("drop_path_rate", 0.0),
}
SCHEMA: schema.Kinds = {
    **schema.HF_DINOV3,
    **dict.fromkeys(("num_queries", "num_blocks"), schema.POSITIVE),
    "num_upscale_blocks": schema.WHOLE,
    "use_swiglu_ffn": schema.FLAG,
    "rope_parameters": schema.TABLE | schema.NULL,
}
MODEL_TYPES = {
    "eomt": ModelType("Eomt", preprocess=STRETCH),
    "eomt_dinov3": ModelType("Eomt", preprocess=STRETCH),
}


def _options(config: Options) -> Options:
    schema.check(config, SCHEMA, "config.json")
    own = {**hf.read_fields(config, FIELDS), "head_activation": hf.activation_of(config)}
    if config.get("model_type") == "eomt":
        encoder = hf.read_fields(config, ENCODER) | {"layer_scale": float(config.get("layerscale_value", 1.0)) or 1.0}
        return own | encoder | {"activation": own["head_activation"]}
    usual: Options = dict(ENCODER.values())
    rope: Options = config.get("rope_parameters") or {}
    values = {**usual, "intermediate_size": 4096, "rope_theta": rope.get("rope_theta", 100.0), **config}
    return own | dinov3.options_from({**values, "model_type": "dinov3_vit"})


def _is_eomt(keys: set[str]) -> bool:
    return {"query.weight", "class_predictor.weight", "mask_head.fc1.weight"} <= keys


IGNORED = {r"criterion\.empty_weight": "a weight of the loss", r"embeddings\.position_ids": "numbers of the patches"}
HF = Dialect(
    name="hf",
    rules=(*HEAD, *encoder_rules((*VIT_COMMON, *VIT_PLAIN, *GATED, *OLD_GATED))),
    recognise=lambda keys: _is_eomt(keys) and "embeddings.position_embeddings.weight" in keys,
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess=STRETCH,
    options={"resize_rule": "bicubic_antialias", "prefix_positions": "none"},
    ignored=IGNORED,
    read_stated=hf.reader(_options, MODEL_TYPES),
)
HF_DINOV3 = Dialect(
    name="hf",
    rules=(*HEAD, *encoder_rules((*DINOV3_COMMON, *GATED, *DINOV3_PLAIN))),
    recognise=lambda keys: _is_eomt(keys) and "embeddings.patch_embeddings.weight" in keys,
    assumed={"eps": 1e-6},
    preprocess=STRETCH,
    ignored=IGNORED,
    read_stated=hf.reader(_options, MODEL_TYPES),
)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    state = renamed.tensors
    for key in ("encoder.register_tokens", "masking"):
        if key not in state:
            raise CheckpointError(f"{key} is missing, so this is not a complete EoMT.")
    if not state["encoder.register_tokens"].numel():
        renamed.leave_out("encoder.register_tokens", "holds no tokens")
    masking = tuple(min(max(float(share), 0.0), 1.0) for share in state["masking"])
    renamed.leave_out("masking", "a part of the config here")
    stated = clues.stated.options
    own = {name: stated[name] for name in (*FIELDS, "head_activation") if name in stated}
    inside = encoder_clues(clues, own)
    if clues.dialect is HF:
        family, encoder = "vit", vit.infer_config(renamed.part("encoder."), inside)
        assumed = vit.assumed_options(encoder, inside)
    else:
        reading = dinov3.FAMILY.infer(renamed.part("encoder."), inside)
        family, encoder, assumed = "dinov3", reading.config, reading.assumed
    queries = keymap.shape_of(state, "queries", 3, "EoMT")[1]
    seen = {"queries": queries, "joined": len(masking), "upscale": count_numbered(state, "upscale.")}
    check_agreement(own, seen)
    classes = keymap.shape_of(state, "head.weight", 2, "EoMT")[0] - 1
    config = EoMTConfig(joined=1).with_encoder(family, encoder)
    return Reading(config.with_options(**own | seen, classes=classes, masking=masking if any(masking) else ()), assumed)


# ------------------------------------------------------------------------------------------------------------- writing


def _write(model: Network, state: State) -> Written:
    c: EoMTConfig = model.config
    height, width = c.image_size
    if height != width:
        raise UsageError(
            f"transformers' EoMT takes square images only, and this one {height}x{width}: load it with "
            f"image_size={max(c.image_size)} first, or use --to native."
        )
    encoder = c.encoder
    if isinstance(encoder, DINOv3Config):
        config, rules = _dinov3_config(encoder, state)
    elif isinstance(encoder, ViTConfig):
        config, rules = _vit_config(encoder, state)
    else:
        family = c.backbone["family"]
        raise UsageError(f"transformers' EoMT is around DINOv2 or DINOv3, and this one around {family}: --to native.")
    if hf.activation_for(c.head_activation) != config["hidden_act"]:
        raise UsageError(f"transformers' EoMT has one activation, and here the head has {c.head_activation}.")
    assert isinstance(model, EoMT)
    weights = asdict(model.loss_weights)
    names = {"classes": "class_weight", "masks": "mask_weight", "dice": "dice_weight", "no_object": "no_object_weight"}
    names |= {"points": "train_num_points", "oversampling": "oversample_ratio", "uncertain": "importance_sample_ratio"}
    config |= {
        **hf.write_fields(c, FIELDS),
        "image_size": height,
        **{theirs: weights[ours] for ours, theirs in names.items()},
        **hf.class_fields(c.classes, model.labels),
        "dtype": "float32",
    }
    state = {**state, "masking": torch.tensor(c.masking or (0.0,) * c.joined)}
    tensors = keymap.write("transformers", (*HEAD, *encoder_rules(rules)), state, heads=encoder.option("heads"))
    tensors["criterion.empty_weight"] = torch.tensor([1.0] * c.classes + [model.loss_weights.no_object])
    size = {"shortest_edge": height, "longest_edge": height}
    return whole_image(tensors, config, model.preprocess, "EomtImageProcessor", size)


def _vit_config(c: ViTConfig, state: State) -> tuple[Options, tuple[Rule, ...]]:
    """config.json of the encoder, and the names; `state` is completed with what transformers always has."""
    features = ("positions", "class_token", "distill_token", "norm", "norm_pre", "final_norm", "qk_norm", "stem")
    others = {
        "qkv_bias=False": not c.attention.qkv_bias,
        "positions of registers": c.positions.prefix_positions == "all" and bool(c.tokens.registers),
        f"mlp_ratio={c.mlp.mlp_ratio} (only whole numbers)": c.mlp.mlp_ratio % 1 != 0,
        "pad or crop": c.stem.pad or c.stem.crop,
    }
    check_vit("transformers' EoMT", c, (*features, "head_dim", "patch_norms", "patch_bias"), others)
    state.pop("encoder.mask_token", None)
    table, like = state["encoder.positions.table"], state["encoder.class_token"]
    if c.positioned_prefix:  # only patches have positions there: the class token's is added to it
        state["encoder.class_token"] = like + table[:, :1]
        state["encoder.positions.table"] = table[:, 1:]
    state.setdefault("encoder.register_tokens", like.new_zeros(1, 0, c.width))
    if not c.residual.layer_scale:
        for layer in range(c.depth):
            for branch in ("scale1", "scale2"):
                state[f"encoder.blocks.{layer}.{branch}.gamma"] = like.new_ones(c.width)
    gated = c.mlp.kind == "swiglu"
    config: Options = {
        **hf.write_fields(c, ENCODER),
        "architectures": ["EomtForUniversalSegmentation"],
        "model_type": "eomt",
        "hidden_act": hf.activation_for(c.mlp.activation),
        "mlp_ratio": int(c.mlp.mlp_ratio),
        "use_swiglu_ffn": gated,
        "layerscale_value": c.residual.layer_scale or 1.0,
    }
    return config, (*VIT_COMMON, *(GATED if gated else VIT_PLAIN))


def _dinov3_config(c: DINOv3Config, state: State) -> tuple[Options, tuple[Rule, ...]]:
    state.pop("encoder.mask_token", None)
    state.setdefault("encoder.register_tokens", state["encoder.class_token"].new_zeros(1, 0, c.width))
    config = dinov3.config_for(c) | {
        "architectures": ["EomtDinov3ForUniversalSegmentation"],
        "model_type": "eomt_dinov3",
        "hidden_dropout_prob": 0.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rotary_base},
    }
    config.pop("rope_theta")
    return config, (*DINOV3_COMMON, *(GATED if c.mlp == "swiglu" else DINOV3_PLAIN))


FAMILY = Family(
    "eomt",
    EoMTConfig,
    (HF, HF_DINOV3),
    _infer,
    {"hf": Writer(_write)},
    bare_options=("heads", "eps", "image_size"),
    model_types=MODEL_TYPES,
    check_theirs=lambda theirs: DenseOutput(theirs.class_queries_logits, theirs.masks_queries_logits),
)
