"""Training objectives. Each is one file of this package and one line of the table below.

An objective owns all that differs between methods: its options and their checks, its model, augmentation, inputs and
loss, its evaluation, diagnosis and charts. `base.Objective` lists what it may override, `supervised` is the simplest.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitlab.training.objectives.base import Objective, ObjectiveOptions

OBJECTIVES = {  # objective.name, which is also the name of the file -> class
    "supervised": "Supervised",
    "multilabel": "MultiLabel",
    "regression": "Regression",
    "distill": "Distillation",
    "mae": "MaskedReconstruction",
    "dino": "SelfDistillation",
    "clip": "ContrastiveLearning",
    "segment": "Segmentation",
    "instance": "InstanceSegmentation",
    "detect": "Detection",
}
DEFAULT = next(iter(OBJECTIVES))


def objective_class(name: str) -> type[Objective]:
    """Imports the objective's file, and with it torch, which a recipe does without."""
    return getattr(import_module(f"{__name__}.{name}"), OBJECTIVES[name])


@cache
def option_owners() -> dict[str, type[ObjectiveOptions]]:
    """Every option of [objective] -> the class that declares it. Imports all objectives."""
    owners = [objective_class(name).options_class for name in OBJECTIVES]
    return {field.name: owner for owner in owners for field in fields(owner)}
