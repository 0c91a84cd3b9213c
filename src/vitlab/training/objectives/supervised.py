"""Supervised learning: cross-entropy with soft targets (B, K), smoothed, mixed or plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitlab.models.base import Network
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import ImageSet, TrainingBatch
from vitlab.training.evaluate import Scores, evaluate_classifier
from vitlab.training.finetune import build_classifier
from vitlab.training.objectives.base import Inputs, MicroStep, Objective, mix_of, set_patch_dropout
from vitlab.training.optim import Optimisers
from vitlab.training.recipe import Recipe


class Supervised(Objective):
    shardable = True

    @classmethod
    def build_model(
        cls, recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None
    ) -> tuple[Network, list[str]]:
        return build_classifier(recipe.model, classes, channels)

    def setup(self) -> None:
        self.mix = mix_of(self.recipe)

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        set_patch_dropout(self.model, self.recipe, step, self.plan.total)

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        classes, smoothing = len(self.data.classes), self.recipe.augment.smoothing
        images, targets = self.mix(batch.images, batch.labels, classes, smoothing, **vars(at))
        return {"images": images.to(self.who.device), "targets": targets.to(self.who.device)}

    def loss(self, forward: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        return F.cross_entropy(forward(inputs["images"], reducer=self.train_reducer), inputs["targets"]), {}

    def evaluate(self, model: Network, image_set: ImageSet, *, final: bool = False) -> Scores:
        flip = self.recipe.augment.flip_at_test
        return evaluate_classifier(model, image_set, processes=self.who, flip=flip, reducer=self.reducer)
