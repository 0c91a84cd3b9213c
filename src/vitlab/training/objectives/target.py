"""Base class of objectives that learn from a table something else than one class: several labels, or a number."""

from __future__ import annotations

from typing import Any

from vitlab.models.base import Network
from vitlab.training.batches import ImageSet
from vitlab.training.objectives.base import AnyScores
from vitlab.training.objectives.supervised import Supervised
from vitlab.training.target_scores import TargetScores, task_scores


class LearnsTarget(Supervised):
    def choose_answers(self, model: Network, scores: TargetScores) -> TargetScores:
        """Set what of the model is chosen by the validation images; returns the scores with that."""
        return scores

    def evaluate(self, model: Network, image_set: ImageSet, *, final: bool = False) -> TargetScores:
        scores = task_scores(self.evaluate_outputs(model, image_set), model.task)
        assert isinstance(scores, TargetScores)  # set_task
        return scores

    def after_validation(self, model: Network, scores: AnyScores) -> AnyScores:
        assert isinstance(scores, TargetScores)
        return self.choose_answers(model, scores)

    def rank(self, scores: AnyScores, model: Network, image_set: ImageSet) -> tuple[float, dict[str, float]]:
        assert isinstance(scores, TargetScores)
        return (-scores.loss() if self.learns == "number" else scores.value), {}

    def results(self, scores: AnyScores) -> dict[str, Any]:
        assert isinstance(scores, TargetScores)
        return dict(scores.numbers())
