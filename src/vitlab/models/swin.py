"""Swin: attention in windows that shift from layer to layer (arXiv:2103.14030): cost grows with pixels, not with their
square.

    model = vitlab.create("swin_tiny", classes=10)
    logits = model(images)                     # (B, 3, H, W) -> (B, 10), any size

Run `vitlab inspect swin_tiny` to see every step with its shape, parameters and MACs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Path
from vitlab.layers.block import MLP, Activation
from vitlab.layers.patches import fit_to_patches
from vitlab.layers.positions import RelativeBias
from vitlab.layers.trace import Trace
from vitlab.layers.windows import WindowAttention, Windows
from vitlab.models.entry import HALF, IMAGENET_CROP, Entry, Paper, ParsedName
from vitlab.models.hierarchy import (
    Grid,
    GridBlock,
    Hierarchy,
    Merge,
    StagedConfig,
    check_stages,
    depth_rates,
    init_matrices,
    mark_embed,
    new_head,
)


@dataclass(frozen=True)
class SwinConfig(StagedConfig):
    image_size: tuple[int, int] = (224, 224)  # (H, W) of the preprocess; the network takes any
    patch_size: int = 4  # P
    channels: int = 3
    classes: int = 1000  # 0: the model returns pooled features (B, D)
    width: int = 96  # C of the first stage; each later one has twice as many
    depths: tuple[int, ...] = (2, 2, 6, 2)  # blocks in each stage; every second one is shifted
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int | tuple[int, ...] = 7  # M, or one for each stage; a map that is smaller is one window
    shift_axes: Literal["together", "each"] = "together"  # where a map is one window along one axis, the other is still
    # shifted ("each": timm), or not (the paper's code, transformers)
    roll_first: bool = False  # timm rolls a map before it is filled up to whole windows, the others afterwards
    mlp_ratio: float = 4.0
    activation: Activation = "gelu"
    qkv_bias: bool = True
    eps: float = 1e-5
    merge_eps: float = 1e-5  # of the norms in patch embedding and merging; transformers has 1e-5 there in any case
    attention: Path = "auto"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate at the last block, growing linearly from 0
    gradient_checkpointing: bool = False
    fixed = ("patch_size", "channels", "width", "depths", "heads", "mlp_ratio", "qkv_bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stages(self, "heads")
        if not isinstance(self.window, int):
            sizes = tuple(self.window)
            object.__setattr__(self, "window", sizes[0] if len(set(sizes)) == 1 else sizes)
            if len(sizes) != len(self.depths):
                raise UsageError(
                    f"window={sizes} must be one number, or one for each of the {len(self.depths)} stages."
                )
        if min(self.window_sizes) < 1 or self.width < 1:
            raise UsageError(f"window={self.window} and width={self.width} must be at least 1.")

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(self.width * 2**stage for stage in range(len(self.depths)))

    @property
    def merges(self) -> tuple[Merge, ...]:
        P = self.patch_size
        return Merge(P, P, fill=True), *(Merge(2, 2, fill=True) for _ in self.depths[1:])

    @property
    def window_sizes(self) -> tuple[int, ...]:
        """M of each stage; timm and the authors store the last stage's smaller where its map is."""
        return (self.window,) * len(self.depths) if isinstance(self.window, int) else self.window

    def table_grid(self, key: str) -> Grid:
        M = self.window_sizes[int(key.split(".")[1])]  # stages.2.0.attention.relative.table
        return M, M

    def windows(self, grid: Grid, M: int, shifted: bool) -> Windows:
        """Sec. 3.2: windows of M x M; shifted ones by half of it, unless the whole map is in view."""
        one_window = [side <= M for side in grid]
        if self.shift_axes == "together":
            one_window = [any(one_window)] * 2
        shift = [0 if single or not shifted else M // 2 for single in one_window]
        return Windows(grid, (min(M, grid[0]), min(M, grid[1])), (shift[0], shift[1]), self.roll_first)


VARIANTS: dict[str, dict[str, Any]] = {  # sec. 3.3
    "tiny": dict(width=96, depths=(2, 2, 6, 2), heads=(3, 6, 12, 24)),
    "small": dict(width=96, depths=(2, 2, 18, 2), heads=(3, 6, 12, 24)),
    "base": dict(width=128, depths=(2, 2, 18, 2), heads=(4, 8, 16, 32)),
    "large": dict(width=192, depths=(2, 2, 18, 2), heads=(6, 12, 24, 48)),
}
LARGER: dict[str, Any] = dict(image_size=(384, 384), window=12)  # sec. 4.1
SMALL_IMAGES: dict[str, Any] = dict(  # 16 x 16, 8 x 8 and 4 x 4 tokens; the last stage is one window
    **dict(image_size=(32, 32), patch_size=2, window=4, classes=10, mlp_ratio=2.0),
    **dict(width=48, depths=(2, 2, 2), heads=(3, 6, 12)),
)
MODELS = {
    **{f"swin_{name}": SwinConfig(**variant) for name, variant in VARIANTS.items()},
    **{f"swin_{name}_384": SwinConfig(**variant, **LARGER) for name, variant in VARIANTS.items()},
    "swin_cifar": SwinConfig(**SMALL_IMAGES),
}


class SwinEmbed(nn.Module):
    """Every P x P patch becomes a token, then a norm."""

    def __init__(self, c: SwinConfig):
        super().__init__()
        self.patch_size, self.channels = c.patch_size, c.channels
        self.proj = nn.Conv2d(c.channels, c.width, kernel_size=c.patch_size, stride=c.patch_size)
        self.norm = nn.LayerNorm(c.width, eps=c.merge_eps)

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W)
        x = self.proj(fit_to_patches(images, self.patch_size, self.channels, pad=True))  # (B, D, H/P, W/P)
        return self.norm(x.flatten(2).transpose(1, 2))  # (B, N, D), row by row


