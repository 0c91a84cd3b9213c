"""CLIP's image tower alone, by transformers' names: CLIPVisionModel, CLIPForImageClassification (read and written).

Both are a ViT. transformers' last_hidden_state has not yet seen the last norm: CLIPVisionModel applies it to the class
token (pooling="class_norm"), the classifier never (the mean of the patches as they are). The names in a CLIP's blocks
stand here too; checkpoints/clip.py reads CLIPs, and towers with a projection.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from vitlab.checkpoints import hf, keymap, schema
from vitlab.checkpoints.family import ModelType, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import TABLE, TOKENS, Codec, Dialect, Options, Rule, Source, State, Stated, layers
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.entry import CLIP_CROP
from vitlab.models.vit_config import ViTConfig

CLASS = Codec(TOKENS.read, lambda t, n, h: [t.reshape(-1)])  # (D,) <-> (1, 1, D)
PROCESSOR = ModelType("CLIP", hf.INTERPOLATE, {})
TOWER_TYPE = "clip_vision_model"
TOWER_TYPES = (TOWER_TYPE, "metaclip_2_vision_model")


def openai_blocks(ours: str, theirs: str) -> tuple[Rule, ...]:
    """OpenAI's and open_clip's names in every block of both towers."""
    names = {"attention.proj": "attn.out_proj", "norm1": "ln_1", "norm2": "ln_2"}
    return (
        *(Rule(f"{ours}attention.qkv.{part}", f"{theirs}attn.in_proj_{part}") for part in ("weight", "bias")),
        *layers(ours, theirs, names | {"mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}),
    )


def hf_tower(ours: str, theirs: str) -> tuple[Rule, ...]:
    """transformers' names of the image tower below two prefixes, without the last norm."""
    return (
        Rule(ours + "class_token", theirs + "embeddings.class_embedding", CLASS),
        Rule(ours + "positions.table", theirs + "embeddings.position_embedding.weight", TABLE),
        Rule(ours + "patch_embed.proj.weight", theirs + "embeddings.patch_embedding.weight"),
        Rule(ours + "norm_pre.*", theirs + "pre_layrnorm.*"),
        *hf.tower_blocks(ours + "blocks.{i}.", theirs + "encoder.layers.{i}."),
    )


def openai_tower(ours: str, theirs: str) -> tuple[Rule, ...]:
    """OpenAI's and open_clip's."""
    return (
        Rule(ours + "class_token", theirs + "class_embedding", CLASS),
        Rule(ours + "positions.table", theirs + "positional_embedding", TABLE),
        Rule(ours + "patch_embed.proj.weight", theirs + "conv1.weight"),
        Rule(ours + "norm_pre.*", theirs + "ln_pre.*"),
        *openai_blocks(ours + "blocks.{i}.", theirs + "transformer.resblocks.{i}."),
    )


# ------------------------------------------------------------------------------------------------------------ reading

FIELDS: hf.Fields = {
    "image_size": ("image_size", 224),
    "patch_size": ("patch_size", 32),
    "channels": ("num_channels", 3),
    "width": ("hidden_size", 768),
    "depth": ("num_hidden_layers", 12),
    "heads": ("num_attention_heads", 12),
    "eps": ("layer_norm_eps", 1e-5),
    "attention_dropout": ("attention_dropout", 0.0),
}


def hf_options(config: Options) -> Options:
    """config.json of a vision model, or of the CLIP that it is a part of -> options."""
    kind = schema.check(config, schema.HF, "config.json").get("model_type")
    if kind not in (*TOWER_TYPES, "clip", "metaclip_2"):
        raise CheckpointError(f"config.json has model_type {kind!r} beside the weights of a CLIPVisionModel.")
    vision = config if kind in TOWER_TYPES else hf.tower_config(config, "vision")
    return {**hf.read_fields(vision, FIELDS), "activation": hf.activation_of(vision, "quick_gelu")}


def _read_stated(source: Source) -> Stated:
    path = source.path / "config.json"
    if not path.is_file():
        return Stated()
    config = read_json(path)
    return with_processor(Stated(hf_options(config), labels=hf.labels_from(config)), source.path)


def with_processor(stated: Stated, folder: Path) -> Stated:
    return hf.with_processor(replace(stated, model_type=TOWER_TYPE), folder, PROCESSOR)


def has_tower(keys: set[str]) -> bool:
    """Whether transformers' image tower is there without the text tower."""
    alone = "text_model.embeddings.token_embedding.weight" not in keys
    return alone and bool(keys & {"embeddings.class_embedding", "vision_model.embeddings.class_embedding"})


def _is_classifier(keys: set[str]) -> bool:
    return has_tower(keys) and "classifier.weight" in keys


