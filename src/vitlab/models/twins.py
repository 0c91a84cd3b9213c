"""Twins: PVT with positions from a convolution (PCPVT), and attention in windows and to reduced keys by turns (SVT)
(arXiv:2104.13840).

    model = vitlab.create("twins_svt_small", classes=10)
    logits = model(images)                     # (B, 3, H, W) -> (B, 10), any size that leaves no stage empty

Run `vitlab inspect twins_svt_small` to see every step with its shape, parameters and MACs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.block import BLOCK_KINDS, MLP
from vitlab.layers.reduced import Grid, Reduced, to_map, to_tokens
from vitlab.layers.trace import Trace, mark
from vitlab.layers.windows import WindowAttention, Windows
from vitlab.models.entry import HALF, IMAGENET_CROP, Entry, Paper
from vitlab.models.hierarchy import (
    GridBlock,
    Hierarchy,
    depth_rates,
    init_convolutions,
    init_matrices,
    mark_embed,
    new_head,
)
from vitlab.models.pvt import REDUCED_KINDS, PVTConfig, conv_embeds, reduced_attention


@dataclass(frozen=True)
class TwinsConfig(PVTConfig):
    """PVT's options and windows; its norms' eps are those of the paper's code and timm, which mix two."""

    merge_eps: float = 1e-5
    reduction_eps: float = 1e-5
    window: int = 0  # side of the windows that every second block, beginning with the first, looks in; 0: none (PCPVT)
    fixed = (*PVTConfig.fixed, "windowed")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 0:
            raise UsageError(f"window={self.window} must be 0 (no windows: PCPVT) or more.")

    @property
    def windowed(self) -> bool:
        return self.window > 0

    def local(self, number: int) -> bool:
        """Whether block `number` of a stage looks in windows (LSA), or at reduced keys (GSA), sec. 3."""
        return self.windowed and number % 2 == 0


SVT: dict[str, Any] = dict(window=7, mlp_ratios=(4, 4, 4, 4))
VARIANTS: dict[str, dict[str, Any]] = {  # PCPVT has the sizes of PVT
    "pcpvt_small": dict(depths=(3, 4, 6, 3)),
    "pcpvt_base": dict(depths=(3, 4, 18, 3)),
    "pcpvt_large": dict(depths=(3, 8, 27, 3)),
    "svt_small": dict(**SVT, widths=(64, 128, 256, 512), depths=(2, 2, 10, 4), heads=(2, 4, 8, 16)),
    "svt_base": dict(**SVT, widths=(96, 192, 384, 768), depths=(2, 2, 18, 2), heads=(3, 6, 12, 24)),
    "svt_large": dict(**SVT, widths=(128, 256, 512, 1024), depths=(2, 2, 18, 2), heads=(4, 8, 16, 32)),
}
SMALL_IMAGES: dict[str, Any] = dict(  # 16 x 16, 8 x 8 and 4 x 4 tokens with 4 x 4 keys each
    **dict(image_size=(32, 32), patch_size=2, classes=10, reductions=(4, 2, 1), mlp_ratios=(4, 4, 2)),
    **dict(widths=(48, 96, 192), depths=(2, 2, 2), heads=(3, 6, 12)),
)
MODELS = {
    **{f"twins_{name}": TwinsConfig(**variant) for name, variant in VARIANTS.items()},
    "twins_pcpvt_cifar": TwinsConfig(**SMALL_IMAGES),
    "twins_svt_cifar": TwinsConfig(**SMALL_IMAGES, window=4),
}


class PositionConv(nn.Module):
    """A 3 x 3 convolution of each channel, added to the tokens: the zeros around the map tell where each stands
    (CPVT's PEG, arXiv:2102.10882).
    """

    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=width)

    def forward(self, z: Tensor, grid: Grid) -> Tensor:  # (B, N, D)
        return to_tokens(self.conv(to_map(z, grid)))


class Twins(Hierarchy):
    """Patches; then blocks, with positions after the first; and so on, each stage from the map of the one before; norm,
    mean, head.
    """

    family = "twins"
    config: TwinsConfig

    def __init__(self, config: TwinsConfig):
        super().__init__(config)
        c = config
        self.block_kinds = tuple(
            dict.fromkeys((*(BLOCK_KINDS if c.windowed else ()), *REDUCED_KINDS, "position_conv", "positions"))
        )
        self.embeds = conv_embeds(c)
        rates = depth_rates(c.depths, c.stochastic_depth)
        self.stages = nn.ModuleList(
            nn.ModuleList(twins_block(c, stage, number, next(rates)) for number in range(depth))
            for stage, depth in enumerate(c.depths)
        )
        self.positions = nn.ModuleList(PositionConv(width) for width in c.widths)  # one a stage
        self.dropout = nn.Dropout(c.dropout)
        self.norm = nn.LayerNorm(c.widths[-1], eps=c.eps)
        self.apply(init_matrices).apply(init_convolutions)
        self.head = new_head(c.widths[-1], c.classes)

    def places(self, height: int, width: int) -> tuple[Windows | Reduced, ...]:
        c, M = self.config, self.config.window
        return tuple(
            Windows(grid, (M, M)) if c.local(number) else Reduced(grid, c.key_merges[stage])
            for stage, grid in enumerate(c.grids(height, width))
            for number in range(c.depths[stage])
        )

    def run(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        x = images  # (B, C, H, W)
        for stage, (steps, grid) in enumerate(self.steps(images, trace)):
            z = self.dropout(mark_embed(stage, self.embeds[stage](x), trace, steps))  # (B, N, D)
            for number, step in enumerate(steps):
                z = self.run_block(step, z)
                if number == 0:
                    z = mark(step.at, "positions", z + mark(step.at, "position_conv", self.positions[stage](z, grid)))
            yield z, grid
            x = to_map(z, grid)  # (B, D, rows, columns)


def twins_block(c: TwinsConfig, stage: int, number: int, stochastic_depth: float) -> GridBlock:
    width = c.widths[stage]
    attention = window_attention(c, stage) if c.local(number) else reduced_attention(c, stage)
    mlp = MLP(width, width * c.mlp_ratios[stage], activation=c.activation, dropout=c.dropout)
    return GridBlock(attention, mlp, width, eps=c.eps, stochastic_depth=stochastic_depth)


def window_attention(c: TwinsConfig, stage: int) -> WindowAttention:
    return WindowAttention(
        *(c.widths[stage], c.heads[stage]),
        qkv_bias=c.qkv_bias,
        attention_dropout=c.attention_dropout,
        dropout=c.dropout,
        path=c.attention,
    )


def _entry(name: str, config: TwinsConfig) -> Entry:
    if config.image_size != (224, 224):
        return Entry(name, "twins", config, HALF)
    variant, size = name.rsplit("_", 1)
    return Entry(name, "twins", config, IMAGENET_CROP, (f"{variant}_{size[0]}".replace("_", "-"),))  # Twins-SVT-S


PAPER = Paper("twins", TwinsConfig, Twins, [_entry(name, config) for name, config in MODELS.items()])
