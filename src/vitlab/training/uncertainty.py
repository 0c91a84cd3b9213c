"""How sure a figure is: intervals, whether one model beats another, and what more labels would bring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.images.sources.splits import few_labels

Z = 1.959964  # the 97.5 % point of the normal distribution
DRAWS = 3  # of the images of a smaller training set
RESAMPLES = 500
SHARES = (0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Accuracy:
    """A share of right answers with its 95 % interval (Wilson's), over so many images."""

    value: float
    low: float
    high: float
    images: int

    def __str__(self) -> str:
        return f"{self.value:.1%} (95 % interval {self.low:.1%} to {self.high:.1%}, {self.images:,} images)"


def accuracy(right: Tensor | np.ndarray, groups: np.ndarray | None = None) -> Accuracy:
    """Of answers (n,), True where they are right. `groups` (n,): images of one group tend to be right together."""
    answers = np.asarray(right, dtype=np.float64)
    p = float(answers.mean())
    low, high = wilson(p, len(answers) if groups is None else effective_images(answers, groups))
    return Accuracy(p, low, high, len(answers))


def wilson(share: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval for a share of n images, which holds near 0 and 1 where the plain one does not."""
    middle, spread = share + Z**2 / (2 * n), Z * np.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    scale = 1 + Z**2 / n
    return float(max(0.0, (middle - spread) / scale)), float(min(1.0, (middle + spread) / scale))


def effective_images(values: np.ndarray, groups: np.ndarray) -> float:
    """How many independent images give a mean as sure as these: n / design effect (Kish), n at most.

    The design effect is the variance of the mean over groups against that over images. Where all values are equal it
    is not known, and each group counts as one image.
    """
    _, members = np.unique(groups, return_inverse=True)
    n, count, rest = len(values), int(members.max()) + 1, values - values.mean()
    if count < 2 or not rest.any():
        return float(count)
    sums = np.bincount(members, weights=rest)  # (count,)
    over_groups, over_images = np.square(sums).sum() * count / (count - 1), np.square(rest).sum()
    return n / max(1.0, float(over_groups / over_images))


def resamples(n: int, times: int, seed: int, groups: np.ndarray | None = None) -> Iterator[np.ndarray]:
    """Indices of images drawn with replacement (bootstrap), as many as there are; `groups` are drawn complete."""
    random = np.random.default_rng(seed)
    if groups is None:
        for _ in range(times):
            yield random.integers(0, n, n)
        return
    _, numbers = np.unique(groups, return_inverse=True)
    members = np.split(np.argsort(numbers, kind="stable"), np.cumsum(np.bincount(numbers))[:-1])
    for _ in range(times):
        yield np.concatenate([members[g] for g in random.integers(0, len(members), len(members))])


def majority(train: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy on `labels` of always answering with the most frequent class of `train`."""
    return float((labels == np.bincount(train).argmax()).mean())


def beats(new: Tensor, old: Tensor, groups: np.ndarray | None = None) -> bool:
    """Whether answers are better than others to the same images, by more than one standard error of the difference.

    Images that both have right or both have wrong say nothing: gained - lost has the variance gained + lost. With
    `groups` (n,), each group gains or loses as one.
    """
    gains = (new.long() - old.long()).numpy()  # 1 gained, -1 lost
    if groups is not None:
        gains = np.bincount(np.unique(groups, return_inverse=True)[1], weights=gains)
    return float(gains.sum()) > float(np.square(gains).sum()) ** 0.5


@dataclass(frozen=True)
class LearningCurve:
    """Accuracy on validation images against the number of labels, and what twice as many would bring."""

    labels: list[int]
    accuracies: list[float]
    forecast_labels: int
    forecast: float
    low: float  # 95 % interval of the forecast
    high: float

    @property
    def gain(self) -> float:
        return self.forecast - self.accuracies[-1]

    def __str__(self) -> str:
        gain, low, high = (100 * (v - self.accuracies[-1]) for v in (self.forecast, self.low, self.high))
        span = f"{gain:+.1f} points ({low:+.1f} to {high:+.1f})"
        more = f"twice the labels ({self.forecast_labels:,}) would bring about {span}"
        if gain >= 1 and low > 0:
            return f"More labels would help: {more}."
        if high < 1:
            return f"More labels would bring little: {more}."
        return f"Whether more labels would help is not sure: {more}."

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def learning_curve(
    answers: Callable[[np.ndarray], Tensor],
    labels: np.ndarray,
    classes: list[str],
    truth: Tensor,
    *,
    seed: int = 0,
    groups: np.ndarray | None = None,
    train_groups: np.ndarray | None = None,
) -> LearningCurve | None:
    """`answers(indices)` trains on these images of the training set and answers the validation images, (n,).

    `groups` (n,) are those of the validation images, `train_groups` those of the training images, of which a smaller
    set has fewer. The error is taken to fall as a power of the number of labels. None where there are too few, or no
    errors.
    """
    sizes: list[int] = []
    right: list[np.ndarray] = []  # (draws, n) for each size
    for share in SHARES:
        draws = range(DRAWS if share < 1 else 1)
        chosen = [few_labels(labels, classes, seed + draw, fraction=share, groups=train_groups) for draw in draws]
        if any(len(np.unique(labels[part])) < 2 for part in chosen):
            return None
        sizes.append(round(float(np.mean([len(part) for part in chosen]))))
        right.append(np.stack([(answers(part) == truth).numpy() for part in chosen]))
    accuracies = [float(part.mean()) for part in right]
    if len(set(sizes)) < len(SHARES) or accuracies[-1] == 1.0:
        return None
    forecast = _forecast(sizes, accuracies)
    samples = []
    for drawn in resamples(len(truth), RESAMPLES, seed, groups):
        samples.append(_forecast(sizes, [float(part[:, drawn].mean()) for part in right]) - right[-1][0, drawn].mean())
    low, high = np.quantile(samples, [0.025, 0.975]) + accuracies[-1]
    return LearningCurve(sizes, accuracies, 2 * sizes[-1], forecast, float(low), float(min(1.0, high)))


def _forecast(sizes: list[int], accuracies: list[float]) -> float:
    """Accuracy at twice the largest size, by a line through log error against log size; it does not get worse."""
    error = np.log(np.maximum(1 - np.array(accuracies), 1e-3))
    slope, level = np.polyfit(np.log(sizes), error, 1)
    last = float(torch.tensor(accuracies[-1]))
    return max(last, float(1 - np.exp(level + slope * np.log(2 * sizes[-1]))) if slope < 0 else last)
