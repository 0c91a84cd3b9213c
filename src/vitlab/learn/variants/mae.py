"""Masked autoencoding, section 3 of MAE (arXiv:2111.06377): hide, encode the visible, restore the order, compare."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.learn.variants.base import Note, Sizes, Weights, linear, no_record, with_prefix
from vitlab.learn.variants.vit import BlockVariant, block


@dataclass(frozen=True)
class MaskingVariant:
    count: str = "down"
    keep: str = "lowest"
    noise: str = "each image"
    positions: str = "before"
    encoder: str = "visible"
    fill: str = "mask token"
    restore: str = "inverse"
    decoder_positions: str = "after"
    target: str = "pixels"
    error: str = "squared"
    over: str = "hidden"


def masking(
    w: Weights, patches: Tensor, noise: Tensor, sizes: Sizes, variant: MaskingVariant, note: Note = no_record
) -> Tensor:
    """(B, N, C*P*P), (B, N) -> ()"""
    (B, N), D = noise.shape, sizes["D"]
    ratio = sizes["mask percent"] / 100
    n = {"down": int(N * (1 - ratio)), "up": N - int(N * ratio), "hidden": int(N * ratio)}[variant.count]
    if variant.noise == "one for all":
        noise = noise[:1].expand(B, -1)
    order = noise.argsort(dim=1, descending=variant.keep == "highest")  # (B, N), the visible first
    if variant.restore == "none, sorted":
        order = torch.cat([order[:, :n].sort(dim=1).values, order[:, n:]], dim=1)
    hidden = torch.ones(B, N).scatter(1, order[:, :n], 0.0)  # (B, N)

    tokens = linear(w, "embed", patches)  # (B, N, D)
    tokens = note("embedded", tokens + w["positions"] if variant.positions == "before" else tokens)
    mask_token = torch.zeros(1, 1, D) if variant.fill == "zeros" else w["mask_token"]
    if variant.encoder == "mask tokens":  # SimMIM
        masked = torch.where(hidden[..., None] > 0, mask_token, linear(w, "embed", patches)) + w["positions"]
        full = _block(w, "encoder", masked, sizes)
    else:
        full = _restored(_latent(w, tokens, order[:, :n], sizes, variant), order, mask_token, w, variant)
    full = note("restored", full)  # (B, N, D)
    full = full + w["decoder_positions"] if variant.decoder_positions == "after" else full
    prediction = note("prediction", linear(w, "pixels", _block(w, "decoder", full, sizes)))  # (B, N, C*P*P)

    target = patches
    if variant.target == "normalised":
        target = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    difference = prediction - target
    error = difference.abs() if variant.error == "absolute" else difference.square()
    error = note("error", error.sum(-1) if variant.error == "summed" else error.mean(-1))  # (B, N)
    if variant.over == "mask not restored":
        hidden = (torch.arange(N) >= n).float().expand(B, -1)
    return note("loss", _mean(error, hidden, variant.over))


def _latent(w: Weights, tokens: Tensor, keep: Tensor, sizes: Sizes, variant: MaskingVariant) -> Tensor:
    """(B, n, D)"""
    if variant.encoder == "all":
        tokens = _block(w, "encoder", tokens, sizes)
    visible = _gather(tokens, keep)
    if variant.positions == "after":
        visible = visible + w["positions"][:, : keep.shape[1]]
    return visible if variant.encoder == "all" else _block(w, "encoder", visible, sizes)


def _restored(latent: Tensor, order: Tensor, mask_token: Tensor, w: Weights, variant: MaskingVariant) -> Tensor:
    """(B, n, D) -> (B, N, D)"""
    (B, n, _), N = latent.shape, order.shape[1]
    full = torch.cat([latent, mask_token.expand(B, N - n, -1)], dim=1)
    if variant.decoder_positions == "before the order is restored":
        full = full + w["decoder_positions"]
    if variant.restore.startswith("none"):
        return full
    return _gather(full, order if variant.restore == "shuffle" else order.argsort(dim=1))


def _mean(error: Tensor, hidden: Tensor, over: str) -> Tensor:
    if over == "all":
        return error.mean()
    if over == "hidden, divided by N":
        return (error * hidden).mean()
    chosen = 1 - hidden if over == "visible" else hidden
    total = (error * chosen).sum()
    return total if over == "hidden, summed" else total / chosen.sum()


def _gather(tokens: Tensor, index: Tensor) -> Tensor:
    return tokens.gather(1, index[..., None].expand(-1, -1, tokens.shape[-1]))


def _block(w: Weights, name: str, x: Tensor, sizes: Sizes) -> Tensor:
    return block(with_prefix(w, f"{name}."), x, sizes, BlockVariant())
