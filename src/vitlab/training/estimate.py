"""How long a run will take, from measured speeds; and the longest schedule that fits a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from vitlab.training.batches import Plan
from vitlab.training.candidates import Facts
from vitlab.training.measure import Speed
from vitlab.training.recipe import Recipe, with_settings
from vitlab.training.timelimit import wrap_up_seconds

JUDGING = 0.1  # share of the training time that may go into validation
SAVE_EVERY = 30  # seconds, about: what a kill may cost


@dataclass(frozen=True)
class Estimate:
    """Seconds."""

    training: float
    judging: float  # on the validation split, on the way
    ending: float  # the test split, the report

    @property
    def total(self) -> float:
        return self.training + self.judging + self.ending


def plan_of(recipe: Recipe, facts: Facts) -> Plan:
    return Plan(
        n=facts.train,
        batch_size=recipe.data.batch_size,
        epochs=recipe.run.epochs,
        seed=recipe.run.seed,
        accumulate=recipe.optim.accumulate,
        world=facts.world,
    )


def workers_for(facts: Facts, speed: Speed) -> int:
    """Processes that prepare batches, where preparing takes more than a tenth of the step."""
    if facts.in_memory or speed.prepare < 0.1 * speed.step:
        return 0
    return min(facts.cpus, 1 + math.ceil(speed.prepare / speed.step))


def step_seconds(recipe: Recipe, facts: Facts, speed: Speed) -> float:
    """One step, on average over the run, with its share of preparing pictures."""
    until = recipe.augment.drop_patches_until if recipe.augment.drop_patches else 0.0
    step, workers = until * speed.early + (1 - until) * speed.step, recipe.data.workers
    if workers == 0:
        return step + speed.prepare
    if facts.device == "cpu":  # they share the cores with the step itself
        return step + speed.prepare / min(workers, facts.cpus)
    return max(step, speed.prepare / workers)


def estimate(recipe: Recipe, facts: Facts, speed: Speed) -> Estimate:
    """What is still to come after measuring."""
    total = plan_of(recipe, facts).total
    saves = math.ceil(total / (recipe.run.save_every or plan_of(recipe, facts).steps_per_epoch))
    resizing = speed.resize * (facts.train + facts.val + facts.test) if facts.in_memory else 0.0
    steps = total * step_seconds(recipe, facts, speed)
    return Estimate(
        training=resizing + speed.first + steps + saves * wrap_up_seconds(speed.params) / 10,
        judging=math.ceil(recipe.run.epochs / recipe.run.eval_every) * facts.val * speed.judge,
        ending=(facts.test or facts.val) * speed.judge + wrap_up_seconds(speed.params),
    )


def scheduled(recipe: Recipe, epochs: int, facts: Facts, speed: Speed, settings: list[str]) -> Recipe:
    """The recipe with so many epochs, and with workers, warm-up, validation and saves to match."""
    recipe = replace(recipe, run=replace(recipe.run, epochs=epochs))
    recipe = replace(recipe, data=replace(recipe.data, workers=workers_for(facts, speed)))
    recipe = with_settings(recipe, settings)
    total = plan_of(recipe, facts).total
    seconds = total * step_seconds(recipe, facts, speed)
    times = max(1, min(10, int(JUDGING * seconds / max(facts.val * speed.judge, 1e-9))))
    saves = max(1, min(20, int(seconds / SAVE_EVERY)))
    optim = replace(recipe.optim, warmup_epochs=round(0.05 * epochs, 2))
    run = replace(recipe.run, eval_every=math.ceil(epochs / times), save_every=math.ceil(total / saves))
    return with_settings(replace(recipe, optim=optim, run=run), settings)


def longest(
    recipe: Recipe, facts: Facts, speed: Speed, settings: list[str], seconds: float, most: int
) -> Recipe | None:
    """The recipe with the most epochs, up to `most`, that is estimated to end within `seconds`; None: not even one."""
    one = scheduled(recipe, 1, facts, speed, settings)
    per_epoch = plan_of(one, facts).steps_per_epoch * step_seconds(one, facts, speed)
    for epochs in range(min(most, int(max(seconds, 0.0) / max(per_epoch, 1e-9))), 0, -1):
        found = scheduled(recipe, epochs, facts, speed, settings)
        if estimate(found, facts, speed).total <= seconds:
            return found
    return None
