"""How good the answers of a model are where they are not classes: several labels an image, or a number.

scores = LabelScores(logits, labels, read, seconds, task=model.task)
scores.mean_average_precision(), scores.f1("micro"), best_thresholds(logits, labels)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.models.task import LabelTask, ModelTask, NumberTask
from vitlab.training.evaluate import Scores

LEAST, MOST = 1e-4, 1 - 1e-4  # of a threshold


@dataclass
class TargetScores:
    """Base class: the outputs of a model for a dataset."""

    outputs: Tensor  # (N, K)
    labels: Tensor  # (N, K) of 0 and 1, or (N,) numbers
    read: Tensor  # (N,), False where an image could not be read
    seconds: float
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read: name -> what is wrong
    task: ModelTask = field(default_factory=ModelTask)

    metric = ""  # the name of `value`

    @property
    def value(self) -> float:
        """The figure that chooses the best model; more is better."""
        raise NotImplementedError

    def numbers(self) -> dict[str, float]:
        """All figures, as the log and result.json have them."""
        raise NotImplementedError

    def loss(self) -> float:
        """The loss in training, over these images."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": int(self.read.sum()),
            "unreadable": int((~self.read).sum()),
            "unreadable_pictures": list(self.skipped.values()),
            **self.numbers(),
            "seconds": self.seconds,
            "images_per_second": len(self.labels) / max(self.seconds, 1e-9),
        }


@dataclass
class LabelScores(TargetScores):
    """Several labels an image, each there or not."""

    metric = "mAP"

    @property
    def label_task(self) -> LabelTask:
        return self.task if isinstance(self.task, LabelTask) else LabelTask()

    @property
    def probabilities(self) -> Tensor:
        return self.label_task.scores(self.outputs)

    @property
    def present(self) -> Tensor:
        """(N, K): the labels that are given to each image."""
        return self.label_task.present(self.probabilities)

    @property
    def value(self) -> float:
        return self.mean_average_precision()

    def average_precisions(self) -> list[float | None]:
        """Of each label; None where no image has it."""
        outputs, labels = self.outputs[self.read], self.labels[self.read]
        pairs = zip(outputs.T, labels.T, strict=True)
        return [average_precision(scores, truth) if bool(truth.any()) else None for scores, truth in pairs]

    def mean_average_precision(self) -> float:
        """Over the labels that some image has."""
        values = [value for value in self.average_precisions() if value is not None]
        return sum(values) / len(values) if values else 0.0

    def chance(self) -> float:
        """The mean average precision of a random order, about: the mean share of images that have a label."""
        has = self.labels[self.read].float().mean(dim=0)  # (K,)
        return float(has[has > 0].mean()) if bool((has > 0).any()) else 0.0

    def f1s(self) -> list[float | None]:
        """Of each label; None where no image has it and none is given it."""
        right, given, has = self._counts()
        sums = (given + has).tolist()
        return [2 * r / s if s else None for r, s in zip(right.tolist(), sums, strict=True)]

    def f1(self, average: Literal["micro", "macro"]) -> float:
        """2 TP / (2 TP + FP + FN): of all answers together, or the mean over the labels."""
        if average == "macro":
            values = [value or 0.0 for value in self.f1s()]
            return sum(values) / len(values)
        right, given, has = (float(part.sum()) for part in self._counts())
        return 2 * right / (given + has) if given + has else 0.0

    def _counts(self) -> tuple[Tensor, Tensor, Tensor]:
        """(K,) each: true positives, positives given, positives there are."""
        given, truth = self.present[self.read], self.labels[self.read] > 0
        return (given & truth).sum(dim=0), given.sum(dim=0), truth.sum(dim=0)

    def loss(self) -> float:
        return float(F.binary_cross_entropy_with_logits(self.outputs[self.read], self.labels[self.read].float()))

    def numbers(self) -> dict[str, float]:
        f1 = {"f1_micro": self.f1("micro"), "f1_macro": self.f1("macro")}
        return {"map": self.value, **f1, "loss": self.loss()}

    def to_dict(self) -> dict[str, Any]:
        has = self.labels[self.read].sum(dim=0).long().tolist()
        thresholds = self.label_task.thresholds or (0.5,) * self.labels.shape[1]
        rows = zip(self.average_precisions(), self.f1s(), thresholds, has, strict=True)
        names = ("average_precision", "f1", "threshold", "images")
        return {**super().to_dict(), "per_label": [dict(zip(names, row, strict=True)) for row in rows]}


