"""What all training objectives share.

method = objective_class(recipe.objective.name)
method.check(recipe)
objective = method(recipe, model, data, plan, who, run)

inputs = objective.inputs(batch, at)              # on the device
loss, numbers = objective.loss(forward, inputs)   # then backward, optimiser
objective.end_step(step)                          # e.g. the teacher's moving average
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from vitlab.errors import TrainingError, UsageError, VitlabError
from vitlab.images.augment import MODES, Augment, AugmentOptions
from vitlab.images.augment_regions import RegionAugment
from vitlab.images.datasets import Data, subset
from vitlab.images.mix import Mix
from vitlab.images.multicrop import MultiCrop
from vitlab.images.preprocess import Preprocess
from vitlab.images.randomness import permutation
from vitlab.images.sources.dataset import RegionKind, TargetKind
from vitlab.layers.lora import add_lora
from vitlab.models.base import Network, WrapsEncoder
from vitlab.models.config import Config
from vitlab.models.plain import PlainTransformer
from vitlab.reduce import for_training, reducer_of
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import BatchDataset, ImageSet, Plan, TrainingBatch
from vitlab.training.dense_scores import RegionScores
from vitlab.training.evaluate import Scores, evaluate_knn
from vitlab.training.features import Count
from vitlab.training.objectives import OBJECTIVES, objective_class
from vitlab.training.objectives.diagnosis import Finding, Line
from vitlab.training.optim import Optimisers
from vitlab.training.processes import Processes
from vitlab.training.recipe import ModelRecipe, Recipe, to_tables
from vitlab.training.report.curves import Chart
from vitlab.training.retrieval import Retrieval
from vitlab.training.target_scores import TargetScores

HEAD = ("head.", "head_distill.", "head_norm.", "pool.", "pre_logits.")  # of a classifier, by parameter names
BANK = 10_000  # labelled images for k-NN during a run; the final evaluation uses all
BANK_DRAW = 3  # coordinate of the draw that picks them

Forward = Callable[..., Any]  # the model as it is called: compiled, or wrapped for many processes (DDP)
Inputs = dict[str, Tensor]
AnyScores = Scores | Retrieval | TargetScores | RegionScores


@dataclass(frozen=True)
class MicroStep:
    """Coordinates of a micro-step: everything random in it is a function of these."""

    seed: int
    step: int
    rank: int = 0
    micro: int = 0


@dataclass(frozen=True)
class ObjectiveOptions(Config):
    """Settings of [objective] that one objective declares; this one has none."""

    @classmethod
    def of(cls, recipe: Recipe) -> Self:
        """What the recipe sets, the rest at its defaults."""
        options = recipe.objective.options
        return cls(**{field.name: options[field.name] for field in fields(cls) if field.name in options})


class Objective:
    """Base class. The class methods work on a recipe before there is a model; the rest runs within the loop."""

    metric = "top-1"  # name of what `evaluate` measures
    learns: TargetKind = "class"  # what the labels of its data are
    balances = False  # follows data.balance
    uses_labels = True
    uses_captions = False
    marks: RegionKind | None = None  # what it learns of masks and boxes; None: nothing
    chooses_patches = False  # the objective decides which patches or crops its model sees
    shardable = False  # runs with run.sharding=fsdp
    options_class: type[ObjectiveOptions] = ObjectiveOptions
    head: tuple[str, ...] = HEAD  # parameters, by the beginning of their names, that learn fully beside adapters
    own_settings: tuple[str, ...] = ()  # refused with every other objective
    charts: tuple[Chart, ...] = ()  # of its numbers in the log

    def __init__(self, recipe: Recipe, model: Network, data: Data, plan: Plan, who: Processes, run: Path):
        self.check(recipe)
        self.check_model(recipe, model)
        self.recipe, self.model, self.data, self.plan, self.who, self.run = recipe, model, data, plan, who, run
        self.notes: list[str] = []
        text = recipe.model.reducer
        self.reducer = None if text is None else reducer_of(text)  # in evaluation
        self.train_reducer = None if self.reducer is None else for_training(self.reducer)
        self.logged = False  # whether the log gets a line for this step
        self.setup()

    def setup(self) -> None:
        """What a subclass prepares once."""

    # ------------------------------------------------------------------------------------------------- before a run

    @classmethod
    def check_installed(cls) -> None:
        """Refuse to begin without packages that only this objective needs."""

    @classmethod
    def check(cls, recipe: Recipe) -> None:
        """Refuse settings that contradict each other."""
        check_own_settings(recipe)
        name, a = recipe.objective.name, recipe.augment
        mix_of(recipe)
        if recipe.run.sharding == "fsdp" and not cls.shardable:
            raise TrainingError(f"run.sharding=fsdp is not yet for {name}: leave it out.")
        if recipe.data.balance != "none" and not cls.balances:
            raise TrainingError(f"data.balance={recipe.data.balance} is not for objective.name={name}: leave it out.")
        if not cls.uses_labels and (a.mixup or a.cutmix):
            raise TrainingError(f"augment.mixup and augment.cutmix mix labels, which {name} does not learn.")

    @classmethod
    def check_model(cls, recipe: Recipe, model: Network) -> None:
        """Refuse settings that the model cannot follow."""
        check_patch_dropout(cls, recipe, model)
        check_reducer(cls, recipe, model)

    @classmethod
    def build_model(
        cls, recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None
    ) -> tuple[Network, list[str]]:
        """The model, and notes on how it was made."""
        raise NotImplementedError

    @classmethod
    def set_task(cls, model: Network, data: Data) -> None:
        """Set what the outputs of the model mean, where that depends on the data."""

    @classmethod
    def add_adapters(cls, recipe: ModelRecipe, model: Network) -> list[str]:
        """Low-rank adapters (model.lora), in place; notes on them. `head` learns as it would without."""
        try:
            layers = add_lora(model, recipe.lora, recipe.lora_alpha, recipe.lora_layers, trained=cls.head)
        except UsageError as error:
            raise TrainingError(f"model.lora={recipe.lora} is not possible: {error}") from None
        sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
        learns, total = sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)
        notes = [f"LoRA of rank {recipe.lora} on {len(layers)} layers: {learns:,} of {total:,} parameters learn."]
        if recipe.init_from is None and recipe.init_image is None:
            notes.append(
                "the weights that LoRA leaves frozen are random: name trained ones, model.init_from=CHECKPOINT."
            )
        return notes

    @classmethod
    def adapted_model(cls, model: Network) -> Network:
        """The network whose adapters are saved alone."""
        return model

    @classmethod
    def tokenizer(
        cls, recipe: Recipe, data: Data, run: Path, who: Processes, saved: Path | None = None
    ) -> Tokenizer | None:
        """The tokenizer for `build_model`; None where no text is read, or the checkpoint brings its own."""
        return None

    @classmethod
    def image_model(cls, model: Network) -> Network:
        """The part of the model that reads images."""
        return model

    @classmethod
    def augmentation(cls, recipe: Recipe, pre: Preprocess) -> Augment | MultiCrop | RegionAugment:
        names = ("crop", "padding", "border", "scale", "ratio", "flip", "flip_in_turn")
        names += ("randaugment", "magnitude", "jitter", "erasing")
        options = AugmentOptions(**{name: getattr(recipe.augment, name) for name in names})
        kernel = pre.interpolation if pre.interpolation in MODES else "bicubic"
        return Augment(options, pre.size, pre.mean, pre.std, kernel, pre.scale, pre.pixels)

    @classmethod
    def preview_settings(cls, recipe: Recipe) -> list[str]:
        """Settings outside [augment] that a preview of the data shows, as key=value."""
        return []

    @classmethod
    def preview_notes(cls, model: Network) -> list[str]:
        """What the model does to its images that a preview does not draw."""
        return []

    # --------------------------------------------------------------------------------------------------- in the loop

    def forward_module(self) -> nn.Module:
        """The module that is compiled or wrapped for many processes, and then passed to `loss`."""
        return self.model

    def batches(self, steps: BatchDataset, count: Count | None) -> BatchDataset:
        """What the steps of the run read: its images, or what was computed of them. `count` shows progress."""
        return steps

    def begin_run(self, saved: Path | None) -> None:
        """All is built and checked; `saved`: the save that the run continues from."""

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        """Set what changes with the step, besides the learning rate."""
        self.logged = (step + 1) % self.plan.log_every == 0

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        """What the loss needs, on the device."""
        raise NotImplementedError

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        """The loss, and numbers for the log."""
        raise NotImplementedError

    def before_update(self, step: int) -> None:
        """After the backward pass, before the optimiser's step."""

    def end_step(self, step: int) -> None:
        """After the optimiser's step."""

    # ---------------------------------------------------------------------------------------------------- evaluation

    def evaluate(self, model: Network, image_set: ImageSet, *, final: bool = False) -> AnyScores:
        """`final`: at the end of a run, where it may take longer."""
        raise NotImplementedError

    def after_validation(self, model: Network, scores: AnyScores) -> AnyScores:
        """Set what of the model the validation images choose, before it is saved; returns the scores with that."""
        return scores

    def images_evaluated(self, n: int, *, final: bool = False) -> int:
        """How many images `evaluate` runs through the model to score n."""
        return n

    def rank(self, scores: AnyScores, model: Network, image_set: ImageSet) -> tuple[float, dict[str, float]]:
        """The model of the highest rank is kept as the best; and numbers for the log."""
        assert not isinstance(scores, TargetScores | RegionScores)
        return scores.top(1), {}

    def results(self, scores: AnyScores) -> dict[str, Any]:
        """The scores as result.json holds them."""
        assert isinstance(scores, Scores)
        numbers = {"top1": scores.top(1), "top5": scores.top(5), "loss": scores.loss()}
        return {**numbers, "ece": scores.calibration_error()}

    # ----------------------------------------------------------------------------------------------------- diagnosis

    def diagnose(self, lines: Sequence[Line]) -> list[Finding]:
        """What is wrong with the run so far; lines: the "train" events of its log, oldest first."""
        return []

    @classmethod
    def describe_loss(cls, lines: Sequence[Line]) -> tuple[bool | None, str]:
        """Whether the loss is fine (None: it does not tell), and a sentence on it. `lines` as in `diagnose`."""
        first, last = lines[0]["loss"], lines[-1]["loss"]
        if len(lines) >= 4 and last > 0.98 * first:
            return False, f"the training loss has not fallen: {first:.3f} -> {last:.3f}. Try another optim.lr."
        return True, f"training loss {first:.3f} -> {last:.3f}"


