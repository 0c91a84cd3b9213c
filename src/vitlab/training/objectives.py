"""What is learned. Methods differ in their objective and in nothing else of the loop: what they make of a batch, their
loss, what moves besides the weights, and how their model is judged.

    inputs = objective.inputs(batch, at)              # on the device
    loss, numbers = objective.loss(forward, inputs)   # then backward, optimiser
    objective.end_step(step)                          # e.g. the teacher's moving average
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.images.datasets import Captioned, Data, subset
from vitlab.images.mix import Mix
from vitlab.images.randomness import permutation, torch_seed
from vitlab.layers.reducer import Reducer
from vitlab.models import dino
from vitlab.models.clip import gather, same_captions
from vitlab.models.deit import TwoHeads, hard_loss, soft_loss
from vitlab.reduce import for_training, reducer_of
from vitlab.text.templates import read_templates
from vitlab.training.batches import Batch, Pictures, Plan
from vitlab.training.checks import check_objective, check_patches, check_reducer
from vitlab.training.evaluate import Scores, evaluate, evaluate_knn, evaluate_zeroshot, evaluating
from vitlab.training.optim import Optimisers
from vitlab.training.processes import Processes
from vitlab.training.recipe import Recipe
from vitlab.training.retrieval import Retrieval, evaluate_retrieval
from vitlab.training.ssl_doctor import clip_numbers, mae_numbers
from vitlab.training.teacher import Teacher, keep_answers
from vitlab.training.words import Sentences, trimmed, words_of

JUDGED = 1024  # pictures whose reconstruction is measured
BANK = 10_000  # labelled pictures among which neighbours are looked for while a run goes on; at its end, all
CHOICE, NOISE = 3, 4  # coordinates of the draws that pick them, and the patches that are hidden from judgement

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class At:
    """Coordinates of a micro-step: everything random in it is a function of these."""

    seed: int
    step: int
    rank: int = 0
    micro: int = 0


class Objective:
    """What all have; `Supervised` shows it at its plainest."""

    judged_by = "top-1"  # what `scores` tell, in words

    def __init__(self, recipe: Recipe, model: Any, data: Data, plan: Plan, who: Processes, run: Path):
        self.recipe, self.model, self.data, self.plan, self.who, self.run = recipe, model, data, plan, who, run
        self.notes: list[str] = []
        text = recipe.model.reducer
        self.reducer = None if text is None else reducer_of(text)  # in judging
        self.learns_by = None if self.reducer is None else for_training(self.reducer)

    def learner(self) -> Any:
        """What is compiled or wrapped for many processes, and then given to `loss`: the model, or a shell around it."""
        return self.model

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        """Set what changes with the step, besides the learning rate."""

    def inputs(self, batch: Batch, at: At) -> Inputs:
        """What the loss needs, on the device."""
        raise NotImplementedError

    def loss(self, forward: Any, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        """The loss, and numbers for the log. `forward` is the model, compiled or wrapped for many processes."""
        raise NotImplementedError

    def before_update(self, step: int) -> None:
        """After the gradients are there, before the optimiser uses them."""

    def end_step(self, step: int) -> None:
        """After the optimiser's step."""

    def scores(self, model: Any, pictures: Pictures, *, whole: bool = False) -> Scores | Retrieval:
        """How good is the model? `whole`: at the end of a run, where the answer may take its time."""
        raise NotImplementedError

    def looked_at(self, n: int, *, whole: bool = False) -> int:
        """How many pictures `scores` runs through the model to judge n."""
        return n

    def rank(self, scores: Any, model: Any, pictures: Pictures) -> tuple[float, dict[str, float]]:
        """The best model is the one of the highest rank; and numbers for the log."""
        return scores.top(1), {}

    def results(self, scores: Any) -> dict[str, Any]:
        """What result.json says of them."""
        numbers = {"top1": scores.top(1), "top5": scores.top(5), "loss": scores.loss()}
        return {**numbers, "ece": scores.calibration_error()}


