"""lucidrains' vit-pytorch ViT (state dict; read only): patches in (row, column, channel) order, norms around them."""

from __future__ import annotations

import math

from torch import Tensor

from vitlab.checkpoints.keymap import TOKENS, Codec, Dialect, Rule
from vitlab.errors import CheckpointError


def _side(values: int) -> tuple[int, int]:
    """(P, C) of a patch of P*P*C values: RGB, grey, RGBA, whichever gives a whole side."""
    for channels in (3, 1, 4):
        side = math.isqrt(values // channels)
        if side * side * channels == values:
            return side, channels
    raise CheckpointError(f"a patch of {values} values is not P x P x 3, 1 or 4: write a rename table and pass map=.")


def _kernel(parts: list[Tensor]) -> Tensor:
    """(D, P*P*C) -> the convolution weight (D, C, P, P)."""
    P, C = _side(parts[0].shape[1])
    return parts[0].reshape(-1, P, P, C).permute(0, 3, 1, 2)


def _norm_in(parts: list[Tensor]) -> Tensor:
    """(P*P*C,) -> (C*P*P,), the order `patchify` has."""
    P, C = _side(parts[0].shape[0])
    return parts[0].reshape(P, P, C).permute(2, 0, 1).reshape(-1)


LAYER = "transformer.layers.{i}."
DIALECT = Dialect(
    name="lucidrains",
    rules=(
        Rule("patch_embed.norm_in.*", "to_patch_embedding.1.*", Codec(_norm_in)),
        Rule("patch_embed.proj.weight", "to_patch_embedding.2.weight", Codec(_kernel)),
        Rule("patch_embed.proj.bias", "to_patch_embedding.2.bias"),
        Rule("patch_embed.norm_out.*", "to_patch_embedding.3.*"),
        Rule("class_token", "cls_token", TOKENS),
        Rule("positions.table", "pos_embedding", TOKENS),
        Rule("blocks.{i}.norm1.*", LAYER + "0.norm.*"),
        Rule("blocks.{i}.attention.qkv.weight", LAYER + "0.to_qkv.weight"),
        Rule("blocks.{i}.attention.proj.*", LAYER + "0.to_out.0.*"),
        Rule("blocks.{i}.norm2.*", LAYER + "1.net.0.*"),
        Rule("blocks.{i}.mlp.fc1.*", LAYER + "1.net.1.*"),
        Rule("blocks.{i}.mlp.fc2.*", LAYER + "1.net.4.*"),
        Rule("norm.*", "transformer.norm.*"),
        Rule("head.*", "mlp_head.*"),
    ),
    recognise=lambda keys: "to_patch_embedding.2.weight" in keys and "transformer.layers.0.0.to_qkv.weight" in keys,
    assumed={"eps": 1e-5, "activation": "gelu"},
    preprocess={},
)
