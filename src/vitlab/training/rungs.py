"""A rung of the ladder: a model, its answers to the validation images, and whether they beat another rung's."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from vitlab.training import targets
from vitlab.training.evaluate import Scores
from vitlab.training.expected_gain import expected_gain
from vitlab.training.target_scores import TargetScores, headline
from vitlab.training.uncertainty import Z, accuracy, beats


@dataclass(frozen=True)
class Rung:
    """A model of the ladder and its answers to the validation images."""

    name: str
    title: str
    scores: Scores | TargetScores
    seconds: float
    checkpoint: Path | None = None  # k-NN has none: its classifier is the training set
    result: dict[str, Any] = field(default_factory=dict)  # of a training run
    groups: np.ndarray | None = None  # data.group of the images in `scores`

    @cached_property
    def right(self) -> Tensor:
        """(n,) bool, of the images that could be read, where classes are learned."""
        assert isinstance(self.scores, Scores)
        return (self.scores.predicted == self.scores.labels)[self.scores.read]

    @property
    def perfect(self) -> bool:
        """Whether nothing can be won: every answer is right."""
        return bool(self.right.all()) if isinstance(self.scores, Scores) else targets.perfect(self.scores)

    def beats(self, other: Rung) -> bool:
        """Whether it is better by more than noise.

        Of classes the right answers are counted. Where the counts tie, it must be expected to get more right, from how
        sure both are of their answers, with 95 % confidence.
        """
        if isinstance(self.scores, TargetScores) and isinstance(other.scores, TargetScores):
            return targets.beats(self.scores, other.scores, self.groups)
        assert isinstance(self.scores, Scores) and isinstance(other.scores, Scores)
        groups, read = self._groups_read, self.scores.read
        if beats(self.right, other.right, groups):
            return True
        if beats(other.right, self.right, groups):
            return False
        gain, error = expected_gain(
            self.scores.logits[read], other.scores.logits[read], self.scores.labels[read], groups
        )
        return gain > Z * error

    @property
    def figure(self) -> str:
        if isinstance(self.scores, Scores):
            return str(accuracy(self.right, self._groups_read))
        return headline({**self.scores.numbers(), **self.certainty})

    @cached_property
    def certainty(self) -> dict[str, Any]:
        """The 95 % interval of the figure, and the images behind it."""
        if isinstance(self.scores, TargetScores):
            return {"interval": list(targets.interval(self.scores, self.groups)), "images": int(self.scores.read.sum())}
        measured = accuracy(self.right, self._groups_read)
        return {"interval": [measured.low, measured.high], "images": measured.images}

    @property
    def numbers(self) -> dict[str, float]:
        """The figure that rungs are compared by, with its name."""
        if isinstance(self.scores, Scores):
            return {"top1": float(self.right.float().mean())}
        return {self.scores.metric.lower(): self.scores.value}

    @property
    def val_numbers(self) -> dict[str, float]:
        """val_top1, val_map or val_r2, for result.json."""
        return {f"val_{name}": value for name, value in self.numbers.items()}

    def to_dict(self, kept: bool) -> dict[str, Any]:
        """As result.json holds it."""
        about = {"name": self.name, "title": self.title, **self.val_numbers, **self.certainty}
        return {**about, "seconds": self.seconds, "kept": kept}

    @property
    def _groups_read(self) -> np.ndarray | None:
        return None if self.groups is None else self.groups[self.scores.read.numpy()]
