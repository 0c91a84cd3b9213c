"""The records that models/index.py names, in its order."""

from __future__ import annotations

from importlib import import_module

from vitlab.checkpoints.family import Family
from vitlab.models import registry
from vitlab.models.index import INDEX


def _record(place: str) -> Family:
    module, name = place.split(".")
    return getattr(import_module(f"vitlab.checkpoints.{module}"), name)


FAMILIES = {family.name: family for _, place in INDEX if place for family in (_record(place),)}


def family_of(name: str) -> Family:
    """The record of a family; one without a record is saved and loaded as vitlab's own folder only."""
    return FAMILIES.get(name) or Family(name, registry.FAMILIES[name][0])
