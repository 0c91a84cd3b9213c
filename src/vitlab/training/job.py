"""Builds all parts of a training run from its recipe; the same for a new run and a resumed one."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vitlab.errors import TrainingError
from vitlab.images.augment import Augment
from vitlab.images.augment_regions import RegionAugment
from vitlab.images.copies import CopyRule
from vitlab.images.datasets import Data, FileOptions, TargetColumns, kind_of, open_data
from vitlab.images.multicrop import MultiCrop
from vitlab.images.preprocess import Preprocess
from vitlab.images.randomness import torch_seed
from vitlab.images.sources.annotated import RECIPES
from vitlab.images.sources.dataset import KIND_NAMES, REGION_NAMES, Annotated, TargetKind
from vitlab.images.sources.splits import strata
from vitlab.models.base import Network
from vitlab.training import processes
from vitlab.training.batches import BalancedDraw, BatchDataset, ImageSet, Plan
from vitlab.training.doctor import check_half
from vitlab.training.features import Count
from vitlab.training.finetune import build_for_data, for_pixels, whiten_stem
from vitlab.training.labels import differing
from vitlab.training.objectives import DEFAULT, objective_class
from vitlab.training.objectives.base import Forward, Objective
from vitlab.training.optim import LONGEST_WARMUP, Optimisers, warmup_steps
from vitlab.training.recipe import Recipe
from vitlab.training.sharding import full_model, gather, load, shard
from vitlab.training.state import Progress, Saved, save_best, save_best_adapter, save_last

OBJECTIVE_FOR: dict[TargetKind, str] = {"class": DEFAULT, "labels": "multilabel", "number": "regression"}
MODEL = 2  # coordinate of the random numbers of a model: initial weights, dropout, stochastic depth


@dataclass
class TrainingJob:
    """All parts of a training run."""

    recipe: Recipe
    run: Path
    who: processes.Processes
    data: Data
    model: Network
    plan: Plan
    steps: BatchDataset
    val: ImageSet
    objective: Objective
    optimisers: Optimisers
    ema: AveragedModel | None
    forward: Forward
    notes: list[str]
    recipe_digest: str | None = None  # of recipe.toml as the run began

    @property
    def evaluated_model(self) -> Network:
        """The model that is evaluated and saved as best: the running average where there is one."""
        model = self.model if self.ema is None else self.ema.module
        assert isinstance(model, Network)
        return model

    def restore(self, saved: Saved, changed: bool = False) -> Progress:
        """Continue from a save. `changed`: the recipe differs from the one it was saved with."""
        if saved.progress.step > self.plan.total:
            raise TrainingError(
                f"{saved.folder}: was saved at step {saved.progress.step:,}, but the recipe ends at "
                f"{self.plan.total:,}. The data or the recipe have changed: put them back, or train for more epochs: "
                "run.epochs=... --changed"
            )
        if not changed:
            self._check_same_input(saved)
        labels = saved.card.get("labels")
        if self.model.labels is not None and labels != self.data.classes:  # None: they are not learned
            raise TrainingError(
                f"{self.run} was trained on other classes than {self.data.name} has now: "
                f"{differing(labels or [], self.data.classes, 'the run', 'the data')}. Put them back as they "
                f"were, or start a new run from it: model.init_from={self.run / 'best'}"
            )
        load(self.model, saved.weights)
        self.optimisers.load(saved.optimizer)
        if self.ema is not None and saved.ema is not None:
            load(self.ema, saved.ema)
        return saved.progress

    def _check_same_input(self, saved: Saved) -> None:
        """Refuse to go on with images that are prepared in another way than before, e.g. at another size."""
        now = {} if self.model.preprocess is None else json.loads(json.dumps(self.model.preprocess.to_dict()))
        before = saved.card.get("preprocess") or {}
        if differs := [key for key in {**before, **now} if before.get(key) != now.get(key)]:
            was, becomes = ({key: values.get(key) for key in differs} for values in (before, now))
            raise TrainingError(
                f"{saved.folder}: was trained on images prepared with {was}, and now it would be {becomes}: what "
                "model.init_from names has changed, or is read differently by this version. Put it back, or pass "
                "--changed to go on with the new."
            )

    def save(self, progress: Progress) -> None:
        """Write `last`. All processes call this together: each gives its shards, the first writes."""
        first = self.who.first
        model, optimizer = full_model(self.model, keep=first), gather(self.optimisers.tensors(), keep=first)
        ema = None if self.ema is None else gather(self.ema.state_dict(), keep=first)
        if model is not None:
            options = {"keep": self.recipe.run.keep, "recipe_digest": self.recipe_digest}
            save_last(self.run, model, optimizer, ema, progress, **options)

    def save_best(self) -> None:
        """Write `best`; all processes together, as in `save`."""
        model = full_model(self.evaluated_model, keep=self.who.first)
        if model is not None:
            save_best(self.run, model)
            if self.recipe.model.lora and self.recipe.model.init_from is not None:
                save_best_adapter(self.run, self.objective.adapted_model(model), self.recipe.model.init_from)


def data_of(recipe: Recipe) -> Data:
    """Open the data of a recipe."""
    d, method = recipe.data, objective_class(recipe.objective.name)
    captions = method.uses_captions
    method.check_installed()
    data = open_data(
        d.source,
        path=d.path,
        seed=recipe.run.seed,
        val_fraction=d.val_fraction,
        per_class=d.per_class,
        fraction=d.fraction,
        captions=captions,
        columns=columns_of(recipe),
        allow_cut=d.allow_cut,
        allow_outside=d.allow_outside,
        apply=d.apply,
        files=FileOptions(d.pixels, d.channels, d.group, method.marks, d.max_bad_annotations),
    )
    if data.captioned and not captions:
        raise TrainingError(
            f"{d.source} has captions and no classes, which objective.name={recipe.objective.name} needs. To learn "
            f"from captions: vitlab train clip_folder data.source={d.source}"
        )
    check_marks(recipe, data)
    check_kind(recipe, data)
    return data


def check_marks(recipe: Recipe, data: Data) -> None:
    """Masks and boxes go with objectives that learn from them."""
    marks, source = objective_class(recipe.objective.name).marks, recipe.data.source
    if isinstance(data.train, Annotated) and marks is None:
        raise TrainingError(
            f"{source} has {REGION_NAMES[data.train.kind]}, which objective.name={recipe.objective.name} does not "
            f"learn: vitlab train {RECIPES[data.train.kind]} {source}"
        )
    if marks is not None and not data.annotated:
        raise TrainingError(
            f"{source} has no masks or boxes, from which objective.name={recipe.objective.name} learns: expected are "
            "images/ beside masks/, instances/ or labels/ (YOLO text), or COCO JSON."
        )


def columns_of(recipe: Recipe) -> TargetColumns:
    d = recipe.data
    return TargetColumns(d.label, d.labels, d.target)


def check_kind(recipe: Recipe, data: Data) -> None:
    """Refuse data of which the objective cannot learn."""
    method = objective_class(recipe.objective.name)
    if data.captioned or data.annotated or method.learns == data.kind:
        return
    raise TrainingError(
        f"{recipe.data.source} has {KIND_NAMES[data.kind]}, which objective.name={recipe.objective.name} does not "
        f"learn: objective.name={OBJECTIVE_FOR[data.kind]}"
    )


def suited_recipe(recipe: Recipe) -> Recipe:
    """The recipe with the objective for the labels of its data, where it names none: a table may have several labels an
    image, or a number.
    """
    if recipe.objective.name != DEFAULT:
        return recipe
    name = OBJECTIVE_FOR[kind_of(recipe.data.source, columns_of(recipe))]
    return replace(recipe, objective=replace(recipe.objective, name=name))


def open_once(recipe: Recipe, who: processes.Processes) -> Data:
    """The first process opens the data before the others, so that only it downloads."""
    return who.only_first(lambda: data_of(recipe)) or data_of(recipe)


def steps_of(recipe: Recipe, data: Data, pre: Preprocess, rank: int = 0, world: int = 1) -> BatchDataset:
    """The augmented batches of a run, for one of its processes."""
    plan = Plan(
        n=len(data.train),
        batch_size=recipe.data.batch_size,
        epochs=recipe.run.epochs,
        seed=recipe.run.seed,
        repeats=recipe.data.repeats,
        accumulate=recipe.optim.accumulate,
        rank=rank,
        world=world,
    )
    if recipe.data.balance == "sampling":
        plan = replace(plan, balanced=BalancedDraw(strata(data.train.labels)))
    augment = objective_class(recipe.objective.name).augmentation(recipe, pre)
    image_set = ImageSet(data.train, pre, recipe.data.decode, _copies(recipe, len(data.train), pre, augment))
    return BatchDataset(image_set, plan, augment)


def _copies(
    recipe: Recipe, images: int, pre: Preprocess, augment: Augment | MultiCrop | RegionAugment
) -> CopyRule | None:
    """How training photos are shrunk; None: files are read in every epoch.

    The recipe and the data alone decide, and not the disk, so that a resumed run reads what it would have read.
    """
    if recipe.run.epochs < 2 or isinstance(augment, RegionAugment):  # masks and boxes are of the whole file
        return None
    crops, channels = augment.random_crops, len(pre.mean)
    rule = CopyRule.for_crops(channels, crops) if crops else CopyRule(channels, None, pre.at_one_size())
    return rule if rule.bytes_for(images) <= recipe.data.copies_gb * 1e9 else None


def _averaging(forward: Forward, who: processes.Processes) -> DistributedDataParallel:
    """DDP, whose sums do not depend on how many steps were made since the start.

    After its first step it would order the gradients anew, by their arrival. Three or more of them are added up in an
    order that follows from their places, so a resumed run would end with other bits. With find_unused_parameters it
    keeps the first order.
    """
    devices = [who.device.index] if who.device.type == "cuda" else None
    return DistributedDataParallel(forward, device_ids=devices, find_unused_parameters=who.world > 2)  # type: ignore[arg-type]


def prepare(
    recipe: Recipe, run: Path, data: Data | None = None, saved: Path | None = None, count: Count | None = None
) -> TrainingJob:
    """Build a job; `data` are those of the recipe, where they are open already.

    `saved`: the save that the run continues from, which holds its tokenizer. `count` shows progress of what is computed
    of the images beforehand.
    """
    who = processes.start(recipe.run.device)
    check_half(recipe.run.amp, who.device)
    data = data or open_once(recipe, who)
    torch.manual_seed(torch_seed(recipe.run.seed, MODEL))  # initial weights
    method = objective_class(recipe.objective.name)
    tokenizer = method.tokenizer(recipe, data, run, who, saved)
    model, notes = build_for_data(recipe, data, tokenizer)
    method.set_task(model, data)
    model.to(who.device).train()
    assert model.preprocess is not None  # check_channels
    steps = steps_of(for_pixels(recipe, data), data, model.preprocess, who.rank, who.world)
    if recipe.model.init_from is None:
        whiten_stem(model, steps.image_set)
    decay, sharding = recipe.optim.ema, recipe.run.sharding
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) if decay else None
    if sharding == "fsdp" and who.world > 1:
        for part in [model] if ema is None else [model, ema.module]:
            shard(part, who)
    elif sharding == "fsdp":
        notes.append(
            "run.sharding=fsdp: there is one process, which keeps the whole model. "
            "torchrun --nproc-per-node 2 -m vitlab train ... shares it out."
        )
    objective = method(recipe, model, data, steps.plan, who, run)
    forward: Any = objective.forward_module()
    forward = torch.compile(forward) if recipe.run.compile else forward
    if who.world > 1 and sharding == "none":
        forward = _averaging(forward, who)
    wanted, given = warmup_steps(recipe.optim, steps.plan.steps_per_epoch, steps.plan.total)
    if given < wanted:
        notes.append(
            f"the warm-up takes {given} of the {steps.plan.total} steps of this run, not the {wanted} of the recipe: "
            f"{LONGEST_WARMUP:.0%} at most, so that there is time to learn."
        )
    steps = objective.batches(steps, count)
    objective.begin_run(saved)
    return TrainingJob(
        recipe=recipe,
        run=run,
        who=who,
        data=data,
        model=model,
        plan=steps.plan,
        steps=steps,
        val=ImageSet(data.val, model.preprocess),
        objective=objective,
        optimisers=Optimisers(model, recipe.optim),
        ema=ema,
        forward=forward,
        notes=[*data.notes, *notes, *objective.notes],
    )
