"""Encoders that a study compares: the ViT that each is, by name and options, and what taught a checkpoint.

encoder = read_encoder("mae", "bundled:mae")     # refused where another method taught it
encoder.network({"pooling": "mean"})             # the same ViT without its weights, as a recipe names it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitlab.checkpoints.foreign import fitting_preprocess
from vitlab.checkpoints.load import load_with_report
from vitlab.images.preprocess import Preprocess
from vitlab.models.config import nearest, option_paths
from vitlab.models.registry import ALIASES, FAMILIES, MODELS, Entry, find
from vitlab.training.recipe import ModelRecipe

LARGEST = "vit_base_patch16"  # whose options describe any ViT that has no name


@dataclass(frozen=True)
class Encoder:
    """A ViT that learned without labels, or is going to."""

    name: str  # of the model around it, e.g. mae_cifar
    config: Any  # ViTConfig
    preprocess: Preprocess | None
    checkpoint: str | None = None  # where it lies; None: this study trains it
    source: str = ""  # what its card says of it

    def network(self, head: dict[str, Any]) -> ModelRecipe:
        """The same ViT, new: fine-tuned and from scratch shall differ in nothing but their first weights."""
        entry = _like(self)
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
        if self.checkpoint is not None:  # otherwise the data decide
            options["channels"] = self.config.channels
        return ModelRecipe(name=entry.name, options={**options, **head})

    def notes(self) -> list[str]:
        """Where it comes from, and what no recipe can make alike."""
        if self.checkpoint is None:
            return []
        found = [f"the encoder is {self.checkpoint}" + (f": {self.source}." if self.source else ".")]
        if (ours := _reads(_like(self), self.config)) != self.preprocess:
            found.append(f"it reads pictures by {self.preprocess}; from scratch they are read by {ours}.")
        return found


def encoder_of(model: ModelRecipe) -> Encoder:
    """Of a model that is going to learn without labels."""
    entry, carried = find(model.name)
    config: Any = entry.config.with_options(**{**carried, **model.options})
    return Encoder(entry.name, config.encoder, _reads(entry, config.encoder))


def read_encoders(settings: list[str], methods: list[str]) -> dict[str, Encoder]:
    """METHOD=CHECKPOINT as typed, each refused in words where it cannot be meant."""
    found: dict[str, Encoder] = {}
    for setting in settings:
        method, sign, checkpoint = (part.strip() for part in setting.partition("="))
        if not sign or not checkpoint:
            raise ValueError(f"--pretrained {setting!r}: write METHOD=CHECKPOINT, e.g. mae=bundled:mae.")
        if method not in methods:
            raise ValueError(
                f"--pretrained {setting}: {method} is not compared here.{nearest(method, methods)} "
                f"Compared: {', '.join(methods)}. Add it: --methods {','.join([*methods, method])}."
            )
        if method in found:
            raise ValueError(f"--pretrained names {method} twice: {found[method].checkpoint} and {checkpoint}.")
        found[method] = read_encoder(method, checkpoint)
    return found


def read_encoder(method: str, checkpoint: str) -> Encoder:
    model, _ = load_with_report(checkpoint)
    taught = _taught_by(model)
    if taught not in (method, ""):
        raise ValueError(
            f"{checkpoint} was taught by {taught}, not by {method}: it would stand in the table under a wrong name."
        )
    config = getattr(model.config, "encoder", model.config)
    source = model.card.source or ""
    if not taught:
        source = f"{source + '; ' if source else ''}the file does not say that {method} taught it"
    return Encoder(model.card.name or "", config, model.preprocess, checkpoint, source)


def _taught_by(model: Any) -> str:
    """The method, '' where nothing tells it. A folder may hold an encoder alone: then its card names the whole."""
    if getattr(model.config, "encoder", None) is not None:
        return model.family
    if model.family != "vit":
        return f"nothing that a ViT learns by: it is a {model.family}"
    if model.config.classes:
        return f"labels ({model.config.classes} classes)"
    whole = MODELS.get(model.card.name or "")
    return whole.family if whole is not None and hasattr(FAMILIES[whole.family][0], "encoder") else ""


def _like(encoder: Encoder) -> Entry:
    """The registered ViT that this one is described by: of its name, if it reads pictures alike; else one that does."""
    named = "vit_" + encoder.name.partition("_")[2]
    first = MODELS[ALIASES.get(named, LARGEST)]
    every = (first, *(entry for entry in MODELS.values() if entry.family == "vit"))
    return next((entry for entry in every if _reads(entry, encoder.config) == encoder.preprocess), first)


def _reads(entry: Entry, config: Any) -> Preprocess | None:
    return fitting_preprocess(entry.preprocess, entry.config.image_size, config)
