"""What of the ladder fits into the time: how many images the encoder sees, which rungs are trained, and for how long.

Everything is reckoned with the speed of the machine as it is at that moment: others may use it too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from vitlab.errors import TrainingError, UsageError
from vitlab.images.datasets import Data, subset
from vitlab.models.base import Network
from vitlab.training import processes
from vitlab.training.autopick import choose, inspect_data
from vitlab.training.batches import ImageSet
from vitlab.training.candidates import (
    LEVELS,
    Facts,
    draft,
    enough_passes,
    estimate,
    given_keys,
    level_for,
    longest,
    scheduled,
)
from vitlab.training.clock import Clock
from vitlab.training.features import dataset_features, missing_share
from vitlab.training.measure import SpeedMeter
from vitlab.training.objectives import objective_class
from vitlab.training.processes import Processes
from vitlab.training.recipe import AUTO, ModelRecipe, Recipe, single_run
from vitlab.training.report.html import duration
from vitlab.training.run_report import FORWARD_PASSES
from vitlab.training.starting_points import Need, find_start
from vitlab.training.timelimit import busy_wrap_up

SHARE = 0.92  # of the time left that is planned for; a run that gets slower still ends in time
FEATURES = 0.5  # of the time that running the encoder over the images may take
ENOUGH = 3  # passes of LoRA that leave the rest of the time to the whole network
TIMED = 8  # images that the encoder is timed with
OWN = {"model.init_from", "model.name", "run.ladder", "run.dir", "run.minutes"}  # settings of the run as a whole


def ladder_or_scratch(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Who names a model and no weights wants that model from scratch; the ladder needs weights to start from."""
    given = given_keys(settings)
    if recipe.model.init_from == AUTO and "model.name" in given and "model.init_from" not in given:
        recipe = replace(recipe, model=replace(recipe.model, init_from=None))
    if recipe.model.init_from == AUTO and not recipe.run.ladder:
        if objective_class(recipe.objective.name).marks is not None:  # see `with_start`
            return recipe
        raise UsageError("model.init_from=auto is part of run.ladder=true: name a checkpoint, or none.")
    return recipe if recipe.model.init_from else single_run(recipe)


def with_start(recipe: Recipe, note: Callable[[str], object] = lambda text: None) -> Recipe:
    """The recipe with the best trained weights that can be had, where it asks for them and climbs no ladder. Without
    any the network is trained from scratch.
    """
    if recipe.model.init_from != AUTO or objective_class(recipe.objective.name).marks is None:
        return recipe
    who = processes.start(recipe.run.device)
    start = who.from_first(lambda: find_start(Need(0, None, who.device.type)))
    note(
        f"starting from {start.name}"
        if start.name
        else f"no trained weights, the network learns from scratch: {start.why}"
    )
    return replace(recipe, model=replace(recipe.model, init_from=start.name))


def tuning_recipe(recipe: Recipe, data: Data, settings: Sequence[str]) -> Recipe:
    """How the ladder trains the whole network, or `recipe` itself where it does not climb: for a preview."""
    recipe = with_start(ladder_or_scratch(recipe, settings))
    if not recipe.run.ladder:
        return recipe
    who = processes.start(recipe.run.device)
    name = recipe.model.init_from
    if name == AUTO:
        name = find_start(Need(len(data.train) + len(data.val), None, who.device.type)).name
    model = replace(recipe.model, init_from=name)
    if name is None:
        return replace(recipe, model=model)
    facts = inspect_data(data, recipe.data.source, who)[0]
    tuning = draft(facts, model, level_for(enough_passes(facts, tuned=True)), own_settings(settings))
    return replace(tuning, objective=recipe.objective)


def own_settings(settings: Sequence[str]) -> list[str]:
    """What a user set of the training runs, without what concerns the ladder as a whole."""
    return [text for text in settings if text.partition("=")[0].strip() not in OWN]


@dataclass(frozen=True)
class RungPlan:
    """The recipe of a rung, or why there is none."""

    recipe: Recipe | None
    why_not: str = ""
    notes: tuple[str, ...] = ()
    why_short: str = ""  # although more passes would fit into the time


