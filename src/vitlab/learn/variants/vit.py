"""Eqs. 1-8 of ViT (arXiv:2010.11929): patches, attention, MLP, block and the whole network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.layers.block import ACTIVATIONS
from vitlab.learn.variants.base import Note, Sizes, Weights, linear, no_record, with_prefix

# ---------------------------------------------------------------- eq. 1, first half

OUTER = {"rows": (2, 4), "columns": (4, 2)}
INNER = {"channel, row, column": (1, 3, 5), "row, column, channel": (3, 5, 1), "channel, column, row": (1, 5, 3)}


@dataclass(frozen=True)
class PatchEmbedVariant:
    order: str = "rows"
    within: str = "channel, row, column"
    cut: str = "patches"
    bias: bool = True
    layout: str = "B, N, D"


def patch_embed(w: Weights, images: Tensor, sizes: Sizes, variant: PatchEmbedVariant, note: Note = no_record) -> Tensor:
    (B, C, H, W), P = images.shape, sizes["P"]
    N = (H // P) * (W // P)
    if variant.cut == "patches":
        x = images.reshape(B, C, H // P, P, W // P, P)
        x = x.permute(0, *OUTER[variant.order], *INNER[variant.within]).reshape(B, N, C * P * P)
    elif variant.cut == "reshape":
        x = images.reshape(B, N, C * P * P)
    elif variant.cut == "reshape, channels last":
        x = images.permute(0, 2, 3, 1).reshape(B, N, C * P * P)
    elif variant.cut == "channels before patches":
        x = images.unfold(2, P, P).unfold(3, P, P).reshape(B, N, C * P * P)
    else:  # F.unfold gives (B, C*P*P, N)
        x = F.unfold(images, P, stride=P).reshape(B, N, C * P * P)
    x = note("patches", x)
    x = F.linear(x, w["proj.weight"].flatten(1), w["proj.bias"] if variant.bias else None)
    if variant.layout == "B, D, N":
        return x.transpose(1, 2)
    if variant.layout == "mixed":  # the numbers of (B, D, N), read as (B, N, D)
        return x.transpose(1, 2).reshape(B, N, -1)
    return note("tokens", x)


# ---------------------------------------------------------------- eqs. 5-8

SCALES: dict[str, Callable[[int, int, int, int], float]] = {  # of d, h, D, N
    "1/sqrt(d)": lambda d, h, D, N: d**-0.5,
    "none": lambda d, h, D, N: 1.0,
    "1/d": lambda d, h, D, N: 1 / d,
    "1/sqrt(D)": lambda d, h, D, N: D**-0.5,
    "1/sqrt(h)": lambda d, h, D, N: h**-0.5,
    "1/sqrt(N)": lambda d, h, D, N: N**-0.5,
    "sqrt(d)": lambda d, h, D, N: d**0.5,
    "after": lambda d, h, D, N: 1.0,  # ... the softmax
}
AXES = {"keys": -1, "queries": -2, "heads": 1, "batch": 0}


@dataclass(frozen=True)
class AttentionVariant:
    split: str = "3, h, d"
    order: str = "qkv"
    over: str = "tokens"
    product: str = "q k^T"
    scale: str = "1/sqrt(d)"
    causal: bool = False
    softmax: str = "keys"
    average: bool = False
    turned: bool = False
    merge: str = "side by side"
    proj: bool = True
    residual: bool = False


def attention(w: Weights, x: Tensor, sizes: Sizes, variant: AttentionVariant, note: Note = no_record) -> Tensor:
    B, N, D = x.shape
    if variant.over == "batch":  # as a layer that expects (N, B, D)
        kept = AttentionVariant(scale=variant.scale, softmax=variant.softmax, merge=variant.merge, proj=variant.proj)
        return attention(w, x.transpose(0, 1), sizes, kept).transpose(0, 1)
    h = 1 if variant.split == "one head" else sizes["h"]
    d = D // h
    qkv = note("qkv", linear(w, "qkv", x))  # (B, N, 3D)
    parts = dict(zip(variant.order, _heads(qkv, h, d, variant.split), strict=True))
    q, k, v = (note(name, parts[name]) for name in "qkv")  # each (B, h, N, d)
    if variant.over == "heads":
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # each (B, N, h, d)
    factor = SCALES[variant.scale](d, h, D, N)
    left, right = {"q k^T": (q, k), "q q^T": (q, q), "k k^T": (k, k), "q v^T": (q, v)}[variant.product]
    scores = note("scores", left @ right.transpose(-2, -1) * factor)  # (B, h, N, N)
    if variant.causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    A = scores if variant.softmax == "none" else scores.softmax(dim=AXES[variant.softmax])
    A = note("weights", A * d**-0.5 if variant.scale == "after" else A)
    A = A.mean(dim=1, keepdim=True) if variant.average else A
    x_heads = (A.transpose(-2, -1) if variant.turned else A) @ v  # (B, h, N, d)
    if variant.over == "heads":
        x_heads = x_heads.transpose(1, 2)
    x_heads = note("heads", x_heads)
    if variant.merge == "view":
        y = x_heads.reshape(B, N, D)
    elif variant.merge == "interleaved":
        y = x_heads.permute(0, 2, 3, 1).reshape(B, N, D)
    elif variant.merge == "mean":  # (B, N, d), which proj does not take
        y = x_heads.mean(dim=1)
    elif variant.merge == "mean, repeated":
        y = x_heads.mean(dim=1).repeat(1, 1, h)
    elif variant.merge == "sum":
        y = x_heads.sum(dim=1)
    else:
        y = x_heads.transpose(1, 2).reshape(B, N, D)
    y = note("merged", y)
    y = note("proj", linear(w, "proj", y)) if variant.proj else y
    return x + y if variant.residual else y


def _heads(qkv: Tensor, h: int, d: int, split: str) -> tuple[Tensor, ...]:
    """Three parts, each (B, h, N, d)."""
    B, N, _ = qkv.shape
    if split == "h, 3, d":
        return tuple(part.transpose(1, 2) for part in qkv.unflatten(-1, (h, 3, d)).unbind(3))
    if split == "3, d, h":
        return tuple(part.permute(0, 3, 1, 2) for part in qkv.unflatten(-1, (3, d, h)).unbind(2))
    if split == "view":  # (B, N, D) read as (B, h, N, d)
        return tuple(part.reshape(B, h, N, d) for part in qkv.chunk(3, dim=-1))
    return tuple(part.transpose(1, 2) for part in qkv.unflatten(-1, (3, h, d)).unbind(2))


# ---------------------------------------------------------------- eqs. 2-3

MORE_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "none": lambda x: x}


@dataclass(frozen=True)
class MLPVariant:
    activation: str = "gelu"
    place: str = "between"
    residual: bool = False


def mlp(w: Weights, x: Tensor, sizes: Sizes, variant: MLPVariant, note: Note = no_record) -> Tensor:
    act = {**ACTIVATIONS, **MORE_ACTIVATIONS}[variant.activation]
    y = note("fc1", linear(w, "fc1", act(x) if variant.place == "before" else x))  # (B, N, hidden)
    y = note("activation", act(y) if variant.place in ("between", "twice") else y)
    y = note("fc2", linear(w, "fc2", y))  # (B, N, D)
    y = act(y) if variant.place in ("after", "twice") else y
    return x + y if variant.residual else y


@dataclass(frozen=True)
class BlockVariant:
    norm: str = "pre"
    skip: str = "both"
    order: str = "attention, mlp"
    eps: float = 1e-6


def block(w: Weights, z: Tensor, sizes: Sizes, variant: BlockVariant, note: Note = no_record) -> Tensor:
    def attend(x: Tensor) -> Tensor:
        return note("attention", attention(with_prefix(w, "attention."), x, sizes, AttentionVariant()))

    def feed(x: Tensor) -> Tensor:
        return note("mlp", mlp(with_prefix(w, "mlp."), x, sizes, MLPVariant()))

    def normed(number: int, x: Tensor) -> Tensor:
        number = {"first twice": 1, "swapped": 3 - number}.get(variant.norm, number)
        return layer_norm(w, f"norm{number}", x, variant.eps)

    start = z
    parts = {"attention": (1, attend), "mlp": (2, feed)}
    if variant.order == "parallel":
        return z + attend(normed(1, z)) + feed(normed(2, z))
    for place, name in enumerate(variant.order.split(", "), 1):
        number, part = parts[name]
        alone = variant.norm == f"no {number}" or variant.norm == "none"
        before = z if variant.norm in ("post", "branch") or alone else note(f"norm{number}", normed(number, z))
        y = part(before)
        y = normed(number, y) if variant.norm == "branch" else y
        if variant.skip in ("none", f"not {place}"):
            z = y
        elif variant.skip == "normed":
            z = before + y
        elif variant.skip == "input" and place == 2:
            z = start + y
        else:
            z = z + y
        z = normed(number, z) if variant.norm == "post" else z
        z = note("eq. 2" if number == 1 else "eq. 3", z)
    return z


def layer_norm(w: Weights, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


# ---------------------------------------------------------------- eqs. 1-4


@dataclass(frozen=True)
class ViTVariant:
    token: str = "first"
    positions: str = "all"
    blocks: str = "all"
    norm: str = "final"
    read: str = "class"
    head: str = "linear"


def vit(w: Weights, images: Tensor, sizes: Sizes, variant: ViTVariant, note: Note = no_record) -> Tensor:
    table = w["positions.table"]  # (1, N + 1, D)
    z = patch_embed(with_prefix(w, "patch_embed."), images, sizes, PatchEmbedVariant())  # (B, N, D)
    z = note("patch_embed", z)
    if variant.positions in ("patches", "shifted"):
        z = z + (table[:, 1:] if variant.positions == "patches" else table[:, :-1])
    first = w["class_token"].expand(len(z), -1, -1)  # (B, 1, D)
    if variant.token == "zeros":
        first = torch.zeros_like(first)
    pair = [z, first] if variant.token == "last" else [first, z]
    z = z if variant.token == "none" else note("class token", torch.cat(pair, dim=1))  # (B, N + 1, D)
    if variant.positions == "all":
        z = note("positions", z + (table[:, 1:] if variant.token == "none" else table))
    elif variant.positions == "twice":
        z = z + 2 * table
    if variant.norm == "before":
        z = layer_norm(w, "norm", z)
    for layer, following in pairwise((*_order(variant.blocks, sizes["L"]), -1)):
        if variant.positions == "every block":
            z = z + table
        z = note(f"block {layer}", block(with_prefix(w, f"blocks.{layer}."), z, sizes, BlockVariant()))
        if variant.norm == "every block" and following >= 0:
            z = layer_norm(w, "norm", z)
    if variant.norm in ("final", "every block"):
        z = note("norm", layer_norm(w, "norm", z))
    y = {
        "class": lambda: z[:, 0],
        "last": lambda: z[:, -1],
        "mean": lambda: z.mean(dim=1),
        "mean of the patches": lambda: z[:, 1:].mean(dim=1),
        "max": lambda: z.amax(dim=1),
        "sum": lambda: z.sum(dim=1),
        "every token": lambda: z,
    }[variant.read]()
    y = note("class vector", y)  # (B, D)
    if variant.head == "none":
        return y
    logits = note("head", linear(w, "head", y))  # (B, classes)
    return {"linear": logits, "softmax": logits.softmax(-1), "log softmax": logits.log_softmax(-1)}[variant.head]


def _order(blocks: str, depth: int) -> tuple[int, ...]:
    return {
        "all": tuple(range(depth)),
        "reversed": tuple(reversed(range(depth))),
        "first only": (0,),
        "last only": (depth - 1,),
        "all but the last": tuple(range(depth - 1)),
        "first repeated": (0,) * depth,
        "none": (),
    }[blocks]
