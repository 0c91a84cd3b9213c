"""Steps of a claim that trains every arm with every seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vitlab.study.grid import file_safe
from vitlab.study.reproduce.bench import accuracy
from vitlab.study.reproduce.claim import ClaimStep
from vitlab.training.loop import Show
from vitlab.training.recipe import Recipe

Score = Callable[[Recipe, Path, Show], float]


def grid(
    arms: Mapping[str, Any], recipe: Callable[[Any, int], Recipe], seeds: int, score: Score = accuracy
) -> list[ClaimStep]:
    """`recipe(arm's value, seed)` for all arms, seed by seed."""
    return [
        ClaimStep(file_safe(f"{arm},seed={seed}"), str(seed), partial(_measure, arm, recipe(varied, seed), score))
        for seed in range(seeds)
        for arm, varied in arms.items()
    ]


def _measure(arm: str, recipe: Recipe, score: Score, folder: Path, show: Show) -> dict[str, float]:
    return {arm: score(recipe, folder, show)}


def seed_by_seed(seeds: int, measure: Callable[[int, Path, Show], dict[str, float]]) -> list[ClaimStep]:
    """One step for each seed, which measures all arms."""
    return [ClaimStep(f"seed={seed}", str(seed), partial(measure, seed)) for seed in range(seeds)]
