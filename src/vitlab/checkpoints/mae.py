"""Masked autoencoders with their decoder: transformers' ViTMAEForPreTraining (read and written), facebook's (read).

Their encoder is read like any ViT; what stands here is the decoder, the config of both, and the fixed positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from vitlab.advice import to_type
from vitlab.checkpoints import facebook, hf, keymap, timm, vit
from vitlab.checkpoints.dense import encoder_rules
from vitlab.checkpoints.family import Clues, Family, Reading, Writer, Written
from vitlab.checkpoints.keymap import Options, Renamed, Rule, State
from vitlab.errors import CheckpointError, UsageError
from vitlab.models.base import Network
from vitlab.models.entry import IMAGENET_CROP
from vitlab.models.mae import DecoderOptions, MAEConfig
from vitlab.models.vit_config import ViTConfig

HEADS = {512: 16}  # the published decoder's width; others must be passed
USUAL: Options = {"mask_ratio": 0.75, "norm_pix": False}  # what bare weights do not state

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


FIELDS: hf.Fields = {
    "mask_ratio": ("mask_ratio", 0.75),
    "norm_pix": ("norm_pix_loss", False),
    "decoder.width": ("decoder_hidden_size", 512),
    "decoder.depth": ("decoder_num_hidden_layers", 8),
    "decoder.heads": ("decoder_num_attention_heads", 16),
}


def _hf_options(config: Options) -> Options:
    """config.json: the options of any ViT, and MAE-specific ones; some files call their network a vit."""
    masking = hf.read_fields(config, FIELDS) if config.get("model_type") == "vit_mae" else {}
    return hf.options_from(config) | masking


HF = replace(
    hf.DIALECT,
    rules=(*encoder_rules(hf.DIALECT.rules), *HF_RULES),
    recognise=hf.has_decoder,
    preprocess=IMAGENET_CROP,
    ignored={},
    read_stated=hf.reader(_hf_options, hf.READABLE),
    bare_variants=(),
)
FACEBOOK = replace(facebook.MAE_ENCODER, rules=(*encoder_rules(timm.RULES), *FACEBOOK_RULES), ignored={})


def _infer(renamed: Renamed, clues: Clues) -> Reading:
    own = {name: value for name, value in clues.stated.options.items() if name in FIELDS}
    shared = {name: value for name, value in clues.stated.options.items() if name not in own}
    encoder_clues = replace(clues, stated=replace(clues.stated, options=shared))
    encoder = vit.infer_config(renamed.part("encoder."), encoder_clues)
    config = _infer_config(encoder, renamed.tensors, {**own, **clues.given})
    if vit.leave_out_sincos(renamed, "encoder.positions.table", config.grid):
        config = config.with_options(positions="sincos")
    if vit.leave_out_sincos(renamed, "decoder.positions.table", config.grid):
        config = config.with_options(**{"decoder.positions": "sincos"})
    assumed = vit.assumed_options(encoder, encoder_clues)
    assumed |= {name: getattr(config, name) for name in USUAL if name not in {**own, **clues.given}}
    is_vit = clues.stated.model_type not in ("", "vit_mae")  # by its config a ViT, whose images are read as a ViT's
    usual = Options() if is_vit else None
    return Reading(config, assumed, usual, tuple(vit.resize_notes(encoder, encoder_clues)))


def _infer_config(c: ViTConfig, decoder: State, facts: Options) -> MAEConfig:
    """The config of an encoder and a decoder; `facts`: what the caller or config.json states."""
    for key, axes in {"embed.weight": 2, "blocks.0.mlp.fc1.weight": 2, "positions.table": 3}.items():
        keymap.shape_of(decoder, f"decoder.{key}", axes, "masked autoencoder")
    width = decoder["decoder.embed.weight"].shape[0]
    depth = len({key.split(".")[2] for key in decoder if key.startswith("decoder.blocks.")})
    group: Options = facts["decoder"] if isinstance(facts.get("decoder"), dict) else {}
    stated: Options = {"width": width, "depth": depth, **group}
    stated |= {path.removeprefix("decoder."): facts[path] for path in FIELDS if path in facts}
    if (stated["width"], stated["depth"]) != (width, depth):
        raise CheckpointError(
            f"a decoder of width {stated['width']} and depth {stated['depth']} is requested, but the weights have "
            f"width {width} and depth {depth}: they do not belong together."
        )
    heads = stated.get("heads", HEADS.get(width))
    if heads is None:
        guess = next(h for h in (16, 8, 4, 2, 1) if width % h == 0)
        say = to_type(f"vitlab.load(path, decoder=dict(heads={guess}))", "in Python, and save the model: it then knows")
        raise CheckpointError(
            f"the number of the decoder's heads cannot be read from weights of width {width}. Say it: {say}."
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
        resize_rule=c.positions.resize_rule,
        positions=c.positions.kind,  # type: ignore[arg-type]  # checked at birth
        decoder=DecoderOptions(width, depth, heads, hidden / width, "learned"),
        **{name: facts.get(name, usual) for name, usual in USUAL.items()},
    )
    if config.encoder != c:
        raise CheckpointError(
            "its encoder is none that a masked autoencoder has here"
            + to_type(": read it alone, with encoder=True.", ". Commands that need the encoder alone read it.")
        )
    return config


# ------------------------------------------------------------------------------------------------------------ writing

WRITTEN = (*encoder_rules((*hf.COMMON, *hf.VIT_BLOCK)), *HF_RULES)


def _write(model: Network, state: State) -> Written:
    """transformers' ViTMAEForPreTraining, by the names of version 4."""
    c: MAEConfig = model.config
    if c.image_size[0] != c.image_size[1]:
        raise UsageError(
            f"transformers' vit_mae takes square images only, and this one {c.image_size[0]}x{c.image_size[1]}: "
            f"load it with image_size={max(c.image_size)} first, or use --to native."
        )
    like = state["decoder.mask_token"]
    tables = {part: model.get_submodule(f"{part}.positions") for part in ("encoder", "decoder")}
    state = {**state, **{f"{part}.positions.table": p(c.grid, like=like).detach() for part, p in tables.items()}}
    config = {
        **hf.config_for(c.encoder.with_options(positions="learned"), None),
        "architectures": ["ViTMAEForPreTraining"],
        "model_type": "vit_mae",
        **hf.write_fields(c, FIELDS),
        "decoder_intermediate_size": c.decoder_stack.mlp_hidden,
    }
    return hf.folder(
        keymap.write("transformers", WRITTEN, state, prefix="vit.", heads=c.heads), config, model.preprocess
    )


def _noise(model: Network, images: Tensor) -> dict[str, Tensor]:
    """The same patches are hidden wherever this is passed."""
    rows, columns = model.grid_of((images.shape[-2], images.shape[-1]))
    return {"noise": torch.rand(len(images), rows * columns, generator=torch.Generator().manual_seed(1))}


FAMILY = Family(
    "mae",
    MAEConfig,
    (HF, FACEBOOK),
    _infer,
    {"hf": Writer(_write)},
    bare_options=("heads", "eps", "activation", *USUAL, "image_size", "decoder.heads"),
    model_types=hf.VIT_MAE,
    check_inputs=_noise,
    check_output=lambda output: output.prediction,
)