@dataclass(frozen=True)
class SelfSupervisedOptions(ObjectiveOptions):
    freeze_encoder_epochs: float | None = None  # the encoder waits so long; none: see `waiting_steps`

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.freeze_encoder_epochs is not None and self.freeze_encoder_epochs < 0:
            raise TrainingError(f"freeze_encoder_epochs={self.freeze_encoder_epochs} must be 0 or more.")


class SelfSupervised(Objective):
    """Learns without labels. They only score the features, by k-NN against the training images.

    Where a run starts from an encoder alone, the decoder or head around it is random, and its first gradients may
    spoil the encoder. It can wait until the rest has learned to use it, as it does by default for MAE.
    """

    metric = "k-NN top-1"
    uses_labels = False
    chooses_patches = True
    options_class = SelfSupervisedOptions
    encoder_waits = False  # by default, where all but the encoder is new

    def setup(self) -> None:
        super().setup()
        self.frozen_steps = self.waiting_steps()
        if self.frozen_steps:
            epochs = self.frozen_steps / self.plan.steps_per_epoch
            self.notes.append(
                f"the encoder is frozen for the first {self.frozen_steps:,} steps ({epochs:g} epochs), while the rest "
                "learns: objective.freeze_encoder_epochs."
            )

    def waiting_steps(self) -> int:
        """Steps in which the encoder is frozen: as the recipe says; or with `encoder_waits`, where all but the encoder
        is new, as many as the recipe's warm-up has, but at least an epoch and at most half of the run.
        """
        epochs, o, plan = SelfSupervisedOptions.of(self.recipe).freeze_encoder_epochs, self.recipe.optim, self.plan
        if epochs is not None:
            return round(epochs * plan.steps_per_epoch)
        if not self.encoder_waits or not isinstance(self.model, WrapsEncoder) or not self.model.encoder_loaded:
            return 0
        warmup = o.warmup_steps or round(o.warmup_epochs * plan.steps_per_epoch)
        return min(max(warmup, plan.steps_per_epoch), plan.total // 2)

    def trained_encoder(self) -> Network:
        """The encoder that gradients reach."""
        return self.model.encoder

    def before_update(self, step: int) -> None:
        if step < self.frozen_steps:
            for parameter in self.trained_encoder().parameters():
                parameter.grad = None

    @classmethod
    def adapted_model(cls, model: Network) -> Network:
        return model.encoder

    def evaluate(self, model: Network, image_set: ImageSet, *, final: bool = False) -> Scores:
        train = self.data.train
        if not final:
            train = subset(train, np.sort(permutation(len(train), self.recipe.run.seed, BANK_DRAW)[:BANK]))
        bank = ImageSet(train, image_set.preprocess)
        return evaluate_knn(model.encoder, bank, image_set, len(self.data.classes), processes=self.who)

    def images_evaluated(self, n: int, *, final: bool = False) -> int:
        return n + (len(self.data.train) if final else min(BANK, len(self.data.train)))


def check_own_settings(recipe: Recipe) -> None:
    """Refuse settings that belong to another objective."""
    tables = to_tables(recipe)
    for name in OBJECTIVES:
        for key in objective_class(name).own_settings if name != recipe.objective.name else ():
            group, _, option = key.partition(".")
            if value := tables[group][option]:
                raise TrainingError(
                    f"{key}={value} is for objective.name={name}, not for objective.name={recipe.objective.name}."
                )


def check_patch_dropout(method: type[Objective], recipe: Recipe, model: Network) -> None:
    """augment.drop_patches needs a model that can leave patches out."""
    if not recipe.augment.drop_patches:
        return
    network, why = method.image_model(model), ""
    if method.chooses_patches:
        why = f"objective.name={recipe.objective.name} decides itself which patches its model sees"
    elif not isinstance(network, PlainTransformer):
        why = f"a {model.family} needs all patches of an image"
    elif "relative" in network.config.position_kind:
        why = "positions=relative needs the whole grid"
    if why:
        raise TrainingError(
            f"augment.drop_patches={recipe.augment.drop_patches:g} is not possible: {why}. Set it to 0."
        )


def check_reducer(method: type[Objective], recipe: Recipe, model: Network) -> None:
    """model.reducer needs a model that works with fewer tokens, and gives what the reducer ranks them by."""
    text = recipe.model.reducer
    if text is None:
        return
    network = method.image_model(model)
    try:
        if method.chooses_patches:
            raise TrainingError(f"objective.name={recipe.objective.name} decides itself which patches its model sees.")
        if not isinstance(network, PlainTransformer):
            raise TrainingError(f"a {model.family} needs all patches of an image; a ViT works with fewer tokens.")
        reducer, c = reducer_of(text), network.config
        network.reducing(reducer)
        rows, columns = network.layout(*network.input_size).grid
        reducer.removes(0, c.depth, rows * columns + len(c.prefix), len(c.prefix))
    except VitlabError as error:
        raise TrainingError(f"model.reducer={text} is not possible: {error}") from None


def set_patch_dropout(network: Network, recipe: Recipe, step: int, total: int) -> None:
    """augment.drop_patches in the first part of a run, the model's own rate after it."""
    a = recipe.augment
    if a.drop_patches and isinstance(network, PlainTransformer):  # check_patch_dropout refused any other
        early = step < a.drop_patches_until * total
        network.patch_dropout = a.drop_patches if early else network.config.own_patch_dropout


def mix_of(recipe: Recipe) -> Mix:
    a = recipe.augment
    return Mix(a.mixup, a.cutmix, probability=a.mix_probability)
