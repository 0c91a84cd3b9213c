"""Masked autoencoders with their decoder: transformers' ViTMAEForPreTraining (read and written), facebook's (read).

Their encoder is read like any ViT; what stands here is the decoder, the config of both, and the fixed positions.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints import hf, keymap, timm
from vitlab.checkpoints.keymap import Dialect, Renamed, Rule, State
from vitlab.errors import CheckpointError
from vitlab.layers.positions import sincos_2d
from vitlab.models.mae import DecoderOptions, MAEConfig, MaskedAutoencoder
from vitlab.models.vit_config import ViTConfig

HEADS = {512: 16}  # the published decoder's width; others must be told
USUAL: dict[str, Any] = {"mask_ratio": 0.75, "norm_pix": False}  # what bare weights leave unsaid
TOLERANCE = 1e-5  # of a stored table from sin-cos positions, which others compute in float32

HF_LAYERS = (
    "decoder.decoder_layers.{i}.",  # version 4, which is written; version 5 in memory
    "decoder.decoder_encoder.layer.{i}.",  # version 5 saves "layers" as "encoder.layer", here too
)
HF_RULES = (
    Rule("decoder.embed.*", "decoder.decoder_embed.*"),
    Rule("decoder.mask_token", "decoder.mask_token"),
    Rule("decoder.positions.table", "decoder.decoder_pos_embed"),
    *(
        Rule(f"decoder.{rule.ours}", tuple(key.replace(hf.LAYER, layer) for key in rule.keys), rule.codec)
        for layer in HF_LAYERS
        for rule in (*hf.VIT_BLOCK, *hf.new_names(hf.LAYER))
    ),
    Rule("decoder.norm.*", "decoder.decoder_norm.*"),
    Rule("decoder.pixels.*", "decoder.decoder_pred.*"),
)
FACEBOOK_RULES = (
    Rule("decoder.embed.*", "decoder_embed.*"),
    Rule("decoder.mask_token", "mask_token"),
    Rule("decoder.positions.table", "decoder_pos_embed"),
    *(
        Rule(f"decoder.{rule.ours}", tuple(f"decoder_{key}" for key in rule.keys), rule.codec)
        for rule in timm.RULES
        if rule.ours.startswith("blocks.")
    ),
    Rule("decoder.norm.*", "decoder_norm.*"),
    Rule("decoder.pixels.*", "decoder_pred.*"),
)
DECODERS = {  # whose keys these are -> how they are called, and what of a file is the decoder's
    "hf": (HF_RULES, re.compile(r"decoder\..*")),
    "facebook": (FACEBOOK_RULES, re.compile(r"decoder_.*|mask_token")),
}


def has_decoder(keys: set[str]) -> bool:
    return bool(keys & {"decoder.decoder_pos_embed", "decoder_pos_embed"})


def read_decoder(dialect: str, state: State) -> Renamed:
    """The decoder's tensors under our names."""
    rules, pattern = DECODERS[dialect]
    own = {key: value for key, value in state.items() if pattern.fullmatch(key)}
    return keymap.read(Dialect(dialect, rules, lambda keys: True, assumed={}, preprocess={}), own)


def options_from(config: dict[str, Any]) -> dict[str, Any]:
    """What config.json says beside what it says of any ViT."""
    return {
        "mask_ratio": config.get("mask_ratio", 0.75),
        "norm_pix": config.get("norm_pix_loss", False),
        "decoder.width": config.get("decoder_hidden_size", 512),
        "decoder.depth": config.get("decoder_num_hidden_layers", 8),
        "decoder.heads": config.get("decoder_num_attention_heads", 16),
    }


