"""A job: everything one run holds, put together from its recipe; the same for a new run and a resumed one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.datasets import Data, open_data
from vitlab.images.mix import Mix
from vitlab.images.randomness import torch_seed
from vitlab.training import processes
from vitlab.training.batches import Pictures, Plan, Steps
from vitlab.training.finetune import build_model
from vitlab.training.optim import Optimisers
from vitlab.training.recipe import Recipe
from vitlab.training.state import Progress, Saved, save_last

MODEL = 2  # coordinate of what a model draws itself: first weights, dropout, stochastic depth


@dataclass
class Job:
    """Everything one run holds, put together from its recipe."""

    recipe: Recipe
    run: Path
    who: processes.Processes
    data: Data
    model: Any
    plan: Plan
    steps: Steps
    val: Pictures
    mix: Mix
    optimisers: Optimisers
    ema: AveragedModel | None
    forward: Any  # the model as it is called: compiled, or wrapped for many processes
    notes: list[str]

    @property
    def judged(self) -> Any:
        """The model that is evaluated and kept: the running average where there is one."""
        return self.model if self.ema is None else self.ema.module

    def restore(self, saved: Saved) -> Progress:
        self.model.load_state_dict(saved.weights)
        self.optimisers.load(saved.optimizer)
        if self.ema is not None and saved.ema is not None:
            self.ema.load_state_dict(saved.ema)
        return saved.progress

    def save(self, progress: Progress) -> None:
        ema: dict[str, Tensor] | None = None
        if self.ema is not None:
            ema = {key: value.detach().cpu().contiguous() for key, value in self.ema.state_dict().items()}
        save_last(self.run, self.model, self.optimisers.tensors(), ema, progress)


def prepare(recipe: Recipe, run: Path) -> Job:
    """Data, model and optimiser of a recipe; the same for a new run and a resumed one."""
    who = processes.start(recipe.run.device)
    d, a = recipe.data, recipe.augment
    data = open_data(
        d.source,
        path=d.path,
        seed=recipe.run.seed,
        val_fraction=d.val_fraction,
        per_class=d.per_class,
        fraction=d.fraction,
    )
    torch.manual_seed(torch_seed(recipe.run.seed, MODEL))  # first weights
    model, notes = build_model(recipe.model, data.classes, data.train.channels)
    model.to(who.device).train()
    pre = model.preprocess
    names = ("crop", "padding", "border", "scale", "ratio", "flip", "randaugment", "magnitude", "jitter", "erasing")
    augment = Augment(AugmentOptions(**{name: getattr(a, name) for name in names}), pre.size, pre.mean, pre.std)
    plan = Plan(
        n=len(data.train),
        batch_size=d.batch_size,
        epochs=recipe.run.epochs,
        seed=recipe.run.seed,
        repeats=d.repeats,
        accumulate=recipe.optim.accumulate,
        rank=who.rank,
        world=who.world,
    )
    forward: Any = torch.compile(model) if recipe.run.compile else model
    if who.world > 1:
        forward = DistributedDataParallel(forward, device_ids=[who.device.index] if who.device.type == "cuda" else None)
    decay = recipe.optim.ema
    return Job(
        recipe=recipe,
        run=run,
        who=who,
        data=data,
        model=model,
        plan=plan,
        steps=Steps(Pictures(data.train, pre), plan, augment),
        val=Pictures(data.val, pre),
        mix=Mix(a.mixup, a.cutmix, probability=a.mix_probability),
        optimisers=Optimisers(model, recipe.optim),
        ema=AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) if decay else None,
        forward=forward,
        notes=[*getattr(data, "notes", []), *notes],
    )
