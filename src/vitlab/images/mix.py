"""Mixup (arXiv:1710.09412) and CutMix (arXiv:1905.04899): each image is mixed with another, and so are their labels.

    x, targets = Mix(mixup_alpha=0.8, cutmix_alpha=1.0)(images, labels, classes, smoothing, seed=0, step=step)

As in both papers' code, one lambda is drawn for a batch, and the partners are the same batch in another order. All that
is drawn is a function of (seed, step, rank, micro-step).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.images.randomness import permutation, torch_seed, uniform

CHOICE, LAMBDA, PARTNER = range(111, 114)  # the coordinate that says what a number is for


def smooth_targets(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """(B,) -> (B, K) float32: 1 - eps + eps / K at the label, eps / K elsewhere (label smoothing, arXiv:1512.00567)."""
    if not 0 <= smoothing < 1:
        raise UsageError(f"smoothing={smoothing} must lie in 0 .. 1, below 1.")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise UsageError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but {classes} classes are 0 .. {classes - 1}."
        )
    targets = torch.full((len(labels), classes), smoothing / classes, device=labels.device)
    return targets.scatter_(1, labels.long()[:, None], 1 - smoothing + smoothing / classes)


@dataclass(frozen=True)
class Mixing:
    """The random choices for one batch."""

    how: Literal["mixup", "cutmix"]
    lam: float  # lambda: the part of the image that stays its own
    partner: np.ndarray  # (B,)
    box: tuple[int, int, int, int] | None = None  # cutmix: left, top, right, bottom


@dataclass(frozen=True)
class Mix:
    """Mixup, CutMix, or a choice of the two for each batch."""

    mixup_alpha: float = 0.0  # lambda ~ Beta(alpha, alpha); 0: no Mixup
    cutmix_alpha: float = 0.0  # 0: no CutMix
    probability: float = 1.0  # that a batch is mixed at all
    switch: float = 0.5  # where both are on: the probability of CutMix

    def __post_init__(self) -> None:
        for name in ("mixup_alpha", "cutmix_alpha"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UsageError(f"{name}={getattr(self, name)!r} must be 0 (off) or above.")
        for name in ("probability", "switch"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name}={getattr(self, name)!r} must lie in 0 .. 1.")

    def __call__(
        self, images: Tensor, targets: Tensor, *, seed: int, step: int, rank: int = 0, micro: int = 0
    ) -> tuple[Tensor, Tensor]:
        """(B, C, H, W) floats and (B, K) of any kind, e.g. smooth_targets, mixed alike; neither is changed."""
        if not (self.mixup_alpha or self.cutmix_alpha):
            return images, targets
        H, W = images.shape[2:]
        drawn = self.draw(len(images), (H, W), seed=seed, step=step, rank=rank, micro=micro)
        if drawn is None:
            return images, targets
        if not images.is_floating_point():
            raise UsageError(f"found {images.dtype} images. Mix after normalising: whole numbers cannot be averaged.")
        partner, lam = torch.from_numpy(drawn.partner).to(images.device), drawn.lam
        if drawn.box is None:
            mixed = lam * images + (1 - lam) * images[partner]
        else:
            left, top, right, bottom = drawn.box
            mixed = images.clone()
            mixed[:, :, top:bottom, left:right] = images[partner, :, top:bottom, left:right]
        return mixed, lam * targets + (1 - lam) * targets[partner.to(targets.device)]

    def draw(
        self, count: int, size: tuple[int, int], *, seed: int, step: int, rank: int = 0, micro: int = 0
    ) -> Mixing | None:
        """For a batch of `count` images of size (H, W); None: this batch is not mixed."""
        mixed, switched, across, down = uniform(seed, CHOICE, step, rank, micro, count=4)[0].tolist()
        if mixed >= self.probability or not (self.mixup_alpha or self.cutmix_alpha):
            return None
        cut = self.cutmix_alpha > 0 and (self.mixup_alpha == 0 or switched < self.switch)
        alpha = self.cutmix_alpha if cut else self.mixup_alpha
        generator = np.random.Generator(np.random.Philox(key=torch_seed(seed, LAMBDA, step, rank, micro)))
        lam = float(generator.beta(alpha, alpha))
        partner = permutation(count, seed, PARTNER, step, rank, micro)
        if not cut:
            return Mixing("mixup", lam, partner)
        box, lam = cut_box(size, lam, across, down)
        return Mixing("cutmix", lam, partner, box)


def cut_box(size: tuple[int, int], lam: float, across: float, down: float) -> tuple[tuple[int, int, int, int], float]:
    """Eq. 2 of CutMix: r_w = W sqrt(1 - lambda), r_h = H sqrt(1 - lambda), its centre anywhere in the image.

    The box is clipped at the image's edge, so lambda is counted again: 1 - area / (H W).
    """
    H, W = size
    rw, rh = int(W * (1 - lam) ** 0.5), int(H * (1 - lam) ** 0.5)
    x, y = int(across * W), int(down * H)
    left, top = x - rw // 2, y - rh // 2
    right, bottom = min(left + rw, W), min(top + rh, H)
    left, top = max(left, 0), max(top, 0)
    return (left, top, right, bottom), 1 - (right - left) * (bottom - top) / (H * W)
