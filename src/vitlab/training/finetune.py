"""The model of a recipe: new, or from any checkpoint with a new head, another size, a frozen encoder.

A checkpoint that learned without labels (MAE, DINO, CLIP) gives its encoder, unless it continues without.
"""

from __future__ import annotations

from typing import TypeVar

from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.report import Report
from vitlab.errors import TrainingError, UsageError
from vitlab.factory import create
from vitlab.models import registry
from vitlab.models.base import Network, WrapsEncoder
from vitlab.models.config import option_paths
from vitlab.models.entry import Entry
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.objectives import OBJECTIVES, objective_class
from vitlab.training.objectives.base import HEAD, check_own_settings
from vitlab.training.recipe import ModelRecipe, Recipe

N = TypeVar("N", bound=Network)
SAME_WEIGHTS = ("image_size", "dropout", "attention_dropout", "stochastic_depth", "gradient_checkpointing")


def build_model(
    recipe: Recipe, classes: list[str], channels: int, tokenizer: Tokenizer | None = None
) -> tuple[Network, list[str]]:
    """The model, and notes on how it was made. `tokenizer`: for a new model that reads text."""
    check_own_settings(recipe)
    method, m = objective_class(recipe.objective.name), recipe.model
    if m.lora and m.freeze != "none":
        raise TrainingError("model.lora freezes all but the head and its adapters by itself: leave out model.freeze.")
    if not m.lora and (m.lora_alpha is not None or m.lora_layers != "attention"):
        raise TrainingError("model.lora_alpha and model.lora_layers need adapters: set model.lora=8, e.g.")
    model, notes = method.build_model(recipe, classes, channels, tokenizer)
    return model, [*notes, *(method.add_adapters(m, model) if m.lora else [])]


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


def build_pretraining_model(recipe: ModelRecipe, kind: type[N], channels: int, *, example: str) -> tuple[N, list[str]]:
    """A model of the class that the objective named as its family teaches; `example` is one, for the error message."""
    family, notes = kind.family, []
    if recipe.freeze != "none":
        raise TrainingError(f"model.freeze={recipe.freeze} leaves nothing that objective.name={family} could teach.")
    if recipe.init_from is None:
        model = create(recipe.name, **{"channels": channels, **recipe.options})
    else:
        model, notes = _continued(recipe, kind, recipe.init_from)
        model.train()
    if not isinstance(model, kind):
        raise TrainingError(
            f"objective.name={family} teaches a model of the family {family}, but {recipe.init_from or recipe.name} is "
            f"of {model.family}: model.name={example}, for instance."
        )
    check_channels(model)
    return model, notes


def _continued(recipe: ModelRecipe, kind: type[Network], source: str) -> tuple[Network, list[str]]:
    """A whole model of this kind; or the encoder of any other checkpoint, with all else new."""
    stored, report = load_with_report(source)
    if isinstance(stored, kind) and recipe.options:
        stored, report = load_with_report(source, **recipe.options)
    if isinstance(stored, kind) or not issubclass(kind, WrapsEncoder) or not kind.untrained:
        return stored, [*report.notes, f"started from {source}."]
    entry, _ = registry.find(recipe.name)
    if entry.family != kind.family:
        raise TrainingError(
            f"{source} is a {stored.family}. To continue from its encoder, model.name must be a {kind.family}, not "
            f"{recipe.name}."
        )
    return _around_encoder(recipe, entry, source)


def _around_encoder(recipe: ModelRecipe, entry: Entry, source: str) -> tuple[Network, list[str]]:
    """The encoder's sizes are the file's; the rest is that of model.name, and untrained."""
    encoder, report = load_with_report(source, encoder=True, classes=0)
    inside, known = option_paths(type(encoder.config)), option_paths(type(entry.config))
    own = {name: value for name, value in recipe.options.items() if name not in inside or name not in known}
    changes = {name: recipe.options[name] for name in SAME_WEIGHTS if name in recipe.options and name not in own}
    if "head_hidden" in inside and encoder.config.option("head_hidden"):
        changes["head_hidden"] = 0  # a pooler, which belongs to a classifier
    if changes:
        encoder, report = load_with_report(source, encoder=True, classes=0, **changes)
    try:
        config = entry.config.with_encoder(encoder.family, encoder.config).with_options(**own)
    except UsageError as error:
        raise TrainingError(f"{source} cannot be continued by {entry.family}: {error}") from None
    model = registry.build(entry.family, config)
    assert isinstance(model, WrapsEncoder)
    model.load_encoder(encoder)
    notes = [*report.notes, *resized_notes(report)]
    for name in recipe.options.keys() - own.keys() - changes.keys():
        real = config.encoder.option(name)
        real = getattr(real, "kind", real)  # of a group
        if recipe.options[name] != real:
            notes.append(f"model.{name}={recipe.options[name]} is not used: the encoder of {source} has {real}.")
    loaded = sum(parameter.numel() for parameter in model.encoder.parameters())
    new = " and ".join(model.untrained)
    notes.append(f"started from the encoder of {source}, at its sizes: {loaded:,} parameters. Untrained: {new}.")
    return model, notes


def resized_notes(report: Report) -> list[str]:
    return [f"{row.ours} resized {row.note}." for row in report.rows if row.status == "resized"]


def check_channels(model: Network) -> None:
    if model.preprocess is None:
        raise TrainingError(
            f"a model of {model.config.channels} channels cannot read images: use model.channels=1 or 3."
        )
