"""The model a recipe asks for: new, or from any checkpoint with a new head, another size, a frozen encoder."""

from __future__ import annotations

from typing import Any

from vitlab.checkpoints.load import create, load_with_report
from vitlab.training.recipe import ModelRecipe

HEAD = ("head.", "head_distill.", "head_norm.", "pool.", "pre_logits.")


def build_model(recipe: ModelRecipe, classes: list[str], channels: int) -> tuple[Any, list[str]]:
    """The model and, in words, what was done to get it."""
    notes: list[str] = []
    if recipe.init_from is None:
        model = create(recipe.name, **{"classes": len(classes), "channels": channels, **recipe.options})
    else:
        plain, report = load_with_report(recipe.init_from, **recipe.options)
        same = plain.labels == classes or (plain.labels is None and plain.config.classes == len(classes))
        notes += report.notes
        if same:
            model = plain
            notes.append(f"started from {recipe.init_from}, with its head for the same {len(classes)} classes.")
        else:
            model, report = load_with_report(recipe.init_from, **{**recipe.options, "classes": len(classes)})
            if plain.config.classes == len(classes):
                model.reset_classifier(len(classes))  # as many classes, but others
            notes.append(f"started from {recipe.init_from}, with a new head for {len(classes)} classes.")
        resized = [row for row in report.rows if row.status == "resized"]
        notes += [f"{row.ours} resized {row.note}." for row in resized]
    if model.config.classes != len(classes):
        raise ValueError(
            f"the model has {model.config.classes} classes but the data have {len(classes)}: leave model.classes out."
        )
    if model.preprocess is None:
        raise ValueError(
            f"a model of {model.config.channels} channels cannot read pictures: use model.channels=1 or 3."
        )
    model.labels = list(classes)
    if recipe.freeze == "encoder":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(HEAD))
        notes.append("the encoder is frozen: only the head learns.")
    return model, notes