class PatchMerging(nn.Module):
    """Four neighbours side by side, normed, and by one matrix from 4C to 2C channels."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.norm = nn.LayerNorm(4 * width, eps=eps)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, z: Tensor, grid: Grid) -> Tensor:  # (B, N, C)
        return self.reduction(self.norm(neighbours(z, grid)))  # (B, N/4, 2C)


def neighbours(z: Tensor, grid: Grid) -> Tensor:
    """Four neighbours side by side, (B, N, C) -> (B, N/4, 4C); odd sides are filled up."""
    x = torch.unflatten(z, 1, grid)  # (B, rows, columns, C)
    if grid[0] % 2 or grid[1] % 2:
        x = F.pad(x, (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
    B, rows, columns, C = x.shape
    x = x.reshape(B, rows // 2, 2, columns // 2, 2, C).permute(0, 1, 3, 4, 2, 5)  # left column first, top to bottom
    return x.reshape(B, -1, 4 * C)


class Swin(Hierarchy):
    """Patches; then stages of blocks whose windows shift by turns, with merging between; norm, mean, head (fig. 3)."""

    family = "swin"
    config: SwinConfig

    def __init__(self, config: SwinConfig):
        super().__init__(config)
        c, widths = config, config.widths
        self.embeds = nn.ModuleList([SwinEmbed(c), *(self.merging(width) for width in widths[:-1])])
        self.dropout = nn.Dropout(c.dropout)
        rates = depth_rates(c.depths, c.stochastic_depth)
        self.stages = nn.ModuleList(
            nn.ModuleList(self.block(stage, next(rates)) for _ in range(depth)) for stage, depth in enumerate(c.depths)
        )
        self.norm = nn.LayerNorm(widths[-1], eps=c.eps)
        self.apply(init_matrices)  # the patches as torch starts them
        self.head = new_head(widths[-1], c.classes)

    def merging(self, width: int) -> nn.Module:
        """From `width` channels to twice as many."""
        return PatchMerging(width, self.config.merge_eps)

    def block(self, stage: int, stochastic_depth: float) -> GridBlock:
        c = self.config
        return swin_block(c, c.widths[stage], c.heads[stage], c.window_sizes[stage], stochastic_depth)

    def places(self, height: int, width: int) -> tuple[Windows, ...]:
        grids = self.config.grids(height, width)
        return tuple(
            self.config.windows(grid, M, shifted=number % 2 == 1)
            for grid, M, depth in zip(grids, self.config.window_sizes, self.config.depths, strict=True)
            for number in range(depth)
        )

    def run(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        z, before = images, (0, 0)
        for stage, (steps, grid) in enumerate(self.steps(images, trace)):
            if stage == 0:
                z = self.dropout(mark_embed(stage, self.embeds[0](z), trace, steps))  # (B, N, C)
            else:
                z = mark_embed(stage, self.embeds[stage](z, before), trace, steps)  # (B, N/4, 2C)
            for step in steps:
                z = self.run_block(step, z)  # eq. 3
            before = grid
            yield z, grid


def swin_block(c: SwinConfig, width: int, heads: int, M: int, stochastic_depth: float) -> GridBlock:
    attention = WindowAttention(
        *(width, heads),
        qkv_bias=c.qkv_bias,
        attention_dropout=c.attention_dropout,
        dropout=c.dropout,
        path=c.attention,
        relative=RelativeBias((M, M), heads, prefix=0),
    )
    mlp = MLP(width, int(width * c.mlp_ratio), activation=c.activation, dropout=c.dropout)
    return GridBlock(attention, mlp, width, eps=c.eps, stochastic_depth=stochastic_depth)


def _entry(name: str, config: SwinConfig) -> Entry:
    size, side = name.split("_")[1], config.image_size[0]
    if size not in VARIANTS:
        return Entry(name, "swin", config, HALF)
    aliases = (f"swin_{size}_patch4_window{config.window}_{side}",)  # timm's and the hub's
    if side == 224:
        aliases += (f"Swin-{size[0].upper()}", f"swin_{size[0]}")  # the paper's
        return Entry(name, "swin", config, IMAGENET_CROP, aliases)
    return Entry(name, "swin", config, {**IMAGENET_CROP, "resize": side, "size": (side, side)}, aliases)


def parse_name(name: str) -> ParsedName | None:
    """timm's, of other windows and sizes: swin_base_patch4_window8_256."""
    match = re.fullmatch(rf"swin_({'|'.join(VARIANTS)})_patch4_window([0-9]{{1,9}})_([0-9]{{1,9}})", name)
    return (f"swin_{match[1]}", {"window": int(match[2]), "image_size": int(match[3])}) if match else None


PAPER = Paper("swin", SwinConfig, Swin, [_entry(name, config) for name, config in MODELS.items()], parse_name)
