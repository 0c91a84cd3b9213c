"""Parameters and MACs of a registered model, extrapolated from shallow copies on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.explain.resolve import encoder_config
from vitlab.models import registry
from vitlab.models.hierarchy import StagedConfig


@cache
def size_of(name: str) -> tuple[int, int]:
    """Parameters and MACs of a registered model for one image, and one text for a CLIP. MAE and DINO: their encoder.

    Exact: blocks are equal, so both numbers grow linearly with depth.
    """
    entry, config = registry.build_config(name)
    family, config = (entry.family, config) if entry.family == "clip" else encoder_config(entry.family, config)
    if family == "clip":
        depths = {"image.depth": config.image.depth, "text.depth": config.text.depth}
    elif hasattr(config, "depth"):
        depths = {"depth": config.depth}
    elif isinstance(config, StagedConfig):
        return count_stages(lambda c: registry.build(family, c), config)
    else:
        return count(family, config)
    shallow = dict.fromkeys(depths, 1)
    one = count(family, config.with_options(**shallow))
    parameters, macs = one
    for option, depth in depths.items():
        two = count(family, config.with_options(**{**shallow, option: 2}))
        parameters += (two[0] - one[0]) * (depth - 1)
        macs += (two[1] - one[1]) * (depth - 1)
    return parameters, macs


def count(family: str, config: Any) -> tuple[int, int]:
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as flops:
        model = registry.build(family, config).eval().requires_grad_(False)
        images = torch.empty(1, config.channels, *config.image_size)
        model(*((images, torch.full((1, config.text.context), config.text.end_id)) if family == "clip" else (images,)))
    return sum(p.numel() for p in model.parameters()), flops.get_total_flops() // 2


def count_stages(build: Callable[[Any], Any], config: Any) -> tuple[int, int]:
    """Parameters and MACs: counts two blocks per stage and extrapolates, as every second block is equal."""
    shallow = config.with_options(depths=tuple(min(depth, 2) for depth in config.depths))
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as flops:
        model = build(shallow).eval().requires_grad_(False)
        model(torch.empty(1, config.channels, *config.image_size))
    parameters, total_flops = sum(p.numel() for p in model.parameters()), flops.get_total_flops()
    for stage, depth in enumerate(config.depths):
        for number in range(2, depth):
            parameters += sum(p.numel() for p in model.stages[stage][number % 2].parameters())
            inside = flops.get_flop_counts()[f"{type(model).__name__}.stages.{stage}.{number % 2}"]
            total_flops += sum(inside.values())
    return parameters, total_flops // 2
