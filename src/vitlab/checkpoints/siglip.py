"""SigLIP and SigLIP 2 at a fixed image size: transformers' SiglipModel, and open_clip's with a timm trunk.

transformers computes both towers with the tanh GELU; open_clip some with the exact one, as its config or the name of
the trunk says. Read both; write both. The image tower alone is siglip_tower.py's, or timm's.
"""

from __future__ import annotations

from dataclasses import replace

from vitlab.checkpoints import hf, keymap, schema, siglip_tower, timm
from vitlab.checkpoints.clip_image import openai_blocks
from vitlab.checkpoints.family import Clues, Family, Reading, Writer, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import SCALAR, Dialect, Options, Renamed, Rule, Source, State, Stated
from vitlab.checkpoints.timm_names import facts_of
from vitlab.checkpoints.two_towers import (
    FACTS,
    OPEN_CLIP_FILE,
    OPEN_CLIP_TEXT,
    TEXT_FIELDS,
    UNKNOWN_ACTIVATION,
    by_path,
    check_stated,
    infer_towers,
    open_clip_parts,
    open_clip_preprocess,
    open_clip_preprocess_cfg,
    read_tokenizer,
    three_texts,
    unstated,
    with_defaults,
)
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.siglip import SQUASH, TOWERS, SigLIPConfig, SigLIPTextConfig
from vitlab.text.tokenizer import Tokenizer

HF_TEXT = with_defaults(
    TEXT_FIELDS,
    {
        "vocab_size": 32000,
        "max_position_embeddings": 64,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "layer_norm_eps": 1e-6,
    },
)


# ------------------------------------------------------------------------------------------ files beside the weights


def token_ids(tokenizer: Tokenizer | None, vocab: int) -> Options:
    """config.json's bos, eos and pad ids are CLIP's by mistake; without a tokenizer, as the releases have them."""
    if tokenizer is not None:
        return {"text.end_id": tokenizer.end_id, "text.pad_id": tokenizer.pad_id}
    return {"text.end_id": 1, "text.pad_id": 0 if vocab == 256000 else 1}


def _read_hf(source: Source) -> Stated:
    tokenizer, path = read_tokenizer(source), source.path / "config.json"
    if not path.is_file():
        return Stated(tokenizer=tokenizer)
    config = schema.check(read_json(path), schema.HF, "config.json")
    if config.get("model_type") != "siglip":
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r}, the weights are a SiglipModel's."
        )
    text, vision = hf.tower_config(config, "text"), hf.tower_config(config, "vision")
    options = hf.read_fields(text, HF_TEXT) | token_ids(tokenizer, text.get("vocab_size", 32000))
    options["text.activation"] = hf.activation_of(text, "gelu_pytorch_tanh")
    options |= {f"image.{name}": value for name, value in siglip_tower.options_from(vision).items()}
    options["embed_dim"] = text.get("projection_size", options["text.width"])
    return hf.with_processor(Stated(options, tokenizer=tokenizer), source.path, siglip_tower.SIGLIP["siglip"])


KNOWN = {  # what open_clip's options must be, where they change the network
    "vision_cfg": {"timm_pool": ("map",), "timm_proj": ("none", "", None)},
    "text_cfg": {"no_causal_mask": (True,), "proj_bias": (True,), "pool_type": ("last",)},
}
USUAL = {  # in open_clip, where they are left out
    "vision_cfg": {"timm_pool": "avg", "timm_proj": "linear"},
    "text_cfg": {"no_causal_mask": False, "proj_bias": False, "pool_type": "argmax"},
}
READ = {
    "vision_cfg": ("image_size", "timm_model_name"),
    "text_cfg": ("norm_kwargs", "act_kwargs", "mlp_ratio", *(name for name, _ in OPEN_CLIP_TEXT.values())),
}
WITHOUT_EFFECT = (
    *("timm_model_pretrained", "timm_drop", "timm_drop_path", "patch_dropout", "output_tokens", "eos_id", "pad_id"),
    *("hf_tokenizer_name", "tokenizer_kwargs", "tokenizer_mode", "hf_model_pretrained"),
)


