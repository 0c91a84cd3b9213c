"""timm's VisionTransformer and VisionTransformerDistilled: state dict, and the folder its hub uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from vitlab.checkpoints import keymap, schema
from vitlab.checkpoints.family import Writer, Written
from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.keymap import Dialect, Options, Rule, Source, State, Stated, layers
from vitlab.checkpoints.timm_names import facts_of, other_network
from vitlab.checkpoints.writable import check_vit
from vitlab.errors import CheckpointError, UsageError
from vitlab.images.preprocess import Preprocess
from vitlab.layers.pooling import NORM_AFTER
from vitlab.models.base import Network
from vitlab.models.entry import CLIP_CROP
from vitlab.models.plain import PlainConfig
from vitlab.models.vit_config import SIZES, ViTConfig

ATTENTION_POOL = (  # global_pool="map", as in SigLIP
    Rule("pool.query", "attn_pool.latent"),
    *layers("pool.", "attn_pool.", ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")),
)
RULES = (
    Rule("patch_embed.proj.*", "patch_embed.proj.*"),
    Rule("class_token", "cls_token"),
    Rule("distill_token", "dist_token"),
    Rule("register_tokens", "reg_token"),
    Rule("positions.table", "pos_embed"),
    Rule("norm_pre.*", "norm_pre.*"),
    Rule("blocks.{i}.norm1.*", "blocks.{i}.norm1.*"),
    Rule("blocks.{i}.attention.qkv.*", "blocks.{i}.attn.qkv.*"),
    Rule("blocks.{i}.attention.q_norm.*", "blocks.{i}.attn.q_norm.*"),
    Rule("blocks.{i}.attention.k_norm.*", "blocks.{i}.attn.k_norm.*"),
    Rule("blocks.{i}.attention.proj.*", "blocks.{i}.attn.proj.*"),
    Rule("blocks.{i}.scale1.gamma", "blocks.{i}.ls1.gamma"),
    Rule("blocks.{i}.norm2.*", "blocks.{i}.norm2.*"),
    Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.fc1.*"),
    Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.fc2.*"),
    Rule("blocks.{i}.scale2.gamma", "blocks.{i}.ls2.gamma"),
    Rule("norm.*", "norm.*"),
    Rule("head_norm.*", "fc_norm.*"),
    *ATTENTION_POOL,
    Rule("pre_logits.*", "pre_logits.fc.*"),
    Rule("head.*", "head.*"),
    Rule("head_distill.*", "head_dist.*"),
)

HEADS = {1536: 24} | {v["width"]: v["heads"] for _, _, v in reversed(SIZES.values())}  # by width, else to be passed
PARTS = {
    "model_args": schema.TIMM_ARGUMENTS,
    "pretrained_cfg": schema.TIMM_PREPROCESS,
    "vitlab": {"eps": schema.EPS},
}
ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu")
ARGUMENTS = {  # timm's arguments -> our options, where the values mean the same
    "num_heads": "heads",
    "img_size": "image_size",
    "act_layer": "activation",
    "embed_dim": "width",
    "depth": "depth",
    "patch_size": "patch_size",
    "in_chans": "channels",
    "qkv_bias": "qkv_bias",
    "qk_norm": "qk_norm",
    "class_token": "class_token",
    "reg_tokens": "registers",
    "pre_norm": "norm_pre",
}
WITHOUT_EFFECT = re.compile(r".*drop.*|num_classes|mlp_ratio|init_values|fc_norm|.*img_size|.*img_pad|weight_init")
AVERAGED = r"_gap_|^eva_large_"  # names of networks that average their patches
OWN_RULE = ("final_norm", "global_pool", "no_embed_class", "pos_embed", "pool_include_prefix", "norm_layer")


def read_config(source: Source) -> Options | None:
    """The config.json of a timm hub folder, its values checked; None: there is none, or it is another library's."""
    path = source.path / "config.json"
    config = read_json(path) if path.is_file() else {}
    if "architecture" not in config:
        return None
    schema.check(config, schema.TIMM, "config.json")
    for part, kinds in PARTS.items():
        config[part] = schema.check(config.get(part) or {}, kinds, f"config.json's {part}")
    return config


def labels_from(config: Options) -> list[str] | None:
    """Class names in timm's config.json; transformers' own fillers LABEL_0, LABEL_1, ... are none."""
    names: list[str] = config.get("label_names") or []
    return None if all(name == f"LABEL_{i}" for i, name in enumerate(names)) else names


