"""CLIP and SigLIP: within a batch, an image is matched to its caption and a caption to its image (two_towers.py).

Evaluated by zero-shot accuracy where the data have classes, with templates it was not trained on; otherwise by recall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitlab.checkpoints.load import load_with_report
from vitlab.errors import TrainingError, VitlabError
from vitlab.factory import create
from vitlab.images.datasets import Captioned, Captions, Data
from vitlab.layers.collective import gather
from vitlab.layers.reducer import Reducer
from vitlab.models import registry
from vitlab.models.base import Network
from vitlab.models.clip import ProjectedConfig
from vitlab.models.siglip import SigLIPConfig
from vitlab.models.two_towers import TwoTowers, TwoTowersConfig, same_captions
from vitlab.parsing import flat
from vitlab.text.templates import read_templates
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import ImageSet, TrainingBatch
from vitlab.training.captions import (
    ClassCaptions,
    check_same_tokenizer,
    make_tokenizer,
    save_tokenizer,
)
from vitlab.training.evaluate import Scores, evaluate_zeroshot
from vitlab.training.finetune import build_pretraining_model, check_channels, resized_notes
from vitlab.training.objectives import diagnosis
from vitlab.training.objectives.base import (
    AnyScores,
    Forward,
    Inputs,
    MicroStep,
    Objective,
    ObjectiveOptions,
    set_patch_dropout,
)
from vitlab.training.objectives.diagnosis import Finding, Line
from vitlab.training.optim import Optimisers
from vitlab.training.processes import Processes
from vitlab.training.recipe import ModelRecipe, Recipe
from vitlab.training.report.curves import Chart
from vitlab.training.retrieval import Retrieval, evaluate_retrieval


@dataclass(frozen=True)
class CLIPOptions(ObjectiveOptions):
    loss: Literal["softmax", "sigmoid"] | None = None  # one of many (CLIP), each pair by itself (SigLIP); the model's
    templates: str = "train"  # for classes: a list of text/templates.py, a file, or "a photo of a {}|one {}"
    eval_templates: str = "held_out"  # for classes: the sentences it is evaluated with


class ContrastiveLearning(Objective):
    model: TwoTowers
    options_class = CLIPOptions
    charts = (Chart("Pairs found in the batch", "批内配对正确率", "matched", percent=True),)
    uses_labels = False
    uses_captions = True
    head = ()
    own_settings = ("model.init_image",)

    @classmethod
    def tokenizer(
        cls, recipe: Recipe, data: Data, run: Path, who: Processes, saved: Path | None = None
    ) -> Tokenizer | None:
        needed = recipe.model.init_from is None or recipe.text.tokenizer is not None
        return make_tokenizer(recipe, _captions(recipe, data), run, who, saved) if needed else None

    @classmethod
    def build_model(
        cls, recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None
    ) -> tuple[TwoTowers, list[str]]:
        """A new model, also with the image tower of another checkpoint; or a loaded one with its own tokenizer."""
        model, notes = (
            _new_model(recipe, channels, tokenizer)
            if recipe.model.init_from is None
            else _loaded_model(recipe, channels, tokenizer)
        )
        if recipe.model.freeze == "encoder":
            model.image.requires_grad_(False)
            notes.append("the image tower is locked: the text tower and both projections learn.")
        return model, notes

    @classmethod
    def image_model(cls, model: Network) -> Network:
        return model.encoder

    def setup(self) -> None:
        self.captions, o = _captions(self.recipe, self.data), CLIPOptions.of(self.recipe)
        self.metric = "recall@1" if self.data.captioned else "zero-shot top-1"
        if isinstance(self.captions, ClassCaptions):
            self.templates = read_templates(o.eval_templates)
            shared = len(set(self.templates) & set(self.captions.templates))
            seen = f"{shared} of them are learned from" if shared else "none of them is learned from"
            self.notes.append(f"evaluated by the {len(self.templates)} templates of {o.eval_templates}: {seen}.")
        self.tokenize = self.model.require_tokenizer()
        if self.recipe.model.freeze == "encoder":
            self.model.image.eval()  # no dropout in what does not learn

    def forward_module(self) -> nn.Module:
        return BothTowers(self.model)

    def begin_run(self, saved: Path | None) -> None:
        check_same_tokenizer(self.tokenize, saved)
        if self.who.first:
            save_tokenizer(self.tokenize, self.run)

    def begin_step(self, step: int, optimisers: Optimisers) -> None:
        super().begin_step(step, optimisers)
        set_patch_dropout(self.model.image, self.recipe, step, self.plan.total)

    def inputs(self, batch: TrainingBatch, at: MicroStep) -> Inputs:
        """The images, their captions, and what tells which captions say the same."""
        indices = batch.indices.numpy() if len(batch.indices) else np.zeros(1, np.int64)  # blank image: any caption
        texts = self.captions.draw(indices, seed=at.seed, epoch=at.step // self.plan.steps_per_epoch)
        ids = self.tokenize(texts)  # (B, N)
        kinds = self.captions.kinds(indices) if isinstance(self.captions, ClassCaptions) else ids
        inputs = {"images": batch.images, "ids": self.model.text.trim_padding(ids), "kinds": kinds}
        return {name: tensor.to(self.who.device) for name, tensor in inputs.items()}

    def loss(self, forward: Forward, inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        features = forward(inputs["images"], inputs["ids"], reducer=self.train_reducer)
        images, texts = (gather(part) for part in features)
        same = same_captions(gather(inputs["kinds"]))  # (B, B)
        loss = self.model.loss(images, texts, same)
        return loss, matching_numbers(self.model, images, texts, same) if self.logged else {}

    def end_step(self, step: int) -> None:
        self.model.clamp_scale()

    def evaluate(self, model: Network, image_set: ImageSet, *, final: bool = False) -> Scores | Retrieval:
        assert isinstance(model, TwoTowers)
        flip = self.recipe.augment.flip_at_test
        common: dict[str, Any] = dict(processes=self.who, flip=flip, reducer=self.reducer)
        if isinstance(image_set.data, Captioned):
            return evaluate_retrieval(model, image_set, image_set.data.captions, **common)
        return evaluate_zeroshot(model, image_set, self.data.classes, self.templates, **common)

    def rank(self, scores: AnyScores, model: Network, image_set: ImageSet) -> tuple[float, dict[str, float]]:
        if not isinstance(scores, Retrieval):
            return super().rank(scores, model, image_set)
        return scores.mean_recall(), {"recall5": scores.top(5), "recall10": scores.top(10)}

    def results(self, scores: AnyScores) -> dict[str, Any]:
        if not isinstance(scores, Retrieval):
            return {**super().results(scores), "templates": CLIPOptions.of(self.recipe).eval_templates}
        values = scores.to_dict()
        return {"top1": scores.top(1), "top5": scores.top(5), **{k: values[k] for k in ("loss", "recall", "chance")}}

    def diagnose(self, lines: Sequence[Line]) -> list[Finding]:
        return findings(lines, batch=self.plan.part * self.plan.world, settled=self.plan.total // 5)


def _captions(recipe: Recipe, data: Data) -> Captions | ClassCaptions:
    if isinstance(data.train, Captioned):
        return data.train.captions
    return ClassCaptions(data.train.labels, data.classes, read_templates(CLIPOptions.of(recipe).templates))


class BothTowers(nn.Module):
    """Both towers in one call, which is what DDP wraps."""

    def __init__(self, model: TwoTowers):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, ids: Tensor, *, reducer: Reducer | None = None) -> tuple[Tensor, Tensor]:
        return self.model.encode_image(images, reducer=reducer), self.model.encode_text(ids)


# --------------------------------------------------------------------------------------------------------- the model


def _loaded_model(recipe: Recipe, channels: int, tokenizer: Tokenizer | None) -> tuple[TwoTowers, list[str]]:
    m = recipe.model
    if m.init_image is not None:
        raise TrainingError("model.init_from has an image tower already: leave out model.init_image.")
    model, notes = build_pretraining_model(
        *(replace(m, freeze="none"), TwoTowers, channels), family="clip", example="clip_nano"
    )
    loss = "softmax" if model.bias is None else "sigmoid"
    if CLIPOptions.of(recipe).loss not in (None, loss):
        raise TrainingError(f"{m.init_from} learned with the {loss} loss: set objective.loss={loss}.")
    model.tokenizer = model.tokenizer or tokenizer
    if model.tokenizer is None:
        raise TrainingError(f"{m.init_from} has no tokenizer: name its file, text.tokenizer=tokenizer.json.")
    if tokenizer is not None and tokenizer.to_json() != model.tokenizer.to_json():
        raise TrainingError(f"{m.init_from} has a tokenizer of its own: leave out text.tokenizer.")
    return model, notes


def _new_model(recipe: Recipe, channels: int, tokenizer: Tokenizer | None) -> tuple[TwoTowers, list[str]]:
    m, loss = recipe.model, CLIPOptions.of(recipe).loss
    config = registry.find(m.name)[0].config
    if not isinstance(config, TwoTowersConfig):
        raise TrainingError(f"objective.name=clip teaches a CLIP or SigLIP, not {m.name}: model.name=clip_nano, e.g.")
    if isinstance(config, SigLIPConfig) and loss == "softmax":
        raise TrainingError(f"{m.name} learns with the sigmoid loss: leave out objective.loss.")
    if m.freeze == "encoder" and m.init_image is None:
        raise TrainingError(
            "model.freeze=encoder would lock an image tower that has learned nothing: name a checkpoint of a ViT, "
            "model.init_image=bundled:cifar10, e.g."
        )
    options: dict[str, Any] = {**({} if tokenizer is None else tokenizer.options), **m.options}
    if isinstance(config, ProjectedConfig):
        options = {"loss": loss or "softmax", **options}
    notes, tower = [], None
    if m.init_image is None:
        options = {"channels": channels, **options}
    else:
        tower, notes = _image_tower(m, m.init_image)
        options = {"image": tower.config, **options}
    model = cast(TwoTowers, create(m.name, **options))
    if tower is not None:
        model.image.load_state_dict(tower.state_dict())
        model.preprocess = tower.preprocess
    model.tokenizer = tokenizer
    check_channels(model, channels)
    return model, notes


def _image_tower(recipe: ModelRecipe, source: str) -> tuple[Network, list[str]]:
    """The ViT of any checkpoint, resized to what the recipe sets; another shape is refused."""
    tower, report = load_with_report(source, encoder=True, classes=0)
    if tower.family != "vit":
        raise TrainingError(f"{source} is of the family {tower.family}: an image tower is a ViT.")
    _, config = registry.build_config(recipe.name, **{"image": tower.config, **recipe.options})
    has, wants = flat(tower.config.to_dict()), flat(config.image.to_dict())
    changed = {name: value for name, value in wants.items() if value != has[name]}
    if changed:
        try:
            tower, report = load_with_report(source, encoder=True, **{"classes": 0, **changed})
        except VitlabError as error:
            raise TrainingError(
                f"{error} The recipe clip_lit leaves the image tower as it is: "
                f"vitlab train clip_lit model.init_image={source}"
            ) from None
    return tower, [*report.notes, *resized_notes(report), f"the image tower started from {source}."]


# --------------------------------------------------------------------------------------------------------- diagnosis


def matching_numbers(model: TwoTowers, images: Tensor, texts: Tensor, same: Tensor) -> dict[str, float]:
    """Features (B, E) of both towers, (B, B) equal captions -> the scale, the share matched, the loss of guessing.

    Guessing: ln B where one of B is right (softmax); for single pairs (sigmoid) the best constant output.
    """
    with torch.no_grad():
        own = torch.arange(len(images), device=images.device)
        others = same & (own[:, None] != own[None])
        logits = (images.float() @ texts.float().T).masked_fill(others, -math.inf)
        count = (~others).sum(dim=1).float()  # candidates, the own one included
        guessing = count.log() if model.bias is None else count.log() - torch.special.xlogy(count - 1, 1 - 1 / count)
        numbers = {
            "scale": model.scale.item(),
            "matched": float((logits.argmax(dim=1) == own).float().mean()),
            "guessing": float(guessing.mean()),
        }
        if len(images) > 1:  # one image has no spread
            numbers["image_std"] = float(images.float().std(dim=0).mean() * images.shape[1] ** 0.5)
            numbers["text_std"] = float(texts.float().std(dim=0).mean() * texts.shape[1] ** 0.5)
        return numbers


def findings(lines: Sequence[Line], *, batch: int, settled: int = 0) -> list[Finding]:
    """lines: oldest first, with `matching_numbers`; batch: pairs in one loss."""
    results = diagnosis.general_findings(lines)
    if any(finding.name == "not finite" for finding in results):
        return results
    recent = diagnosis.recent_lines(lines, settled)
    loss, guessing = diagnosis.mean_of(recent, "loss"), diagnosis.mean_of(recent, "guessing")
    if len(recent) < diagnosis.ENOUGH or loss is None or guessing is None:
        return results
    spread = {"images": diagnosis.mean_of(recent, "image_std"), "texts": diagnosis.mean_of(recent, "text_std")}
    same = [name for name, std in spread.items() if std is not None and std < diagnosis.ALIKE_STD]
    if same:
        message = f"all {' and all '.join(same)} get nearly the same embedding: the model has collapsed."
        remedy = "Start again with optim.lr divided by 3 and a longer warm-up (optim.warmup_epochs)."
        results.append(Finding("collapse", message, remedy))
    elif loss >= diagnosis.NO_BETTER * guessing:
        message = (
            f"the loss is {loss:.4f}, that of guessing among the captions of a batch ({batch} pairs) {guessing:.4f}: "
            "images and captions are not matched yet."
        )
        remedy = "Train longer (run.epochs), or learn faster (optim.lr times 3). Do the captions belong to the images?"
        results.append(Finding("no better than guessing", message, remedy))
    return results
