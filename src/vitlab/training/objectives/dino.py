"""DINO: for every view, the student predicts what its own moving average outputs for the two large ones
(models/dino.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.errors import TrainingError
from vitlab.images.multicrop import MultiCrop, MultiCropOptions
from vitlab.images.preprocess import Preprocess
from vitlab.layers.lora import is_adapter_key
from vitlab.models import dino
from vitlab.models.base import Network
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import TrainingBatch
from vitlab.training.finetune import build_pretraining_model
from vitlab.training.objectives import diagnosis
from vitlab.training.objectives.base import Forward, Inputs, MicroStep, SelfSupervised, SelfSupervisedOptions
from vitlab.training.objectives.diagnosis import Finding, Line
from vitlab.training.optim import Optimisers
from vitlab.training.recipe import ModelRecipe, Recipe
from vitlab.training.report.curves import Chart

UNIFORM = 0.98  # of ln K
SURE, CERTAIN = 0.25, 0.02  # of ln K
FEW = 2.5  # outputs
SMALL_BATCH = 32


@dataclass(frozen=True)
class DINOOptions(SelfSupervisedOptions):
    local_views: int = 8  # small crops beside the two large ones
    local_size: int = 0  # their side in pixels; 0: three sevenths of the large ones', as 96 is of 224
    local_scale: tuple[float, float] = (0.05, 0.4)  # share of the image's area
    global_scale: tuple[float, float] = (0.4, 1.0)
    momentum: float = 0.996  # of the teacher at the start; it rises to 1
    teacher_temperature: tuple[float, float] = (0.04, 0.07)  # at the start, and after the warm-up
    temperature_epochs: float = 30.0  # length of that warm-up
    freeze_last_epochs: float = 1.0  # the last layer of the head waits so long
    final_weight_decay: float | None = None  # weight decay rises to this by a cosine

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise TrainingError(f"momentum={self.momentum} must be at least 0 and below 1.")
        if min(self.teacher_temperature) <= 0:
            raise TrainingError(f"teacher_temperature={self.teacher_temperature} must be above 0.")
        for name, value in (("local_views", self.local_views), ("local_size", self.local_size)):
            if value < 0:
                raise TrainingError(f"{name}={value} must be 0 or more.")
        for name, (low, high) in (("local_scale", self.local_scale), ("global_scale", self.global_scale)):
            if not 0 < low <= high <= 1:
                raise TrainingError(f"{name}=[{low}, {high}] must rise, above 0 and up to 1.")


class SelfDistillation(SelfSupervised):
    model: dino.DINO
    options_class = DINOOptions
    head = ("student_head.", "teacher_head.")
    charts = (
        Chart("Entropy of the teacher", "教师输出的熵", "teacher_entropy", from_zero=True),
        Chart("Directions that features use", "特征的有效秩", "rank", from_zero=True),
        Chart("Spread of features", "特征的离散程度", "teacher_std", from_zero=True),
        Chart("Norm of the centre", "中心的范数", "centre_norm", from_zero=True),
    )

    @classmethod
    def build_model(
        cls, recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None
    ) -> tuple[Network, list[str]]:
        return build_pretraining_model(recipe.model, dino.DINO, channels, family="dino", example="dino_cifar")

    @classmethod
    def add_adapters(cls, recipe: ModelRecipe, model: Network) -> list[str]:
        """The teacher's begin as the student's, which they follow."""
        notes = super().add_adapters(recipe, model)
        assert isinstance(model, dino.DINO)
        adapters = {key: value for key, value in model.student.state_dict().items() if is_adapter_key(key)}
        model.teacher.load_state_dict(adapters, strict=False)
        return notes

    @classmethod
    def augmentation(cls, recipe: Recipe, pre: Preprocess) -> MultiCrop:
        """Two large views and several small ones, as [objective] describes."""
        if pre.stored is not None:
            raise TrainingError(f"objective.name=dino changes the colours of photos, and the images are {pre.stored}.")
        o, side = DINOOptions.of(recipe), min(pre.size)
        grey = len(pre.mean) == 1
        options = MultiCropOptions(
            local_views=o.local_views,
            local_size=o.local_size or max(1, round(side * 3 / 7)),
            global_scale=o.global_scale,
            local_scale=o.local_scale,
            flip=0.5 if recipe.augment.flip else 0.0,
            blur_sigma=(0.1 * side / 224, 2.0 * side / 224),  # the paper's, for its size
            solarize=(0.0, 0.0 if grey else 0.2, 0.0),  # an inverted digit is not an image of it
        )
        return MultiCrop(options, pre.size, pre.mean, pre.std, scale=pre.scale)

    @classmethod
    def preview_settings(cls, recipe: Recipe) -> list[str]:
        o = DINOOptions.of(recipe)
        return [f"{name}={getattr(o, name)}" for name in ("local_views", "global_scale", "local_scale")]

    def setup(self) -> None:
        super().setup()
        self.options = DINOOptions.of(self.recipe)
        self.temperature = 0.0
        self.means: list[Tensor] = []

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        super().begin_step(step, optimisers)
        o, w = self.options, self.recipe.optim.weight_decay
        warmup = round(o.temperature_epochs * self.plan.steps_per_epoch)
        self.temperature = dino.teacher_temperature(step, warmup, *o.teacher_temperature)
        if o.final_weight_decay is not None:
            optimisers.set_decay(dino.weight_decay(step, self.plan.total, w, o.final_weight_decay))
        self.means = []

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        return {f"view{number}": view.to(self.who.device) for number, view in enumerate(batch.views)}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        out = forward(list(inputs.values()), self.temperature, watched=self.logged)
        self.means.append(out.teacher_mean)
        return out.loss, {key: float(value) for key, value in out.numbers.items()}

    def trained_encoder(self) -> Network:
        return self.model.student

    def before_update(self, step: int) -> None:
        super().before_update(step)
        if dino.last_layer_frozen(step, self.plan.steps_per_epoch, self.options.freeze_last_epochs):
            for parameter in self.model.last_layer:
                parameter.grad = None

    def end_step(self, step: int) -> None:
        self.model.update_teacher(dino.teacher_momentum(step, self.plan.total, self.options.momentum))
        self.model.update_centre(torch.stack(self.means).mean(dim=0))

    def diagnose(self, lines: Sequence[Line]) -> list[Finding]:
        outputs = self.model.config.projection.out_dim
        return findings(lines, outputs=outputs, batch=self.plan.per_step, settled=self.plan.total // 5)

    @classmethod
    def describe_loss(cls, lines: Sequence[Line]) -> tuple[bool | None, str]:
        """The loss may rise while all is well."""
        if not any("teacher_entropy" in line for line in lines):
            return super().describe_loss(lines)
        last = lines[-1]
        names = {"entropy of the teacher": "teacher_entropy", "directions used": "rank", "spread": "teacher_std"}
        signs = ", ".join(f"{name} {last[key]:.2f}" for name, key in names.items() if key in last)
        return None, f"loss {lines[0]['loss']:.3f} -> {last['loss']:.3f}, which says little; {signs}"


def findings(lines: Sequence[Line], *, outputs: int, batch: int, settled: int = 0) -> list[Finding]:
    """lines: oldest first; outputs: K; batch: images in a step, over all processes.

    settled: the step from which a collapse counts, because an untrained network gives all images similar features.
    The loss alone proves nothing: both collapsed solutions have a low or constant one.
    """
    results = diagnosis.general_findings(lines)
    if any(finding.name == "not finite" for finding in results):
        return results
    if batch < SMALL_BATCH:
        message = f"{batch} images in a step are few to estimate the teacher's mean output, which centring subtracts."
        more = f"data.batch_size=128, or optim.accumulate={-(-128 // batch)}; or model.centre_momentum=0.99."
        results.append(Finding("small batch", message, f"Use more: {more}"))
    recent = diagnosis.recent_lines(lines, settled)
    if len(recent) < diagnosis.ENOUGH:
        return results
    ln_k, loss, entropy = (
        math.log(outputs),
        diagnosis.mean_of(recent, "loss"),
        diagnosis.mean_of(recent, "teacher_entropy"),
    )
    if loss is not None and loss >= UNIFORM * ln_k and (entropy is None or entropy >= UNIFORM * ln_k):
        message = (
            f"the loss stays at {loss:.2f}, and ln K is {ln_k:.2f}: the teacher gives all {outputs} outputs alike, "
            "so there is nothing to learn from it."
        )
        remedy = (
            "Make it surer: objective.teacher_temperature=[0.015,0.02] with model.sinkhorn=3. Make the views more "
            "alike: objective.global_scale=[0.7,1.0] objective.local_scale=[0.3,0.6]. "
            "Or start slower: a longer warm-up (optim.warmup_epochs), a third of optim.lr."
        )
        results.append(Finding("uniform output", message, remedy))
    used = diagnosis.mean_of(recent, "used_outputs")
    if entropy is not None and entropy <= (CERTAIN if used is None else SURE) * ln_k and (used or 0) <= FEW:
        chosen = "" if used is None else f" {used:.1f} of {outputs} outputs are anyone's first choice;"
        message = (
            f"the teacher gives nearly all images the same output:{chosen} its entropy is {entropy:.2f}, and "
            f"ln K is {ln_k:.2f}."
        )
        remedy = (
            "Turn centring on: model.centring=true. If it is on, let the centre follow faster, "
            "model.centre_momentum=0.9, or make the teacher less sure: objective.teacher_temperature=[0.04,0.07]."
        )
        results.append(Finding("one output", message, remedy))
    spread, rank = diagnosis.mean_of(recent, "teacher_std"), diagnosis.mean_of(recent, "rank")
    if (spread is not None and spread <= diagnosis.ALIKE_STD) or (rank is not None and rank <= diagnosis.ALIKE_RANK):
        seen = [f"spread {spread:.3f} of 1"] if spread is not None else []
        seen += [f"effective rank {rank:.2f}"] if rank is not None else []
        remedy = (
            "Learn slower: optim.lr to a third, optim.warmup_epochs longer, optim.clip=3.0; let the teacher follow "
            "more slowly: objective.momentum=0.996."
        )
        message = f"the features of all images are nearly the same: {', '.join(seen)}."
        results.append(Finding("same features", message, remedy))
    first, last = (line.get("centre_norm") for line in (recent[0], recent[-1]))
    if first is not None and last is not None and last > math.sqrt(outputs) and last > 2 * first:
        message = f"the centre's norm went from {first:.1f} to {last:.1f}: the outputs grow without end."
        remedy = "Keep the rows of the last layer at length 1: model.norm_last_layer=true, or optim.clip=3.0."
        results.append(Finding("centre grows", message, remedy))
    return results
