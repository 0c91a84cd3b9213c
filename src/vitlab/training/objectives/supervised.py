"""Supervised learning: cross-entropy with soft targets (B, K), smoothed, mixed or plain.

data.balance=loss weighs each class by n / (K n_k), so that rare ones count as much as frequent ones.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.images.datasets import images_per_class
from vitlab.images.mix import smooth_targets
from vitlab.models.base import Network
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import BatchDataset, ImageSet, TrainingBatch
from vitlab.training.evaluate import Scores, evaluate_classifier
from vitlab.training.features import Count
from vitlab.training.finetune import build_classifier
from vitlab.training.frozen import Classifier, FrozenEncoder, why_in_every_step
from vitlab.training.objectives.base import AnyScores, Forward, Inputs, MicroStep, Objective, mix_of, set_patch_dropout
from vitlab.training.optim import Optimisers
from vitlab.training.recipe import Recipe


class Supervised(Objective):
    shardable, balances = True, True

    @classmethod
    def build_model(
        cls, recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None
    ) -> tuple[Network, list[str]]:
        return build_classifier(recipe.model, classes, channels, cls.learns)

    def setup(self) -> None:
        self.mix = mix_of(self.recipe)
        self.class_weights = None
        if self.recipe.data.balance == "loss" and self.learns == "class":
            counts = images_per_class(self.data.train)
            self.class_weights = balanced_weights(counts).to(self.who.device)
        self.frozen = FrozenEncoder(self.model, self.who) if self.keeps_features() else None

    def keeps_features(self) -> bool:
        """Whether steps read the features of a frozen encoder, which then runs over the images once."""
        if self.recipe.model.freeze != "encoder":
            return False
        if why := why_in_every_step(self.recipe, self.model):
            self.notes.append(f"the frozen encoder runs in every step, because {why}.")
            return False
        return True

    def forward_module(self) -> nn.Module:
        return self.model if self.frozen is None else Classifier(self.model)

    def batches(self, steps: BatchDataset, count: Count | None) -> BatchDataset:
        return steps if self.frozen is None else self.frozen.batches(steps, self.recipe.augment.flip, count)

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        set_patch_dropout(self.model, self.recipe, step, self.plan.total)

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        classes, smoothing = len(self.data.classes), self.recipe.augment.smoothing
        targets = smooth_targets(batch.labels, classes, smoothing)
        images, targets = self.mix(batch.images, targets, **vars(at))
        return {"images": images.to(self.who.device), "targets": targets.to(self.who.device)}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        logits = forward(inputs["images"], reducer=self.train_reducer)  # (B, K)
        return F.cross_entropy(logits, inputs["targets"], weight=self.class_weights), {}

    def evaluate(self, model: Network, image_set: ImageSet, *, final: bool = False) -> AnyScores:
        return self.evaluate_outputs(model, image_set)

    def evaluate_outputs(self, model: Network, image_set: ImageSet) -> Scores:
        """The outputs of the classifier, whatever they mean."""
        flip, shift = self.recipe.augment.flip_at_test, self.recipe.augment.shift_at_test
        if self.frozen is not None:
            return self.frozen.evaluate(model, image_set, flip=flip)
        return evaluate_classifier(model, image_set, processes=self.who, flip=flip, shift=shift, reducer=self.reducer)


def balanced_weights(counts: np.ndarray) -> Tensor:
    """n / (K n_k) for the K classes that have images: 1 on average over the images."""
    present = counts > 0
    weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights).float()
