"""EVA-02 by timm's names (its hub's folders and bare files) and by its authors', BAAI's; EVA-02-CLIP by BAAI's and
open_clip's. Queries, keys and values are one matrix in Ti and S, and three in B and L; the gates likewise.

BAAI's files hold cosines and sines of the rotary positions, which show the heads and the grid of the pre-training.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from vitlab.checkpoints import clip_around, keymap, plain, timm
from vitlab.checkpoints.family import Family, Writer, Written
from vitlab.checkpoints.keymap import JOIN, Dialect, Options, Renamed, Rule, State, layers
from vitlab.checkpoints.two_towers import by_path, three_texts
from vitlab.checkpoints.vit import grid_options
from vitlab.errors import CheckpointError
from vitlab.layers.positions import rotary_scaled, rotary_speeds
from vitlab.models.base import Network
from vitlab.models.entry import CLIP_CROP
from vitlab.models.eva02 import MODELS, SIZES, EVA02CLIPConfig, EVA02Config
from vitlab.models.plain import PlainConfig
from vitlab.models.two_towers import TextConfig

HEADS = {options["width"]: options["heads"] for options in SIZES.values()}


def _infer_options(renamed: Renamed, facts: Options) -> Options:
    state = renamed.tensors
    options = plain.encoder_options(state, facts, HEADS, "EVA-02")
    if options.pop("mlp") == "mlp":
        raise CheckpointError(
            "its MLP has no gate, so this is an EVA (eva_giant_patch14_*) or the enormous EVA-02-CLIP, which are not "
            "read here. EVA-02 is: eva02_tiny to eva02_large."
        )
    options |= {
        "mlp_norm": "blocks.0.mlp.norm.weight" in state,
        "attention_norm": "blocks.0.attention.inner_norm.weight" in state,
        "qkv_bias": plain.qkv_bias(state),
        "pooling": "mean_norm" if "head_norm.weight" in state else "class",
    }
    prefix = {"class_token": True, "distill_token": False, "registers": 0, "patch_size": options["patch_size"]}
    grid = grid_options(state, prefix, {**facts, "prefix_positions": "class", "positions": "learned"})
    return options | {"image_size": grid["image_size"]}


def _timm_options(architecture: str, pool: Options) -> Options | None:
    match = re.fullmatch(r"eva02_(tiny|small|base|large)_patch\d+_(clip_)?\d+(\..*)?", architecture)
    if match is None:
        return None
    kind = pool.get("global_pool", "token" if match[2] else "avg")
    if kind not in ("avg", "token"):
        raise CheckpointError(f"config.json has global_pool {kind!r}; known are avg and token.")
    pooling = "mean_norm" if kind == "avg" else "class"
    size = {name: SIZES[match[1]][name] for name in ("width", "heads")}
    return {**size, "eps": 1e-6, "rotary_grid": (16, 16), "pooling": pooling}


def _recognise(keys: set[str]) -> bool:
    bias = keys & {"blocks.0.attn.q_bias", "blocks.0.attn.q_proj.bias"}
    others = keys & {"blocks.0.gamma_1", "reg_token", "blocks.0.attn.relative_position_bias_table"}
    others |= keys & {"rel_pos_bias.relative_position_bias_table", "norm_pre.weight", "blocks.0.attn.k_proj.bias"}
    return bool(bias) and not others and {"pos_embed", "cls_token", "blocks.0.mlp.fc2.weight"} <= keys


TIMM = Dialect(
    name="timm",
    rules=plain.TIMM_RULES,
    recognise=_recognise,
    assumed={"eps": 1e-6, "rotary_grid": (16, 16)},
    preprocess=CLIP_CROP,
    read_stated=plain.timm_reader(
        "EVA-02's (eva02_tiny to eva02_large)",
        _timm_options,
        {**plain.ARGUMENTS, "ref_feat_shape": "rotary_grid", "rope_temperature": "rotary_base"},
    ),
)

# ---------------------------------------------------------------------------------------------------- BAAI's .pt files

BLOCK = "{p}blocks.{i}."
BAAI_RULES = (
    Rule("patch_embed.proj.*", "{p}patch_embed.proj.*"),
    Rule("class_token", "{p}cls_token"),
    Rule("positions.table", "{p}pos_embed"),
    *layers("blocks.{i}.", BLOCK, {"norm1": "norm1", "norm2": "norm2", "attention.proj": "attn.proj"}),
    Rule("blocks.{i}.attention.qkv.weight", tuple(f"{BLOCK}attn.{part}_proj.weight" for part in "qkv"), JOIN),
    Rule("blocks.{i}.attention.qkv.weight", f"{BLOCK}attn.qkv.weight"),
    Rule("blocks.{i}.attention.qkv.q_bias", f"{BLOCK}attn.q_bias"),
    Rule("blocks.{i}.attention.qkv.v_bias", f"{BLOCK}attn.v_bias"),
    Rule("blocks.{i}.attention.inner_norm.*", f"{BLOCK}attn.inner_attn_ln.*"),
    Rule("blocks.{i}.mlp.fc1.*", (f"{BLOCK}mlp.w1.*", f"{BLOCK}mlp.w2.*"), JOIN),
    Rule("blocks.{i}.mlp.fc1.*", f"{BLOCK}mlp.w12.*"),
    Rule("blocks.{i}.mlp.norm.*", f"{BLOCK}mlp.ffn_ln.*"),
    Rule("blocks.{i}.mlp.fc2.*", f"{BLOCK}mlp.w3.*"),
    *layers("", "{p}", {"norm": "norm", "head_norm": "fc_norm", "head": "head"}),
)


def _is_baais(keys: set[str]) -> bool:
    own = any({f"{p}blocks.0.mlp.w3.weight", f"{p}blocks.0.attn.q_bias"} <= keys for p in ("", "visual."))
    return own and not clip_around.has_text(keys)


def _rotary_hints(state: State) -> Options:
    """Heads, and the grid of the pre-training, by the stored cosines and sines (N, d); checked against ours."""
    prefix = "visual." if "visual.cls_token" in state else ""
    cos, sin = (state.get(f"{prefix}rope.freqs_{part}") for part in ("cos", "sin"))
    if cos is None or sin is None or cos.ndim != 2 or cos.shape != sin.shape:
        return {}
    side, d = math.isqrt(cos.shape[0]), cos.shape[1]
    if side < 2 or side**2 != cos.shape[0] or d % 4:
        raise CheckpointError(f"rope.freqs_cos has the shape {tuple(cos.shape)}: its rows are those of no square grid.")
    speeds = rotary_speeds(d, 10000.0)
    pair = len(speeds) // 2  # of middle speed: the fastest may turn by more than half a circle
    channel = d // 2 + 2 * pair
    turn = torch.atan2(sin[1, channel].float(), cos[1, channel].float())  # from column 0 to 1
    reference = round(float(turn / speeds[pair]) * side)
    if reference < 1 or not torch.allclose(
        rotary_scaled((side, side), (reference, reference), speeds, 0).cos.repeat_interleave(2, dim=1),
        cos.float(),
        atol=2e-3,  # some files are in half precision
    ):
        raise CheckpointError("rope.freqs_cos are not those of base 10000, stretched to a square grid.")
    width = state[f"{prefix}cls_token"].shape[-1]
    return {"heads": width // d, "rotary_grid": (reference, reference)}


BAAI = Dialect(
    name="baai",
    rules=BAAI_RULES,
    recognise=_is_baais,
    assumed={"rotary_grid": (16, 16)},
    preprocess=CLIP_CROP,
    options={"eps": 1e-6},
    prefixes=("", "visual."),
    ignored={
        r".*rope\.freqs_(cos|sin)": "computed from the grid",
        r"mask_token|lm_head\..*": "for the masked patches of the pre-training",
    },
    hints=_rotary_hints,
)

# ------------------------------------------------------------------------------------------------------------ writing


def _write(model: Network, state: State) -> Written:
    """timm's, in the form of Ti and S, or with a norm inside the MLP in that of B and L."""
    c: EVA02Config = model.config
    timm.check_expressible(
        "timm's EVA-02", {f"pooling={c.pooling}": c.pooling == "mean", "a bias of keys": c.qkv_bias is True}
    )
    args = plain.timm_arguments(c) | {
        "qkv_fused": not c.mlp_norm,
        "scale_mlp": c.mlp_norm,
        "scale_attn_inner": c.attention_norm,
        "global_pool": "token" if c.pooling == "class" else "avg",
    }
    size = next((name for name, options in SIZES.items() if options["width"] == c.width), None)
    size = size or ("base" if c.mlp_norm else "small")
    config = timm.hub_config(c, model.preprocess, f"eva02_{size}_patch14_224", args)
    tensors = keymap.write("timm", plain.write_rules(separate=c.mlp_norm), state, heads=c.heads)
    bare = (
        [] if HEADS.get(c.width) == c.heads else [f"a bare file does not say its heads: load it with heads={c.heads}."]
    )
    return Written(tensors, {"config.json": config}, timm.eps_note("timm's EVA-02", c.eps), bare)


