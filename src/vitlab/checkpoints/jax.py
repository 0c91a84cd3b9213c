"""Google's JAX files (.npz): kernels are (in, out), heads have an axis of their own, so the file tells their number."""

from __future__ import annotations

import torch
from torch import Tensor

from vitlab.checkpoints import keymap
from vitlab.checkpoints.family import Writer, Written
from vitlab.checkpoints.keymap import TRANSPOSE, Codec, Dialect, Options, Rule, State
from vitlab.checkpoints.timm import eps_note
from vitlab.checkpoints.writable import check_vit
from vitlab.models.base import Network
from vitlab.models.vit_config import ViTConfig


def _write_qkv(t: Tensor, n: int, heads: int) -> list[Tensor]:
    return [part.T.reshape(part.shape[1], heads, -1) for part in t.chunk(n)]


CONV = Codec(lambda p: p[0].permute(3, 2, 0, 1), lambda t, n, h: [t.permute(2, 3, 1, 0)])  # HWIO <-> OIHW
QKV = Codec(lambda parts: torch.cat([p.flatten(1).T for p in parts]), _write_qkv)  # 3 x (D, h, d) <-> (3hd, D)
QKV_BIAS = Codec(
    lambda parts: torch.cat([p.flatten() for p in parts]), lambda t, n, h: [p.reshape(h, -1) for p in t.chunk(n)]
)
OUT = Codec(lambda p: p[0].flatten(0, 1).T, lambda t, n, h: [t.T.reshape(h, -1, t.shape[0])])  # (h, d, D) <-> (D, hd)

BLOCK = "Transformer/encoderblock_{i}/"
ATTENTION = BLOCK + "MultiHeadDotProductAttention_1/"
RULES = (
    Rule("patch_embed.proj.weight", "embedding/kernel", CONV),
    Rule("patch_embed.proj.bias", "embedding/bias"),
    Rule("class_token", "cls"),
    Rule("positions.table", "Transformer/posembed_input/pos_embedding"),
    Rule("blocks.{i}.norm1.weight", BLOCK + "LayerNorm_0/scale"),
    Rule("blocks.{i}.norm1.bias", BLOCK + "LayerNorm_0/bias"),
    Rule("blocks.{i}.attention.qkv.weight", tuple(ATTENTION + f"{x}/kernel" for x in ("query", "key", "value")), QKV),
    Rule("blocks.{i}.attention.qkv.bias", tuple(ATTENTION + f"{x}/bias" for x in ("query", "key", "value")), QKV_BIAS),
    Rule("blocks.{i}.attention.proj.weight", ATTENTION + "out/kernel", OUT),
    Rule("blocks.{i}.attention.proj.bias", ATTENTION + "out/bias"),
    Rule("blocks.{i}.norm2.weight", BLOCK + "LayerNorm_2/scale"),
    Rule("blocks.{i}.norm2.bias", BLOCK + "LayerNorm_2/bias"),
    Rule("blocks.{i}.mlp.fc1.weight", BLOCK + "MlpBlock_3/Dense_0/kernel", TRANSPOSE),
    Rule("blocks.{i}.mlp.fc1.bias", BLOCK + "MlpBlock_3/Dense_0/bias"),
    Rule("blocks.{i}.mlp.fc2.weight", BLOCK + "MlpBlock_3/Dense_1/kernel", TRANSPOSE),
    Rule("blocks.{i}.mlp.fc2.bias", BLOCK + "MlpBlock_3/Dense_1/bias"),
    Rule("norm.weight", "Transformer/encoder_norm/scale"),
    Rule("norm.bias", "Transformer/encoder_norm/bias"),
    Rule("pre_logits.weight", "pre_logits/kernel", TRANSPOSE),
    Rule("pre_logits.bias", "pre_logits/bias"),
    Rule("head.weight", "head/kernel", TRANSPOSE),
    Rule("head.bias", "head/bias"),
)


def _heads(state: State) -> Options:
    kernel = state.get("Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel")
    return {} if kernel is None or kernel.ndim != 3 else {"heads": kernel.shape[1]}


DIALECT = Dialect(
    name="jax",
    rules=RULES,
    recognise=lambda keys: "Transformer/encoder_norm/scale" in keys,
    assumed={"eps": 1e-6, "activation": "gelu"},
    preprocess={"interpolation": "bilinear"},  # mean and std 0.5
    hints=_heads,
)


UNSUPPORTED = (
    *("positions", "class_token", "registers", "distill_token", "mask_token", "pooling", "norm", "norm_pre"),
    *("final_norm", "qk_norm", "qkv_bias", "layer_scale", "mlp", "stem", "patch_norms", "patch_bias"),
)


def _write(model: Network, state: State) -> Written:
    c: ViTConfig = model.config
    prefix = c.positions.prefix_positions
    check_vit("the JAX layout", c, UNSUPPORTED, {f"prefix_positions={prefix}": prefix == "none"})
    notes = eps_note("Google's JAX code", c.norm.eps)
    if c.image_size[0] != c.image_size[1]:
        notes.append(f"an .npz does not say its grid: load it with image_size={c.image_size}.")
    return Written(keymap.write("jax", RULES, state, heads=c.heads), notes=notes, weights="weights.npz")


WRITER = Writer(_write)