@dataclass
class NumberScores(TargetScores):
    """A number for each image, in the units of the data."""

    metric = "R2"

    @property
    def predicted(self) -> Tensor:
        """(N,)"""
        return self.task.scores(self.outputs)[:, 0]

    @property
    def errors(self) -> Tensor:
        return (self.predicted - self.labels)[self.read]

    @property
    def value(self) -> float:
        return self.r2()

    def mae(self) -> float:
        return float(self.errors.abs().mean())

    def rmse(self) -> float:
        return float(self.errors.square().mean().sqrt())

    def r2(self) -> float:
        """The share of the variance that is explained: 1 - sum of squared errors / that of the mean of these images."""
        truth = self.labels[self.read]
        spread = float((truth - truth.mean()).square().sum())
        return 1 - float(self.errors.square().sum()) / spread if spread else float("nan")

    def loss(self) -> float:
        """The mean squared error in training: of standardised numbers."""
        std = self.task.std if isinstance(self.task, NumberTask) else 1.0
        return float((self.errors / std).square().mean())

    def numbers(self) -> dict[str, float]:
        return {"mae": self.mae(), "rmse": self.rmse(), "r2": self.r2(), "loss": self.loss()}


def task_scores(scores: Scores, task: ModelTask) -> Scores | TargetScores:
    """The outputs of a model, judged by what they mean."""
    parts = scores.logits, scores.labels, scores.read, scores.seconds, scores.skipped
    if isinstance(task, LabelTask):
        return LabelScores(*parts, task)
    return NumberScores(*parts, task) if isinstance(task, NumberTask) else scores


def reordered(task: ModelTask, order: list[int]) -> ModelTask:
    """For outputs in another order: `order` has the number of each in the model."""
    if isinstance(task, LabelTask) and task.thresholds:
        return LabelTask(thresholds=tuple(task.thresholds[k] for k in order))
    return task


def headline(numbers: Mapping[str, Any], metric: str = "top-1") -> str:
    """The figures of a log line or of result.json in words; `metric` is what top1 stands for."""
    n = numbers
    if "miou" in n:
        return f"mIoU {n['miou']:.2%}, pixel accuracy {n['pixel_accuracy']:.2%}"
    if "ap" in n:
        quality = f", PQ {n['pq']:.2%}" if "pq" in n else ""
        return f"AP {n['ap']:.2%}, AP50 {n['ap50']:.2%}{quality}"
    if "map" in n:
        return f"mAP {n['map']:.2%}{_span(n, '.1%')}, F1 {n['f1_micro']:.2%} (micro), {n['f1_macro']:.2%} (macro)"
    if "mae" in n:
        errors = f"MAE {n['mae']:.4g}, RMSE {n['rmse']:.4g}"
        return errors if math.isnan(n["r2"]) else f"R2 {n['r2']:.4f}{_span(n, '.3f')}, {errors}"
    return f"{metric} {n['top1']:.2%}{_span(n, '.1%')}"


def _span(numbers: Mapping[str, Any], form: str) -> str:
    """The 95 % interval and the images behind it, where they are known."""
    if "interval" not in numbers:
        return ""
    low, high = numbers["interval"]
    return f" (95 % interval {low:{form}} to {high:{form}}, {numbers['images']:,} images)"


def average_precision(scores: Tensor, truth: Tensor) -> float:
    """sum over thresholds of (R_n - R_{n-1}) P_n: equal scores are one threshold, and nothing is interpolated."""
    order = scores.argsort(descending=True, stable=True)
    scores, truth = scores[order], truth[order].double()
    right = truth.cumsum(dim=0)
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])  # of those with equal scores
    precision = (right / torch.arange(1, len(truth) + 1))[last]
    recall = (right / right[-1])[last]
    return float((torch.diff(recall, prepend=recall.new_zeros(1)) * precision).sum())


def best_thresholds(outputs: Tensor, labels: Tensor) -> tuple[float, ...]:
    """For each label the probability from which it is given: that of the highest F1 on these images.

    It lies half-way between two images' probabilities. Of equally good ones the nearest to 0.5; 0.5 where no image, or
    every image, has the label.
    """
    return tuple(_best_threshold(column, truth) for column, truth in zip(outputs.T, labels.T, strict=True))


def _best_threshold(outputs: Tensor, truth: Tensor) -> float:
    truth = truth > 0
    if not bool(truth.any()) or bool(truth.all()):
        return 0.5
    order = outputs.argsort(descending=True, stable=True)
    chances, right = outputs[order].double().sigmoid(), truth[order].double().cumsum(dim=0)
    given = torch.arange(1, len(truth) + 1)
    f1 = 2 * right / (given + truth.sum())  # where so many are given the label
    cuts = torch.cat([(chances[:-1] + chances[1:]) / 2, chances[-1:] / 2])
    possible = torch.cat([chances[:-1] != chances[1:], torch.ones(1, dtype=torch.bool)])
    f1, cuts = f1[possible], cuts[possible]
    best = cuts[f1 >= f1.max() - 1e-12]
    chosen = float(best[(best - 0.5).abs().argmin()])
    return min(max(chosen, LEAST), MOST)