FAMILY = plain.family(
    "eva02",
    EVA02Config,
    (TIMM, BAAI),
    _infer_options,
    bare_options=("heads", "eps", "rotary_grid", "image_size"),
    writers={"timm": Writer(_write)},
)


# -------------------------------------------------------------------------------------------------------- EVA-02-CLIP


def _below(prefix: str) -> tuple[Rule, ...]:
    """BAAI's image tower under another name than {p}, which is the text tower's."""
    rules = tuple(replace(rule, theirs=tuple(key.replace("{p}", "") for key in rule.keys)) for rule in BAAI_RULES)
    return clip_around.below(rules, "image.", prefix)


CLIP_BAAI = Dialect(
    name="baai",
    rules=(*_below("visual."), *clip_around.TEXT_RULES),
    recognise=lambda keys: {"visual.blocks.0.mlp.w3.weight"} <= keys and clip_around.has_text(keys),
    assumed={"image.rotary_grid": (16, 16)},
    preprocess=CLIP_CROP,
    options={"image.eps": 1e-6, **clip_around.TEXT_OPTIONS},
    prefixes=clip_around.TEXT_PREFIXES,
    ignored=BAAI.ignored,
    hints=lambda state: {f"image.{name}": value for name, value in _rotary_hints(state).items()},
)


