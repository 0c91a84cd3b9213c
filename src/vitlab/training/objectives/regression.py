"""A number for each image: the mean squared error of standardised values.

    vitlab train prices.csv data.target=price

Mean and standard deviation are those of the training images, and are stored with the model, which answers in the
units of the data.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import TrainingError
from vitlab.images.datasets import Data
from vitlab.models.base import Network
from vitlab.models.task import NumberTask
from vitlab.training.batches import TrainingBatch
from vitlab.training.objectives.base import Forward, Inputs, MicroStep
from vitlab.training.objectives.target import LearnsTarget
from vitlab.training.recipe import Recipe
from vitlab.training.report.curves import Chart


class Regression(LearnsTarget):
    metric, learns = "R2", "number"
    charts = (Chart("Mean absolute error", "平均绝对误差", "mae", from_zero=True), Chart("R2", "决定系数", "r2"))

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if recipe.data.balance != "none":
            raise TrainingError(f"data.balance={recipe.data.balance} needs classes or labels: a number has none.")

    @classmethod
    def set_task(cls, model: Network, data: Data) -> None:
        if not isinstance(model.task, NumberTask):  # a head that is kept stays in the units that it has learned
            values = data.train.labels
            std = float(values.std()) or 1.0  # 0 in a few images that only time a step
            model.task = NumberTask(mean=float(values.mean()), std=std)

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        task = self.model.task
        assert isinstance(task, NumberTask)
        targets = task.standardise(batch.labels).float()[:, None]  # (B, 1)
        images, targets = self.mix(batch.images, targets, **vars(at))
        return {"images": images.to(self.who.device), "targets": targets.to(self.who.device)}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        return F.mse_loss(forward(inputs["images"], reducer=self.train_reducer), inputs["targets"]), {}
