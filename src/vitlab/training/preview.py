"""The images that a model will see: before and after augmentation, and in mixed batches.

result = preview(recipe, data_of(recipe), images=8, views=4)
result.rows[0].images           # 1 + 4 of (H, W, C) uint8: as evaluated, then in epochs 0 to 3
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import ImageError
from vitlab.images.datasets import Annotated, Data, label_text
from vitlab.images.draw_regions import drawn
from vitlab.images.mix import Mix, Mixing, smooth_targets
from vitlab.images.multicrop import MultiCrop
from vitlab.images.preprocess import Preprocess
from vitlab.images.regions import Regions, RegionView
from vitlab.images.sources.dataset import target_kind
from vitlab.training.batches import BatchDataset, Plan, TrainingBatch
from vitlab.training.dense_targets import regions_of_target, target_of
from vitlab.training.finetune import build_for_data, for_pixels
from vitlab.training.job import steps_of
from vitlab.training.objectives import objective_class
from vitlab.training.objectives.base import mix_of
from vitlab.training.recipe import AugmentRecipe, Recipe

SEARCHED = 200  # steps of the run that are searched for mixed batches
Parts = list[tuple[str, float]]  # classes and their shares, the largest first


@dataclass(frozen=True)
class PreviewRow:
    """One image in several epochs, or in several views."""

    label: str
    name: str  # where it comes from
    index: int  # in the training set
    images: list[np.ndarray]  # (H, W, C) uint8: as it is evaluated, then as the columns of the preview say


@dataclass(frozen=True)
class MixedBatch:
    """Part of a batch that was mixed."""

    how: str
    step: int
    lam: float  # lambda, as in Mixing
    images: list[np.ndarray]  # (H, W, C) uint8
    labels: list[Parts]


@dataclass(frozen=True)
class Preview:
    title: str
    about: str
    settings: list[str]  # key=value of [augment], where it is not the default
    columns: list[str]  # what the images of a row are
    rows: list[PreviewRow]
    mixed: list[MixedBatch] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def preview(recipe: Recipe, data: Data, images: int = 8, views: int = 4) -> Preview:
    """The first `images` images of a run in epochs 0 .. `views` - 1, and mixed batches if any.

    Where every image is cut into several views, all views of epoch 0.
    """
    model, method = _model(recipe, data), objective_class(recipe.objective.name)
    recipe = for_pixels(recipe, data)
    steps, mix, a = steps_of(recipe, data, model.preprocess), mix_of(recipe), recipe.augment
    columns = [f"epoch {epoch}" for epoch in range(views)]
    epochs = views
    if isinstance(steps.augment, MultiCrop):
        small, epochs = steps.augment.sizes[2:], 1
        columns = ["large 1", "large 2", *(f"small {number}, {h} px" for number, (h, _) in enumerate(small, 1))]
    rows, unreadable = _rows(steps, images, epochs)
    mixed = _mixed(steps, mix, data.classes, a.smoothing, 1 + views)
    notes = [*data.notes, *unreadable]
    if a.drop_patches:
        notes.append(f"augment.drop_patches={a.drop_patches}: the model itself leaves patches out, which is not drawn.")
    notes += method.preview_notes(model)
    if (a.mixup or a.cutmix) and not mixed:
        notes.append(f"none of the first {SEARCHED} batches is mixed: augment.mix_probability={a.mix_probability}.")
    default = AugmentRecipe()
    on = [f.name for f in fields(a) if getattr(a, f.name) != getattr(default, f.name)]
    about = f"{len(rows)} of {len(data.train):,} training images, seed {recipe.run.seed}"
    settings = [f"{name}={getattr(a, name)}" for name in on] + method.preview_settings(recipe)
    return Preview(Path(data.name).name or data.name, about, settings, ["before", *columns], rows, mixed, notes)


def _model(recipe: Recipe, data: Data) -> Any:
    """On the meta device, unless it starts from a checkpoint."""
    with torch.device("meta") if recipe.model.init_from is None else nullcontext():
        return build_for_data(recipe, data)[0]


def _pixels(images: Iterable[Tensor], pre: Preprocess) -> list[np.ndarray]:
    """(C, H, W) each, normalised -> (H, W, C) uint8; clipped to 0..255."""
    pixels = [np.asarray(pre.to_image(image)) for image in images]
    return [image[:, :, None] if image.ndim == 2 else image for image in pixels]


def _rows(steps: BatchDataset, images: int, views: int) -> tuple[list[PreviewRow], list[str]]:
    rows, unreadable = [], []
    image_set, pre = steps.image_set, steps.image_set.preprocess
    for index in _in_order(steps.plan):
        one = np.array([index])
        try:
            before, _ = image_set.normalised(one)
            batches = [steps.batch(epoch, one, np.zeros(1, dtype=np.int64)) for epoch in range(views)]
            later = [view[0] for batch in batches for view in batch.views or [batch.images]]
        except ImageError as error:
            unreadable.append(str(error))
            continue
        data = image_set.data
        pixels = _pixels([before[0], *later], pre)
        if isinstance(data, Annotated):
            pairs = zip(pixels, _marks(steps, index, batches), strict=True)
            pixels = [drawn(image, regions, classes=data.kind == "semantic") for image, regions in pairs]
        rows.append(PreviewRow(label_text(data, index), data.name_of(index), index, pixels))
        if len(rows) == images:
            break
    if not rows:
        raise ImageError(f"none of {len(unreadable)} training images can be read, e.g. {unreadable[0]}")
    return rows, unreadable


def _marks(steps: BatchDataset, index: int, batches: list[TrainingBatch]) -> list[Regions]:
    """What is marked on an image as it is evaluated, and in each batch of it alone."""
    data, pre = steps.image_set.data, steps.image_set.preprocess
    assert isinstance(data, Annotated)
    size = data.read(index).shape
    whole = RegionView(pre.geometry((size[0], size[1])), pre.size)
    targets = [target_of(data.regions(index, (size[0], size[1])), whole, data.kind), *(b.targets[0] for b in batches)]
    return [regions_of_target(target, pre.size) for target in targets]


def _in_order(plan: Plan) -> Iterator[int]:
    """The images of the first epoch, each once, as the steps take them."""
    seen = set()
    for step in range(plan.steps_per_epoch):
        for micro in range(plan.accumulate):
            for index in plan.take(step, micro)[1].tolist():
                if index not in seen:
                    seen.add(index)
                    yield index


def _mixed(steps: BatchDataset, mix: Mix, classes: list[str], smoothing: float, count: int) -> list[MixedBatch]:
    """One batch of each kind: the first that is visibly mixed, or the first."""
    best: dict[str, tuple[int, Mixing]] = {}
    plan, pre = steps.plan, steps.image_set.preprocess
    for step in range(min(plan.total, SEARCHED)):
        drawn = mix.draw(plan.part, pre.size, seed=plan.seed, step=step)
        if drawn is not None and (drawn.how not in best or (_visible(drawn) and not _visible(best[drawn.how][1]))):
            best[drawn.how] = step, drawn
    batches = []
    for how, (step, drawn) in sorted(best.items(), reverse=True):  # mixup, then cutmix
        batch = steps[step, 0]
        if target_kind(steps.image_set.data.labels) == "class":
            own, share = smooth_targets(batch.labels, len(classes), smoothing), smoothing
        else:  # several labels, or a number, which are mixed like the images
            own, share = batch.labels.reshape(len(batch.labels), -1).float(), 0.0
        images, targets = mix(batch.images, own, seed=plan.seed, step=step)
        labels = [shares(target, classes, share) for target in targets[:count]]
        batches.append(MixedBatch(how, step, drawn.lam, _pixels(images[:count], pre), labels))
    return batches


def _visible(drawn: Mixing) -> bool:
    return 0.2 <= drawn.lam <= 0.8


def shares(target: Tensor, classes: list[str], smoothing: float) -> Parts:
    """The classes in soft targets (K,), without label smoothing and shares that round to 0.00."""
    parts = ((target - smoothing / len(classes)) / (1 - smoothing)).tolist()
    return sorted(((classes[k], share) for k, share in enumerate(parts) if share >= 0.005), key=lambda part: -part[1])
