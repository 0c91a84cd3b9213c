"""What autopick chooses from: small models by size, levels of augmentation, and the longest schedule in a time.

A size is a grid of patches and a network. Its patch is the largest of 2, 4, 8, 16 whose grid fits into the images at
their own size, so that small images get small patches and none is enlarged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vitlab.errors import VitlabError
from vitlab.models import registry
from vitlab.models.vit_config import ViTConfig
from vitlab.training.batches import Plan
from vitlab.training.measure import Speed
from vitlab.training.recipe import (
    AugmentRecipe,
    DataRecipe,
    ModelRecipe,
    OptimRecipe,
    Recipe,
    RunRecipe,
    with_settings,
)
from vitlab.training.timelimit import wrap_up_seconds


@dataclass(frozen=True)
class Facts:
    """Facts about the data and the machine."""

    source: str
    train: int  # images
    val: int
    test: int
    classes: int
    channels: int
    side: int  # pixels: the shorter side of a typical image
    alike: bool  # all of one size
    in_memory: bool
    characters: bool  # digits or letters, which have no mirror image
    photos: bool = True  # 8-bit colours
    device: str = "cpu"
    cpus: int = 2  # for each process
    world: int = 1


class ModelSize(NamedTuple):
    name: str  # of the model that has this network
    grid: int
    width: int
    depth: int
    heads: int
    patch: int  # the largest


SIZES = (
    ModelSize("vit_digits", grid=4, width=64, depth=4, heads=4, patch=8),
    ModelSize("vit_digits", grid=8, width=64, depth=4, heads=4, patch=8),
    ModelSize("vit_mnist", grid=4, width=128, depth=6, heads=4, patch=8),
    ModelSize("vit_mnist", grid=8, width=128, depth=6, heads=4, patch=8),
    ModelSize("vit_cifar", grid=8, width=192, depth=9, heads=6, patch=8),
    ModelSize("vit_cifar", grid=12, width=192, depth=9, heads=6, patch=8),
    ModelSize("vit_cifar", grid=16, width=192, depth=9, heads=6, patch=8),
    ModelSize("vit_tiny", grid=14, width=192, depth=12, heads=3, patch=16),
    ModelSize("vit_small", grid=14, width=384, depth=12, heads=6, patch=16),
    ModelSize("vit_small", grid=16, width=384, depth=12, heads=6, patch=8),
)


@dataclass(frozen=True)
class AugmentationLevel:
    """Augmentation and regularisation for a run of at least so many passes over the data."""

    passes: int
    description: str
    augment: dict[str, Any] = field(default_factory=dict)
    stochastic_depth: float = 0.0
    decay: float = 0.05  # of Muon


LEVELS = (
    AugmentationLevel(0, "crops only, for few passes learn most from plain images"),
    AugmentationLevel(
        20,
        "crops, one RandAugment operation, some erasing, stochastic depth 0.05",
        dict(randaugment=1, magnitude=7.0, erasing=0.1),
        stochastic_depth=0.05,
        decay=0.1,
    ),
    AugmentationLevel(
        60,
        "crops, two RandAugment operations, erasing, Mixup or CutMix in half of the batches, stochastic depth 0.1",
        dict(randaugment=2, magnitude=9.0, erasing=0.25, mixup=0.2, cutmix=1.0, mix_probability=0.5),
        stochastic_depth=0.1,
        decay=0.3,  # the best on digits
    ),
)
COLOUR = ("randaugment", "magnitude")  # augmentation that is for photos
PATCH_DROPOUT = dict(drop_patches=0.5, drop_patches_until=0.65)
EVALUATION = 0.1  # share of the training time that may go into validation
SAVE_EVERY = 30  # seconds, about: what a kill may cost


def enough_passes(facts: Facts, tuned: bool) -> int:
    """12 passes over 50,000 images, more over fewer by the square root; 5 to 100. Trained weights need a quarter."""
    passes = min(100.0, max(5.0, 12 * (50_000 / facts.train) ** 0.5))
    return max(3, round(passes / 4)) if tuned else round(passes)


def level_for(passes: int) -> AugmentationLevel:
    return next(level for level in reversed(LEVELS) if level.passes <= passes)


def given_keys(settings: Sequence[str]) -> set[str]:
    return {setting.partition("=")[0].strip() for setting in settings}


def names_model(settings: Sequence[str]) -> bool:
    """Whether the settings say which model; model.init_from=none asks for a new one of any kind."""
    naming = [text for text in settings if given_keys([text]) & {"model.name", "model.init_from"}]
    return "model.name" in given_keys(naming) or with_settings(Recipe(), naming).model.init_from is not None


def candidates(facts: Facts, settings: list[str]) -> list[ModelRecipe]:
    """The models that these images and settings allow, from little work to much; one where the settings name it."""
    if names_model(settings):
        return [with_settings(Recipe(), settings).model]
    models, refused = [], None
    for size in SIZES:
        model = _model(size, facts.side)
        if model is None:
            continue
        model = with_settings(Recipe(model=model), settings).model
        try:
            models.append((work(model), registry.build_config(model.name, **model.options)[1].image_size, model))
        except VitlabError as error:  # the settings do not go with this size
            refused = error
    if not models:
        assert refused is not None
        raise refused
    models.sort(key=lambda row: row[0])
    picked: list[ModelRecipe] = []
    sharpest = (0, 0)
    for _, size, model in models:
        if size >= sharpest and model not in picked:  # more work on a smaller image is a step down
            picked.append(model)
            sharpest = size
    return picked


def _model(size: ModelSize, side: int) -> ModelRecipe | None:
    fitting = [patch for patch in (16, 8, 4, 2) if patch <= size.patch and side // patch >= 0.75 * size.grid]
    if not fitting and size is not SIZES[0]:
        return None
    patch = fitting[0] if fitting else 2  # images below 6 px are enlarged to 8
    grid = min(size.grid, side // patch) if fitting else size.grid
    options = dict(image_size=grid * patch, patch_size=patch, width=size.width, depth=size.depth, heads=size.heads)
    return ModelRecipe(size.name, options={**options, "stem": "conv", "class_token": False, "pooling": "mean"})


def config_of(model: ModelRecipe) -> ViTConfig | None:
    """None for another family than ViT, whose work is not estimated here."""
    config = registry.build_config(model.name, **model.options)[1]
    return config if isinstance(config, ViTConfig) else None


def work(model: ModelRecipe) -> float:
    """Approximate multiplications of the blocks for one image."""
    c = config_of(model)
    assert c is not None  # one of SIZES
    tokens = c.grid[0] * c.grid[1]
    return c.depth * tokens * (2 * c.width * (2 * c.width + c.mlp_hidden) + 2 * tokens * c.width)


def draft(facts: Facts, model: ModelRecipe, level: AugmentationLevel, settings: list[str]) -> Recipe:
    """A recipe for this model and level without the schedule; the settings override it."""
    tuned, config = model.init_from is not None, None if model.init_from is not None else config_of(model)
    if level.stochastic_depth and (tuned or config is not None):  # not every family has it
        model = replace(model, options={"stochastic_depth": level.stochastic_depth, **model.options})
    recipe = Recipe(
        data=DataRecipe(facts.source, batch_size=_batch_size(facts, config)),
        augment=AugmentRecipe(**_augment(facts, config, level)),
        model=model,
        optim=_tuning(model) if tuned else _optim(facts, config, level),
        run=RunRecipe(amp="bf16" if facts.device == "cuda" else "off"),
    )
    return with_settings(recipe, settings)


def _batch_size(facts: Facts, config: ViTConfig | None) -> int:
    """At least 16 steps per pass; smaller for large images, which need memory."""
    most = 128 if facts.device == "cpu" else 256
    if config is None or max(config.image_size) > 96:
        most = 64
    wanted = facts.train // (16 * facts.world)
    return min(most, max(8, 1 << max(0, wanted.bit_length() - 1)))


def _augment(facts: Facts, config: ViTConfig | None, level: AugmentationLevel) -> dict[str, Any]:
    values: dict[str, Any] = dict(smoothing=0.1, flip=not facts.characters)
    if config is None:  # trained weights, or another family: their size is not known yet
        values |= {} if facts.characters else dict(crop="resized", scale=(0.5, 1.0))
    elif facts.characters or (facts.alike and facts.side <= 1.25 * max(config.image_size)):
        border = "zeros" if facts.characters else "reflect"
        values |= dict(crop="padded", padding=max(1, min(config.image_size) // 8), border=border)
    else:
        values |= dict(crop="resized", scale=(0.35, 1.0))
    if not facts.characters:  # RandAugment and mixing turn one character into another
        values |= {name: value for name, value in level.augment.items() if facts.photos or name not in COLOUR}
    if config is not None and level.passes == 0 and config.grid[0] * config.grid[1] >= 36:
        values |= PATCH_DROPOUT if config.positions.kind != "relative" else {}
    return values


def _optim(facts: Facts, config: ViTConfig | None, level: AugmentationLevel) -> OptimRecipe:
    if facts.device == "cpu" and config is not None:
        return OptimRecipe("muon", lr=2e-3, weight_decay=level.decay, schedule="linear")
    return OptimRecipe(
        "adamw", lr=1e-3 if config is not None and config.width < 384 else 5e-4, weight_decay=0.05, clip=1.0
    )


def _tuning(model: ModelRecipe) -> OptimRecipe:
    if model.freeze == "encoder" or model.lora:
        return OptimRecipe("adamw", lr=1e-3, weight_decay=0.05)
    return OptimRecipe("adamw", lr=3e-4, weight_decay=0.05, layer_decay=0.75, clip=1.0)


# ------------------------------------------------------------------------------------------- how long a run takes


@dataclass(frozen=True)
class Estimate:
    """Seconds."""

    training: float
    evaluation: float  # on the validation split, on the way
    ending: float  # the test split, the report

    @property
    def total(self) -> float:
        return self.training + self.evaluation + self.ending


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
    """One step, on average over the run, with its share of preparing images."""
    until = recipe.augment.drop_patches_until if recipe.augment.drop_patches else 0.0
    step, workers = until * speed.early + (1 - until) * speed.step, recipe.data.workers
    if workers == 0:
        return step + speed.prepare
    if facts.device == "cpu":  # they share the cores with the step itself
        return step + speed.prepare / min(workers, facts.cpus)
    return max(step, speed.prepare / workers)


def estimate(recipe: Recipe, facts: Facts, speed: Speed) -> Estimate:
    """What remains after measuring."""
    total = plan_of(recipe, facts).total
    saves = math.ceil(total / (recipe.run.save_every or plan_of(recipe, facts).steps_per_epoch))
    resizing = speed.resize * (facts.train + facts.val + facts.test) if facts.in_memory else 0.0
    steps = total * step_seconds(recipe, facts, speed)
    return Estimate(
        training=resizing + speed.first + steps + saves * wrap_up_seconds(speed.params) / 10,
        evaluation=math.ceil(recipe.run.epochs / recipe.run.eval_every) * facts.val * speed.evaluate,
        ending=(facts.test or facts.val) * speed.evaluate + wrap_up_seconds(speed.params),
    )


def scheduled(recipe: Recipe, epochs: int, facts: Facts, speed: Speed, settings: list[str]) -> Recipe:
    """The recipe with so many epochs, and with workers, warm-up, validation and saves to match."""
    recipe = replace(recipe, run=replace(recipe.run, epochs=epochs))
    recipe = replace(recipe, data=replace(recipe.data, workers=workers_for(facts, speed)))
    recipe = with_settings(recipe, settings)
    total = plan_of(recipe, facts).total
    seconds = total * step_seconds(recipe, facts, speed)
    times = max(1, min(10, int(EVALUATION * seconds / max(facts.val * speed.evaluate, 1e-9))))
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
        candidate = scheduled(recipe, epochs, facts, speed, settings)
        if estimate(candidate, facts, speed).total <= seconds:
            return candidate
    return None
