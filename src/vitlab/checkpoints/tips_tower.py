"""TIPSv2's image tower, by its authors' names, which transformers keeps: inside a Tipsv2Model, or alone.

Alone it is a plain Vision Transformer with a register, and is read and written as one.
"""

from __future__ import annotations

from vitlab.checkpoints import hf, keymap, schema
from vitlab.checkpoints.clip_image import check_square
from vitlab.checkpoints.family import ModelType, Written
from vitlab.checkpoints.keymap import Dialect, Options, Rule, State, layers
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.tips import SQUASH
from vitlab.models.vit_config import ViTConfig

TIPSV2 = {"tipsv2": ModelType("Tipsv2", "", SQUASH)}
ALONE = {"tipsv2_vision_model": TIPSV2["tipsv2"]}
RESIZE_RULE = "bilinear_antialias"
FIELDS: hf.Fields = {
    **hf.FIELDS,
    "image_size": ("image_size", 448),
    "patch_size": ("patch_size", 14),
    "eps": ("layer_norm_eps", 1e-6),
    "layer_scale": ("layerscale_value", 1.0),
    "stochastic_depth": ("drop_path_rate", 0.0),
}
KINDS: schema.Kinds = {**schema.HF, "num_register_tokens": schema.WHOLE, "use_swiglu_ffn": schema.FLAG}


def rules(ours: str, theirs: str, *, swiglu: bool = False) -> tuple[Rule, ...]:
    """The image tower, under our and their prefix; `swiglu`: which of the two MLPs is written."""
    block, their_block = ours + "blocks.{i}.", theirs + "blocks.{i}."
    mlps = [{"fc1": "c_fc", "fc2": "c_proj"}, {"fc1": "w12", "fc2": "w3"}]
    return (
        Rule(f"{ours}class_token", f"{theirs}cls_token"),
        Rule(f"{ours}mask_token", f"{theirs}mask_token"),
        Rule(f"{ours}register_tokens", f"{theirs}register_tokens"),
        Rule(f"{ours}positions.table", f"{theirs}pos_embed"),
        Rule(f"{ours}patch_embed.proj.*", f"{theirs}patch_embed.proj.*"),
        *layers(block, their_block, {"attention.qkv": "attn.qkv", "attention.proj": "attn.proj"}),
        *layers(block, their_block, ("norm1", "norm2")),
        *(Rule(f"{block}scale{n}.gamma", f"{their_block}ls{n}.gamma") for n in (1, 2)),
        *(rule for mlp in mlps[:: -1 if swiglu else 1] for rule in layers(f"{block}mlp.", f"{their_block}mlp.", mlp)),
        Rule(f"{ours}norm.*", f"{theirs}norm.*"),
    )


def options_from(config: Options) -> Options:
    """vision_config, or the config.json of a Tipsv2VisionModel -> options."""
    config = {name: value for name, value in config.items() if value is not None}
    where = "config.json's vision_config"
    schema.check(config, KINDS, where)
    if not isinstance(config.get("patch_size", 14), int):
        raise CheckpointError(f"{where} has patch_size {config['patch_size']}; only square patches are known.")
    options = hf.read_fields(config, FIELDS)
    return {**options, "activation": hf.activation_of(config), "registers": config.get("num_register_tokens", 1)}


def _options(config: Options) -> Options:
    kind = config.get("model_type")
    if kind not in ALONE:
        raise CheckpointError(f"config.json has model_type {kind!r} beside the weights of a Tipsv2VisionModel.")
    return options_from(config)


DIALECT = Dialect(
    name="hf",
    rules=rules("", "{p}"),
    recognise=lambda keys: (
        bool(keys & {f"{p}blocks.0.mlp.c_fc.weight" for p in ("", "vision_encoder.")})
        and "text_encoder.token_embedding.weight" not in keys
    ),
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess=SQUASH,
    options={"resize_rule": RESIZE_RULE, "prefix_positions": "class"},
    prefixes=("", "vision_encoder."),
    read_stated=hf.reader(_options, ALONE),
)


# ------------------------------------------------------------------------------------------------------------ writing

UNSUPPORTED = (
    *("positions", "class_token", "distill_token", "pooling", "head_hidden", "head_dim", "norm", "norm_pre"),
    *("final_norm", "qk_norm", "stem", "patch_norms", "patch_bias"),
)


def check_tower(library: str, c: ViTConfig) -> None:
    """Refuse an image tower that transformers' TIPSv2 cannot have."""
    others = {
        "a network without layer_scale": not c.residual.layer_scale,
        f"prefix_positions={c.positions.prefix_positions}": c.positions.prefix_positions != "class",
        f"resize_rule={c.positions.resize_rule}": c.positions.resize_rule != RESIZE_RULE,
        "classes": bool(c.classes),
        **check_square(c),
    }
    check_vit(library, c, UNSUPPORTED, others)


def vision_config(c: ViTConfig) -> Options:
    """vision_config, or config.json of a vision model."""
    ratio = c.mlp.mlp_ratio
    return {
        **hf.write_fields(c, FIELDS),
        "model_type": "tipsv2_vision_model",
        "hidden_act": hf.activation_for(c.mlp.activation),
        "mlp_ratio": int(ratio) if ratio == int(ratio) else ratio,
        "use_swiglu_ffn": c.mlp.kind == "swiglu",
        "num_register_tokens": c.tokens.registers,
    }


def with_mask_token(state: State, key: str) -> State:
    """transformers' has one always."""
    token = state[key.replace("mask_token", "class_token")]
    return state if key in state else {**state, key: token.new_zeros(1, token.shape[-1])}


def write(model: Network, state: State) -> Written:
    """transformers' Tipsv2VisionModel."""
    c: ViTConfig = model.config
    check_tower("transformers' Tipsv2VisionModel", c)
    table = rules("", "", swiglu=c.mlp.kind == "swiglu")
    tensors = keymap.write("transformers", table, with_mask_token(state, "mask_token"), heads=c.heads)
    config = {"architectures": ["Tipsv2VisionModel"], **vision_config(c), "dtype": "float32"}
    return hf.folder(tensors, config, model.preprocess)