RULES = (*hf_tower("", "{p}"), Rule("head_norm.*", "{p}post_layernorm.*"))
CLASSIFIER_RULES = (*hf_tower("", "{p}"), Rule("head.*", "classifier.*"))
DIALECT = Dialect(
    name="hf",
    rules=RULES,
    recognise=lambda keys: has_tower(keys) and not keys & {"visual_projection.weight", "classifier.weight"},
    assumed={"eps": 1e-5, "activation": "quick_gelu"},
    preprocess=CLIP_CROP,
    options={"resize_rule": "bicubic", "pooling": "class_norm"},
    prefixes=("", "vision_model."),
    read_stated=_read_stated,
    ignored={r".*\.position_ids": "0, 1, 2, ...: counted anew"},
    taken_as="taken as in OpenAI's CLIP (other CLIPs have activation=gelu)",
)
CLASSIFIER = replace(
    DIALECT,
    rules=CLASSIFIER_RULES,
    recognise=_is_classifier,
    options={"resize_rule": "bicubic", "pooling": "mean", "final_norm": "no"},
    ignored={**DIALECT.ignored, r".*post_layernorm\..*": "CLIP's last norm, which the classifier does not read"},
)


# ------------------------------------------------------------------------------------------------------------ writing

UNSUPPORTED = (
    *("positions", "class_token", "head_hidden", "head_dim", "norm"),
    *("layer_scale", "qk_norm", "qkv_bias", "stem", "patch_norms", "mlp"),
)


def check_tower(library: str, c: ViTConfig, others: dict[str, bool]) -> None:
    """Refuse an image tower that a CLIP of another library cannot have."""
    differences = {
        f"prefix_positions={c.positions.prefix_positions}": c.positions.prefix_positions != "class",
        "registers, a distillation or a mask token": bool(
            c.tokens.registers or c.tokens.distill_token or c.tokens.mask_token
        ),
        "norm_pre=False": not c.norm.norm_pre,
        "patch_bias=True": c.stem.patch_bias and c.stem.kind == "patch",
    }
    check_vit(library, c, UNSUPPORTED, differences | others)


def vision_config(c: ViTConfig) -> Options:
    """vision_config, or config.json of a vision model."""
    return {
        **hf.write_fields(c, FIELDS),
        "model_type": TOWER_TYPE,
        "intermediate_size": c.mlp_hidden,
        "hidden_act": hf.activation_for(c.mlp.activation),
    }


def check_square(c: ViTConfig) -> dict[str, bool]:
    height, width = c.image_size
    return {f"images of {height}x{width}, which are no square": height != width}


def write(model: Network, state: State) -> Written:
    """A ViT with a norm before its blocks: CLIPVisionModel, or with classes CLIPForImageClassification."""
    c: ViTConfig = model.config
    if c.classes:
        others = {f"pooling={c.head.pooling}, final_norm={c.final_norm} (only mean and no)": c.head.pooling != "mean"}
        others |= {"final_norm=yes": c.final_norm == "yes"}
        check_tower("transformers' CLIPForImageClassification", c, others | check_square(c))
        norm = {"head_norm.weight": state["norm_pre.weight"].new_ones(c.width)}  # in every file, and read by none
        norm |= {"head_norm.bias": state["norm_pre.weight"].new_zeros(c.width)}
        config: Options = {"architectures": ["CLIPForImageClassification"], "model_type": "clip"}
        config |= {"vision_config": vision_config(c), **hf.class_fields(c.classes, model.labels)}
    else:
        pooled = {f"pooling={c.head.pooling}": c.head.pooling not in ("class", "class_norm")}
        check_tower("transformers' CLIPVisionModel", c, pooled | {"final_norm=no": not has_last_norm(state)})
        norm = last_norm(state)
        config = {"architectures": ["CLIPVisionModel"], **vision_config(c)}
    tensors = {key: value for key, value in state.items() if not key.startswith(("norm.", "head_norm."))} | norm
    rules = (*RULES, Rule("head.*", "classifier.*"))
    written = keymap.write("transformers", rules, tensors, prefix="vision_model.", heads=c.heads)
    return hf.folder(written, {**config, "dtype": "float32"}, model.preprocess, processor="CLIPImageProcessor")


def has_last_norm(state: State) -> bool:
    return "head_norm.weight" in state or "norm.weight" in state


def last_norm(state: State) -> State:
    """Before pooling or after it, the class token comes out the same."""
    theirs = "head_norm" if "head_norm.weight" in state else "norm"
    return {f"head_norm.{part}": state[f"{theirs}.{part}"] for part in ("weight", "bias")}
