"""The loss of a set: each object of an image is given to one query (Hungarian matching, arXiv:2005.12872, eq. 1), and
that query is compared with it: class, mask (arXiv:2112.01527, sec. 3.2) and box.

    terms = set_loss(model(images), targets, model.loss_weights)
    sum(terms.values()).backward()

Masks are compared at random points, three quarters of them where the prediction is least certain (PointRend,
arXiv:1912.08193); points=0 compares every place. Predictions of earlier blocks are matched by themselves and added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.layers.boxes import corners, generalised_iou
from vitlab.layers.collective import all_mean
from vitlab.models.dense import DenseOutput, DenseTarget


@dataclass(frozen=True)
class LossWeights:
    """How much each term counts, in the matching and in the loss; a term of weight 0 is left out."""

    classes: float = 2.0
    masks: float = 5.0  # binary cross-entropy
    dice: float = 5.0
    boxes: float = 0.0  # sum of absolute differences
    giou: float = 0.0
    no_object: float = 0.1  # the weight of that class in the cross-entropy
    points: int = 12544  # of each mask; 0: every place of the prediction, compared with the mask's mean there
    oversampling: float = 3.0  # so many times as many points are drawn to choose from
    uncertain: float = 0.75  # the share that is chosen; the rest is random

    def __post_init__(self) -> None:
        terms = {name: getattr(self, name) for name in ("classes", "masks", "dice", "boxes", "giou", "no_object")}
        if min(terms.values()) < 0 or self.points < 0:
            raise UsageError("weights of the loss and points must be 0 or more.")
        if self.oversampling < 1 or not 0 <= self.uncertain <= 1:
            raise UsageError("oversampling must be at least 1, and uncertain a share from 0 to 1.")


Match = tuple[Tensor, Tensor]  # numbers of queries, and of the objects given to them, both (m,)


def set_loss(output: DenseOutput, targets: Sequence[DenseTarget], weights: LossWeights) -> dict[str, Tensor]:
    """The terms by name, weighted: their sum is the loss."""
    parts = [_terms(part, targets, weights) for part in (*output.auxiliary, output)]
    return {name: torch.stack([part[name] for part in parts]).sum() for name in parts[-1]}


def _terms(output: DenseOutput, targets: Sequence[DenseTarget], weights: LossWeights) -> dict[str, Tensor]:
    matches = match(output, targets, weights)
    count = torch.tensor(float(sum(len(target.labels) for target in targets)), device=_classes(output).device)
    count = all_mean(count).clamp(min=1)  # of objects, over all processes
    terms = {"classes": weights.classes * class_loss(_classes(output), targets, matches, weights.no_object)}
    if output.masks is not None and weights.masks + weights.dice:
        masks, dice = mask_losses(output.masks, targets, matches, weights)
        terms |= {"masks": weights.masks * masks / count, "dice": weights.dice * dice / count}
    if output.boxes is not None and weights.boxes + weights.giou:
        boxes, giou = box_losses(output.boxes, targets, matches)
        terms |= {"boxes": weights.boxes * boxes / count, "giou": weights.giou * giou / count}
    return terms


# ------------------------------------------------------------------------------------------------------------ matching


@torch.no_grad()
def match(output: DenseOutput, targets: Sequence[DenseTarget], weights: LossWeights) -> list[Match]:
    """For each image which query is given which object, at the least total cost; the others predict no object."""
    from scipy.optimize import linear_sum_assignment  # pyright: ignore  # it has no types

    matches: list[Match] = []
    for image, target in enumerate(targets):
        costs = _costs(output, image, target, weights)  # (Q, n)
        worst = torch.finfo(costs.dtype).max
        costs = costs.nan_to_num(nan=worst, posinf=worst, neginf=worst)  # chosen only where nothing else is left
        pairs = cast("tuple[NDArray[np.int64], NDArray[np.int64]]", linear_sum_assignment(costs.cpu().numpy()))
        matches.append((torch.as_tensor(pairs[0]).to(costs.device), torch.as_tensor(pairs[1]).to(costs.device)))
    return matches


def _costs(output: DenseOutput, image: int, target: DenseTarget, weights: LossWeights) -> Tensor:
    """What it would cost to give each object to each query: (Q, n)."""
    logits = _classes(output)[image]  # (Q, K + 1)
    costs = -weights.classes * logits.softmax(-1)[:, target.labels]
    if output.masks is not None and weights.masks + weights.dice:
        predicted, wanted = _at_common_points(output.masks[image], _masks(target), weights.points)
        costs = costs + weights.masks * _pairwise_cross_entropy(predicted, wanted)
        costs = costs + weights.dice * _pairwise_dice(predicted, wanted)
    if output.boxes is not None and weights.boxes + weights.giou:
        predicted, wanted = output.boxes[image], _boxes(target).to(logits.dtype)
        costs = costs + weights.boxes * torch.cdist(predicted, wanted, p=1)
        costs = costs - weights.giou * generalised_iou(corners(predicted)[:, None], corners(wanted)[None])
    return costs


def _at_common_points(logits: Tensor, masks: Tensor, points: int) -> tuple[Tensor, Tensor]:
    """logits (Q, h, w) and masks (n, H, W) at the same random points: (Q, P) and (n, P)."""
    masks = masks.to(logits.dtype)
    if not points:
        return logits.flatten(1), _mean_masks(masks, logits.shape[-2:]).flatten(1)
    drawn = torch.rand(1, points, 2, device=logits.device)
    return _sample(logits[None], drawn)[0], _sample(masks[None], drawn)[0]


def _pairwise_cross_entropy(logits: Tensor, masks: Tensor) -> Tensor:
    """(Q, P) and (n, P) -> (Q, n): softplus(x) - x y, the mean over points."""
    return (F.softplus(logits).sum(-1)[:, None] - logits @ masks.T) / logits.shape[-1]


def _pairwise_dice(logits: Tensor, masks: Tensor) -> Tensor:
    shares = logits.sigmoid()
    both = shares.sum(-1)[:, None] + masks.sum(-1)[None]
    return 1 - (2 * shares @ masks.T + 1) / (both + 1)


# --------------------------------------------------------------------------------------------------------------- terms


def class_loss(logits: Tensor, targets: Sequence[DenseTarget], matches: Sequence[Match], no_object: float) -> Tensor:
    """Cross-entropy over all queries of all processes, in which "no object" has its own weight."""
    labels = torch.full(logits.shape[:2], logits.shape[-1] - 1, device=logits.device)  # (B, Q)
    for row, target, (queries, objects) in zip(labels, targets, matches, strict=True):
        row[queries] = target.labels[objects]
    weight = logits.new_ones(logits.shape[-1])
    weight[-1] = no_object
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight, reduction="sum")
    return loss / all_mean(weight[labels].sum())


def mask_losses(
    logits: Tensor, targets: Sequence[DenseTarget], matches: Sequence[Match], weights: LossWeights
) -> tuple[Tensor, Tensor]:
    """Sums over the matched objects: binary cross-entropy, the mean over points, and dice."""
    predicted = torch.cat([logits[image][queries] for image, (queries, _) in enumerate(matches)])  # (m, h, w)
    if not len(predicted):
        return 0 * logits.sum(), 0 * logits.sum()
    wanted = [_masks(target)[objects].to(logits.dtype) for target, (_, objects) in zip(targets, matches, strict=True)]
    if weights.points:
        with torch.no_grad():
            points = uncertain_points(predicted, weights)  # (m, P, 2)
            parts = torch.split(points, [len(masks) for masks in wanted])
            truth = torch.cat([_sample(m[:, None], p)[:, 0] for m, p in zip(wanted, parts, strict=True) if len(m)])
        scores = _sample(predicted[:, None], points)[:, 0]  # (m, P)
    else:
        truth = torch.cat([_mean_masks(masks, logits.shape[-2:]) for masks in wanted]).flatten(1)
        scores = predicted.flatten(1)
    shares = scores.sigmoid()
    dice = 1 - (2 * (shares * truth).sum(-1) + 1) / (shares.sum(-1) + truth.sum(-1) + 1)
    return F.binary_cross_entropy_with_logits(scores, truth, reduction="none").mean(1).sum(), dice.sum()


def uncertain_points(logits: Tensor, weights: LossWeights) -> Tensor:
    """Points (m, P, 2), x and y in 0..1: of many random ones those where |logit| is least, and some more."""
    m, P = len(logits), weights.points
    drawn = torch.rand(m, int(P * weights.oversampling), 2, device=logits.device)
    chosen = int(weights.uncertain * P)
    uncertainty = -_sample(logits[:, None], drawn)[:, 0].abs()  # (m, drawn)
    places = uncertainty.topk(chosen, dim=1).indices
    points = drawn.gather(1, places[..., None].expand(-1, -1, 2))
    if chosen < P:
        points = torch.cat([points, torch.rand(m, P - chosen, 2, device=logits.device)], dim=1)
    return points


def box_losses(predicted: Tensor, targets: Sequence[DenseTarget], matches: Sequence[Match]) -> tuple[Tensor, Tensor]:
    """Sums over the matched objects: absolute differences, and 1 - GIoU."""
    ours = torch.cat([predicted[image][queries] for image, (queries, _) in enumerate(matches)])  # (m, 4)
    wanted = torch.cat([_boxes(t)[objects] for t, (_, objects) in zip(targets, matches, strict=True)]).to(ours.dtype)
    return (ours - wanted).abs().sum(), (1 - generalised_iou(corners(ours), corners(wanted))).sum()


def _sample(maps: Tensor, points: Tensor) -> Tensor:
    """Bilinear values of maps (n, C, h, w) at points (n, P, 2), x and y in 0..1: (n, C, P)."""
    places = 2 * points.to(maps.dtype)[:, :, None] - 1  # (n, P, 1, 2)
    return F.grid_sample(maps, places, align_corners=False)[..., 0]


def _mean_masks(masks: Tensor, size: Sequence[int]) -> Tensor:
    """The share of each place of a coarser map (n, h, w) that a mask (n, H, W) covers."""
    return F.adaptive_avg_pool2d(masks[:, None], (size[0], size[1]))[:, 0] if len(masks) else masks.new_zeros(0, *size)


def _classes(output: DenseOutput) -> Tensor:
    if output.classes is None:
        raise UsageError("the loss of a set compares queries, and this network has none: use its own `loss`.")
    return output.classes


def _masks(target: DenseTarget) -> Tensor:
    if target.masks is None:
        raise UsageError(
            "this network learns from masks, and the data has none: use data with masks, or a network of boxes (yolos)."
        )
    return target.masks


def _boxes(target: DenseTarget) -> Tensor:
    if target.boxes is None:
        raise UsageError("this network learns from boxes, and the data has none: use data with boxes or with masks.")
    return target.boxes
