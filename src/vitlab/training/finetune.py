"""The model of a recipe: new, or from any checkpoint with a new head, another size, a frozen encoder.

A checkpoint that learned without labels (MAE, DINO, CLIP) gives its encoder, unless it continues without.
"""

from __future__ import annotations

from typing import TypeVar

from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.report import Report
from vitlab.errors import TrainingError
from vitlab.factory import create
from vitlab.models import registry
from vitlab.models.base import Network
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.objectives import OBJECTIVES, objective_class
from vitlab.training.objectives.base import check_own_settings
from vitlab.training.recipe import ModelRecipe, Recipe

N = TypeVar("N", bound=Network)
HEAD = ("head.", "head_distill.", "head_norm.", "pool.", "pre_logits.")


def build_model(
    recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None = None
) -> tuple[Network, list[str]]:
    """The model, and notes on how it was made. `tokenizer`: for a new model that reads text."""
    check_own_settings(recipe)
    return objective_class(recipe.objective.name).build_model(recipe, classes, channels, tokenizer)


def build_classifier(recipe: ModelRecipe, classes: list[str], channels: int) -> tuple[Network, list[str]]:
    """A model with a head for these classes."""
    notes: list[str] = []
    if recipe.init_from is None:
        family = registry.find(recipe.name)[0].family
        if family in OBJECTIVES:
            raise TrainingError(f"{recipe.name} learns without labels: set objective.name={family}.")
        model = create(recipe.name, **{"classes": len(classes), "channels": channels, **recipe.options})
    else:
        model, report = load_with_report(recipe.init_from, encoder=True, **recipe.options)
        notes += report.notes
        same_count = model.config.classes == len(classes)
        if model.labels == classes or (model.labels is None and same_count):
            notes.append(f"started from {recipe.init_from}, with its head for the same {len(classes)} classes.")
        else:
            options = {**recipe.options, "classes": len(classes)}
            model, report = load_with_report(recipe.init_from, encoder=True, **options)
            if same_count:
                model.reset_classifier(len(classes))  # as many classes, but others
            notes.append(f"started from {recipe.init_from}, with a new head for {len(classes)} classes.")
        notes += resized_notes(report)
    if model.config.classes != len(classes):
        raise TrainingError(
            f"the model has {model.config.classes} classes but the data have {len(classes)}: leave model.classes out."
        )
    check_channels(model)
    model.labels = list(classes)
    if recipe.freeze == "encoder":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(HEAD))
        notes.append("the encoder is frozen: only the head learns.")
    return model, notes


def build_pretraining_model(
    recipe: ModelRecipe, kind: type[N], channels: int, *, family: str, example: str
) -> tuple[N, list[str]]:
    """A model of the class that the objective named `family` teaches; `example` is one, for the error message."""
    notes = []
    if recipe.freeze != "none":
        raise TrainingError(f"model.freeze={recipe.freeze} leaves nothing that objective.name={family} could teach.")
    if recipe.init_from is None:
        model = create(recipe.name, **{"channels": channels, **recipe.options})
    else:
        model, report = load_with_report(recipe.init_from, **recipe.options)
        model.train()
        notes += [*report.notes, f"started from {recipe.init_from}."]
    if not isinstance(model, kind):
        why = "".join(f" It {note}" for note in notes[:-1])  # it may hold an encoder alone
        raise TrainingError(
            f"objective.name={family} teaches a model of the family {family}, but {recipe.init_from or recipe.name} is "
            f"of {model.family}: model.name={example}, for instance.{why}"
        )
    check_channels(model)
    return model, notes


def resized_notes(report: Report) -> list[str]:
    return [f"{row.ours} resized {row.note}." for row in report.rows if row.status == "resized"]


def check_channels(model: Network) -> None:
    if model.preprocess is None:
        raise TrainingError(
            f"a model of {model.config.channels} channels cannot read images: use model.channels=1 or 3."
        )