def _read_stated(source: Source) -> Stated | None:
    if (config := read_config(source)) is None:
        return None
    state, name = source.state, config["architecture"]
    if what := other_network(name):
        raise CheckpointError(f"timm's {name} has {what}, which is not known here.")
    args = {key: value for key, value in config["model_args"].items() if value is not None}
    cfg = config["pretrained_cfg"]
    options = {ours: args[theirs] for theirs, ours in ARGUMENTS.items() if theirs in args}
    width = None if "width" in options else state["patch_embed.proj.weight"].shape[0]
    options = {**facts_of(name, width), **options, **config["vitlab"]}
    if options.get("activation", "gelu") not in ACTIVATIONS:
        raise CheckpointError(f"timm's act_layer {options['activation']!r} is not one of {', '.join(ACTIVATIONS)}.")
    if "image_size" not in options and len(cfg.get("input_size", ())) == 3:
        options["image_size"] = tuple(cfg["input_size"][1:])
    if args.get("no_embed_class"):
        options["prefix_positions"] = "none"
    if args.get("final_norm") is False:
        options["final_norm"] = "no"
    if args.get("pos_embed") == "none":
        options["positions"] = "none"
    pooled = args.get("global_pool") or config.get("global_pool") or usual_pooling(name)
    wrong = {key: args[key] for key in ("pool_include_prefix", "norm_layer") if args.get(key)}
    poolings = ("token", "avg", *(["map"] if "attn_pool.latent" in state else []))
    wrong |= {} if pooled in poolings else {"global_pool": pooled}
    wrong |= {
        k: v for k, v in args.items() if k not in (*ARGUMENTS, *OWN_RULE) and not WITHOUT_EFFECT.fullmatch(k) and v
    }
    if wrong:
        raise CheckpointError(f"timm's {', '.join(f'{k}={v!r}' for k, v in wrong.items())} is not known here.")
    options |= pooling_options(pooled, state)
    size_note = "timm needs dynamic_img_size=True for that"
    return Stated(options, preprocess_from(cfg), labels=labels_from(config), size_note=size_note)


def usual_pooling(name: str) -> str:
    """timm's global_pool of an architecture."""
    return "avg" if re.search(AVERAGED, name) else "token"


def pooling_options(pooled: str, state: State, prefix: str = "") -> Options:
    """timm's global_pool -> our pooling, where it is not the one that the weights show."""
    if f"{prefix}fc_norm.weight" in state:
        return {"pooling": "mean_norm" if pooled == "avg" else "class_norm"}
    return {"pooling": "mean"} if pooled == "avg" else {}


def preprocess_from(cfg: Options) -> Options:
    """pretrained_cfg -> values for Preprocess."""
    preprocess: Options = {k: cfg[k] for k in ("mean", "std", "interpolation") if k in cfg}
    if len(cfg.get("input_size", ())) == 3:
        preprocess["size"] = tuple(cfg["input_size"][1:])
    if "crop_pct" in cfg and "size" in preprocess:
        sides = [int(side / cfg["crop_pct"] + 1e-6) for side in preprocess["size"]]
        mode = cfg.get("crop_mode") or "center"
        if mode not in ("center", "squash"):
            raise CheckpointError(f"pretrained_cfg has crop_mode {mode!r}; known are center and squash.")
        preprocess |= {"how": "crop", "resize": tuple(sides) if mode == "squash" else min(sides)}
    return preprocess


def _has_norm_pre(keys: set[str]) -> bool:
    return "norm_pre.weight" in keys


_BASE = Dialect(
    name="timm",
    rules=RULES,
    recognise=lambda keys: "blocks.0.attn.qkv.weight" in keys and "patch_embed.proj.weight" in keys,
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess={"interpolation": "bicubic", "how": "crop", "mean": (0.5,) * 3, "std": (0.5,) * 3},
    options={"resize_rule": "bicubic_antialias"},
    read_stated=_read_stated,
)
CLIP_TRUNK = replace(  # the image tower of a CLIP
    _BASE,
    recognise=_has_norm_pre,
    assumed={"eps": 1e-5, "activation": "quick_gelu"},
    preprocess=CLIP_CROP,
    taken_as="taken as in OpenAI's CLIP, because of norm_pre (other CLIPs have activation=gelu)",
)
DIALECT = replace(_BASE, bare_variants=(CLIP_TRUNK,))


# ------------------------------------------------------------------------------------------------------------ writing


