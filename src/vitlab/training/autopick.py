"""`vitlab train FOLDER --minutes 10`: model, image size, augmentation and schedule that fit the data and the time.

    picked = pick("photos/", 10, ["run.seed=1"])
    fit(picked.recipe, run, data=picked.data, notes=picked.reasons)

Picks the largest candidate that, timed on this machine, gets enough passes over the data in 80 % of the time left.
All timing is done by `measure`, so `choose` is a function of its arguments.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from vitlab.errors import ImageError, TrainingError, UsageError
from vitlab.images.datasets import Data, Dataset
from vitlab.training import processes
from vitlab.training.candidates import (
    LEVELS,
    AugmentationLevel,
    Facts,
    candidates,
    config_of,
    draft,
    enough_passes,
    estimate,
    given_keys,
    level_for,
    longest,
    names_model,
    plan_of,
    scheduled,
    work,
)
from vitlab.training.job import open_once
from vitlab.training.loop import Show, Silent
from vitlab.training.measure import Speed, SpeedMeter
from vitlab.training.recipe import ModelRecipe, Recipe, to_toml, with_settings, with_value
from vitlab.training.report.html import duration

SHARE = 0.8  # of the time left; the rest is for a machine that gets slower
LEAST_STEPS = 20  # fewer are no training
OPTIMISM = (0.05, 0.5)  # of the time that its MACs predict a larger model may take only this share; on a CPU the second
PATIENCE = 0.03  # share of the time in which the picked model is timed once more
LOOK = (24, 2.0)  # images that are read to learn their size, and seconds it may take
CHARACTERS = ("digits", "mnist")


class Measure(Protocol):
    def __call__(self, recipe: Recipe, patience: float = 0.0) -> Speed: ...


@dataclass(frozen=True)
class Picked:
    recipe: Recipe
    reasons: list[str]  # in words, a line each
    data: Data  # opened


def pick(
    source: str,
    minutes: float,
    settings: list[str] | None = None,
    *,
    since: float | None = None,
    measure: Measure | None = None,
    show: Show | None = None,
) -> Picked:
    """A recipe for this source that ends `minutes` after `since` (time.perf_counter(); default: now)."""
    settings, show = settings or [], show or Silent()
    since = time.perf_counter() if since is None else since
    check(minutes, settings)
    base = with_settings(with_value(Recipe(), "data.source", source), settings)
    show.note("looking at the data, and timing this machine ...")
    who = processes.start(base.run.device)
    data = open_once(base, who)
    facts, read = inspect_data(data, base.data.source, who)
    recipe, reasons = choose(facts, minutes, settings, measure or SpeedMeter(data, read, since))
    return Picked(recipe, reasons, data)


def check(minutes: float, settings: list[str]) -> None:
    if not 0 < minutes < math.inf:
        raise UsageError(f"--minutes {minutes:g} must be above 0: the time that the whole command may take.")
    for key, why in {
        "run.epochs": "picks the number of epochs. Leave one of the two out",
        "run.minutes": "is the same thing. Leave it out",
    }.items():
        if key in given_keys(settings):
            raise UsageError(f"{key} was given, but --minutes {minutes:g} {why}.")


def inspect_data(data: Data, source: str, who: processes.Processes) -> tuple[Facts, float]:
    """Facts about the data, from a few images, and the seconds that reading one takes."""
    train = data.train
    sizes, read = who.from_first(lambda: _image_sizes(train))
    facts = Facts(
        source=source,
        train=len(train),
        val=len(data.val),
        test=len(data.test) if data.test is not None else 0,
        classes=len(data.classes),
        channels=train.channels,
        side=int(np.median([min(size) for size in sizes])),
        alike=len(set(sizes)) == 1,
        in_memory=train.images is not None,
        characters=data.name in CHARACTERS or all(len(name) == 1 for name in data.classes),
        photos=train.stored is None,
        device=who.device.type,
        cpus=max(1, (os.cpu_count() or 1) // who.world),
        world=who.world,
    )
    return facts, read


def _image_sizes(train: Dataset) -> tuple[list[tuple[int, ...]], float]:
    """(H, W) of a few images, and the seconds that reading one takes."""
    if train.images is not None:
        return [train.images.shape[1:3]], 0.0
    began, sizes, broken = time.perf_counter(), [], None
    for index in np.linspace(0, len(train) - 1, min(len(train), LOOK[0])).astype(int):
        try:
            sizes.append(train.read(int(index)).shape[:2])
        except ImageError as error:
            broken = error
        if time.perf_counter() - began > LOOK[1]:
            break
    if not sizes and broken is not None:
        raise broken
    return sizes, (time.perf_counter() - began) / len(sizes)


@dataclass
class Trial:
    """A timed candidate with the longest schedule that fits."""

    model: ModelRecipe
    level: AugmentationLevel
    speed: Speed
    recipe: Recipe | None

    @property
    def epochs(self) -> int:
        return self.recipe.run.epochs if self.recipe is not None else 0


def choose(facts: Facts, minutes: float, settings: list[str], measure: Measure) -> tuple[Recipe, list[str]]:
    """The largest model that fits, with the strongest augmentation for its number of passes; and the reasons."""
    check(minutes, settings)
    models = candidates(facts, settings)
    given = names_model(settings)
    enough = enough_passes(facts, tuned=models[0].init_from is not None)
    most = max(100, 4 * enough)
    speeds: dict[str, Speed] = {}

    def left(speed: Speed) -> float:
        return SHARE * (60 * minutes - speed.spent)

    def trial(model: ModelRecipe, level: AugmentationLevel, patience: float = 0.0) -> Trial:
        recipe = draft(facts, model, level, settings)
        key = to_toml(recipe)
        speeds[key] = speeds[key] if key in speeds and not patience else measure(recipe, patience)
        speed = replace(speeds[key], spent=max(speed.spent for speed in speeds.values()))
        return Trial(model, level, speed, longest(recipe, facts, speed, settings, left(speed), most))

    def expected_epochs(base: Trial, model: ModelRecipe) -> int:
        """Epochs that a larger model gets at best."""
        factor = OPTIMISM[facts.device == "cpu"] * work(model) / work(base.model)
        speed = replace(base.speed, step=factor * base.speed.step, early=factor * base.speed.early)
        recipe = draft(facts, base.model, base.level, settings)
        longer = longest(recipe, facts, speed, settings, left(speed), most)
        return longer.run.epochs if longer is not None else 0

    best, larger = trial(models[0], level_for(enough)), None
    if left(best.speed) <= 0:  # timing alone has taken it all: no more of it
        raise too_little_time(best, least_epochs(best, facts, settings), facts, minutes, settings, given)
    for model in models[1:] if best.epochs >= enough else []:
        if (epochs := expected_epochs(best, model)) >= enough:
            tried = trial(model, best.level)
            epochs = tried.epochs
            if epochs >= enough:
                best = tried
                continue
        larger = model, epochs
        break
    for level in reversed([level for level in LEVELS if level.passes <= best.epochs]):
        stronger = trial(best.model, level)
        if stronger.epochs >= level.passes:
            best = stronger
            break
    best = trial(best.model, best.level, patience=PATIENCE * 60 * minutes)
    least = least_epochs(best, facts, settings)
    if best.recipe is None or best.epochs < least:
        raise too_little_time(best, least, facts, minutes, settings, given)
    recipe = replace(best.recipe, run=replace(best.recipe.run, minutes=float(minutes)))
    why = "you named it" if given else _why_this_model(best, larger, enough, facts)
    return recipe, reasons(recipe, best, why, most, facts, minutes, settings)


def least_epochs(best: Trial, facts: Facts, settings: list[str]) -> int:
    plan = plan_of(draft(facts, best.model, best.level, settings), facts)
    return math.ceil(LEAST_STEPS / plan.steps_per_epoch)


def too_little_time(
    best: Trial, least: int, facts: Facts, minutes: float, settings: list[str], given: bool
) -> TrainingError:
    """The error for a time that is too short to learn anything; it says how much is needed."""
    recipe = scheduled(draft(facts, best.model, best.level, settings), least, facts, best.speed, settings)
    needs = estimate(recipe, facts, best.speed).total
    smallest = math.ceil(11 * (best.speed.spent + needs / SHARE) / 60) / 10  # a tenth more, in tenths
    which = "this model" if given else "the smallest model"
    passes = "one pass" if least == 1 else f"{least} passes"
    return TrainingError(
        f"--minutes {minutes:g} is too little: looking at the data and timing this machine took "
        f"{best.speed.spent:.0f} s, and {which} needs {needs:.0f} s for {passes} over {facts.train:,} images, "
        f"validation and the report. Use --minutes {smallest:g} or more."
    )


def reasons(
    recipe: Recipe, best: Trial, why: str, most: int, facts: Facts, minutes: float, settings: list[str]
) -> list[str]:
    """What was picked and why, a line each."""
    r, a, speed, plan, keys = recipe, recipe.augment, best.speed, plan_of(recipe, facts), given_keys(settings)
    test = f", {facts.test:,} to test" if facts.test else ""
    colours = "grey" if facts.channels == 1 else "colour" if facts.photos else f"{facts.channels}-channel"
    lines = [
        f"data: {facts.train:,} {colours} images to train on, {facts.val:,} to validate{test}; {facts.classes} "
        f"classes; {facts.side} px on the shorter side",
        f"picked model: {describe_model(r.model)} ({speed.params / 1e6:.2f} M parameters), because {why}",
    ]
    early = f" ({1000 * speed.early:.0f} ms while patches are left out)" if a.drop_patches else ""
    timed = f"a step of {plan.per_step} images takes {1000 * speed.step:.0f} ms here{early}, preparing them "
    timed += f"{1000 * speed.prepare:.0f} ms in one process"
    because = f"more would add little; {timed}" if r.run.epochs == most else timed
    epochs = "1 epoch" if r.run.epochs == 1 else f"{r.run.epochs} epochs"
    lines.append(f"picked {epochs} of {plan.steps_per_epoch} steps, because {because}")
    level = (
        "small shifts only, for more turns one character into another"
        if facts.characters
        else best.level.description
        if facts.photos
        else f"{best.level.description} (without RandAugment, which is for colours)"
    )
    changed = " (except what you set)" if any(key.startswith("augment.") for key in keys) else ""
    lines.append(f"picked augmentation: {level}{changed}")
    if a.drop_patches:
        lines.append(
            f"picked {a.drop_patches:.0%} of the patches left out in the first {a.drop_patches_until:.0%} of the run, "
            "because that buys more passes"
        )
    if a.flip:
        lines.append("picked mirror images too, right for photos and wrong for writing and signs: augment.flip=false")
    elif facts.characters:
        lines.append("picked no mirror images, because the labels look like characters: augment.flip=true")
    if "optim.name" not in keys:
        lines.append(f"picked {_optimiser(r, facts)}")
    if r.data.workers:
        lines.append(f"picked data.workers={r.data.workers}, because preparing images would hold up the steps")
    if speed.prepare > speed.step and not facts.in_memory:
        lines.append("reading the images takes longer than learning from them: smaller files would train faster")
    if settings:
        lines.append(f"as you set: {', '.join(settings)}")
    e = estimate(r, facts, speed)
    lines.append(
        f"plan: {duration(speed.spent)} gone, {duration(e.training)} of training, {duration(e.evaluation)} of "
        f"validation, {duration(e.ending)} for test and report: {duration(speed.spent + e.total)} of "
        f"{duration(60 * minutes)}. If this machine gets slower, the run ends in time with what it has"
    )
    return lines


def _why_this_model(best: Trial, larger: tuple[ModelRecipe, int] | None, enough: int, facts: Facts) -> str:
    few = f"the {enough} passes that are enough for {facts.train:,} images"
    if best.epochs < enough and larger is None:
        return f"the time allows no larger one: even this gets only {best.epochs} of {few}"
    if larger is None:
        return f"it is the largest for such images, and gets {few}"
    return f"it is the largest that gets {few}; the next, {describe_model(larger[0])}, would get about {larger[1]}"


def describe_model(model: ModelRecipe) -> str:
    if model.init_from is not None:
        return f"the trained {model.init_from}, at its own size unless set"
    c = config_of(model)
    if c is None:
        return model.name
    stem = " behind a convolutional stem" if c.stem.kind == "conv" else ""
    size = f"{c.image_size[0]} px" if c.image_size[0] == c.image_size[1] else f"{c.image_size[0]}x{c.image_size[1]} px"
    return f"{c.width} wide, {c.depth} deep, at {size} in patches of {c.patch_size}{stem}"


def _optimiser(recipe: Recipe, facts: Facts) -> str:
    o = recipe.optim
    if recipe.model.init_from is not None:
        return f"{o.name} at the low rate {o.lr:g}, layer decay {o.layer_decay:g}, because the weights are trained"
    if facts.device == "cpu" and o.name == "muon":
        return f"{o.name} with {o.schedule} decay in float32, because it learns most per step and CPUs are slow at bf16"
    amp = f" in {recipe.run.amp}" if recipe.run.amp != "off" else ""
    return f"{o.name} with {o.schedule} decay{amp}, the usual choice on {facts.device}"
