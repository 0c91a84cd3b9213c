"""The ladder for several labels an image, or a number: its linear probe, and whether one model beats another.

probe = fit_target_probe(features, labels, task)       # logistic regressions, or ridge regression
beats(new_scores, old_scores)                          # by more than the noise of the images
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vitlab.images.randomness import permutation
from vitlab.images.sources.splits import strata
from vitlab.models.task import LabelTask, ModelTask, NumberTask
from vitlab.training.probe import CHOOSES, FOLD, STRENGTHS, Probe, deal
from vitlab.training.target_scores import LabelScores, TargetScores, average_precision
from vitlab.training.uncertainty import resamples

PENALTIES = (1.0, 10.0, 100.0, 1e3, 1e4)  # of the ridge, for features of variance 1: a large one shrinks most
LABELS = 8  # labels that choose the strength; more would take long and choose the same
RESAMPLES = 200
Fit = Callable[[np.ndarray, np.ndarray, float], tuple[np.ndarray, np.ndarray]]  # x, y, strength -> (K, E), (K,)


def fit_target_probe(
    features: Tensor,
    labels: Tensor,
    task: ModelTask,
    *,
    seed: int = 0,
    groups: np.ndarray | None = None,
    balanced: bool = False,
) -> Probe:
    """features (n, E), labels as a dataset has them. Strength: the best on folds that the probe was not fitted on.

    `groups` (n,): images of one group are held out together. `balanced`: images with a label count as much as those
    without.
    """
    x = features.double().numpy()
    mean, scale = x.mean(axis=0), x.std(axis=0)
    scale[scale < 1e-6] = 1.0
    x = (x - mean) / scale
    if isinstance(task, NumberTask):
        y, fit, loss, strengths = task.standardise(labels.double()).numpy()[:, None], ridge, squared_error, PENALTIES
        alike = strata(labels.double().numpy())
    else:
        y, loss, strengths = labels.double().numpy(), log_loss, STRENGTHS
        fit: Fit = lambda x, y, strength: logistic(x, y, strength, balanced)
        alike = strata(labels.numpy() > 0)
    folds = deal(alike, seed, groups)
    few, columns = permutation(len(y), seed, FOLD)[:CHOOSES], permutation(y.shape[1], seed, FOLD)[:LABELS]
    part = x[few], y[np.ix_(few, columns)], folds[few]
    losses = [loss(held_out(*part, fit, strength), part[1]) for strength in strengths]
    strength = strengths[int(np.argmin(losses))]
    weight, bias = fit(x, y, strength)
    weight = weight / scale  # as a layer on features that are not standardised
    bias = bias - weight @ mean
    layer = [torch.from_numpy(value).float() for value in (weight, bias)]
    seen = torch.from_numpy(held_out(x, y, folds, fit, strength))
    return Probe(layer[0], layer[1], strength, seen, np.ones(len(y), dtype=bool))


def held_out(x: np.ndarray, y: np.ndarray, folds: np.ndarray, fit: Fit, strength: float) -> np.ndarray:
    """(n, K) outputs, each fold's by a probe that is fitted on the others."""
    outputs = np.zeros_like(y)
    for fold in np.unique(folds):
        rest = folds != fold
        if rest.any():
            weight, bias = fit(x[rest], y[rest], strength)
            outputs[~rest] = x[~rest] @ weight.T + bias
    return outputs


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> tuple[np.ndarray, np.ndarray]:
    """(X^T X + penalty I)^-1 X^T y, of centred x and y."""
    centre, level = x.mean(axis=0), y.mean(axis=0)
    x, y = x - centre, y - level
    if len(x) < x.shape[1]:  # the same, by the smaller matrix
        weight = (x.T @ np.linalg.solve(x @ x.T + penalty * np.eye(len(x)), y)).T  # (K, E)
    else:
        weight = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y).T
    return weight, level - weight @ centre


def logistic(x: np.ndarray, y: np.ndarray, strength: float, balanced: bool) -> tuple[np.ndarray, np.ndarray]:
    """One regression for each label; where all images here have it, or none, the same answer for all."""
    from sklearn.linear_model import LogisticRegression

    weight, bias = np.zeros((y.shape[1], x.shape[1])), np.zeros(y.shape[1])
    for k, truth in enumerate(y.T > 0):
        has = int(truth.sum())
        if 0 < has < len(truth):
            weights = "balanced" if balanced else None
            fitted = LogisticRegression(C=strength, max_iter=1000, class_weight=weights).fit(x, truth)
            weight[k], bias[k] = fitted.coef_[0], fitted.intercept_[0]
        else:
            bias[k] = np.log((has + 0.5) / (len(truth) - has + 0.5))
    return weight, bias


def squared_error(outputs: np.ndarray, y: np.ndarray) -> float:
    return float(np.square(outputs - y).mean())


def log_loss(outputs: np.ndarray, y: np.ndarray) -> float:
    """Binary cross-entropy of logits."""
    return float((np.logaddexp(0.0, outputs) - y * outputs).mean())


def interval(scores: TargetScores, groups: np.ndarray | None = None, seed: int = 0) -> tuple[float, float]:
    """95 % interval of `scores.value`, by the bootstrap. `groups` (N,): images that are drawn together.

    NaN where no draw has a value: R2 needs two different numbers.
    """
    read = scores.read.nonzero()[:, 0]
    outputs, labels = scores.outputs[read], scores.labels[read]
    values = []
    for rows in resamples(len(read), RESAMPLES, seed, None if groups is None else groups[read.numpy()]):
        drawn = torch.from_numpy(rows)
        part = replace(scores, outputs=outputs[drawn], labels=labels[drawn], read=torch.ones(len(rows)).bool())
        values.append(part.value)
    if np.isnan(values).all():
        return math.nan, math.nan
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)


def beats(new: TargetScores, old: TargetScores, groups: np.ndarray | None = None, seed: int = 0) -> bool:
    """Whether the figure is better by more than one standard error of the difference, over draws of the images with
    replacement (bootstrap). The figure is the mAP, or the mean squared error. `groups` (N,): images drawn together.
    """
    both = new.read & old.read
    labels, a, b = new.labels[both], new.outputs[both], old.outputs[both]
    if isinstance(new, LabelScores):
        figure = lambda rows: _mean_precision(a[rows], labels[rows]) - _mean_precision(b[rows], labels[rows])
    else:
        gain = (old.task.scores(b)[:, 0] - labels).square() - (new.task.scores(a)[:, 0] - labels).square()
        figure = lambda rows: float(gain[rows].mean())
    together = None if groups is None else groups[both.numpy()]
    draws = [figure(torch.from_numpy(rows)) for rows in resamples(len(labels), RESAMPLES, seed, together)]
    return figure(torch.arange(len(labels))) > float(np.std(draws))


def _mean_precision(outputs: Tensor, labels: Tensor) -> float:
    """mAP over the labels that some of these images have."""
    present = labels.any(dim=0).nonzero()[:, 0].tolist()
    values = [average_precision(outputs[:, k], labels[:, k]) for k in present]
    return sum(values) / len(values) if values else 0.0


def perfect(scores: TargetScores) -> bool:
    """Whether nothing can be won: every label of every image is right, at its threshold."""
    if not isinstance(scores, LabelScores) or not isinstance(scores.task, LabelTask):
        return False
    return bool((scores.present == (scores.labels > 0))[scores.read].all())
