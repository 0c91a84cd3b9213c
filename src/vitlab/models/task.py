"""What the outputs of a head mean: one class of several, labels that are each there or not, or a number.

    model.task.scores(model(images))     # probabilities (B, K); of a number its value (B, 1), in the data's units

It is saved in model.json beside the class names, and goes into exported files.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torch import Tensor

from vitlab.errors import UsageError

RegionKind = Literal["semantic", "instance", "detect"]
Kind = Literal["class", "labels", "number"] | RegionKind
CLOSE = 0.05  # standard deviations between two numbers that count as the same answer


@dataclass(frozen=True)
class ModelTask:
    """One class of several: outputs are logits, and their softmax probabilities that add up to 1."""

    kind: Kind = "class"

    @property
    def description(self) -> str:
        return "classes"

    def same_answers(self, a: Tensor, b: Tensor) -> Tensor:
        """Where outputs (B, K) lead to the same answer: (B,) bool."""
        return a.argmax(dim=1) == b.argmax(dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        """What a user reads: (B, K) -> (B, K)."""
        return outputs.softmax(dim=-1)

    def check(self, outputs: int) -> None:
        """Refuse values that do not fit a head with so many outputs."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class LabelTask(ModelTask):
    """Several labels, each there or not: the sigmoid of an output is the probability of one label."""

    kind: Kind = "labels"
    thresholds: tuple[float, ...] = ()  # an image has a label if its probability is this or more; none: 0.5 for each

    @property
    def description(self) -> str:
        return "labels with thresholds of their own"

    def same_answers(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.present(self.scores(a)) == self.present(self.scores(b))).all(dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def present(self, probabilities: Tensor) -> Tensor:
        """(..., K) -> bool"""
        thresholds = self.thresholds or (0.5,) * probabilities.shape[-1]
        return probabilities >= probabilities.new_tensor(thresholds)

    def check(self, outputs: int) -> None:
        if self.thresholds and len(self.thresholds) != outputs:
            raise UsageError(f"there are {len(self.thresholds)} thresholds for {outputs} labels.")
        if not all(0 < threshold < 1 for threshold in self.thresholds):
            raise UsageError("thresholds of labels must lie between 0 and 1.")


@dataclass(frozen=True)
class NumberTask(ModelTask):
    """A number: the output is in standard deviations from the mean of the training images."""

    kind: Kind = "number"
    mean: float = 0.0
    std: float = 1.0

    @property
    def description(self) -> str:
        return "a number"

    def same_answers(self, a: Tensor, b: Tensor) -> Tensor:
        return ((a - b).abs() <= CLOSE).all(dim=1)

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.double() * self.std + self.mean

    def standardise(self, values: Tensor) -> Tensor:
        return (values - self.mean) / self.std

    def check(self, outputs: int) -> None:
        if outputs != 1:
            raise UsageError(f"a model of one number has 1 output, not {outputs}.")
        if not (math.isfinite(self.mean) and 0 < self.std < math.inf):
            raise UsageError(f"a number needs a finite mean and a std above 0, not {self.mean} and {self.std}.")


@dataclass(frozen=True)
class RegionTask(ModelTask):
    """What of a DenseOutput was learned, and is read: the class of every pixel, masks of objects, or boxes."""

    kind: Kind = "semantic"

    @property
    def region_kind(self) -> RegionKind:
        assert self.kind in REGIONS
        return self.kind

    @property
    def description(self) -> str:
        return REGIONS[self.region_kind]

    def scores(self, outputs: Tensor) -> Tensor:
        raise UsageError(f"this network answers with {self.description}, and gives no scores of a whole image.")


REGIONS: dict[RegionKind, str] = {
    "semantic": "the class of every pixel",
    "instance": "masks of objects",
    "detect": "boxes of objects",
}
CLASSES = ModelTask()
KINDS: dict[str, type[ModelTask]] = {
    "class": ModelTask,
    "labels": LabelTask,
    "number": NumberTask,
    **dict.fromkeys(REGIONS, RegionTask),
}


def task_from_dict(values: dict[str, Any] | None) -> ModelTask:
    """The task of model.json; None, as in files of before: classes."""
    if values is None:
        return CLASSES
    named = values.get("kind")
    kind = KINDS.get(str(named))
    if kind is None:
        raise UsageError(f"task of the kind {values.get('kind')!r:.40} is not known: update vitlab.")
    if named in REGIONS:
        return RegionTask(kind=named)
    try:
        if kind is LabelTask:
            return LabelTask(thresholds=tuple(float(value) for value in values.get("thresholds", ())))
        if kind is NumberTask:
            return NumberTask(mean=float(values["mean"]), std=float(values["std"]))
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"task is damaged ({error!r:.60}).") from None
    return CLASSES
