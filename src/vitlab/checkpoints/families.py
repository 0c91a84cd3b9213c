"""Index of families, in the order in which they are asked whether weights are theirs."""

from __future__ import annotations

from vitlab.checkpoints import clip, mae, pvt, resnet, swin, twins, vit
from vitlab.checkpoints.family import Family
from vitlab.models import registry

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        swin.FAMILY,
        pvt.PVT,
        pvt.PVT_V2,
        twins.FAMILY,
        resnet.FAMILY,
        clip.FAMILY,
        mae.FAMILY,
        vit.FAMILY,  # last: transformers' Swin and MAE have its mark too
    )
}


def family_of(name: str) -> Family:
    """The record of a family; one without a record is saved and loaded as vitlab's own folder only."""
    return FAMILIES.get(name) or Family(name, registry.FAMILIES[name][0])
