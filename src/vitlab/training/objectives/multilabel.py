"""Several labels an image: one yes-or-no question for each, binary cross-entropy. Recognised from a table of labels.

    vitlab train tags.csv                                  # image,labels with cat;dog, or a column of 0 and 1 for each

The probability from which an image is given a label is chosen for each label on the validation images, by F1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.images.datasets import Data
from vitlab.models.base import Network
from vitlab.models.task import LabelTask
from vitlab.training.batches import TrainingBatch
from vitlab.training.objectives.base import Forward, Inputs, MicroStep
from vitlab.training.objectives.target import LearnsTarget
from vitlab.training.report.curves import Chart
from vitlab.training.target_scores import TargetScores, best_thresholds


class MultiLabel(LearnsTarget):
    metric, learns = "mAP", "labels"
    charts = (
        Chart("Mean average precision", "平均精度均值", "map", percent=True),
        Chart("F1 (micro)", "F1（微平均）", "f1_micro", percent=True),
    )

    @classmethod
    def set_task(cls, model: Network, data: Data) -> None:
        if not isinstance(model.task, LabelTask):
            model.task = LabelTask()

    def setup(self) -> None:
        super().setup()
        self.positive_weight = None
        if self.recipe.data.balance == "loss":  # a label's images with it count as much as those without
            has = torch.from_numpy(self.data.train.labels.sum(axis=0)).float()  # (K,)
            self.positive_weight = ((len(self.data.train) - has) / has.clamp(min=1)).to(self.who.device)

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        smoothing = self.recipe.augment.smoothing
        targets = batch.labels * (1 - smoothing) + smoothing / 2  # (B, K)
        images, targets = self.mix(batch.images, targets, **vars(at))
        return {"images": images.to(self.who.device), "targets": targets.to(self.who.device)}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        outputs = forward(inputs["images"], reducer=self.train_reducer)  # (B, K)
        weight = self.positive_weight
        return F.binary_cross_entropy_with_logits(outputs, inputs["targets"], pos_weight=weight), {}

    def choose_answers(self, model: Network, scores: TargetScores) -> TargetScores:
        outputs, labels = (values[scores.read] for values in (scores.outputs, scores.labels))
        model.task = LabelTask(thresholds=best_thresholds(outputs, labels))
        return replace(scores, task=model.task)
