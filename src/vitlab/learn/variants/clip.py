"""The loss of CLIP, figure 3 of arXiv:2103.00020: every image finds its text among all texts, every text its image."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.learn.variants.base import Note, Sizes, Weights, linear, no_record


@dataclass(frozen=True)
class CLIPLossVariant:
    norm: str = "length"
    scale: str = "exp"
    softmax: str = "once"
    direction: str = "both"
    reduction: str = "mean"


def clip_loss(
    w: Weights, images: Tensor, texts: Tensor, sizes: Sizes, variant: CLIPLossVariant, note: Note = no_record
) -> Tensor:
    """(B, I), (B, T) -> ()"""
    if variant.norm == "before the projection":
        images, texts = F.normalize(images, dim=-1), F.normalize(texts, dim=-1)
    I_e = note("I_e", _normalised(linear(w, "image_projection", images), variant.norm, "texts only"))  # (B, E)
    T_e = note("T_e", _normalised(linear(w, "text_projection", texts), variant.norm, "images only"))
    t = w["log_scale"]
    factor = {"exp": t.exp(), "log": t, "none": torch.ones(()), "divided": (-t).exp(), "divided by log": 1 / t}
    logits = note("logits", factor[variant.scale] * I_e @ T_e.mT)  # (B, B)
    return note("loss", _loss(logits, variant))


def _normalised(x: Tensor, norm: str, other: str) -> Tensor:
    if norm in ("none", "before the projection", other):
        return x
    if norm == "over the batch":
        return F.normalize(x, dim=0)
    if norm == "sum of absolute values":
        return F.normalize(x, p=1, dim=-1)
    if norm == "squared length":
        return x / x.square().sum(dim=-1, keepdim=True)
    if norm == "softmax":
        return x.softmax(dim=-1)
    return F.normalize(x, dim=-1)


def _loss(logits: Tensor, variant: CLIPLossVariant) -> Tensor:
    B = len(logits)
    own = torch.arange(B)
    if variant.softmax == "sigmoid":  # SigLIP, without its bias
        return -F.logsigmoid((2 * torch.eye(B) - 1) * logits).sum() / B
    if variant.softmax == "none":
        return -logits.diagonal().mean()
    if variant.softmax == "whole matrix":
        return -logits.flatten().log_softmax(0).reshape(B, B).diagonal().mean()

    def cross_entropy(logits: Tensor) -> Tensor:
        logits = logits.softmax(dim=1) if variant.softmax == "twice" else logits
        return F.cross_entropy(logits, own, reduction="sum" if variant.reduction == "sum" else "mean")

    of_images, of_texts = cross_entropy(logits), cross_entropy(logits.mT)
    return {
        "both": (of_images + of_texts) / 2,
        "not halved": of_images + of_texts,
        "images": of_images,
        "texts": of_texts,
    }[variant.direction]
