"""What a run of so many minutes is picked from: a ladder of small models, and how much augmentation the data stand.

A rung is a grid of patches and a network. Its patch is the largest of 2, 4, 8, 16 that leaves the grid whole in the
pictures' own size, so that small pictures are cut finely and none is enlarged.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vitlab.models import registry
from vitlab.training.recipe import (
    AugmentRecipe,
    DataRecipe,
    ModelRecipe,
    OptimRecipe,
    Recipe,
    RunRecipe,
    with_settings,
)


@dataclass(frozen=True)
class Facts:
    """What was found out about the data and the machine."""

    source: str
    train: int  # pictures
    val: int
    test: int
    classes: int
    channels: int
    side: int  # pixels: the shorter side of a typical picture
    alike: bool  # all of one size
    in_memory: bool
    characters: bool  # digits or letters, which have no mirror image
    device: str = "cpu"
    cpus: int = 2  # for each process
    world: int = 1


class Rung(NamedTuple):
    name: str  # of the model that has this network
    grid: int
    width: int
    depth: int
    heads: int
    patch: int  # the largest


LADDER = (
    Rung("vit_digits", grid=4, width=64, depth=4, heads=4, patch=8),
    Rung("vit_digits", grid=8, width=64, depth=4, heads=4, patch=8),
    Rung("vit_mnist", grid=4, width=128, depth=6, heads=4, patch=8),
    Rung("vit_mnist", grid=8, width=128, depth=6, heads=4, patch=8),
    Rung("vit_cifar", grid=8, width=192, depth=9, heads=6, patch=8),
    Rung("vit_cifar", grid=12, width=192, depth=9, heads=6, patch=8),
    Rung("vit_cifar", grid=16, width=192, depth=9, heads=6, patch=8),
    Rung("vit_tiny", grid=14, width=192, depth=12, heads=3, patch=16),
    Rung("vit_small", grid=14, width=384, depth=12, heads=6, patch=16),
    Rung("vit_small", grid=16, width=384, depth=12, heads=6, patch=8),
)


@dataclass(frozen=True)
class Level:
    """How much is done against learning by heart, from so many passes over the data on."""

    passes: int
    words: str
    augment: dict[str, Any] = field(default_factory=dict)
    stochastic_depth: float = 0.0
    decay: float = 0.05  # of Muon


LEVELS = (
    Level(0, "crops only, for few passes learn most from plain pictures"),
    Level(
        20,
        "crops, one RandAugment operation, some erasing, stochastic depth 0.05",
        dict(randaugment=1, magnitude=7.0, erasing=0.1),
        stochastic_depth=0.05,
        decay=0.1,
    ),
    Level(
        60,
        "crops, two RandAugment operations, erasing, Mixup or CutMix in half of the batches, stochastic depth 0.1",
        dict(randaugment=2, magnitude=9.0, erasing=0.25, mixup=0.2, cutmix=1.0, mix_probability=0.5),
        stochastic_depth=0.1,
        decay=0.3,  # the best on digits
    ),
)
NAMING = {"model.name", "model.init_from"}  # settings that say which model
PATCHES_LEFT_OUT = dict(drop_patches=0.5, drop_patches_until=0.65)


def enough_passes(facts: Facts, tuned: bool) -> int:
    """12 passes over 50,000 pictures, more over fewer by the square root; 5 to 100. Trained weights need a quarter."""
    passes = min(100.0, max(5.0, 12 * (50_000 / facts.train) ** 0.5))
    return max(3, round(passes / 4)) if tuned else round(passes)


def level_for(passes: int) -> Level:
    return next(level for level in reversed(LEVELS) if level.passes <= passes)


def given_keys(settings: list[str]) -> set[str]:
    return {setting.partition("=")[0].strip() for setting in settings}


def candidates(facts: Facts, settings: list[str]) -> list[ModelRecipe]:
    """The rungs that these pictures and settings allow, from little work to much; one where the model is named."""
    if given_keys(settings) & NAMING:
        return [with_settings(Recipe(), settings).model]
    found, refused = [], None
    for rung in LADDER:
        model = _model(rung, facts.side)
        if model is None:
            continue
        model = with_settings(Recipe(model=model), settings).model
        try:
            found.append((work(model), config_of(model).image_size, model))
        except ValueError as error:  # the settings do not go with this rung
            refused = error
    if not found:
        assert refused is not None
        raise refused
    found.sort(key=lambda row: row[0])
    picked: list[ModelRecipe] = []
    sharpest = (0, 0)
    for _, size, model in found:
        if size >= sharpest and model not in picked:  # more work on a smaller picture is a step down
            picked.append(model)
            sharpest = size
    return picked


def _model(rung: Rung, side: int) -> ModelRecipe | None:
    fitting = [patch for patch in (16, 8, 4, 2) if patch <= rung.patch and side // patch >= 0.75 * rung.grid]
    if not fitting and rung is not LADDER[0]:
        return None
    patch = fitting[0] if fitting else 2  # pictures below 6 px are enlarged to 8
    grid = min(rung.grid, side // patch) if fitting else rung.grid
    options = dict(image_size=grid * patch, patch_size=patch, width=rung.width, depth=rung.depth, heads=rung.heads)
    return ModelRecipe(rung.name, options={**options, "stem": "conv", "class_token": False, "pooling": "mean"})


def config_of(model: ModelRecipe) -> Any:
    return registry.build_config(model.name, **model.options)[1]


def work(model: ModelRecipe) -> float:
    """Multiplications of the blocks, about, for one picture."""
    c = config_of(model)
    tokens = c.grid[0] * c.grid[1]
    return c.depth * tokens * (2 * c.width * (2 * c.width + c.mlp_hidden) + 2 * tokens * c.width)


def draft(facts: Facts, model: ModelRecipe, level: Level, settings: list[str]) -> Recipe:
    """A whole recipe for this model and level, but for the schedule; the settings have the last word."""
    tuned, config = model.init_from is not None, None if model.init_from is not None else config_of(model)
    if level.stochastic_depth:
        model = replace(model, options={"stochastic_depth": level.stochastic_depth, **model.options})
    recipe = Recipe(
        data=DataRecipe(facts.source, batch_size=_batch_size(facts, config)),
        augment=AugmentRecipe(**_augment(facts, config, level)),
        model=model,
        optim=_tuning(model) if tuned else _optim(facts, config, level),
        run=RunRecipe(amp="bf16" if facts.device == "cuda" else "off"),
    )
    return with_settings(recipe, settings)


def _batch_size(facts: Facts, config: Any) -> int:
    """16 steps a pass or more; what is large takes memory."""
    most = 128 if facts.device == "cpu" else 256
    if config is None or max(config.image_size) > 96:
        most = 64
    wanted = facts.train // (16 * facts.world)
    return min(most, max(8, 1 << max(0, wanted.bit_length() - 1)))


def _augment(facts: Facts, config: Any, level: Level) -> dict[str, Any]:
    values: dict[str, Any] = dict(smoothing=0.1, flip=not facts.characters)
    if config is None:  # trained weights: their size is not known yet
        values |= {} if facts.characters else dict(crop="resized", scale=(0.5, 1.0))
    elif facts.characters or (facts.alike and facts.side <= 1.25 * max(config.image_size)):
        border = "zeros" if facts.characters else "reflect"
        values |= dict(crop="padded", padding=max(1, min(config.image_size) // 8), border=border)
    else:
        values |= dict(crop="resized", scale=(0.35, 1.0))
    if not facts.characters:  # RandAugment and mixing turn one character into another
        values |= level.augment
    if config is not None and level.passes == 0 and config.grid[0] * config.grid[1] >= 36:
        values |= PATCHES_LEFT_OUT if config.positions.kind != "relative" else {}
    return values


def _optim(facts: Facts, config: Any, level: Level) -> OptimRecipe:
    if facts.device == "cpu":
        return OptimRecipe("muon", lr=2e-3, weight_decay=level.decay, schedule="linear")
    return OptimRecipe("adamw", lr=1e-3 if config.width < 384 else 5e-4, weight_decay=0.05, clip=1.0)


def _tuning(model: ModelRecipe) -> OptimRecipe:
    if model.freeze == "encoder":
        return OptimRecipe("adamw", lr=1e-3, weight_decay=0.05)
    return OptimRecipe("adamw", lr=3e-4, weight_decay=0.05, layer_decay=0.75, clip=1.0)