class Supervised(Objective):
    """Cross-entropy with soft targets (B, K): smoothed, mixed or plain."""

    def __init__(self, recipe: Recipe, model: Any, data: Data, plan: Plan, who: Processes, run: Path):
        super().__init__(recipe, model, data, plan, who, run)
        self.mix = mix_of(recipe)

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        set_patch_dropout(self.model, self.recipe, step, self.plan.total)

    def inputs(self, batch: Batch, at: At) -> Inputs:
        classes, smoothing = len(self.data.classes), self.recipe.augment.smoothing
        images, targets = self.mix(batch.images, batch.labels, classes, smoothing, **vars(at))
        return {"images": images.to(self.who.device), "targets": targets.to(self.who.device)}

    def loss(self, forward: Any, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        return F.cross_entropy(forward(inputs["images"], reducer=self.learns_by), inputs["targets"]), {}

    def scores(self, model: Any, pictures: Pictures, *, whole: bool = False) -> Scores:
        flip = self.recipe.augment.flip_at_test
        return evaluate(model, pictures, processes=self.who, flip=flip, reducer=self.reducer)


class Distil(Supervised):
    """DeiT: the student learns from the labels and from a teacher's answers to the same pictures (models/deit.py)."""

    def __init__(self, recipe: Recipe, model: Any, data: Data, plan: Plan, who: Processes, run: Path):
        super().__init__(recipe, model, data, plan, who, run)
        o = recipe.objective
        assert o.teacher is not None  # the recipe has checked it
        self.teacher = Teacher.load(o.teacher, data.classes, model.preprocess, who.device)
        self.notes += self.teacher.notes
        self.answers = keep_answers(run / "teacher", self.teacher, data.train, data.name, who=who) if o.cache else None

    def learner(self) -> Any:
        return TwoHeads(self.model)

    def inputs(self, batch: Batch, at: At) -> Inputs:
        inputs = super().inputs(batch, at)
        if self.answers is None:
            return {**inputs, "teacher": self.teacher(inputs["images"])}
        answers = self.answers.take(batch.indices) if len(batch.indices) else torch.zeros(1, len(self.data.classes))
        return {**inputs, "teacher": answers.to(self.who.device)}

    def loss(self, forward: Any, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        heads = forward(inputs["images"], reducer=self.learns_by)
        o, answers = self.recipe.objective, inputs["teacher"]
        agreed = float((heads[1].detach().argmax(dim=1) == answers.argmax(dim=1)).float().mean())
        if o.distillation == "hard":
            return hard_loss(heads, inputs["targets"], answers, share=o.teacher_share), {"agreed": agreed}
        settings = dict(share=o.teacher_share, temperature=o.temperature)
        return soft_loss(heads, inputs["targets"], answers, **settings), {"agreed": agreed}


class SelfSupervised(Objective):
    """Labels are not learned from. They judge the features: the nearest neighbours among training pictures vote."""

    judged_by = "k-NN top-1"

    def scores(self, model: Any, pictures: Pictures, *, whole: bool = False) -> Scores:
        train = self.data.train
        if not whole:
            train = subset(train, np.sort(permutation(len(train), self.recipe.run.seed, CHOICE)[:BANK]))
        bank = Pictures(train, pictures.preprocess)
        return evaluate_knn(model.encoder, bank, pictures, len(self.data.classes), processes=self.who)

    def looked_at(self, n: int, *, whole: bool = False) -> int:
        return n + (len(self.data.train) if whole else min(BANK, len(self.data.train)))


class Reconstruct(SelfSupervised):
    """MAE: three quarters of the patches are hidden, and their pixels are to be predicted (models/mae.py)."""

    def inputs(self, batch: Batch, at: At) -> Inputs:
        return {"images": batch.images.to(self.who.device)}

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        self.logged = (step + 1) % self.plan.log_every == 0

    def loss(self, forward: Any, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        out = forward(inputs["images"])
        if not self.logged:
            return out.loss, {}
        return out.loss, mae_numbers(out.prediction, self.model.target(inputs["images"]), out.mask)

    def rank(self, scores: Scores, model: Any, pictures: Pictures) -> tuple[float, dict[str, float]]:
        """By what it is taught, on pictures it has not seen: neighbours say little of what fine-tuning will make."""
        error = self._error(model, pictures)
        return -error, {"reconstruction": error}

    def _error(self, model: Any, pictures: Pictures) -> float:
        """The loss on the first pictures, with the same patches hidden each time."""
        few = np.arange(min(len(pictures), JUDGED))
        noise = torch.Generator().manual_seed(torch_seed(self.recipe.run.seed, NOISE))
        total, count = 0.0, 0
        with evaluating(model):
            for part in np.array_split(few, -(-len(few) // 256)):
                images, kept = pictures.normalised(part)
                patches = math.prod(model.encoder.layout(*images.shape[-2:]).grid)
                hidden = torch.rand(len(kept), patches, generator=noise)
                found = model(images.to(self.who.device), hidden.to(self.who.device)).loss
                total, count = total + float(found) * len(kept), count + len(kept)
        return total / count


class SelfDistil(SelfSupervised):
    """DINO: the student says of every view what its own moving average says of the two large ones (models/dino.py)."""

    def __init__(self, recipe: Recipe, model: Any, data: Data, plan: Plan, who: Processes, run: Path):
        super().__init__(recipe, model, data, plan, who, run)
        self.temperature = 0.0
        self.means: list[Tensor] = []

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        o, w = self.recipe.objective, self.recipe.optim.weight_decay
        warmup = round(o.temperature_epochs * self.plan.steps_per_epoch)
        self.temperature = dino.teacher_temperature(step, warmup, *o.teacher_temperature)
        if o.final_weight_decay is not None:
            optimisers.set_decay(dino.weight_decay(step, self.plan.total, w, o.final_weight_decay))
        self.means, self.logged = [], (step + 1) % self.plan.log_every == 0

    def inputs(self, batch: Batch, at: At) -> Inputs:
        return {f"view{number}": view.to(self.who.device) for number, view in enumerate(batch.views)}

    def loss(self, forward: Any, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        out = forward(list(inputs.values()), self.temperature, watched=self.logged)
        self.means.append(out.teacher_mean)
        return out.loss, {key: float(value) for key, value in out.numbers.items()}

    def before_update(self, step: int) -> None:
        if dino.last_layer_frozen(step, self.plan.steps_per_epoch, self.recipe.objective.freeze_last_epochs):
            for parameter in self.model.last_layer:
                parameter.grad = None

    def end_step(self, step: int) -> None:
        self.model.update_teacher(dino.teacher_momentum(step, self.plan.total, self.recipe.objective.momentum))
        self.model.update_centre(torch.stack(self.means).mean(dim=0))


class Contrast(Objective):
    """CLIP: a picture finds its caption among those of the batch, and a caption its picture (models/clip.py).

    Judged by zero-shot accuracy where the data have classes, with sentences it has not learned; else by recall.
    """

    def __init__(self, recipe: Recipe, model: Any, data: Data, plan: Plan, who: Processes, run: Path):
        super().__init__(recipe, model, data, plan, who, run)
        self.words, o = words_of(recipe, data), recipe.objective
        self.judged_by = "recall@1" if data.captioned else "zero-shot top-1"
        if isinstance(self.words, Sentences):
            self.templates = read_templates(o.eval_templates)
            known = len(set(self.templates) & set(self.words.templates))
            seen = f"{known} of them are learned from" if known else "none of them is learned from"
            self.notes.append(f"judged by the {len(self.templates)} templates of {o.eval_templates}: {seen}.")
        if recipe.model.freeze == "encoder":
            model.image.eval()  # no dropout in what does not learn

    def learner(self) -> Any:
        return Towers(self.model)

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        set_patch_dropout(self.model.image, self.recipe, step, self.plan.total)
        self.logged = (step + 1) % self.plan.log_every == 0

    def inputs(self, batch: Batch, at: At) -> Inputs:
        """The images, their captions, and what tells which captions say the same."""
        indices = batch.indices.numpy() if len(batch.indices) else np.zeros(1, np.int64)  # a blank: any caption will do
        texts = self.words.draw(indices, seed=at.seed, epoch=at.step // self.plan.steps_per_epoch)
        ids = self.model.tokenizer(texts)  # (B, N)
        kinds = self.words.kinds(indices) if isinstance(self.words, Sentences) else ids
        found = {"images": batch.images, "ids": trimmed(ids, self.model.config.text.end_id), "kinds": kinds}
        return {name: tensor.to(self.who.device) for name, tensor in found.items()}

    def loss(self, forward: Any, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        found = forward(inputs["images"], inputs["ids"], reducer=self.learns_by)
        images, texts = (gather(features) for features in found)
        same = same_captions(gather(inputs["kinds"]))  # (B, B)
        loss = self.model.loss(images, texts, same)
        return loss, clip_numbers(self.model, images, texts, same) if self.logged else {}

    def end_step(self, step: int) -> None:
        self.model.clamp_scale()

    def scores(self, model: Any, pictures: Pictures, *, whole: bool = False) -> Scores | Retrieval:
        flip = self.recipe.augment.flip_at_test
        common: dict[str, Any] = dict(processes=self.who, flip=flip, reducer=self.reducer)
        if isinstance(pictures.data, Captioned):
            return evaluate_retrieval(model, pictures, pictures.data.captions, **common)
        return evaluate_zeroshot(model, pictures, self.data.classes, self.templates, **common)

    def rank(self, scores: Any, model: Any, pictures: Pictures) -> tuple[float, dict[str, float]]:
        if not isinstance(scores, Retrieval):
            return scores.top(1), {}
        return scores.mean_recall(), {"recall5": scores.top(5), "recall10": scores.top(10)}

    def results(self, scores: Any) -> dict[str, Any]:
        if not isinstance(scores, Retrieval):
            return {**super().results(scores), "templates": self.recipe.objective.eval_templates}
        told = scores.to_dict()
        return {"top1": scores.top(1), "top5": scores.top(5), **{k: told[k] for k in ("loss", "recall", "chance")}}


class Towers(nn.Module):
    """Both towers in one call, which is what is wrapped for many processes."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, ids: Tensor, *, reducer: Reducer | None = None) -> tuple[Tensor, Tensor]:
        return self.model.encode_image(images, reducer=reducer), self.model.encode_text(ids)


METHODS: dict[str, type[Objective]] = {
    "supervised": Supervised,
    "distill": Distil,
    "mae": Reconstruct,
    "dino": SelfDistil,
    "clip": Contrast,
}


def objective_of(recipe: Recipe, model: Any, data: Data, plan: Plan, who: Processes, run: Path) -> Objective:
    check_objective(recipe)
    check_patches(recipe, model)
    check_reducer(recipe, model)
    return METHODS[recipe.objective.name](recipe, model, data, plan, who, run)


def set_patch_dropout(network: Any, recipe: Recipe, step: int, total: int) -> None:
    """More patches are left out in the first part of a run, where the recipe says so."""
    a = recipe.augment
    if a.drop_patches:
        early = step < a.drop_patches_until * total
        network.patch_dropout = a.drop_patches if early else network.config.drop.patch_dropout


def mix_of(recipe: Recipe) -> Mix:
    a = recipe.augment
    return Mix(a.mixup, a.cutmix, probability=a.mix_probability)
