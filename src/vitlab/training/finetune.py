"""The model a recipe asks for: new, or from any checkpoint with a new head, another size, a frozen encoder.

A checkpoint that learned without labels (MAE, DINO) gives its encoder, unless it goes on to learn without.
"""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints.load import create, load_with_report
from vitlab.training.recipe import ModelRecipe, ObjectiveRecipe

HEAD = ("head.", "head_distill.", "head_norm.", "pool.", "pre_logits.")
WITHOUT_LABELS = {"mae": "mae_cifar", "dino": "dino_cifar"}  # objective, which is its family's name; a model of it


def build_model(
    recipe: ModelRecipe, classes: list[str], channels: int, objective: ObjectiveRecipe | None = None
) -> tuple[Any, list[str]]:
    """The model and, in words, what was done to get it."""
    method = "supervised" if objective is None else objective.name
    if method in WITHOUT_LABELS:
        return _without_labels(recipe, method, channels)
    notes: list[str] = []
    if recipe.init_from is None and recipe.name.startswith(tuple(f"{family}_" for family in WITHOUT_LABELS)):
        family = recipe.name.partition("_")[0]
        raise ValueError(f"{recipe.name} learns without labels: set objective.name={family}.")
    if recipe.init_from is None:
        model = create(recipe.name, **{"classes": len(classes), "channels": channels, **recipe.options})
    else:
        plain, report = load_with_report(recipe.init_from, encoder=True, **recipe.options)
        same = plain.labels == classes or (plain.labels is None and plain.config.classes == len(classes))
        notes += report.notes
        if same:
            model = plain
            notes.append(f"started from {recipe.init_from}, with its head for the same {len(classes)} classes.")
        else:
            options = {**recipe.options, "classes": len(classes)}
            model, report = load_with_report(recipe.init_from, encoder=True, **options)
            if plain.config.classes == len(classes):
                model.reset_classifier(len(classes))  # as many classes, but others
            notes.append(f"started from {recipe.init_from}, with a new head for {len(classes)} classes.")
        resized = [row for row in report.rows if row.status == "resized"]
        notes += [f"{row.ours} resized {row.note}." for row in resized]
    if model.config.classes != len(classes):
        raise ValueError(
            f"the model has {model.config.classes} classes but the data have {len(classes)}: leave model.classes out."
        )
    _check_reads(model)
    model.labels = list(classes)
    if recipe.freeze == "encoder":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(HEAD))
        notes.append("the encoder is frozen: only the head learns.")
    return model, notes


def _without_labels(recipe: ModelRecipe, method: str, channels: int) -> tuple[Any, list[str]]:
    notes: list[str] = []
    if recipe.freeze != "none":
        raise ValueError(f"model.freeze={recipe.freeze} leaves nothing that objective.name={method} could teach.")
    if recipe.init_from is None:
        model = create(recipe.name, **{"channels": channels, **recipe.options})
    else:
        model, report = load_with_report(recipe.init_from, **recipe.options)
        model.train()
        notes += [*report.notes, f"started from {recipe.init_from}."]
    if model.family != method:
        found = recipe.init_from or recipe.name
        why = "".join(f" It {note}" for note in notes[:-1])  # it may hold an encoder alone
        raise ValueError(
            f"objective.name={method} teaches a model of the family {method}, but {found} is of {model.family}: "
            f"model.name={WITHOUT_LABELS[method]}, for instance.{why}"
        )
    _check_reads(model)
    return model, notes


def _check_reads(model: Any) -> None:
    if model.preprocess is None:
        raise ValueError(
            f"a model of {model.config.channels} channels cannot read pictures: use model.channels=1 or 3."
        )