@dataclass(frozen=True)
class Planner:
    """Plans the rungs of one run."""

    data: Data
    facts: Facts
    read_seconds: float  # for an image
    clock: Clock
    recipe: Recipe
    settings: list[str]  # of the training runs
    who: Processes

    @property
    def unlimited(self) -> bool:
        return math.isinf(self.clock.limit)

    def affordable_share(self, model: Network) -> float:
        """Of the images: as many as the encoder can see in its part of the time."""
        if self.unlimited:
            return 1.0
        per_image, parts = self.encoder_seconds(model), [self.image_set(model, split) for split in ("train", "val")]
        images = sum(missing_share(model, part) * len(part) for part in parts)
        left = self.clock.left - self.reserve(model, per_image)
        return min(1.0, max(FEATURES * left / max(per_image * images, 1e-9), 1e-6))

    def image_set(self, model: Network, split: Literal["train", "val"]) -> ImageSet:
        """What features are computed of: training photos are read as data.decode says, others exactly."""
        dataset, pre = getattr(self.data, split), model.require_preprocess()
        return ImageSet(dataset, pre, self.recipe.data.decode if split == "train" else "exact")

    def encoder_seconds(self, model: Network) -> float:
        """For one image, measured on a few."""
        train = self.data.train
        few = subset(train, np.linspace(0, len(train) - 1, min(len(train), TIMED)).astype(np.int64))
        image_set = ImageSet(few, model.require_preprocess(), self.recipe.data.decode)
        return dataset_features(model, image_set, stored=False).seconds / len(few)

    def reserve(self, model: Network, per_image: float) -> float:
        """Seconds for the test images, the report and its heat maps, where the encoder takes `per_image`."""
        return (
            busy_wrap_up(sum(p.numel() for p in model.parameters()), self.clock.limit)
            + ((self.facts.test or 0) + FORWARD_PASSES) * per_image
        )

    def why_not_mirrored(self, model: Network) -> str:
        """Why there is no time for the features of the mirror images; empty: there is."""
        if self.unlimited:
            return ""
        per_image, images = self.encoder_seconds(model), self.image_set(model, "train")
        seconds = per_image * len(images) * missing_share(model, images, mirrored=True)
        left = max(0.0, SHARE * (self.clock.left - self.reserve(model, per_image)))
        return "" if seconds <= left else f"for it takes {duration(seconds)} and {duration(left)} are left"

    def tuning(self, network: Network, model: ModelRecipe, more_follows: bool = False) -> RungPlan:
        """Of a rung that trains from `network`, with as many passes as the time allows."""
        enough, why_short = enough_passes(self.facts, tuned=True), ""
        first, seconds = draft(self.facts, model, LEVELS[0], self.settings), math.inf
        if not self.unlimited:
            per_image, seconds = self.who.from_first(lambda: self._training_seconds(network))
            least = per_image * self.facts.train
            if least > seconds:  # timing the steps would take time, too
                return RungPlan(None, f"for one pass takes {duration(least)} or more, and {_left(seconds)} are left")
        since = self.clock.since - self.clock.before
        speed = SpeedMeter(self.data, self.read_seconds, since, self.recipe.model.init_from)(first)
        if self.unlimited:
            epochs = enough
        else:
            _, seconds = self.who.from_first(lambda: self._training_seconds(network))
            if more_follows:  # and can then still get somewhere
                half = longest(first, self.facts, speed, self.settings, seconds / 2.5, 4 * enough)
                seconds = seconds / 2.5 if half is not None and half.run.epochs >= ENOUGH else seconds
            planned = longest(first, self.facts, speed, self.settings, seconds, 4 * enough)
            epochs = 0 if planned is None else planned.run.epochs
            if epochs == 4 * enough:
                why_short = f"more than {epochs} passes over {self.facts.train:,} images would add little"
        if epochs < 1:
            cost = estimate(scheduled(first, 1, self.facts, speed, self.settings), self.facts, speed)
            one_pass = duration(cost.total)
            why = f"for one pass, with evaluation and saving, takes {one_pass}, and {_left(seconds)} are left"
            return RungPlan(None, why)
        level = draft(self.facts, model, level_for(epochs), self.settings)
        recipe = scheduled(level, epochs, self.facts, speed, self.settings)
        minutes = 0.0 if self.unlimited else max(seconds / SHARE, 1.0) / 60
        return RungPlan(replace(recipe, run=replace(recipe.run, minutes=minutes, ladder=False)), why_short=why_short)

    def _training_seconds(self, network: Network) -> tuple[float, float]:
        """That the encoder takes for an image, and that are left for training."""
        per_image = self.encoder_seconds(network)
        return per_image, SHARE * (self.clock.left - self.reserve(network, per_image))

    def scratch(self) -> RungPlan:
        """Of a network that starts from nothing."""
        if self.unlimited:
            return RungPlan(single_run(self.recipe))
        meter = SpeedMeter(self.data, self.read_seconds, time.perf_counter())
        try:
            recipe, reasons = choose(self.facts, self.clock.left / 60, self.settings, meter)
        except TrainingError as error:
            return RungPlan(None, str(error))
        return RungPlan(single_run(recipe), notes=tuple(reasons))


def _left(seconds: float) -> str:
    return duration(max(seconds, 0.0))
