"""Recipes of the claims' trainings: digits, which everybody has, or CIFAR-10 by its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UsageError
from vitlab.study.runner import StepsOnly
from vitlab.training.doctor import DivergedError
from vitlab.training.job import data_of
from vitlab.training.loop import Show, fit
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import Recipe, from_tables, with_settings, with_value
from vitlab.training.runs import RECIPE, read_result

Network = Literal["vit", "resnet"]
Method = Literal["mae", "dino", "clip"]

WARMUP = 0.1  # of the epochs
SAVE_EVERY = 200  # steps
MUON = {"name": "muon", "lr": 2e-3, "weight_decay": 0.3}
ADAMW = {"name": "adamw", "lr": 2e-3, "weight_decay": 0.05, "clip": 1.0}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}
RESERVED = {"run.seed": "--seeds", "run.dir": "-o", "run.eval_every": "nothing: the last model is evaluated"}


@dataclass(frozen=True)
class DataPreset:
    """A dataset with the networks and augmentation that fit its images."""

    name: str
    batch: int
    augment: Mapping[str, Any]
    networks: Mapping[Network, tuple[str, Mapping[str, Any]]]
    recipes: Mapping[Method, str]  # shipped with vitlab
    epochs: float = 1.0  # factor: more images need fewer epochs


SOURCES = {
    "digits": DataPreset(
        name="digits",
        batch=64,
        augment={"crop": "padded", "padding": 1, "border": "zeros", "smoothing": 0.1},
        networks={"vit": ("vit_digits", {}), "resnet": ("resnet_cifar", {"image_size": 8})},
        recipes={"mae": "mae_digits", "dino": "dino_digits", "clip": "clip_digits"},
    ),
    "cifar10": DataPreset(
        name="cifar10",
        batch=128,
        augment={"crop": "padded", "padding": 4, "flip": True, "smoothing": 0.1},
        networks={"vit": ("vit_cifar", {"width": 128, "depth": 6, "heads": 4}), "resnet": ("resnet_cifar", {})},
        recipes={"mae": "mae_cifar10", "dino": "dino_cifar10", "clip": "clip_cifar10"},
        epochs=0.2,
    ),
}


@dataclass(frozen=True)
class Workbench:
    """Makes the recipes. `settings` are those of `vitlab train`, for every run."""

    settings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        keys = [text.partition("=")[0].strip() for text in self.settings]
        for key in keys:
            if key in RESERVED:
                raise UsageError(f"{key} is decided by the claim: use {RESERVED[key]}.")
        with_settings(self.source_recipe, list(self.settings))  # unknown names are refused before anything runs

    @property
    def source(self) -> DataPreset:
        """data.path without data.source is that of CIFAR-10: digits need no files."""
        values = {key.strip(): text.strip() for key, _, text in (s.partition("=") for s in self.settings)}
        name = values.get("data.source", "cifar10" if "data.path" in values else "digits")
        if name not in SOURCES:
            raise UsageError(f"data.source={name}: claims run on {' or '.join(SOURCES)}.")
        return SOURCES[name]

    @property
    def source_recipe(self) -> Recipe:
        return with_value(Recipe(), "data.source", self.source.name)

    def network(
        self,
        kind: Network,
        epochs: float,
        seed: int,
        varied: Mapping[str, Any] | None = None,
        *,
        optim: Mapping[str, Any] = MUON,
        fraction: float = 1.0,
    ) -> Recipe:
        """Training with labels. With a fraction of the images the number of steps is the same."""
        name, options = self.source.networks[kind]
        tables = {"augment": dict(self.source.augment), "model": {"name": name, **options}, "optim": dict(optim)}
        recipe = replace(from_tables(tables), data=replace(Recipe().data, batch_size=self.source.batch))
        recipe = with_value(recipe, "data.fraction", None if fraction == 1 else fraction)
        return self._finished(recipe, epochs / fraction, seed, varied or {})

    def pretraining(self, method: Method, epochs: float, seed: int, varied: Mapping[str, Any] | None = None) -> Recipe:
        """Training without labels, or with text, by the shipped recipe."""
        recipe = find_recipe(self.source.recipes[method])[1]
        return self._finished(recipe, epochs, seed, varied or {})

    def _finished(self, recipe: Recipe, epochs: float, seed: int, varied: Mapping[str, Any]) -> Recipe:
        """Warm-up, settings, then what is varied, which no setting may change."""
        epochs = max(1, round(epochs * self.source.epochs))
        values = {"data.source": self.source.name, "run.epochs": epochs, "run.save_every": SAVE_EVERY}
        values |= {"optim.warmup_epochs": WARMUP * epochs, "optim.warmup_steps": 0}
        for key, value in values.items():
            recipe = with_value(recipe, key, value)
        for text in self.settings:
            key = text.partition("=")[0].strip()
            if key in varied:
                raise UsageError(f"{key} is what this claim varies: it cannot be set.")
        recipe = with_settings(recipe, list(self.settings))
        if recipe.optim.warmup_epochs > recipe.run.epochs:  # run.epochs=1 in the settings
            recipe = with_value(recipe, "optim.warmup_epochs", WARMUP * recipe.run.epochs)
        for key, value in varied.items():
            recipe = with_value(recipe, key, value)
        recipe = with_value(recipe, "run.seed", seed)
        return with_value(recipe, "run.eval_every", recipe.run.epochs)

    @property
    def split(self) -> Recipe:
        """The data alone."""
        return with_settings(self.source_recipe, [s for s in self.settings if s.startswith("data.")])


def train(recipe: Recipe, run: Path, show: Show) -> Path:
    """Train, or resume; the folder of the last weights."""
    fit(recipe, run, resume=(run / RECIPE).is_file(), show=StepsOnly(show))
    return run / "last"


def accuracy(recipe: Recipe, run: Path, show: Show) -> float:
    """Test accuracy after training. A run that diverges counts as guessing."""
    try:
        train(recipe, run, show)
    except DivergedError as error:
        show.note(f"  diverged, which counts as guessing: {error}")
        return 1 / len(data_of(recipe).classes)
    return float(read_result(run)["top1"])
