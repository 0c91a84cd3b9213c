"""Parameters and MACs of a registered model, without building it whole."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.explain.asked import encoder_of
from vitlab.explain.inspect_stages import count_stages
from vitlab.models import registry
from vitlab.models.hierarchy import StagedConfig


@cache
def size_of(name: str) -> tuple[int, int]:
    """Parameters and MACs (one image, and one text of a CLIP) of a registered model; of MAE and DINO, of their encoder.

    Blocks are equal, so both grow by the same step with each one: shallow models tell the deep one's size exactly.
    """
    entry, config = registry.build_config(name)
    family, config = (entry.family, config) if entry.family == "clip" else encoder_of(entry.family, config)
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
