"""Base class of objectives that learn what is marked on images: a class for every pixel, masks, or boxes.

The network (models/dense_network.py) compares what it answers with the targets of the images itself; what differs
between these objectives is what is learned of the marks, and what the answers are judged by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from vitlab.checkpoints.load import load_with_report
from vitlab.errors import TrainingError
from vitlab.factory import create
from vitlab.images.augment import AugmentOptions
from vitlab.images.augment_regions import NOT_MOVED, RegionAugment
from vitlab.images.datasets import Data
from vitlab.images.preprocess import Preprocess
from vitlab.images.sources.dataset import RegionKind
from vitlab.models import registry
from vitlab.models.base import Network
from vitlab.models.dense import DenseTarget
from vitlab.models.dense_network import DenseConfig, DenseNetwork
from vitlab.models.task import RegionTask
from vitlab.optional import require
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import ImageSet, TrainingBatch
from vitlab.training.dense_scores import RegionScores, evaluate_regions
from vitlab.training.finetune import around_encoder
from vitlab.training.objectives import diagnosis
from vitlab.training.objectives.base import AnyScores, Forward, Inputs, MicroStep, Objective
from vitlab.training.objectives.diagnosis import Finding, Line
from vitlab.training.optim import Optimisers
from vitlab.training.recipe import ModelRecipe, Recipe

LEFT_OUT = ("mixup", "cutmix", "smoothing", "drop_patches", "flip_at_test", "shift_at_test", *NOT_MOVED)
MORE = 1e-3  # weight of AP50 where AP is equal: early in a run both are near 0


class LearnsRegions(Objective):
    example = "linear_head_small"  # a network that learns it
    chooses_patches = True

    def setup(self) -> None:
        self.targets: tuple[DenseTarget, ...] = ()  # of the micro-step
        self.progress = 0.0  # of the run, 0 to 1

    @classmethod
    def kind(cls) -> RegionKind:
        assert cls.marks is not None
        return cls.marks

    @classmethod
    def check_installed(cls) -> None:
        if cls.marks != "semantic":
            require("average precision", "pycocotools")

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        super().check(recipe)
        name = recipe.objective.name
        for option in LEFT_OUT:
            if value := getattr(recipe.augment, option):
                raise TrainingError(f"augment.{option}={value:g} is not for objective.name={name}: leave it out.")
        if recipe.run.ladder:
            raise TrainingError(f"run.ladder=true compares classifiers, and objective.name={name} trains none.")

    @classmethod
    def check_model(cls, recipe: Recipe, model: Network) -> None:
        super().check_model(recipe, model)
        assert isinstance(model, DenseNetwork)  # build_model

    @classmethod
    def build_model(
        cls, recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None
    ) -> tuple[Network, list[str]]:
        model, notes = build_dense(recipe.model, classes, channels, cls.example)
        if recipe.model.freeze == "encoder":
            model.encoder.requires_grad_(False)
            notes.append("the encoder is frozen: only the head learns.")
        return model, notes

    @classmethod
    def set_task(cls, model: Network, data: Data) -> None:
        if data.train.stored is not None:
            raise TrainingError(
                f"the images hold {data.train.stored}, and masks and boxes are learned on photos: data.pixels=photo "
                "reads them in 8 bits."
            )
        model.task = RegionTask(kind=cls.kind())

    @classmethod
    def augmentation(cls, recipe: Recipe, pre: Preprocess) -> RegionAugment:
        a = recipe.augment
        scale = a.scale if a.crop == "scaled" else (1.0, 1.0)
        options = AugmentOptions(a.crop, scale=scale, flip=a.flip, flip_in_turn=a.flip_in_turn, jitter=a.jitter)
        return RegionAugment(options, pre)

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        super().begin_step(step, optimisers)
        self.progress = step / self.plan.total
        self.network(self.model).anneal(self.progress)

    @staticmethod
    def network(model: Network) -> DenseNetwork:
        assert isinstance(model, DenseNetwork)
        return model

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        self.targets = tuple(target.to(self.who.device) for target in batch.targets)
        return {"images": batch.images.to(self.who.device)}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        terms = self.network(self.model).loss(forward(inputs["images"]), self.targets)
        numbers = {f"{name}_loss": float(term.detach()) for name, term in terms.items()} if self.logged else {}
        total = sum(terms.values())
        assert isinstance(total, Tensor)
        return total, numbers

    def evaluate(self, model: Network, image_set: ImageSet, *, final: bool = False) -> RegionScores:
        network = self.network(model)
        if not final:  # a running average anneals too; the best model keeps what it was saved with
            network.anneal(self.progress)
        return evaluate_regions(network, image_set, self.kind(), processes=self.who)

    def rank(self, scores: AnyScores, model: Network, image_set: ImageSet) -> tuple[float, dict[str, float]]:
        assert isinstance(scores, RegionScores)
        return scores.value + MORE * scores.numbers().get("ap50", 0.0), {}

    def results(self, scores: AnyScores) -> dict[str, Any]:
        assert isinstance(scores, RegionScores)
        return {**scores.numbers(), "per_class": scores.per_class()}

    def diagnose(self, lines: Sequence[Line]) -> list[Finding]:
        return diagnosis.general_findings(lines)


def build_dense(recipe: ModelRecipe, classes: list[str], channels: int, example: str) -> tuple[DenseNetwork, list[str]]:
    """A network for these classes: new, around the encoder of a checkpoint, or one that was trained before."""
    if recipe.options.get("classes", len(classes)) != len(classes):
        raise TrainingError(
            f"the model has {recipe.options['classes']} classes but the data have {len(classes)}: leave model.classes "
            "out."
        )
    if recipe.init_from is None:
        model, notes = create(recipe.name, **{"channels": channels, **recipe.options, "classes": len(classes)}), []
    else:
        model, notes = _from_checkpoint(recipe, recipe.init_from, classes)
    if not isinstance(model, DenseNetwork):
        source = recipe.init_from or recipe.name
        raise TrainingError(
            f"{recipe.name} is a {model.family}, which says nothing of pixels or objects: model.name={example} "
            f"model.init_from={source}, for instance, puts such a head on its encoder."
        )
    model.labels = list(classes)
    model.preprocess = replace(model.require_preprocess(), how="stretch", resize=None)  # all of an image is seen
    return model, notes


def _from_checkpoint(recipe: ModelRecipe, source: str, classes: list[str]) -> tuple[Network, list[str]]:
    stored, report = load_with_report(source)
    if isinstance(stored, DenseNetwork):
        stored, report = load_with_report(source, **recipe.options) if recipe.options else (stored, report)
        if stored.labels == classes:
            return stored, [*report.notes, f"started from {source}."]
        stored.reset_classifier(len(classes))
        return stored, [*report.notes, f"started from {source}, with a new layer for {len(classes)} classes."]
    entry, _ = registry.find(recipe.name)
    if not isinstance(entry.config, DenseConfig):
        return stored, []
    return around_encoder(recipe, replace(entry, config=entry.config.with_options(classes=len(classes))), source)
