"""How many more images one classifier gets right than another, expected from how sure both are of their answers.

Counting right answers uses one bit of each image: among n images on which two classifiers differ, the difference of the
counts has a standard error of sqrt(n). Here both are first combined into one that is calibrated on these images,

    P(y | x) = softmax(w1 z1 + w2 z2),      w = argmax of the likelihood of the labels (stacking, Wolpert 1992)

and an image counts with P(new answer) - P(old answer): zero where they agree, little where nobody can know.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

STEPS = 50
RIDGE = 1e-4  # keeps the weights finite where the labels can be told without an error


def expected_gain(new: Tensor, old: Tensor, labels: Tensor, groups: np.ndarray | None = None) -> tuple[float, float]:
    """Logits (n, K) of both and labels (n,) -> the difference in accuracy, and its standard error.

    The error is that of both steps: the weights are estimated from the same images. `groups` (n,): images of one group
    count as one.
    """
    z = torch.stack([new, old], dim=1).double()  # (n, 2, K)
    z = z - z.mean(dim=2, keepdim=True)
    w = _weights(z, labels)
    p, score, hessian = _likelihood(z, labels, w)
    rows = torch.arange(len(labels))
    answers = z.argmax(dim=2)  # (n, 2)
    chances = p.gather(1, answers)  # (n, 2)
    gains = chances[:, 0] - chances[:, 1]
    mean_z = (z * p[:, None]).sum(dim=2)  # (n, 2)
    slopes = [chances[:, i, None] * (z[rows, :, answers[:, i]] - mean_z) for i in (0, 1)]  # (n, 2): of chances by w
    slope = (slopes[0] - slopes[1]).mean(dim=0)  # (2,)
    gain = gains.mean()
    influence = (gains - gain - score @ torch.linalg.solve(hessian, slope)).numpy()
    if groups is not None:
        influence = np.bincount(np.unique(groups, return_inverse=True)[1], weights=influence)
    return float(gain), float(np.sqrt(np.square(influence).sum()) / len(labels))


def _weights(z: Tensor, labels: Tensor) -> Tensor:
    """(2,): by Newton's method, with half steps where a full one would overshoot. The loss is convex."""
    w = torch.full((2,), 0.5, dtype=z.dtype)
    for _ in range(STEPS):
        _, score, hessian = _likelihood(z, labels, w)
        step, before = torch.linalg.solve(hessian, score.mean(dim=0) + RIDGE * w), _loss(z, labels, w)
        while _loss(z, labels, w - step) > before and float(step.abs().max()) > 1e-10:
            step = step / 2
        w = w - step
        if float(step.abs().max()) < 1e-9:
            break
    return w


def _loss(z: Tensor, labels: Tensor, w: Tensor) -> float:
    log_p = torch.einsum("nik,i->nk", z, w).log_softmax(dim=1)
    return float(-log_p.gather(1, labels[:, None]).mean() + RIDGE * w.square().sum() / 2)


def _likelihood(z: Tensor, labels: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities (n, K), gradients of each image's loss by w (n, 2), and the mean Hessian (2, 2)."""
    p = torch.einsum("nik,i->nk", z, w).softmax(dim=1)
    mean_z = (z * p[:, None]).sum(dim=2)  # (n, 2)
    score = mean_z - z[torch.arange(len(labels)), :, labels]
    spread = torch.einsum("nik,njk,nk->ij", z, z, p) - mean_z.mT @ mean_z
    return p, score, spread / len(z) + RIDGE * torch.eye(2, dtype=z.dtype)