def infer_config(c: ViTConfig, decoder: State, told: dict[str, Any]) -> MAEConfig:
    """The config of an encoder and a decoder; `told`: what the caller or config.json says."""
    for key, axes in {"embed.weight": 2, "blocks.0.mlp.fc1.weight": 2, "positions.table": 3}.items():
        if getattr(decoder.get(f"decoder.{key}"), "ndim", None) != axes:
            raise CheckpointError(f"decoder.{key} is missing or damaged, so this is not a whole masked autoencoder.")
    width = decoder["decoder.embed.weight"].shape[0]
    depth = len({key.split(".")[2] for key in decoder if key.startswith("decoder.blocks.")})
    inside = told["decoder"] if isinstance(told.get("decoder"), dict) else {}
    says = {"width": width, "depth": depth, **inside}
    says |= {name: told[f"decoder.{name}"] for name in ("width", "depth", "heads") if f"decoder.{name}" in told}
    if (says["width"], says["depth"]) != (width, depth):
        raise CheckpointError(
            f"a decoder of width {says['width']} and depth {says['depth']} was asked for, but the weights have width "
            f"{width} and depth {depth}: they do not belong together."
        )
    heads = says.get("heads", HEADS.get(width))
    if heads is None:
        raise CheckpointError(
            f"the number of the decoder's heads cannot be read from weights of width {width}. "
            f"Say it: vitlab.load(path, decoder=dict(heads={next(h for h in (16, 8, 4, 2, 1) if width % h == 0)}))."
        )
    hidden = decoder["decoder.blocks.0.mlp.fc1.weight"].shape[0]
    config = MAEConfig(
        **{name: getattr(c, name) for name in ("image_size", "patch_size", "channels", "width", "depth", "heads")},
        mlp_ratio=c.mlp.mlp_ratio,
        activation=c.mlp.activation,
        qkv_bias=c.attention.qkv_bias,
        eps=c.norm.eps,
        dropout=c.drop.dropout,
        attention_dropout=c.drop.attention_dropout,
        positions=c.positions.kind,  # type: ignore[arg-type]  # checked at birth
        decoder=DecoderOptions(width, depth, heads, hidden / width, "learned"),
        **{name: told.get(name, usual) for name, usual in USUAL.items()},
    )
    if config.encoder != c:
        raise CheckpointError(
            "its encoder is none that a masked autoencoder has here: read it alone, with encoder=True."
        )
    return config


def is_sincos(table: Tensor, grid: tuple[int, int]) -> bool:
    """Whether a stored table, (1, 1 + N, D), is the fixed positions: zeros for the class token, sin-cos for patches."""
    if table.ndim != 3 or table.shape[1] != 1 + grid[0] * grid[1] or table.shape[2] % 4:
        return False
    return torch.allclose(table.float(), F.pad(sincos_2d(grid, table.shape[2]), (0, 0, 1, 0)), rtol=0, atol=TOLERANCE)


# ------------------------------------------------------------------------------------------------------------ writing

WRITTEN = (
    *(Rule(f"encoder.{rule.ours}", rule.theirs, rule.codec) for rule in (*hf.COMMON, *hf.VIT_BLOCK)),
    *HF_RULES,
)


def write(model: MaskedAutoencoder, state: State) -> tuple[State, dict[str, Any]]:
    """Tensors under transformers' names (version 4), and config.json."""
    c = model.config
    if c.image_size[0] != c.image_size[1]:
        raise CheckpointError(
            f"transformers' vit_mae takes square images only, and this one {c.image_size[0]}x{c.image_size[1]}: "
            f"load it with image_size={max(c.image_size)} first, or use --to native."
        )
    like = state["decoder.mask_token"]
    tables = {"encoder": model.encoder.positions, "decoder": model.decoder.positions}
    state = {**state, **{f"{part}.positions.table": p(c.grid, like=like) for part, p in tables.items()}}
    kept = {key: value.detach() for key, value in state.items()}
    found = keymap.write("transformers", WRITTEN, kept, prefix="vit.", heads=c.heads)
    encoder = hf.config_for(c.encoder.with_options(positions="learned"), None)
    return found, {
        **encoder,
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        "decoder_hidden_size": c.decoder.width,
        "decoder_num_hidden_layers": c.decoder.depth,
        "decoder_num_attention_heads": c.decoder.heads,
        "decoder_intermediate_size": c.decoder_stack.mlp_hidden,
        "mask_ratio": c.mask_ratio,
        "norm_pix_loss": c.norm_pix,
    }
