"""What a claim is: what a paper says, the experiment here, and the rule that decides. One file each in claims/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitlab.language import Language
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.verdict import Criterion
from vitlab.training.loop import Show

Measure = Callable[[Path, Show], dict[str, float]]  # (folder for runs, progress) -> value by arm


@dataclass(frozen=True)
class Text:
    en: str
    zh: str

    def __getitem__(self, language: Language) -> str:
        return self.zh if language == "zh" else self.en


@dataclass(frozen=True)
class Citation:
    name: str
    arxiv: str
    place: str  # section, figure, table


@dataclass(frozen=True)
class ClaimStep:
    """One part of an experiment that is repeated as a whole after an interruption."""

    name: str  # of its folder
    unit: str  # what its values are paired by: a seed, or a model
    measure: Measure


@dataclass(frozen=True)
class Arm:
    """One of the things that are compared. With `x` it is a point of the line `series`."""

    name: str
    series: str = ""
    x: float | None = None


@dataclass(frozen=True)
class Claim:
    name: str
    title: Text  # the claim in one sentence
    paper: Citation
    says: Text  # what the paper says, with its numbers
    here: Text  # the experiment
    arms: tuple[Arm, ...]
    rule: tuple[Criterion, ...]  # all must hold
    steps: Callable[[Workbench, int], list[ClaimStep]]  # (networks and data, number of seeds)
    scale: Literal["accuracy", "number"] = "accuracy"
    measured: str = "test accuracy"  # label of the axis
    axis: str = ""  # of the arms' x
    seeded: bool = True  # False: the units are models, and --seeds has no effect
    minutes: float = 3.0  # about, on one thread
