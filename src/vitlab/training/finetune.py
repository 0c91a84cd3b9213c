"""The model of a recipe: new, or from any checkpoint with a new head, another size, a frozen encoder.

A checkpoint that learned without labels (MAE, DINO, CLIP) gives its encoder, unless it continues without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np

from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.report import Report
from vitlab.errors import ImageError, TrainingError, UsageError
from vitlab.factory import create
from vitlab.images.bands import MEASURED, SCALES, StoredPixels, measure_pixels
from vitlab.images.datasets import Data, Dataset
from vitlab.images.preprocess import Preprocess
from vitlab.images.sources.dataset import TargetKind
from vitlab.layers.hybrid_stem import HybridStem
from vitlab.models import registry
from vitlab.models.base import Network, WrapsEncoder
from vitlab.models.config import option_paths
from vitlab.models.entry import Entry
from vitlab.models.task import CLASSES
from vitlab.models.vit import VisionTransformer
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.batches import ImageSet
from vitlab.training.objectives import OBJECTIVES, objective_class
from vitlab.training.objectives.base import HEAD, check_own_settings
from vitlab.training.recipe import ModelRecipe, Recipe

N = TypeVar("N", bound=Network)
OUTPUTS: dict[TargetKind, str] = {"class": "{} classes", "labels": "{} labels", "number": "the number {1}"}
COLOUR = ("randaugment", "jitter")  # augmentation that is for photos
WHITENED_BY = 5000  # images
SAME_WEIGHTS = ("image_size", "patch_size", "gradient_checkpointing")
SAME_WEIGHTS += ("dropout", "attention_dropout", "stochastic_depth")


def build_for_data(recipe: Recipe, data: Data, tokenizer: Tokenizer | None = None) -> tuple[Network, list[str]]:
    """The model of a recipe as it reads these images, and notes on how it was made."""
    fitting = for_pixels(recipe, data)
    model, notes = build_model(fitting, data.classes, data.train.channels, tokenizer)
    notes += [
        f"augment.{name}={value:g} is left out: it is for the colours of photos."
        for name in COLOUR
        if (value := getattr(recipe.augment, name)) != getattr(fitting.augment, name)
    ]
    return model, [*notes, *fit_pixels(model, data, recipe.model)]


def for_pixels(recipe: Recipe, data: Data) -> Recipe:
    """The recipe for images that are no photos: the model reads their channels, unless the recipe states others, and
    nothing changes colours.
    """
    if data.train.stored is None:
        return recipe
    options = {"channels": data.train.channels, **recipe.model.options}
    augment = replace(recipe.augment, randaugment=0, jitter=0.0)
    return replace(recipe, model=replace(recipe.model, options=options), augment=augment)


def fit_pixels(model: Network, data: Data, recipe: ModelRecipe) -> list[str]:
    """Let a model read images that are no photos: by mean and std of the training images, unless it knows such images
    already. Sizes and crops stay as the weights were trained. Returns notes.
    """
    stored, before = data.train.stored, model.preprocess
    if stored is None:
        if before is None or before.stored is not None:
            reads = before.stored if before is not None else f"{model.config.channels} channels"
            raise TrainingError(
                f"the images are photos, and the model reads {reads}: use model.channels=1 or 3, and other weights if "
                "it starts from some."
            )
        return []
    if model.config.channels != stored.channels:
        raise TrainingError(
            f"the images have {stored.channels} channels and the model reads {model.config.channels}: leave "
            "model.channels out."
        )
    if before is not None and before.stored == stored:
        return []
    if before is not None and before.stored is not None:
        raise TrainingError(
            f"the images hold {stored}, and the weights were trained on {before.stored}. Convert the images, or start "
            "from other weights."
        )
    scale = SCALES[stored.kind]
    mean, std = measure_pixels(_readable(data.train), stored.channels, scale)
    notes = [f"channel {c + 1} has one value in all images, so it tells nothing." for c in np.flatnonzero(std == 0)]
    values = {
        "mean": tuple(mean.tolist()),
        "std": tuple(np.where(std > 0, std, 1.0).tolist()),
        "scale": scale,
        "pixels": stored.kind,
    }
    if before is None and recipe.init_from is not None:  # no photo has so many channels, but the photos' size stays
        before = load_with_report(recipe.init_from, encoder=True)[0].preprocess
        before = None if before is None else before.with_size(model.config.image_size)
    size = model.config.image_size
    model.preprocess = Preprocess(size, **values) if before is None else replace(before, **values)
    shown = "; ".join(f"{m / scale:.4g} ± {s / scale:.4g}" for m, s in zip(mean, std, strict=True))
    return [*notes, f"mean and std of each channel, measured on the training images: {shown}"]


def _readable(train: Dataset) -> Iterator[np.ndarray]:
    """Up to MEASURED images, spread evenly, of those that can be read."""
    for index in np.unique(np.linspace(0, len(train) - 1, min(len(train), MEASURED)).astype(int)):
        with suppress(ImageError):  # counted when the images are read to learn from
            array = train.read(int(index))
            if StoredPixels(str(array.dtype), array.shape[2]) == train.stored:
                yield array


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


def build_classifier(
    recipe: ModelRecipe, classes: list[str], channels: int, kind: TargetKind = "class"
) -> tuple[Network, list[str]]:
    """A model with a head for these classes, labels, or this number."""
    notes: list[str] = []
    if recipe.init_from is None:
        family = registry.find(recipe.name)[0].family
        if family in OBJECTIVES:
            raise TrainingError(f"{recipe.name} learns without labels: set objective.name={family}.")
        model = create(recipe.name, **{"classes": len(classes), "channels": channels, **recipe.options})
    else:
        model, report = load_with_report(recipe.init_from, encoder=True, resize_patches=True, **recipe.options)
        notes += report.notes
        same_count, what = model.config.classes == len(classes), OUTPUTS[kind].format(len(classes), classes[0])
        unnamed = model.labels is None and same_count and kind == "class"
        if model.task.kind == kind and (model.labels == classes or unnamed):
            notes.append(f"started from {recipe.init_from}, with its head for the same {what.removeprefix('the ')}.")
        else:
            options = {**recipe.options, "classes": len(classes)}
            model, report = load_with_report(recipe.init_from, encoder=True, resize_patches=True, **options)
            if same_count:
                model.reset_classifier(len(classes))  # as many classes, but others
            model.task = CLASSES  # the objective says what the new head's outputs mean
            notes.append(f"started from {recipe.init_from}, with a new head for {what}.")
        notes += resized_notes(report)
    if model.config.classes != len(classes):
        raise TrainingError(
            f"the model has {model.config.classes} classes but the data have {len(classes)}: leave model.classes out."
        )
    check_channels(model, channels)
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
        model, notes = _continued(recipe, kind, recipe.init_from)
        model.train()
    if not isinstance(model, kind):
        raise TrainingError(
            f"objective.name={family} teaches a model of the family {family}, but {recipe.init_from or recipe.name} is "
            f"of {model.family}: model.name={example}, for instance."
        )
    check_channels(model, channels)
    return model, notes


def _continued(recipe: ModelRecipe, kind: type[Network], source: str) -> tuple[Network, list[str]]:
    """A whole model of this kind; or the encoder of another checkpoint, or for other patches, with all else new."""
    stored, report = load_with_report(source)
    patches = stored.encoder.config.option("patch_size") if isinstance(stored, kind) else None
    whole = isinstance(stored, kind) and recipe.options.get("patch_size", patches) == patches
    if whole and recipe.options:
        stored, report = load_with_report(source, **recipe.options)
    if whole or not issubclass(kind, WrapsEncoder) or not kind.untrained:
        return stored, [*report.notes, f"started from {source}."]
    entry, _ = registry.find(recipe.name)
    if entry.family != kind.family:
        raise TrainingError(
            f"{source} is a {stored.family}. To continue from its encoder, model.name must be a {kind.family}, not "
            f"{recipe.name}."
        )
    return around_encoder(recipe, entry, source)


def around_encoder(recipe: ModelRecipe, entry: Entry, source: str) -> tuple[Network, list[str]]:
    """The encoder's sizes are the file's; the rest is that of model.name, and untrained."""
    encoder, report = load_with_report(source, encoder=True, classes=0)
    inside, paths = option_paths(type(encoder.config)), option_paths(type(entry.config))
    own = {name: value for name, value in recipe.options.items() if name not in inside or name not in paths}
    changes = {name: recipe.options[name] for name in SAME_WEIGHTS if name in recipe.options and name not in own}
    if "head_hidden" in inside and encoder.config.option("head_hidden"):
        changes["head_hidden"] = 0  # a pooler, which belongs to a classifier
    if changes:
        encoder, report = load_with_report(source, encoder=True, classes=0, resize_patches=True, **changes)
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


def whiten_stem(model: Network, images: ImageSet) -> None:
    """Measure the whitening of a new hybrid stem on some of the training images, spread evenly."""
    encoder = model.encoder
    if isinstance(encoder, VisionTransformer) and isinstance(encoder.patch_embed, HybridStem):
        some = np.unique(np.linspace(0, len(images) - 1, min(len(images), WHITENED_BY)).astype(int))
        encoder.patch_embed.whiten_by(images.normalised(some)[0])


def resized_notes(report: Report) -> list[str]:
    return [f"{row.ours} resized {row.note}." for row in report.rows if row.status == "resized"]


def check_channels(model: Network, channels: int) -> None:
    """`channels`: of the images. A model without a preprocess is fitted to images of as many channels, if at all."""
    if model.preprocess is None and (model.config.channels != channels or channels in (1, 3)):
        raise TrainingError(
            f"a model of {model.config.channels} channels cannot read images: use model.channels=1 or 3."
        )
