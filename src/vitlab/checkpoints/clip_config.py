"""What stands beside a CLIP's weights: transformers' config.json and tokenizer, open_clip's open_clip_config.json."""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints import hf, schema
from vitlab.errors import CheckpointError
from vitlab.models.base import Network
from vitlab.models.clip import CLIPConfig
from vitlab.text.tokenizer import END, START, Tokenizer


def hf_options(config: dict[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """transformers' config.json -> options by path; what it leaves out has its library's default."""
    schema.check(config, schema.HF, "config.json")
    if config.get("model_type") != "clip":
        raise CheckpointError(
            f"config.json has model_type {config.get('model_type')!r}, the weights are a CLIPModel's."
        )
    text, vision = (
        _without_nulls(config.get(f"{part}_config") or config.get(f"{part}_config_dict") or {})
        for part in ("text", "vision")
    )
    schema.check(text, schema.HF, "config.json's text_config")
    schema.check(vision, schema.HF, "config.json's vision_config")
    vocab, end = text.get("vocab_size", 49408), text.get("eos_token_id", 49407)
    if end == 2:  # a mistake of early files, for which transformers looks for the largest number
        end = tokenizer.end_id if tokenizer is not None else vocab - 1
    return {
        "image.image_size": vision.get("image_size", 224),
        "image.patch_size": vision.get("patch_size", 32),
        "image.width": vision.get("hidden_size", 768),
        "image.depth": vision.get("num_hidden_layers", 12),
        "image.heads": vision.get("num_attention_heads", 12),
        "image.channels": vision.get("num_channels", 3),
        "image.activation": _activation(vision),
        "image.eps": vision.get("layer_norm_eps", 1e-5),
        "text.vocab": vocab,
        "text.context": text.get("max_position_embeddings", 77),
        "text.width": text.get("hidden_size", 512),
        "text.depth": text.get("num_hidden_layers", 12),
        "text.heads": text.get("num_attention_heads", 8),
        "text.activation": _activation(text),
        "text.eps": text.get("layer_norm_eps", 1e-5),
        "text.end_id": end,
        "text.pad_id": tokenizer.pad_id if tokenizer is not None else end,  # config.json's pad_token_id is not used
        "embed_dim": config.get("projection_dim", 512),
    }


def _without_nulls(config: Any) -> Any:
    """Full dumps of transformers 4 hold null for what has no value, e.g. eos_token_id of the image tower."""
    return {k: v for k, v in config.items() if v is not None} if isinstance(config, dict) else config


def _activation(config: dict[str, Any]) -> str:
    name = config.get("hidden_act", "quick_gelu")
    if name not in hf.ACTIVATIONS:
        raise CheckpointError(f"config.json has hidden_act {name!r}; known are {', '.join(hf.ACTIVATIONS)}.")
    return hf.ACTIVATIONS[name]


READ = {
    "vision_cfg": ("image_size", "layers", "width", "head_width", "patch_size", "mlp_ratio"),
    "text_cfg": ("context_length", "vocab_size", "width", "heads", "layers", "mlp_ratio"),
}
WITHOUT_EFFECT = {  # options of open_clip that change nothing where they are not zero, false or nothing -> which values
    "pool_type": ("tok", "argmax"),
    "pos_embed_type": ("learnable",),
    "proj_type": ("linear",),
    "block_type": ("default",),
    **dict.fromkeys(("patch_dropout", "eos_id", "pad_id", "output_tokens", "final_ln_after_pool")),  # any
    **dict.fromkeys(("attn_pooler_queries", "attn_pooler_heads", "timm_pool", "timm_proj", "hf_model_pretrained")),
    **dict.fromkeys(("tokenizer_kwargs", "tokenizer_mode", "hf_tokenizer_name")),
}


def open_clip_options(config: dict[str, Any], tokenizer: Tokenizer | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """open_clip_config.json -> options by path, and preprocess values."""
    where = "open_clip_config.json"
    model = schema.check(config, schema.OPEN_CLIP, where).get("model_cfg") or {}
    schema.check(model, schema.OPEN_CLIP_MODEL, f"{where}'s model_cfg")
    for part, known in READ.items():
        schema.check(model.get(part) or {}, schema.OPEN_CLIP_TOWER, f"{where}'s {part}")
        for name, value in (model.get(part) or {}).items():
            harmless = WITHOUT_EFFECT.get(name, ()) if name not in known else None
            if value and harmless is not None and value not in harmless:
                raise CheckpointError(f"open_clip's {part}.{name}={value!r} is not known here: only plain CLIPs are.")
    vision, text = model.get("vision_cfg") or {}, model.get("text_cfg") or {}
    theirs = {
        "image.image_size": vision.get("image_size"),
        "image.width": vision.get("width"),
        "image.depth": vision.get("layers"),
        "image.patch_size": vision.get("patch_size"),
        "image.heads": vision["width"] // vision.get("head_width", 64) if "width" in vision else None,
        "text.context": text.get("context_length"),
        "text.vocab": text.get("vocab_size"),
        "text.width": text.get("width"),
        "text.depth": text.get("layers"),
        "text.heads": text.get("heads"),
        "embed_dim": model.get("embed_dim"),
        "text.pad_id": tokenizer.pad_id if tokenizer is not None else None,
        "eps": 1e-5,  # another would stand in norm_kwargs
    }
    if isinstance(model.get("quick_gelu"), bool):  # left out, it may have been set where the weights were made
        theirs["activation"] = "quick_gelu" if model["quick_gelu"] else "gelu"
    cfg, how = config.get("preprocess_cfg") or {}, {"shortest": "crop", "squash": "stretch", "longest": "fit"}
    schema.check(cfg, schema.OPEN_CLIP_PREPROCESS, f"{where}'s preprocess_cfg")
    if (mode := cfg.get("resize_mode", "shortest")) not in how:
        raise CheckpointError(f"{where} has resize_mode {mode!r:.40}; known are {', '.join(how)}.")
    preprocess = {name: cfg[name] for name in ("mean", "std", "interpolation") if name in cfg}
    preprocess |= {"how": how[mode]} if preprocess else {}
    return {name: value for name, value in theirs.items() if value is not None}, preprocess


# ------------------------------------------------------------------------------------------------------------ writing


def hf_files(model: Network) -> dict[str, Any]:
    """config.json, and the tokenizer's files where the model has one."""
    c, tokenizer = model.config, model.tokenizer
    theirs = {ours: name for name, ours in reversed(hf.ACTIVATIONS.items())}
    text = {
        "model_type": "clip_text_model",
        "vocab_size": c.text.vocab,
        "max_position_embeddings": c.text.context,
        "hidden_size": c.text.width,
        "intermediate_size": round(c.text.width * c.text.mlp_ratio),
        "num_hidden_layers": c.text.depth,
        "num_attention_heads": c.text.heads,
        "hidden_act": theirs[c.text.activation],
        "layer_norm_eps": c.text.eps,
        "projection_dim": c.embed_dim,
        "bos_token_id": tokenizer.start_id if tokenizer is not None else max(c.text.end_id - 1, 0),
        "eos_token_id": c.text.end_id,
        "pad_token_id": c.text.end_id,
    }
    vision = {
        "model_type": "clip_vision_model",
        "image_size": c.image.image_size[0],
        "patch_size": c.image.patch_size,
        "num_channels": c.image.channels,
        "hidden_size": c.image.width,
        "intermediate_size": c.image.mlp_hidden,
        "num_hidden_layers": c.image.depth,
        "num_attention_heads": c.image.heads,
        "hidden_act": theirs[c.image.mlp.activation],
        "layer_norm_eps": c.image.norm.eps,
        "projection_dim": c.embed_dim,
    }
    config = {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": c.embed_dim,
        "text_config": text,
        "vision_config": vision,
        "dtype": "float32",
    }
    return {"config.json": config, **(_hf_words(tokenizer) if tokenizer is not None else {})}


def _hf_words(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's files; transformers always pads with end-of-text, which changes no embedding."""
    words = Tokenizer.from_json(tokenizer.to_json(), pad_id=tokenizer.end_id)
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "model_max_length": words.context,
        "bos_token": START,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
    }
    return {"tokenizer.json": words.to_json(), "tokenizer_config.json": config, **words.to_two_files()}


def open_clip_files(model: Network) -> dict[str, Any]:
    """open_clip_config.json; tokenizer.json too, which open_clip itself does not read."""
    c: CLIPConfig = model.config
    cfg: dict[str, Any] = {
        "embed_dim": c.embed_dim,
        "quick_gelu": c.text.activation == "quick_gelu",
        "vision_cfg": {
            "image_size": c.image.image_size[0]
            if c.image.image_size[0] == c.image.image_size[1]
            else list(c.image.image_size),
            "layers": c.image.depth,
            "width": c.image.width,
            "head_width": c.image.width // c.image.heads,
            "patch_size": c.image.patch_size,
            "mlp_ratio": c.image.mlp_hidden / c.image.width,
        },
        "text_cfg": {
            "context_length": c.text.context,
            "vocab_size": c.text.vocab,
            "width": c.text.width,
            "heads": c.text.heads,
            "layers": c.text.depth,
            "mlp_ratio": c.text.mlp_ratio,
        },
    }
    if c.loss == "sigmoid":
        cfg |= {"init_logit_bias": -10.0}
    files: dict[str, Any] = {"open_clip_config.json": {"model_cfg": cfg}}
    p = model.preprocess
    if p is not None:
        how = {"crop": "shortest", "stretch": "squash", "fit": "longest"}[p.how]
        files["open_clip_config.json"]["preprocess_cfg"] = {
            "mean": list(p.mean),
            "std": list(p.std),
            "interpolation": p.interpolation,
            "resize_mode": how,
        }
    return files | ({"tokenizer.json": model.tokenizer.to_json()} if model.tokenizer is not None else {})
