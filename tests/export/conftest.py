"""Small models of every family, with weights far from their first values, or a mistake in a norm would not show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import vitlab
from vitlab.checkpoints.native import on_meta
from vitlab.models import registry
from vitlab.text.tokenizer import Tokenizer

TINY: dict[str, Any] = dict(image_size=(24, 32), patch_size=8, width=24, depth=1, heads=3, classes=5)


def smallest(family: str) -> str:
    """The registered model of this family with the smallest pictures, and among those the fewest parameters."""
    names = [entry.name for entry in registry.MODELS.values() if entry.family == family]
    least = min(math.prod(registry.MODELS[name].config.image_size) for name in names)
    names = [name for name in names if math.prod(registry.MODELS[name].config.image_size) == least]
    built = {name: on_meta(lambda n=name: registry.build(family, registry.MODELS[n].config)) for name in names}
    return min(names, key=lambda name: sum(p.numel() for p in built[name].parameters()))


def _grown(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    if name in registry.FAMILIES:
        name = smallest(name)
        options = {**_shallow(registry.MODELS[name].config), **options}
    tokenizer = None
    if registry.find(name)[0].family == "clip":
        tokenizer = Tokenizer.train(["a photo of a cat", "a dog on a beach", "two boats"], vocab=600, context=16)
        options = {**tokenizer.options, **options}
    model = vitlab.create(name, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for key, value in model.named_buffers():
            if key.endswith("running_mean"):
                value.add_(0.1 * torch.randn_like(value))
            if key.endswith("running_var"):
                value.mul_(0.5 + torch.rand_like(value))
    if tokenizer is not None:
        model.tokenizer = tokenizer
    if model.config.classes:
        model.labels = [f"kind {n}" for n in range(model.config.classes)]
    return model


def _shallow(config: Any) -> dict[str, Any]:
    """Few blocks, and of the stages the first and the last: export takes time for each."""
    if hasattr(config, "text"):
        return {"image.depth": 1, "text.depth": 1}
    if hasattr(config, "depths"):
        by_stage = ("heads", "widths", "reductions", "mlp_ratios")
        ends = {key: (value[0], value[-1]) for key, value in vars(config).items() if key in by_stage}
        return {**ends, "depths": (2, 1)}
    if config.wraps_encoder and hasattr(config.encoder, "depths"):  # a network around one of stages
        return _shallow(config.encoder)
    if hasattr(config, "joined"):
        return {"depth": 1, "joined": 1}
    if hasattr(config, "layers"):  # which blocks a head reads
        return {"depth": 1, "layers": (0,) * len(config.layers)}
    return {"depth": 1}


@pytest.fixture(scope="session")
def grown() -> Callable[..., Any]:
    """By a model's name, or a family's: its smallest. Weights and statistics are as training would leave them."""
    return _grown


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """A ViT of 3 x 4 patches."""
    return lambda **options: _grown("vit_base", **{**TINY, **options})
