"""facebook's own files: DeiT, DINO, MAE encoders, DINOv2 with and without registers. timm's names, with additions."""

from __future__ import annotations

from vitlab.checkpoints import hf, timm
from vitlab.checkpoints.files import BESIDE
from vitlab.checkpoints.keymap import ONE_ROW, Dialect, Options, Rule, State
from vitlab.models.entry import IMAGENET_CROP

RULES = (
    *timm.RULES,
    Rule("register_tokens", "register_tokens"),
    Rule("mask_token", "mask_token", ONE_ROW),
    Rule("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.w12.*"),  # DINOv2's giant: SwiGLU
    Rule("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.w3.*"),
)


def _recognise(keys: set[str]) -> bool:
    own = keys & {"mask_token", "register_tokens", "dist_token"} or any(key.startswith(BESIDE) for key in keys)
    encoder = not keys & {"head.weight", "fc_norm.weight", "reg_token", "norm_pre.weight"}  # DINO and MAE come headless
    return timm.DIALECT.recognise(keys) and (bool(own) or encoder)


def _hints(state: State) -> Options:
    """Each release resizes its positions in its own way."""
    if "register_tokens" in state:
        return {"resize_rule": "bicubic_antialias"}
    return {"resize_rule": "bicubic" if "dist_token" in state else "bicubic_offset"}


DIALECT = Dialect(
    name="facebook",
    rules=RULES,
    recognise=_recognise,
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess=IMAGENET_CROP,
    hints=_hints,
    read_stated=timm.DIALECT.read_stated,
    ignored={BESIDE.replace(".", r"\.") + ".*": "stands beside the backbone: DINO's projection head"},
)
MAE_ENCODER = Dialect(  # of a file with its decoder, whose width the mask token has; encoders alone look like timm's
    name="facebook",
    rules=timm.RULES,
    recognise=lambda keys: timm.DIALECT.recognise(keys) and "decoder_pos_embed" in keys,
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess=IMAGENET_CROP,
    ignored={"decoder_.*|mask_token": hf.NO_DECODER},
)
