"""The models that ship with vitlab, as units of claims that need no training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from vitlab.checkpoints.load import load_with_report
from vitlab.images.photos import PHOTOS, PREFIX
from vitlab.models.plain import PlainTransformer
from vitlab.study.reproduce.claim import ClaimStep
from vitlab.training.loop import Show

DIGITS = 30  # images


def bundled_encoder(name: str) -> PlainTransformer:
    model = load_with_report(f"bundled:{name}")[0].encoder
    assert isinstance(model, PlainTransformer)
    return model


def images_for(model: PlainTransformer) -> list[str]:
    """The photos of the package, or handwritten digits for a model of grey images."""
    if model.config.channels == 1:
        return [f"digits#{number}" for number in range(DIGITS)]
    return [f"{PREFIX}{name}" for name in PHOTOS]


def model_by_model(names: Sequence[str], measure: Callable[[str, Path, Show], dict[str, float]]) -> list[ClaimStep]:
    """One step for each model."""
    return [ClaimStep(name, name, partial(measure, name)) for name in names]