def _read_open_clip(source: Source) -> Stated:
    tokenizer, path = read_tokenizer(source), source.path / OPEN_CLIP_FILE
    if not path.is_file():
        return Stated(tokenizer=tokenizer)
    config = read_json(path)
    model, vision, text = open_clip_parts(config)
    for part, values in (("vision_cfg", vision), ("text_cfg", text)):
        _check_open_clip(part, values)
    norm: Options = text.get("norm_kwargs") or {}
    activation: Options = text.get("act_kwargs") or {}
    options = hf.read_fields(text, OPEN_CLIP_TEXT) | token_ids(tokenizer, text.get("vocab_size", 32000))
    options |= {
        "embed_dim": model.get("embed_dim"),
        "text.eps": norm.get("eps", 1e-5),
        "text.activation": "gelu_tanh" if activation.get("approximate") == "tanh" else "gelu",
        "image.image_size": vision.get("image_size"),
    }
    width = source.state["visual.trunk.patch_embed.proj.weight"].shape[0]
    options |= {f"image.{name}": value for name, value in facts_of(vision["timm_model_name"], width).items()}
    if model.get("quick_gelu"):
        options["text.activation"] = "quick_gelu"
    options = {name: value for name, value in options.items() if value is not None}
    return Stated(options, open_clip_preprocess(config), tokenizer=tokenizer)


def _check_open_clip(part: str, values: Options) -> None:
    for name, value in (USUAL[part] | values).items():
        allowed = KNOWN[part].get(name)
        if (allowed is not None and value not in allowed) or (
            allowed is None and value and name not in (*READ[part], *WITHOUT_EFFECT)
        ):
            raise CheckpointError(f"open_clip's {part}.{name}={value!r} is not known here for a SigLIP.")
    for name, only in (("norm_kwargs", "eps"), ("act_kwargs", "approximate")):
        if more := set(values.get(name) or {}) - {only}:
            raise CheckpointError(
                f"open_clip's {part}.{name} has {', '.join(sorted(more))}: only {only} is known here."
            )
    if part == "vision_cfg" and not isinstance(values.get("timm_model_name"), str):
        raise CheckpointError(f"{OPEN_CLIP_FILE} has no timm_model_name in vision_cfg, which says the trunk's kind.")


HF = Dialect(
    name="hf",
    rules=(
        *siglip_tower.rules("image.", "vision_model."),
        Rule("text.embed.weight", "text_model.embeddings.token_embedding.weight"),
        Rule("text.positions", "text_model.embeddings.position_embedding.weight"),
        *hf.tower_blocks("text.blocks.{i}.", "text_model.encoder.layers.{i}."),
        Rule("text.norm.*", "text_model.final_layer_norm.*"),
        Rule("text_projection.*", "text_model.head.*"),
        Rule("log_scale", "logit_scale", SCALAR),
        Rule("bias", "logit_bias", SCALAR),
    ),
    recognise=lambda keys: {"text_model.head.weight", "vision_model.embeddings.patch_embedding.weight"} <= keys,
    assumed={"eps": 1e-6, "activation": "gelu_tanh"},
    preprocess=SQUASH,
    options={"resize_rule": "bicubic"},
    read_stated=_read_hf,
    ignored={r".*\.position_ids": "0, 1, 2, ...: counted anew"},
)
OPEN_CLIP = Dialect(
    name="open_clip",
    rules=(
        *(replace(rule, ours=f"image.{rule.ours}", theirs=f"visual.trunk.{rule.theirs}") for rule in timm.RULES),
        Rule("text.embed.weight", "text.token_embedding.weight"),
        Rule("text.positions", "text.positional_embedding"),
        *openai_blocks("text.blocks.{i}.", "text.transformer.resblocks.{i}."),
        Rule("text.norm.*", "text.ln_final.*"),
        Rule("text_projection.*", "text.text_projection.*"),
        Rule("log_scale", "logit_scale"),
        Rule("bias", "logit_bias"),
    ),
    recognise=lambda keys: {"visual.trunk.attn_pool.latent", "text.text_projection.weight"} <= keys,
    assumed={"eps": 1e-6},
    preprocess=SQUASH,
    options={"resize_rule": "bicubic_antialias"},
    read_stated=_read_open_clip,
)


