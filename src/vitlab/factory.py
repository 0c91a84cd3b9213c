"""vitlab.create: a new, untrained model by name, with its preprocess."""

from __future__ import annotations

from typing import Any

from vitlab.images.preprocess import fit_preprocess
from vitlab.models import registry
from vitlab.models.base import Card, Network


def create(name: str, **options: Any) -> Network:
    """A new, untrained model by name, with any option changed: create("vit_base", classes=10, image_size=384)."""
    entry, config = registry.build_config(name, **options)
    model: Network = registry.build(entry.family, config)
    model.preprocess = fit_preprocess(
        entry.preprocess, entry.config.image_size, image_size=config.image_size, channels=config.channels
    )
    model.card = Card(name=entry.name)
    return model
