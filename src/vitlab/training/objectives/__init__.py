"""Training objectives. Each is one file of this package and one line of the table below.

An objective owns all that differs between methods: the checks of its settings, its model, augmentation, inputs and
loss, its evaluation and its diagnosis. `base.Objective` lists what it may override, `supervised` is the simplest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitlab.training.objectives.base import Objective

OBJECTIVES = {  # objective.name, which is also the name of the file -> class
    "supervised": "Supervised",
    "distill": "Distillation",
    "mae": "MaskedReconstruction",
    "dino": "SelfDistillation",
    "clip": "ContrastiveLearning",
}


def objective_class(name: str) -> type[Objective]:
    """Imports the objective's file, and with it torch, which a recipe does without."""
    return getattr(import_module(f"{__name__}.{name}"), OBJECTIVES[name])
