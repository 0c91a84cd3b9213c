"""The model a recipe asks for: new, or from any checkpoint with a new head, another size, a frozen encoder.

A checkpoint that learned without labels (MAE, DINO, CLIP) gives its encoder, unless it goes on to learn without.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vitlab.checkpoints.files import CheckpointError
from vitlab.checkpoints.load import create, load_with_report
from vitlab.models import registry
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.recipe import ModelRecipe, ObjectiveRecipe

HEAD = ("head.", "head_distill.", "head_norm.", "pool.", "pre_logits.")
WITHOUT_LABELS = {  # objective, which is its family's name; a model of it
    "mae": "mae_cifar",
    "dino": "dino_cifar",
    "clip": "clip_nano",
}


def build_model(
    recipe: ModelRecipe,
    classes: list[str],
    channels: int,
    objective: ObjectiveRecipe | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Any, list[str]]:
    """The model and, in words, what was done to get it. `tokenizer`: of a new model that reads words."""
    method = "supervised" if objective is None else objective.name
    if recipe.init_image is not None and method != "clip":
        raise ValueError("model.init_image is for objective.name=clip: elsewhere it is model.init_from.")
    if objective is not None and method == "clip":
        return _with_words(recipe, channels, objective, tokenizer)
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


def _with_words(
    recipe: ModelRecipe, channels: int, objective: ObjectiveRecipe, tokenizer: Tokenizer | None
) -> tuple[Any, list[str]]:
    """A CLIP: new, with the image tower of another checkpoint, or one that goes on with its own tokenizer."""
    if recipe.init_from is not None:
        if recipe.init_image is not None:
            raise ValueError("model.init_from brings an image tower along: leave out model.init_image.")
        model, notes = _without_labels(replace(recipe, freeze="none"), "clip", channels)
        if model.config.loss != objective.loss:
            raise ValueError(
                f"{recipe.init_from} learned with the {model.config.loss} loss: set objective.loss={model.config.loss}."
            )
        model.tokenizer = model.tokenizer or tokenizer
        if model.tokenizer is None:
            raise ValueError(f"{recipe.init_from} has no tokenizer: name its file, text.tokenizer=tokenizer.json.")
    else:
        if registry.find(recipe.name)[0].family != "clip":
            raise ValueError(f"objective.name=clip teaches a CLIP, not {recipe.name}: model.name=clip_nano, e.g.")
        if recipe.freeze == "encoder" and recipe.init_image is None:
            raise ValueError(
                "model.freeze=encoder would lock an image tower that has learned nothing: name a checkpoint of a ViT, "
                "model.init_image=bundled:cifar10, e.g."
            )
        options = {"loss": objective.loss, **({} if tokenizer is None else tokenizer.options), **recipe.options}
        notes, tower = [], None
        if recipe.init_image is None:
            options = {"channels": channels, **options}
        else:
            tower, notes = _image_tower(recipe, recipe.init_image)
            options = {"image": tower.config, **options}
        model = create(recipe.name, **options)
        if tower is not None:
            model.image.load_state_dict(tower.state_dict())
            model.preprocess = tower.preprocess
        model.tokenizer = tokenizer
        _check_reads(model)
    if recipe.freeze == "encoder":
        model.image.requires_grad_(False)
        notes.append("the image tower is locked: the text tower and both projections learn.")
    return model, notes


def _image_tower(recipe: ModelRecipe, source: str) -> tuple[Any, list[str]]:
    """The ViT of any checkpoint, at the size that the recipe asks for; of another shape it would not be that ViT."""
    tower, report = load_with_report(source, encoder=True, classes=0)
    if tower.family != "vit":
        raise ValueError(f"{source} is of the family {tower.family}: an image tower is a ViT.")
    _, asked = registry.build_config(recipe.name, **{"image": tower.config, **recipe.options})
    has, wants = _flat(tower.config.to_dict()), _flat(asked.image.to_dict())
    changed = {name: value for name, value in wants.items() if value != has[name]}
    if changed:
        try:
            tower, report = load_with_report(source, encoder=True, **{"classes": 0, **changed})
        except CheckpointError as error:
            raise ValueError(
                f"{error} The recipe clip_lit leaves the image tower as it is: "
                f"vitlab train clip_lit model.init_image={source}"
            ) from None
    resized = [f"{row.ours} resized {row.note}." for row in report.rows if row.status == "resized"]
    return tower, [*report.notes, *resized, f"the image tower started from {source}."]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"head": {"pooling": "mean"}} -> {"head.pooling": "mean"}."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


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
