"""What a paper's file registers: its network and its models by name, each with its preprocess and other names.

PAPER = Paper("swin", SwinConfig, Swin, [Entry("swin_tiny", "swin", SwinConfig(), IMAGENET_CROP, ("Swin-T",))])

models/index.py lists the papers, models/registry.py finds their models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vitlab.models.base import Network
from vitlab.models.config import Config

IMAGENET: dict[str, Any] = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF: dict[str, Any] = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  # Google's ViT
OPENAI: dict[str, Any] = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
IMAGENET_CROP: dict[str, Any] = {
    **IMAGENET,
    "interpolation": "bicubic",
    "how": "crop",
    "resize": 256,
    "size": (224, 224),
}
CLIP_CROP: dict[str, Any] = {**OPENAI, "interpolation": "bicubic", "how": "crop"}


def half(channels: int) -> dict[str, Any]:
    """Mean and deviation of 0.5 for each channel."""
    return dict(mean=(0.5,) * channels, std=(0.5,) * channels)


@dataclass(frozen=True)
class Entry:
    """One registered model; `preprocess` holds plain values, `aliases` further exact names."""

    name: str
    family: str
    config: Any  # the family's Config
    preprocess: dict[str, Any] = field(default_factory=lambda: HALF)
    aliases: tuple[str, ...] = ()


ParsedName = tuple[str, dict[str, Any]]  # an entry's name and the options that a longer name adds


@dataclass(frozen=True)
class Paper:
    """The models of one paper. `parse_name` reads other libraries' names that no list of aliases can hold."""

    family: str  # in model.json; DeiT and DINOv2 are of the family vit
    config: type[Config]
    network: Callable[[Any], Network]
    entries: Sequence[Entry]
    parse_name: Callable[[str], ParsedName | None] = lambda name: None