# ------------------------------------------------------------------------------------------------------ the network

TANH = UNKNOWN_ACTIVATION.format(
    other="its tanh approximation",
    value="gelu_tanh",
    who="transformers computes all with gelu_tanh; open_clip those before SigLIP 2 with gelu. Where the towers differ: "
    "image=dict(activation=...), text=dict(activation=...).",
)


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    stated = clues.stated.options
    vit, text = infer_towers(renamed, clues, "SigLIP", TANH)
    ids = token_ids(clues.stated.tokenizer, text["vocab"])
    text |= {name: stated.get(f"text.{name}", ids[f"text.{name}"]) for name in ("end_id", "pad_id")}
    config = SigLIPConfig(vit, SigLIPTextConfig(**text))
    check_stated(config, config.embed_dim, stated)
    return Reading(config, unstated(config, clues))


# ------------------------------------------------------------------------------------------------------------ writing

UNSUPPORTED = (
    *("positions", "registers", "distill_token", "mask_token", "head_hidden", "head_dim", "norm", "norm_pre"),
    *("final_norm", "qk_norm", "qkv_bias", "layer_scale", "mlp", "stem", "patch_norms", "patch_bias"),
)


def _check_writable(library: str, c: SigLIPConfig, others: dict[str, bool]) -> None:
    image_tower = {
        f"pooling={c.image.head.pooling}": c.image.head.pooling != "attention",
        "a class token": c.image.tokens.class_token,
    }
    check_vit(library, c.image, UNSUPPORTED, image_tower | others)


def hf_config(c: SigLIPConfig) -> Options:
    """config.json."""
    text = {
        **hf.write_fields(c, HF_TEXT),
        "model_type": "siglip_text_model",
        "intermediate_size": c.text.mlp_hidden,
        "hidden_act": hf.activation_for(c.text.activation),
        "projection_size": c.embed_dim,
        "bos_token_id": c.text.end_id,
        "eos_token_id": c.text.end_id,
        "pad_token_id": c.text.pad_id,
    }
    vision = {
        **hf.write_fields(c.image, siglip_tower.FIELDS),
        "model_type": "siglip_vision_model",
        "intermediate_size": c.image.mlp_hidden,
        "hidden_act": hf.activation_for(c.image.mlp.activation),
    }
    names = {"architectures": ["SiglipModel"], "model_type": "siglip"}
    return {**names, "text_config": text, "vision_config": vision, "dtype": "float32"}


