"""DeiT: the student learns from the labels and from a teacher's outputs for the same images (models/deit.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vitlab.errors import TrainingError
from vitlab.models.deit import TwoHeads, hard_loss, soft_loss
from vitlab.training.batches import Batch
from vitlab.training.objectives.base import Inputs, MicroStep
from vitlab.training.objectives.supervised import Supervised
from vitlab.training.recipe import Recipe
from vitlab.training.teacher import Teacher, keep_answers


class Distillation(Supervised):
    shardable = False
    own_settings = ("objective.teacher", "objective.cache")

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        if recipe.objective.teacher is None:
            raise TrainingError("objective.name=distill needs a teacher: objective.teacher=runs/NAME/best")
        if recipe.objective.cache and (recipe.augment.mixup or recipe.augment.cutmix):
            raise TrainingError(
                "objective.cache holds the teacher's answers to single images, so not with mixing (augment.mixup, "
                "augment.cutmix)."
            )

    def setup(self) -> None:
        super().setup()
        o, data = self.recipe.objective, self.data
        assert o.teacher is not None  # checked above
        self.teacher = Teacher.load(o.teacher, data.classes, self.model.preprocess, self.who.device)
        self.notes += self.teacher.notes
        self.answers = None
        if o.cache:
            self.answers = keep_answers(self.run / "teacher", self.teacher, data.train, data.name, who=self.who)

    def forward_module(self) -> Any:
        return TwoHeads(self.model)

    def inputs(self, batch: Batch, at: MicroStep) -> Inputs:
        inputs = super().inputs(batch, at)
        if self.answers is None:
            return {**inputs, "teacher": self.teacher(inputs["images"])}
        answers = self.answers.take(batch.indices) if len(batch.indices) else torch.zeros(1, len(self.data.classes))
        return {**inputs, "teacher": answers.to(self.who.device)}

    def loss(self, forward: Any, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        heads = forward(inputs["images"], reducer=self.train_reducer)
        o, answers = self.recipe.objective, inputs["teacher"]
        agreed = float((heads[1].detach().argmax(dim=1) == answers.argmax(dim=1)).float().mean())
        if o.distillation == "hard":
            return hard_loss(heads, inputs["targets"], answers, share=o.teacher_share), {"agreed": agreed}
        settings = dict(share=o.teacher_share, temperature=o.temperature)
        return soft_loss(heads, inputs["targets"], answers, **settings), {"agreed": agreed}
