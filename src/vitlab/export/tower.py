"""Tower: the one function that a file computes, as a module that export can follow: one tensor in, one tensor out."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.export.about import Gives
from vitlab.layers.reducer import Reducer
from vitlab.models.base import features_of
from vitlab.models.hierarchy import StagedConfig
from vitlab.reduce import reducer_of

INPUTS = {"logits": "images", "features": "images", "text": "ids"}
OUTPUTS = {"logits": "logits", "features": "features", "text": "features"}


class Tower(nn.Module):
    """images (B, C, H, W) -> logits (B, K) or features (B, E); or ids (T, N) -> (T, E)."""

    def __init__(self, model: Any, gives: Gives, reducer: Reducer | str | None = None):
        super().__init__()
        self.gives: Gives = gives
        self.model = _needed(model, gives)
        self.reducer = reducer_of(reducer) if isinstance(reducer, str) else reducer

    def forward(self, x: Tensor) -> Tensor:
        more = {} if self.reducer is None else {"reducer": self.reducer}
        if self.gives == "text":
            return self.model.encode_text(x)
        return self.model(x, **more) if self.gives == "logits" else features_of(self.model, **more)(x)


def what_it_gives(model: Any, *, features: bool = False, text: bool = False) -> Gives:
    """What an export of this model answers: classes where it has some, unless its features are asked for."""
    if text:
        if not hasattr(model, "encode_text"):
            raise ValueError(f"only a CLIP reads text; this is a {model.family}: leave --text out.")
        return "text"
    return "logits" if model.config.classes and not features else "features"


def _needed(model: Any, gives: Gives) -> Any:
    """The part that the answer comes from, so that no weights travel for nothing. The model itself is not changed."""
    if hasattr(model, "encode_text"):
        other = "image" if gives == "text" else "text"
        part = copy.copy(model)
        part._modules = {k: m for k, m in model._modules.items() if k not in (other, f"{other}_projection")}
        return part
    return model if gives == "logits" else getattr(model, "encoder", model)


def example(model: Any, gives: Gives, size: tuple[int, int] | None = None, batch: int = 2) -> Tensor:
    """An input of the right shape; two of a batch, because export takes a batch of one for a constant."""
    if gives == "text":
        words = model.config.text
        return torch.full((batch, words.context), words.end_id)
    return torch.zeros(batch, model.config.channels, *(size or model.input_size))


@dataclass(frozen=True)
class Sides:
    """What a side of an image may be where it is left open: a multiple of `stride`, `least` pixels or more."""

    stride: int
    least: int
    most: int = 2**13


def open_sides(model: Any) -> Sides:
    config = getattr(model.config, "encoder", model.config)
    if isinstance(config, StagedConfig):
        raise ValueError(
            f"a {model.family} lays out its windows for one image size, so it cannot be exported for all: leave "
            "--dynamic-size out, and give --image-size for another than its own."
        )
    if not hasattr(config, "patch_size"):  # convolutions take any, as long as more than one place is left at the end
        halved = 2 ** (len(config.depths) - 1 + 2 * (config.stem == "imagenet"))
        return Sides(1, halved + 1)
    return Sides(config.patch_size, 2 * config.patch_size)
