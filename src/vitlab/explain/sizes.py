"""Parameters and MACs of a registered model, extrapolated from shallow copies on the meta device."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vitlab.checkpoints.native import on_meta
from vitlab.explain.resolve import encoder_config
from vitlab.models import registry
from vitlab.models.base import Network
from vitlab.models.dense_network import DenseConfig
from vitlab.models.hierarchy import StagedConfig
from vitlab.models.plain import PlainConfig
from vitlab.models.two_towers import TwoTowers, TwoTowersConfig
from vitlab.tables import Table, Tabular, by, short
from vitlab.tables import count as with_commas


@dataclass(frozen=True)
class RegisteredModel:
    """A registered model and its costs."""

    name: str
    aliases: list[str]
    image_size: list[int]
    parameters: int
    macs: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def cells(self) -> list[str]:
        costs = with_commas(self.parameters), short(self.macs)
        return [self.name, by(self.image_size), *costs, ", ".join(self.aliases)]


class RegisteredModels(Tabular, list[RegisteredModel]):
    def table(self) -> Table:
        costs = ("parameters", "MACs")
        note = (
            "MACs for one image (for a CLIP also one text); 1 MAC = 2 FLOPs. timm's names work too: "
            "vit_base_patch16_384."
        )
        titles = ["name", "image", *costs, "also called"]
        return Table(titles, [model.cells() for model in self], right=costs, notes=[note])


def list_sizes(pattern: str = "*") -> RegisteredModels:
    """The registered models whose names match, as in `list_models`."""
    entries = [registry.MODELS[name] for name in registry.list_models(pattern)]
    return RegisteredModels(
        RegisteredModel(entry.name, list(entry.aliases), list(entry.config.image_size), *size_of(entry.name))  # type: ignore
        for entry in entries
    )


@cache
def size_of(name: str) -> tuple[int, int]:
    """Parameters and MACs of a registered model for one image, and for a CLIP or SigLIP one text.

    Of MAE and DINO those of the encoder.

    Exact: blocks are equal, so both numbers grow linearly with depth; what has a head for pixels or objects is counted
    as a whole.
    """
    entry, config = registry.build_config(name)
    family = entry.family
    if isinstance(config, DenseConfig):
        return count(family, config)
    if not isinstance(config, TwoTowersConfig):
        family, config = encoder_config(family, config)
    if isinstance(config, TwoTowersConfig):
        return _count_towers(family, config)
    if isinstance(config, StagedConfig):
        return count_stages(family, config)
    if not isinstance(config, PlainConfig):
        return count(family, config)
    one, two = (count(family, config.with_options(depth=depth)) for depth in (1, 2))
    more = config.depth - 1
    return one[0] + more * (two[0] - one[0]), one[1] + more * (two[1] - one[1])


def count(family: str, config: Any) -> tuple[int, int]:
    return _repeat(*_run(family, config), {})


def _count_towers(family: str, config: TwoTowersConfig) -> tuple[int, int]:
    """Counts one block per tower and extrapolates."""
    more = {"image.blocks.0": config.image.depth - 1, "text.blocks.0": config.text.depth - 1}
    return _repeat(*_run(family, config.with_options(**{"image.depth": 1, "text.depth": 1})), more)


def count_stages(family: str, config: Any) -> tuple[int, int]:
    """Counts two blocks per stage and extrapolates, as every second block is equal."""
    model, flops = _run(family, config.with_options(depths=tuple(min(depth, 2) for depth in config.depths)))
    more = {
        f"stages.{stage}.{kind}": len(range(2 + kind, depth, 2))
        for stage, depth in enumerate(config.depths)
        for kind in range(min(depth, 2))
    }
    return _repeat(model, flops, more)


def _repeat(model: Network, flops: FlopCounterMode, more: dict[str, int]) -> tuple[int, int]:
    """Parameters and MACs of the model with each of these blocks so many times more."""
    by_module = flops.get_flop_counts()
    parameters, total_flops = sum(p.numel() for p in model.parameters()), flops.get_total_flops()
    for block, times in more.items():
        parameters += times * sum(p.numel() for p in model.get_submodule(block).parameters())
        total_flops += times * sum(by_module[f"{type(model).__name__}.{block}"].values())
    return parameters, total_flops // 2


def _run(family: str, config: Any) -> tuple[Network, FlopCounterMode]:
    """One image through the model, and one text for a CLIP or SigLIP."""
    model = on_meta(lambda: registry.build(family, config)).eval().requires_grad_(False)
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as flops:
        images = torch.empty(1, config.channels, *config.image_size)
        texts = [model.text.blank_ids(1)] if isinstance(model, TwoTowers) else []
        model(images, *texts)
    return model, flops