def _is_trunk(keys: set[str]) -> bool:
    return clip_around.has_text(keys) and _recognise(
        {key.removeprefix(clip_around.TRUNK) for key in keys if clip_around.TRUNK in key}
    )


CLIP_OPEN_CLIP = Dialect(
    name="open_clip",
    rules=(*clip_around.below(plain.TIMM_RULES, "image.", clip_around.TRUNK), *clip_around.TEXT_RULES),
    recognise=_is_trunk,
    assumed={"image.rotary_grid": (16, 16)},
    preprocess=CLIP_CROP,
    options={"image.eps": 1e-6, **clip_around.TEXT_OPTIONS},
    prefixes=clip_around.TEXT_PREFIXES,
    read_stated=clip_around.open_clip_reader(_timm_options, "token"),
)


def _clip_config(renamed: Renamed, image: PlainConfig, text: TextConfig, embed_dim: int) -> EVA02CLIPConfig:
    assert isinstance(image, EVA02Config)
    return EVA02CLIPConfig(image, text, embed_dim)


def _write_open_clip(model: Network, state: State) -> Written:
    sizes = {"eva02_base_patch16_clip": (224,), "eva02_large_patch14_clip": (224, 336)}
    trunks = {
        f"{name}_{side}": replace(MODELS[name], image_size=(side, side))
        for name, sides in sizes.items()
        for side in sides
    }
    return clip_around.write_open_clip(model, state, plain.write_rules(separate=True), trunks, "token")


CLIP = Family(
    "eva02_clip",
    EVA02CLIPConfig,
    (CLIP_BAAI, CLIP_OPEN_CLIP),
    clip_around.reader(EVA02Config, _infer_options, _clip_config),
    {"open_clip": Writer(_write_open_clip)},
    bare_options=("image.heads", "image.rotary_grid", "text.heads", "image_size"),
    by_path=by_path,
    check_inputs=three_texts,
    check_output=lambda output: output.logits_per_image,
)