def check_writable(c: ViTConfig) -> None:
    """timm's VisionTransformer must be able to be this network."""
    others = {
        f"positions={c.positions.kind}": c.positions.kind not in ("learned", "none"),
        "final_norm=yes beside the head's own norm": c.final_norm == "yes" and c.head.pooling in NORM_AFTER,
        f"pooling={c.head.pooling}": c.head.pooling in ("class_mean", "attention"),
        "registers beside a distillation token": bool(c.tokens.registers and c.tokens.distill_token),
        "a patch bias with norm_pre, or none without": c.norm.norm_pre == c.stem.patch_bias,
        "registers without positions beside a class token with one": bool(
            c.tokens.registers and c.positions.prefix_positions == "class"
        ),
    }
    names = ("stem", "patch_norms", "norm", "head_dim", "mlp", "head_hidden", "mask_token")
    check_vit("timm's ViT", c, names, others)


def config_for(c: ViTConfig, preprocess: Preprocess | None) -> Options:
    """config.json of a timm hub folder; model_args say everything, so that no released name has to fit."""
    args: Options = {
        "img_size": list(c.image_size),
        "patch_size": c.patch_size,
        "in_chans": c.channels,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": ratio(c.width, c.mlp.mlp_ratio, c.mlp_hidden),
        "qkv_bias": c.attention.qkv_bias,
        "qk_norm": c.attention.qk_norm,
        "class_token": c.tokens.class_token,
        "reg_tokens": c.tokens.registers,
        "no_embed_class": c.positions.prefix_positions == "none",
        "pos_embed": "learn" if c.positions.kind == "learned" else "none",
        "init_values": c.residual.layer_scale or None,
        "pre_norm": c.norm.norm_pre,
        "global_pool": "token" if c.head.pooling in ("class", "class_norm") else "avg",
        "fc_norm": c.head.pooling in NORM_AFTER,
        "act_layer": c.mlp.activation,
    }
    if c.final_norm == "no" and c.head.pooling not in NORM_AFTER:
        args["final_norm"] = False
    size = next((s for s, v in (("tiny", 192), ("small", 384), ("base", 768), ("large", 1024)) if v == c.width), "base")
    name = f"deit_{size}_distilled_patch16_224" if c.tokens.distill_token else f"vit_{size}_patch16_224"
    return hub_config(c, preprocess, name, args)


def hub_config(c: PlainConfig, preprocess: Preprocess | None, architecture: str, args: Options) -> Options:
    """config.json of a network that timm makes by the name of an architecture and model_args."""
    config: Options = {
        "architecture": architecture,
        "num_classes": c.classes,
        "num_features": c.width,
        "global_pool": args["global_pool"],
        "model_args": args,
        "vitlab": {"eps": c.option("eps")},  # no argument of timm's; this lets the file come back exactly
    }
    if preprocess is not None:
        config["pretrained_cfg"] = {
            "input_size": [c.channels, *c.image_size],
            "interpolation": preprocess.interpolation,
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "crop_pct": min(preprocess.size) / preprocess.resize if isinstance(preprocess.resize, int) else 1.0,
            **({"crop_mode": "squash"} if preprocess.how == "stretch" else {}),
            "num_classes": c.classes,
        }
    return config


def ratio(width: int, ours: float, hidden: int) -> float:
    """timm and open_clip truncate width * ratio where we round it."""
    return ours if int(width * ours) == hidden else (hidden + 0.5) / width


def eps_note(library: str, eps: float, usual: float = 1e-6) -> list[str]:
    if eps == usual:
        return []
    return [f"{library} uses LayerNorm eps {usual:g}, this network {eps:g}: its numbers will differ a little there."]


def check_expressible(library: str, reasons: Mapping[str, bool]) -> None:
    """Refuse what the other library's network has no option for."""
    if wrong := [reason for reason, has_it in reasons.items() if has_it]:
        raise UsageError(f"{library} cannot express {', '.join(wrong)}. Use --to native.")


def _write(model: Network, state: State) -> Written:
    c: ViTConfig = model.config
    check_writable(c)
    bare = (
        [] if HEADS.get(c.width) == c.heads else [f"a bare file does not say its heads: load it with heads={c.heads}."]
    )
    files = {"config.json": config_for(c, model.preprocess)}
    return Written(keymap.write("timm", RULES, state, heads=c.heads), files, eps_note("timm's ViT", c.norm.eps), bare)


WRITER = Writer(_write)
