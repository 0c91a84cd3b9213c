"""SigLIP's image tower in transformers: inside a SiglipModel, or alone (SiglipVisionModel, ...ForImageClassification).

Alone it is a plain Vision Transformer with attention pooling, and is read as one.
"""

from __future__ import annotations

from vitlab.checkpoints import hf, keymap, schema
from vitlab.checkpoints.clip_image import check_square
from vitlab.checkpoints.family import ModelType, Written
from vitlab.checkpoints.keymap import FIRST_THIRD, LAST_THIRDS, TABLE, Dialect, Options, Rule, State, layers
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.siglip import SQUASH
from vitlab.models.vit_config import ViTConfig

SIGLIP = {"siglip": ModelType("Siglip", hf.INTERPOLATE, SQUASH)}
ALONE = {"siglip_vision_model": SIGLIP["siglip"]}
MODEL_TYPES = SIGLIP | ALONE
PARTS = ("weight", "bias")
FIELDS: hf.Fields = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 16),
    "channels": ("num_channels", 3),
    "width": ("hidden_size", 768),
    "depth": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "eps": ("layer_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
}


def rules(ours: str, theirs: str) -> tuple[Rule, ...]:
    """The image tower, under our and their prefix."""
    pool = {"norm": "layernorm", "proj": "attention.out_proj", "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}
    return (
        Rule(f"{ours}positions.table", f"{theirs}embeddings.position_embedding.weight", TABLE),
        Rule(f"{ours}patch_embed.proj.*", f"{theirs}embeddings.patch_embedding.*"),
        *hf.tower_blocks(f"{ours}blocks.{{i}}.", f"{theirs}encoder.layers.{{i}}."),
        Rule(f"{ours}norm.*", f"{theirs}post_layernorm.*"),
        Rule(f"{ours}pool.query", f"{theirs}head.probe"),
        *(Rule(f"{ours}pool.q.{part}", f"{theirs}head.attention.in_proj_{part}", FIRST_THIRD) for part in PARTS),
        *(Rule(f"{ours}pool.kv.{part}", f"{theirs}head.attention.in_proj_{part}", LAST_THIRDS) for part in PARTS),
        *layers(f"{ours}pool.", f"{theirs}head.", pool),
    )


def options_from(config: Options) -> Options:
    """vision_config, or the config.json of a SiglipVisionModel -> options."""
    config = {name: value for name, value in config.items() if value is not None}
    where = "config.json's vision_config"
    schema.check(config, schema.HF, where)
    if not isinstance(config.get("patch_size", 16), int):
        raise CheckpointError(f"{where} has patch_size {config['patch_size']}; only square patches are known.")
    return {**hf.read_fields(config, FIELDS), "activation": hf.activation_of(config, "gelu_pytorch_tanh")}


def _options(config: Options) -> Options:
    kind = schema.check(config, schema.HF, "config.json").get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"config.json has model_type {kind!r}, the weights are of a SigLIP's image tower: {', '.join(MODEL_TYPES)}."
        )
    return options_from(config if kind == "siglip_vision_model" else config.get("vision_config") or {})


DIALECT = Dialect(
    name="hf",
    rules=(*rules("", "{p}"), Rule("head.*", "classifier.*")),
    recognise=lambda keys: (
        any({f"{p}embeddings.patch_embedding.bias", f"{p}post_layernorm.weight"} <= keys for p in ("", "vision_model."))
        and "text_model.embeddings.token_embedding.weight" not in keys
    ),
    assumed={"eps": 1e-6, "activation": "gelu_tanh"},
    preprocess=SQUASH,
    options={"resize_rule": "bicubic"},
    prefixes=("", "vision_model."),
    ignored={r".*\.position_ids": "0, 1, 2, ...: counted anew"},
    read_stated=hf.reader(_options, MODEL_TYPES),
)


def write(model: Network, state: State) -> Written:
    """A ViT with attention pooling: transformers' SiglipVisionModel, which has no classifier."""
    c: ViTConfig = model.config
    others = {
        "class_token": c.tokens.class_token,
        f"classes={c.classes} (load it with classes=0)": bool(c.classes),
        **check_square(c),
    }
    names = ("positions", "registers", "distill_token", "mask_token", "head_hidden", "head_dim", "norm", "norm_pre")
    names += ("final_norm", "qk_norm", "qkv_bias", "layer_scale", "mlp", "stem", "patch_norms", "patch_bias")
    check_vit("transformers' SiglipVisionModel", c, names, others)
    config = {
        **hf.write_fields(c, FIELDS),
        "architectures": ["SiglipVisionModel"],
        "model_type": "siglip_vision_model",
        "intermediate_size": c.mlp_hidden,
        "hidden_act": hf.activation_for(c.mlp.activation),
        "dtype": "float32",
    }
    tensors = keymap.write("transformers", rules("", "vision_model."), state, heads=c.heads)
    return hf.folder(tensors, config, model.preprocess, processor="SiglipImageProcessor")
