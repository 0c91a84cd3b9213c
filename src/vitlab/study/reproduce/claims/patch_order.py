"""Without positions a ViT cannot tell the order of its patches."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from vitlab.factory import create
from vitlab.models.base import evaluating
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import seed_by_seed
from vitlab.study.reproduce.verdict import value
from vitlab.training.loop import Show

KINDS = ("none", "learned", "sincos")
IMAGES = 64
ROUNDING, CLEAR = -5.0, -3.0  # powers of ten; a float32 has 7 digits


def shuffle_patches(images: Tensor, patch: int, order: Tensor) -> Tensor:
    """(B, C, H, W) with its patches, row by row, in another order."""
    B, C, H, W = images.shape
    h, w = H // patch, W // patch
    patches = images.reshape(B, C, h, patch, w, patch).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)  # (B, N, C, P, P)
    shuffled = patches[:, order].unflatten(1, (h, w))  # (B, h, w, C, P, P)
    return shuffled.permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def measure(name: str, seed: int, folder: Path, show: Show) -> dict[str, float]:
    """By kind of positions: log10 of the largest change of a logit, as a share of the largest logit."""
    random = torch.Generator().manual_seed(seed)
    changes = {}
    for kind in KINDS:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = create(name, positions=kind)
        config = model.config
        images = torch.randn(IMAGES, config.channels, *model.input_size, generator=random)
        patches = (images.shape[-2] // config.patch_size) * (images.shape[-1] // config.patch_size)
        order = torch.randperm(patches, generator=random)
        with evaluating(model), torch.no_grad():
            logits, others = model(images), model(shuffle_patches(images, config.patch_size, order))
        changes[kind] = float(((logits - others).abs().max() / logits.abs().max()).clamp_min(1e-12).log10())
    return changes


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return seed_by_seed(seeds, partial(measure, bench.source.networks["vit"][0]))


CLAIM = Claim(
    name="patch-order",
    title=Text("Without positions, an image is a bag of patches", "没有位置，图像就只是一袋图块"),
    paper=Citation("ViT", "2010.11929", "Appendix D.4"),
    says=Text(
        "Without positions the input is a bag of patches: their order does not matter.",
        "没有位置信息时，输入是一袋图块，顺序无关紧要。",
    ),
    here=Text(
        "New networks see 64 images of noise and the same images with shuffled patches. Measured is the largest change "
        "of a logit, as a share of the largest logit, as a power of ten: rounding of float32 is below -5.",
        "未训练的网络先看 64 张噪声图像，再看图块打乱后的同样图像。测量 logit 的最大变化占最大 logit 的比例，"
        "以 10 的幂表示：float32 的舍入误差低于 -5。",
    ),
    arms=tuple(map(Arm, KINDS)),
    rule=(value("none", high=ROUNDING), value("learned", low=CLEAR), value("sincos", low=CLEAR)),
    steps=steps,
    scale="number",
    measured="log10 of the largest change of a logit",
    minutes=0.1,
)
