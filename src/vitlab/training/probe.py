"""A linear probe: logistic regression on frozen features, which becomes the network's own classifier.

    probe = fit_probe(features, labels, classes=2)
    probe.held_out                                     # (n, K): each image as seen by a probe that was not fitted on it
    probe.install(model.linear_head)

How strongly it is regularised is chosen by cross-validation on the training images, so validation images stay unseen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitlab.images.randomness import permutation
from vitlab.images.sources.splits import group_folds

STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # scikit-learn's C, for features of variance 1: a small one regularises most
FOLDS = 5
CHOOSES = 6_000  # images that choose the strength; more would take long and choose the same
FOLD = 4  # coordinate of the draw that deals images into folds
ABSENT = -20.0  # log-probability of a class that a fold has no image of


@dataclass(frozen=True)
class Probe:
    """logits = x weight^T + bias, for features x as the encoder gives them."""

    weight: Tensor  # (K, E)
    bias: Tensor  # (K,)
    strength: float
    held_out: Tensor  # (n, K) log-probabilities
    fair: np.ndarray  # (n,) bool: the probe that answered in `held_out` had seen other images with the same label

    def logits(self, features: Tensor) -> Tensor:
        return features @ self.weight.T + self.bias

    def install(self, head: nn.Linear) -> None:
        with torch.no_grad():
            head.weight.copy_(self.weight)
            head.bias.copy_(self.bias)


def fit_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    seed: int = 0,
    strength: float | None = None,
    held_out: bool = True,
    groups: np.ndarray | None = None,
    balanced: bool = False,
) -> Probe:
    """features (n, E), labels (n,). `strength`: chosen by cross-validation unless given. `held_out`: see Probe.

    `groups` (n,): images of one group, such as copies of each other, are held out together. `balanced`: each class
    counts as much as any other.
    """
    x, y = features.double().numpy(), labels.numpy()
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale[scale < 1e-6] = 1.0
    x = (x - mean) / scale
    folds = deal(y, seed, groups)
    if strength is None:
        chosen = permutation(len(y), seed, FOLD)[:CHOOSES]
        part = x[chosen], y[chosen], folds[chosen]
        losses = [_loss(_held_out(*part, classes, c, balanced), part[1], balanced) for c in STRENGTHS]
        strength = STRENGTHS[int(np.argmin(losses))]
    seen = _held_out(x, y, folds, classes, strength, balanced) if held_out else np.zeros((0, classes))
    weight, bias = _fit(x, y, classes, strength, balanced)
    weight = weight / scale  # as a layer on features that are not standardised
    bias = bias - weight @ mean
    layer = [torch.from_numpy(value).float() for value in (weight, bias)]
    return Probe(layer[0], layer[1], strength, torch.from_numpy(seen), label_elsewhere(y, folds))


def deal(labels: np.ndarray, seed: int, groups: np.ndarray | None = None) -> np.ndarray:
    """(n,): the fold of each image; the images of a class are dealt out evenly, those of a group together."""
    if groups is not None:
        return group_folds(labels, groups, FOLDS, seed)
    folds = np.zeros(len(labels), dtype=np.int64)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        folds[members[permutation(len(members), seed, FOLD, int(label))]] = (np.arange(len(members)) + label) % FOLDS
    return folds


def label_elsewhere(y: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """(n,) bool: whether an image's label is also in another fold."""
    _, labels = np.unique(y, return_inverse=True)
    pairs = np.zeros((labels.max() + 1, folds.max() + 1), dtype=np.int64)
    np.add.at(pairs, (labels, folds), 1)
    return pairs.sum(axis=1)[labels] > pairs[labels, folds]


def _held_out(
    x: np.ndarray, y: np.ndarray, folds: np.ndarray, classes: int, strength: float, balanced: bool
) -> np.ndarray:
    """(n, K) log-probabilities, each fold's by a probe that is fitted on the others."""
    result = np.full((len(y), classes), ABSENT)
    for fold in np.unique(folds):
        rest = folds != fold
        if len(np.unique(y[rest])) < 2:  # nothing to tell apart
            continue
        weight, bias = _fit(x[rest], y[rest], classes, strength, balanced)
        logits = torch.from_numpy(x[~rest] @ weight.T + bias)
        result[~rest] = logits.log_softmax(dim=1).numpy()
    return result


def _loss(log_probabilities: np.ndarray, y: np.ndarray, balanced: bool) -> float:
    weights = 1 / np.bincount(y)[y] if balanced else np.ones(len(y))
    return float(-np.average(log_probabilities[np.arange(len(y)), y], weights=weights))


def _fit(x: np.ndarray, y: np.ndarray, classes: int, strength: float, balanced: bool) -> tuple[np.ndarray, np.ndarray]:
    """Weights (K, E) and biases (K,); a class without images is never the answer."""
    from sklearn.linear_model import LogisticRegression

    weights = "balanced" if balanced else None
    fitted = LogisticRegression(C=strength, max_iter=1000, class_weight=weights).fit(x, y)
    rows, offsets = fitted.coef_, fitted.intercept_
    if len(fitted.classes_) == 2:  # one row for two classes: the second's logit less the first's
        rows, offsets = np.stack([-rows[0], rows[0]]) / 2, np.array([-offsets[0], offsets[0]]) / 2
    weight, bias = np.zeros((classes, x.shape[1])), np.full(classes, ABSENT)
    weight[fitted.classes_], bias[fitted.classes_] = rows, offsets
    return weight, bias
