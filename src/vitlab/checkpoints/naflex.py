"""SigLIP 2 for images of their own aspect: transformers' Siglip2Model, and its image tower, Siglip2VisionModel; and
timm's naflexvit, which is read.

The names are SigLIP's; the patch embedding is a matrix over flat patches, where a SiglipModel has a convolution. Read
and written; a Siglip2ForImageClassification, whose head reads the mean of the patches, is only read.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

from torch import Tensor

from vitlab.checkpoints import hf, keymap, schema, siglip, siglip_tower, timm, vit
from vitlab.checkpoints.family import Clues, Family, ModelType, Reading, Writer, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import TOKENS, Codec, Options, Renamed, Rule, Source, State, Stated
from vitlab.checkpoints.timm_names import facts_of
from vitlab.checkpoints.two_towers import (
    FACTS,
    by_path,
    check_stated,
    infer_towers,
    read_tokenizer,
    three_texts,
    unstated,
)
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.naflex import NaFlexConfig, NaFlexViTConfig, aspect
from vitlab.models.siglip import SigLIPTextConfig
from vitlab.models.vit_config import ViTConfig

SIGLIP2 = {"siglip2": ModelType("Siglip2", "", aspect(16))}
ALONE = {"siglip2_vision_model": SIGLIP2["siglip2"]}
MODEL_TYPES = SIGLIP2 | ALONE
FIELDS: hf.Fields = {name: field for name, field in siglip_tower.FIELDS.items() if name != "image_size"}
PATCHES = "embeddings.patch_embedding.weight"


def _to_convolution(parts: list[Tensor]) -> Tensor:
    """(D, P*P*C), in the order row, column, channel -> (D, C, P, P)."""
    width, size = parts[0].shape
    channels = 1 if math.isqrt(size) ** 2 == size else 3
    side = math.isqrt(size // channels)
    return parts[0].reshape(width, side, side, channels).permute(0, 3, 1, 2)


FLAT_PATCHES = Codec(_to_convolution, lambda t, n, h: [t.permute(0, 2, 3, 1).flatten(1)])


def _rules(ours: str, theirs: str) -> tuple[Rule, ...]:
    patches = (
        Rule(f"{ours}patch_embed.proj.weight", theirs + PATCHES, FLAT_PATCHES),
        Rule(f"{ours}patch_embed.proj.bias", f"{theirs}embeddings.patch_embedding.bias"),
    )
    others = (rule for rule in siglip_tower.rules(ours, theirs) if rule.ours != f"{ours}patch_embed.proj.*")
    return (*patches, *others)


def _has_flat_patches(state: State) -> bool:
    weights = (state.get(prefix + PATCHES) for prefix in ("", "vision_model."))
    return any(weight is not None and weight.ndim == 2 for weight in weights)


# ------------------------------------------------------------------------------------------ files beside the weights


def _tower_options(config: Options) -> Options:
    """vision_config, or the config.json of a Siglip2VisionModel -> options."""
    config = {name: value for name, value in config.items() if value is not None}
    where = "config.json's vision_config"
    schema.check(config, schema.HF, where)
    patch, patches = config.get("patch_size", 16), config.get("num_patches", 256)
    side = math.isqrt(patches)
    if not isinstance(patch, int) or side**2 != patches:
        raise CheckpointError(
            f"{where} has patch_size {patch} and num_patches {patches}; known are square patches in a square number."
        )
    options = {**hf.read_fields(config, FIELDS), "image_size": side * patch}
    return {**options, "activation": hf.activation_of(config, "gelu_pytorch_tanh")}


def _read_config(source: Source, model_types: dict[str, ModelType]) -> Options | None:
    path = source.path / "config.json"
    if not path.is_file():
        return None
    config = schema.check(read_json(path), schema.HF, "config.json")
    if (kind := config.get("model_type")) not in model_types:
        raise CheckpointError(
            f"config.json has model_type {kind!r}, but the weights are of {' or '.join(model_types)}: its patches are "
            "embedded by a matrix."
        )
    return config


def _with_processor(stated: Stated, folder: Path, tower: Options) -> Stated:
    stated = hf.with_processor(stated, folder, SIGLIP2["siglip2"])
    patch = tower["patch_size"]
    return replace(stated, usual_preprocess=aspect(patch, (tower["image_size"] // patch) ** 2))


def _read_hf(source: Source) -> Stated:
    tokenizer = read_tokenizer(source)
    if (config := _read_config(source, SIGLIP2)) is None:
        return Stated(tokenizer=tokenizer)
    text, tower = hf.tower_config(config, "text"), _tower_options(hf.tower_config(config, "vision"))
    options = hf.read_fields(text, siglip.HF_TEXT) | siglip.token_ids(tokenizer, text.get("vocab_size", 32000))
    options |= {f"image.{name}": value for name, value in tower.items()}
    options["text.activation"] = hf.activation_of(text, "gelu_pytorch_tanh")
    options["embed_dim"] = text.get("projection_size", options["text.width"])
    return _with_processor(Stated(options, tokenizer=tokenizer), source.path, tower)


def _read_tower(source: Source) -> Stated:
    if (config := _read_config(source, MODEL_TYPES)) is None:
        return Stated()
    alone = config["model_type"] in ALONE
    tower = _tower_options(config if alone else hf.tower_config(config, "vision"))
    stated = Stated(tower, labels=hf.labels_from(config), model_type=config["model_type"])
    return _with_processor(stated, source.path, tower)


HF = replace(
    siglip.HF,
    rules=(
        *_rules("image.", "vision_model."),
        *(rule for rule in siglip.HF.rules if not rule.ours.startswith("image.")),
    ),
    fits=_has_flat_patches,
    preprocess=aspect(16),
    options={"resize_rule": "bilinear_antialias"},
    read_stated=_read_hf,
)
HF_TOWER = replace(
    siglip_tower.DIALECT,
    rules=(*_rules("", "{p}"), Rule("head.*", "classifier.*")),
    fits=_has_flat_patches,
    preprocess=aspect(16),
    options={"resize_rule": "bilinear_antialias"},
    read_stated=_read_tower,
)


# ------------------------------------------------------------------------------------------------ timm's naflexvit

TIMM_RULES = (
    Rule("patch_embed.proj.weight", "embeds.proj.weight", FLAT_PATCHES),
    Rule("patch_embed.proj.bias", "embeds.proj.bias"),
    Rule("register_tokens", "embeds.reg_token"),
    Rule("positions.table", "embeds.pos_embed", TOKENS),  # (1, rows, columns, D)
    *(rule for rule in timm.RULES if rule.ours.startswith(("blocks.", "norm.", "head_norm.", "pool.", "head."))),
)
ARGUMENTS = {"num_heads": "heads", "act_layer": "activation", "embed_dim": "width", "depth": "depth"}
TIMM_BICUBIC, TIMM_BILINEAR = "bicubic_antialias", "bilinear_antialias"


def _timm_size(state: State) -> Options:
    """The image size whose grid has a position for each patch."""
    _, rows, columns, _ = keymap.shape_of(state, "embeds.pos_embed", 4)
    side = _to_convolution([state["embeds.proj.weight"]]).shape[-1]
    return {"image_size": (rows * side, columns * side)}


def _read_timm(source: Source) -> Stated | None:
    if (config := timm.read_config(source)) is None:
        return None
    name: str = config["architecture"]
    args = {key: value for key, value in config["model_args"].items() if value is not None}
    unknown = {k: v for k, v in args.items() if k not in ARGUMENTS and not timm.WITHOUT_EFFECT.fullmatch(k) and v}
    if unknown or "_par" in name:
        what = ", ".join(f"{k}={v!r}" for k, v in unknown.items()) or "positions that keep the aspect"
        raise CheckpointError(f"timm's {name} has {what}, which is not known here.")
    own = {ARGUMENTS[key]: value for key, value in args.items() if key in ARGUMENTS}
    width = None if "width" in own else source.state["embeds.proj.weight"].shape[0]
    options = {"eps": 1e-6, **facts_of(name.removeprefix("naflex"), width), "resize_rule": TIMM_BICUBIC}
    if "_siglip" in name:
        options |= {"activation": "gelu_tanh", "resize_rule": TIMM_BILINEAR}
    options |= own
    if options.get("activation", "gelu") not in timm.ACTIVATIONS:
        raise CheckpointError(
            f"timm's act_layer {options['activation']!r} is not one of {', '.join(timm.ACTIVATIONS)}."
        )
    return Stated(options, timm.preprocess_from(config["pretrained_cfg"]), labels=timm.labels_from(config))


def _is_timms(keys: set[str]) -> bool:
    return {"embeds.proj.weight", "embeds.pos_embed", "blocks.0.attn.qkv.weight"} <= keys


def _has_flat_embeds(state: State) -> bool:
    return state["embeds.proj.weight"].ndim == 2


def _is_siglips(keys: set[str]) -> bool:
    return "attn_pool.latent" in keys and "blocks.0.ls1.gamma" not in keys


_BARE = replace(
    timm.DIALECT,
    rules=TIMM_RULES,
    recognise=_is_timms,
    fits=_has_flat_embeds,
    options={"resize_rule": TIMM_BICUBIC},
    hints=_timm_size,
    read_stated=_read_timm,
    bare_variants=(),
)
_SIGLIPS = replace(
    _BARE,
    recognise=_is_siglips,
    assumed={"eps": 1e-6, "activation": "gelu_tanh"},
    options={"resize_rule": TIMM_BILINEAR},
    taken_as="taken as in SigLIP 2, because of attention pooling without LayerScale",
)
TIMM = replace(_BARE, bare_variants=(_SIGLIPS,))


# ------------------------------------------------------------------------------------------------------ the network


def _with_own_aspect(tower: ViTConfig) -> NaFlexViTConfig:
    return NaFlexViTConfig(**{group.name: getattr(tower, group.name) for group in fields(tower)})


def _usual(tower: ViTConfig, clues: Clues) -> Options | None:
    """Preprocess values of weights without a config."""
    rows, columns = tower.grid
    return None if clues.stated.options else aspect(tower.patch_size, rows * columns)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    stated = clues.stated.options
    tower, text = infer_towers(renamed, clues, "SigLIP", siglip.TANH)
    ids = siglip.token_ids(clues.stated.tokenizer, text["vocab"])
    text |= {name: stated.get(f"text.{name}", ids[f"text.{name}"]) for name in ("end_id", "pad_id")}
    config = NaFlexConfig(_with_own_aspect(tower), SigLIPTextConfig(**text))
    check_stated(config, config.embed_dim, stated)
    return Reading(config, unstated(config, clues), preprocess=_usual(tower, clues))


def _infer_tower(renamed: Renamed, clues: Clues) -> Reading:
    if clues.dialect.name == "hf" and "head.weight" in renamed.tensors:
        for key in [key for key in renamed.tensors if key.startswith("pool.")]:
            renamed.leave_out(key, "a pooler, which the classifier does not read")
    tower = vit.infer_config(renamed, clues)
    config = _with_own_aspect(tower)
    return Reading(config, vit.assumed_options(tower, clues), preprocess=_usual(tower, clues))


# ------------------------------------------------------------------------------------------------------------ writing


def _check_writable(library: str, c: ViTConfig) -> None:
    rows, columns = c.grid
    others = {
        f"pooling={c.head.pooling}": c.head.pooling != "attention",
        f"a grid of {rows}x{columns} positions, which is no square": rows != columns,
        f"{c.classes} classes": bool(c.classes),
        f"resize_rule={c.positions.resize_rule}": c.positions.resize_rule != "bilinear_antialias",
    }
    check_vit(library, c, siglip.UNSUPPORTED, others)


def _vision_config(c: ViTConfig) -> Options:
    return {
        **hf.write_fields(c, FIELDS),
        "model_type": "siglip2_vision_model",
        "num_patches": c.grid[0] * c.grid[1],
        "intermediate_size": c.mlp_hidden,
        "hidden_act": hf.activation_for(c.mlp.activation),
    }


def _write(model: Network, state: State) -> Written:
    c: NaFlexConfig = model.config
    _check_writable("transformers' Siglip2Model", c.image)
    tensors = keymap.write("transformers", HF.rules, state, heads=c.image.heads)
    config = siglip.hf_config(c)
    text: Options = {**config["text_config"], "model_type": "siglip2_text_model"}
    config |= {"architectures": ["Siglip2Model"], "model_type": "siglip2", "text_config": text}
    config["vision_config"] = _vision_config(c.image)
    return siglip.with_tokenizer(hf.folder(tensors, config, model.preprocess), model.tokenizer)


def _write_tower(model: Network, state: State) -> Written:
    c: NaFlexViTConfig = model.config
    _check_writable("transformers' Siglip2VisionModel", c)
    tensors = keymap.write("transformers", HF_TOWER.rules, state, prefix="vision_model.", heads=c.heads)
    config = {**_vision_config(c), "architectures": ["Siglip2VisionModel"], "dtype": "float32"}
    return hf.folder(tensors, config, model.preprocess)


FAMILY = Family(
    "naflex",
    NaFlexConfig,
    (HF,),
    _infer,
    {"hf": Writer(_write, any_size=lambda config: True)},
    bare_options=(*FACTS[2:], "image_size"),
    model_types=SIGLIP2,
    by_path=by_path,
    check_inputs=three_texts,
    check_output=lambda output: output.logits_per_image,
)
TOWER = Family(
    "naflex_vit",
    NaFlexViTConfig,
    (HF_TOWER, TIMM),
    _infer_tower,
    {"hf": Writer(_write_tower, any_size=lambda config: True)},
    bare_options=("heads", "image_size", "eps", "activation"),
    model_types=ALONE,
)
