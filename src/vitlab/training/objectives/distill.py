"""DeiT: the student learns from the labels and from a teacher's outputs for the same images (models/deit.py)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.errors import TrainingError
from vitlab.models.deit import TwoHeads, hard_loss, soft_loss
from vitlab.training.batches import TrainingBatch
from vitlab.training.objectives.base import Forward, Inputs, MicroStep, ObjectiveOptions
from vitlab.training.objectives.supervised import Supervised
from vitlab.training.recipe import Recipe
from vitlab.training.teacher import Teacher, keep_answers


@dataclass(frozen=True)
class DistillOptions(ObjectiveOptions):
    teacher: str | None = None  # any checkpoint or hub name, for the same classes
    distillation: Literal["hard", "soft"] = "hard"  # the teacher's answer, or its probabilities
    teacher_share: float = 0.5  # of the loss; the labels have the rest
    temperature: float = 3.0  # soft: of student and teacher
    cache: bool = False  # run the teacher once for each image as it is, not for each augmented view

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.teacher_share <= 1:
            raise TrainingError(f"teacher_share={self.teacher_share} must lie between 0 and 1.")
        if self.temperature <= 0:
            raise TrainingError(f"temperature={self.temperature} must be above 0.")


class Distillation(Supervised):
    shardable, balances = False, False
    options_class = DistillOptions
    own_settings = ("objective.teacher", "objective.cache")

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        options = DistillOptions.of(recipe)
        if options.teacher is None:
            raise TrainingError("objective.name=distill needs a teacher: objective.teacher=runs/NAME/best")
        if options.cache and (recipe.augment.mixup or recipe.augment.cutmix):
            raise TrainingError(
                "objective.cache holds the teacher's answers to single images, so not with mixing (augment.mixup, "
                "augment.cutmix)."
            )

    def keeps_features(self) -> bool:
        return False  # the teacher looks at images

    def setup(self) -> None:
        super().setup()
        self.options, data = DistillOptions.of(self.recipe), self.data
        assert self.options.teacher is not None and self.model.preprocess is not None  # checked above
        self.teacher = Teacher.load(self.options.teacher, data.classes, self.model.preprocess, self.who.device)
        self.notes += self.teacher.notes
        self.answers = None
        if self.options.cache:
            self.answers = keep_answers(self.run / "teacher", self.teacher, data.train, data.name, who=self.who)

    def forward_module(self) -> nn.Module:
        return TwoHeads(self.model)

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        inputs = super().inputs(batch, at)
        if self.answers is None:
            return {**inputs, "teacher": self.teacher(inputs["images"])}
        answers = self.answers.take(batch.indices) if len(batch.indices) else torch.zeros(1, len(self.data.classes))
        return {**inputs, "teacher": answers.to(self.who.device)}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        heads = forward(inputs["images"], reducer=self.train_reducer)
        o, answers = self.options, inputs["teacher"]
        agreed = float((heads[1].detach().argmax(dim=1) == answers.argmax(dim=1)).float().mean())
        if o.distillation == "hard":
            return hard_loss(heads, inputs["targets"], answers, share=o.teacher_share), {"agreed": agreed}
        settings = dict(share=o.teacher_share, temperature=o.temperature)
        return soft_loss(heads, inputs["targets"], answers, **settings), {"agreed": agreed}