def hf_tokenizer(tokenizer: Tokenizer) -> Options:
    """tokenizer.json, for transformers to use as it is."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": tokenizer.context,
        "eos_token": tokenizer.backend.id_to_token(tokenizer.end_id),
        "pad_token": tokenizer.backend.id_to_token(tokenizer.pad_id),
        "padding_side": tokenizer.padding_side,
        "model_input_names": ["input_ids"],
    }
    return {"tokenizer.json": tokenizer.to_json(), "tokenizer_config.json": config}


def _write_hf(model: Network, state: State) -> Written:
    c: SigLIPConfig = model.config
    height, width = c.image_size
    _check_writable(
        "transformers' SiglipModel", c, {f"images of {height}x{width}, which are no square": height != width}
    )
    tensors = keymap.write("transformers", HF.rules, state, heads=c.image.heads)
    written = hf.folder(tensors, hf_config(c), model.preprocess, processor="SiglipImageProcessor")
    return with_tokenizer(written, model.tokenizer)


def with_tokenizer(written: Written, tokenizer: Tokenizer | None) -> Written:
    if tokenizer is None:
        note = "the model has no tokenizer, so none was written: transformers needs spiece.model or tokenizer.json."
        return replace(written, notes=[note, *written.notes])
    return replace(written, files={**hf_tokenizer(tokenizer), **written.files})


TRUNKS = {  # timm's names, by which open_clip builds an image tower: size, patch -> image sizes
    ("base", 16): (224, 256, 384, 512),
    ("base", 32): (256,),
    ("large", 16): (256, 384, 512),
    ("so400m", 14): (224, 378, 384),
    ("so400m", 16): (256, 384, 512),
    ("giantopt", 16): (256, 384),
}


def _trunk_name(c: SigLIPConfig) -> str:
    v = c.image
    for (size, patch), sides in TRUNKS.items():
        tower = TOWERS["giant_opt" if size == "giantopt" else size][0]
        if patch == v.patch_size and v.image_size in {(side, side) for side in sides}:
            name = f"vit_{size}_patch{patch}_siglip_{v.image_size[0]}"
            other = v.with_options(**{"mlp_ratio": 4.0, **tower})
            same = other.mlp_hidden == v.mlp_hidden and replace(other, mlp=v.mlp) == v
            if same and facts_of(name)["activation"] == v.mlp.activation:
                return name
    raise CheckpointError(
        f"open_clip builds a SigLIP's image tower by timm's name, and none has patches of {v.patch_size} in images of "
        f"{v.image_size[0]}x{v.image_size[1]}, width={v.width}, depth={v.depth}, heads={v.heads} and "
        f"activation={v.mlp.activation}. Use --to hf or --to native."
    )


def _write_open_clip(model: Network, state: State) -> Written:
    c: SigLIPConfig = model.config
    others = {f"text.activation={c.text.activation}": c.text.activation not in ("gelu", "gelu_tanh")}
    others |= {f"image.eps={c.image.norm.eps:g}": c.image.norm.eps != 1e-6}
    _check_writable("open_clip's SigLIP", c, others)
    text = {
        **hf.write_fields(c, OPEN_CLIP_TEXT),
        "mlp_ratio": timm.ratio(c.text.width, c.text.mlp_ratio, c.text.mlp_hidden),
        "norm_kwargs": {"eps": c.text.eps},
        **{name: values[0] for name, values in KNOWN["text_cfg"].items()},
        **({"act_kwargs": {"approximate": "tanh"}} if c.text.activation == "gelu_tanh" else {}),
    }
    vision = {"image_size": c.image_size[0], "timm_model_name": _trunk_name(c), "timm_model_pretrained": False}
    vision |= {name: values[0] for name, values in KNOWN["vision_cfg"].items()}
    cfg: Options = {"embed_dim": c.embed_dim, "init_logit_bias": -10, "custom_text": True}
    config: Options = {"model_cfg": {**cfg, "vision_cfg": vision, "text_cfg": text}}
    if model.preprocess is not None:
        config["preprocess_cfg"] = open_clip_preprocess_cfg(model.preprocess)
    files = {OPEN_CLIP_FILE: config, **(hf_tokenizer(model.tokenizer) if model.tokenizer is not None else {})}
    tensors = keymap.write("open_clip", OPEN_CLIP.rules, state, heads=c.image.heads)
    return Written(tensors, files, weights="open_clip_model.safetensors")


FAMILY = Family(
    "siglip",
    SigLIPConfig,
    (OPEN_CLIP, HF),
    _infer,
    {"hf": Writer(_write_hf), "open_clip": Writer(_write_open_clip)},
    bare_options=(*FACTS[2:], "image_size"),
    model_types=siglip_tower.SIGLIP,
    by_path=by_path,
    check_inputs=three_texts,
    check_output=lambda output: output.logits_per_image,
)
