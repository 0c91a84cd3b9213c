"""Pretrained encoders of a study: their ViT by name and options, and the method that trained a checkpoint.

encoder = read_encoder("mae", "bundled:mae")     # refused if another method trained it
encoder.network({"pooling": "mean"})             # recipe of the same ViT without its weights
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitlab.checkpoints.load import load_with_report
from vitlab.errors import UsageError
from vitlab.images.preprocess import Preprocess, fit_preprocess
from vitlab.models.base import Card, Network
from vitlab.models.config import nearest, option_paths
from vitlab.models.entry import Entry
from vitlab.models.registry import ALIASES, MODELS, find
from vitlab.models.vit_config import ViTConfig
from vitlab.training.recipe import ModelRecipe

LARGEST = "vit_base_patch16"  # base of the options for a ViT that has no name


@dataclass(frozen=True)
class Encoder:
    """A ViT with self-supervised pre-training, done or planned."""

    name: str  # of the wrapping model, e.g. mae_cifar
    config: ViTConfig
    preprocess: Preprocess | None
    checkpoint: str | None = None  # None: this study trains it
    source: str = ""  # from its card

    def network(self, head: Mapping[str, object]) -> ModelRecipe:
        """Recipe of the same ViT, so that fine-tuned and from scratch differ only in their initial weights."""
        entry = _closest_entry(self)
        options: dict[str, Any] = {}
        for option, (group, key) in option_paths(type(entry.config)).items():
            if "." in option or key == "" or option in ("classes", "channels"):
                continue
            old, new = (getattr(c if group is None else getattr(c, group), key) for c in (entry.config, self.config))
            if old != new:
                options[option] = list(new) if isinstance(new, tuple) else new
        for group in ("positions", "stem", "norm", "attention", "mlp"):
            if getattr(entry.config, group).kind != getattr(self.config, group).kind:
                options[group] = getattr(self.config, group).kind
        if self.checkpoint is not None:  # otherwise the data decides
            options["channels"] = self.config.channels
        return ModelRecipe(name=entry.name, options={**options, **head})

    def notes(self) -> list[str]:
        """Its origin, and differences that a recipe cannot reproduce."""
        if self.checkpoint is None:
            return []
        notes = [f"the encoder is {self.checkpoint}" + (f": {self.source}." if self.source else ".")]
        if (ours := _preprocess_for(_closest_entry(self), self.config)) != self.preprocess:
            notes.append(f"it reads images by {self.preprocess}; from scratch they are read by {ours}.")
        return notes


def recipe_encoder(model: ModelRecipe) -> Encoder:
    """The encoder of a model that this study pretrains."""
    entry, carried = find(model.name)
    config: Any = entry.config.with_options(**{**carried, **model.options})
    return Encoder(entry.name, config.encoder, _preprocess_for(entry, config.encoder))


def read_encoders(settings: list[str], methods: list[str]) -> dict[str, Encoder]:
    """Parse and load METHOD=CHECKPOINT settings."""
    encoders: dict[str, Encoder] = {}
    for setting in settings:
        method, sign, checkpoint = (part.strip() for part in setting.partition("="))
        if not sign or not checkpoint:
            raise UsageError(f"--pretrained {setting!r}: write METHOD=CHECKPOINT, e.g. mae=bundled:mae.")
        if method not in methods:
            raise UsageError(
                f"--pretrained {setting}: {method} is not compared here.{nearest(method, methods)} "
                f"Compared: {', '.join(methods)}. Add it: --methods {','.join([*methods, method])}."
            )
        if method in encoders:
            raise UsageError(f"--pretrained names {method} twice: {encoders[method].checkpoint} and {checkpoint}.")
        encoders[method] = read_encoder(method, checkpoint)
    return encoders


def read_encoder(method: str, checkpoint: str) -> Encoder:
    model, _ = load_with_report(checkpoint)
    trained_by = _pretraining_method(model)
    if trained_by not in (method, ""):
        raise UsageError(f"{checkpoint} was trained by {trained_by}, not by {method}: the table would name it wrongly.")
    card = model.card or Card()
    source = card.source or ""
    if not trained_by:
        source = f"{source + '; ' if source else ''}the file does not say that {method} trained it"
    return Encoder(card.name or "", model.encoder.config, model.preprocess, checkpoint, source)


def _pretraining_method(model: Network) -> str:
    """The method, '' if unknown. The card of an encoder alone may name the wrapping model."""
    if model.encoder is not model:
        return model.family
    if model.family != "vit":
        return f"no method for a ViT: it is a {model.family}"
    if model.classes:
        return f"labels ({model.classes} classes)"
    wrapper = MODELS.get((model.card or Card()).name or "")
    return wrapper.family if wrapper is not None and wrapper.config.wraps_encoder else ""


def _closest_entry(encoder: Encoder) -> Entry:
    """A registered ViT with the same preprocess, preferably of the same name."""
    name = "vit_" + encoder.name.partition("_")[2]
    first = MODELS[ALIASES.get(name, LARGEST)]
    candidates = (first, *(entry for entry in MODELS.values() if entry.family == "vit"))
    return next((entry for entry in candidates if _preprocess_for(entry, encoder.config) == encoder.preprocess), first)


def _preprocess_for(entry: Entry, config: ViTConfig) -> Preprocess | None:
    size, channels = config.image_size, config.channels
    return fit_preprocess(entry.preprocess, entry.config.image_size, image_size=size, channels=channels)
