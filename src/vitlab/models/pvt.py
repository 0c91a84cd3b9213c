"""PVT: a pyramid of stages, each attending from all its tokens to fewer keys (arXiv:2102.12122); and PVT v2, whose
patches overlap and whose MLPs look at their neighbours, so that it needs no positions (arXiv:2106.13797).

    model = vitlab.create("pvt_v2_b0", classes=10)
    logits = model(images)                     # (B, 3, H, W) -> (B, 10), any size that leaves no stage empty

Run `vitlab inspect pvt_v2_b0` to see every step with its shape, parameters and MACs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Path
from vitlab.layers.block import ACTIVATIONS, BLOCK_KINDS, MLP, Activation
from vitlab.layers.positions import LearnedPositions
from vitlab.layers.reduced import Grid, Merge, Pool, Reduced, ReducedAttention, to_map, to_tokens
from vitlab.layers.trace import LayerTrace, Trace, mark
from vitlab.models.entry import HALF, IMAGENET_CROP, Entry, Paper
from vitlab.models.hierarchy import (
    GridBlock,
    Hierarchy,
    StagedConfig,
    check_stages,
    depth_rates,
    init_convolutions,
    init_matrices,
    mark_embed,
    new_head,
)

POOLED = 7  # keys on a side in the linear attention of PVT v2, sec. 3
REDUCED_KINDS = tuple(  # what a block with reduced keys shows
    found for kind in BLOCK_KINDS for found in (("q", "reduced", "kv") if kind == "qkv" else (kind,))
)


@dataclass(frozen=True)
class PVTConfig(StagedConfig):
    image_size: tuple[int, int] = (224, 224)  # (H, W); PVT's positions are made for it
    patch_size: int = 4  # P_1; later stages have 2
    channels: int = 3
    classes: int = 1000  # 0: the model returns pooled features (B, D)
    widths: tuple[int, ...] = (64, 128, 320, 512)  # C_i
    depths: tuple[int, ...] = (2, 2, 2, 2)  # L_i, blocks in each stage
    heads: tuple[int, ...] = (1, 2, 5, 8)  # N_i
    reductions: tuple[int, ...] = (8, 4, 2, 1)  # R_i: R x R tokens become one key
    mlp_ratios: tuple[int, ...] = (8, 8, 4, 4)  # E_i
    activation: Activation = "gelu"
    qkv_bias: bool = True
    eps: float = 1e-6
    merge_eps: float = 1e-6  # of the norms in patch embeddings; 1e-5 in the papers' code and timm, 1e-6 in transformers
    reduction_eps: float = 1e-6  # of the norms of reduced keys; likewise
    attention: Path = "auto"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    stochastic_depth: float = 0.0  # rate at the last block, growing linearly from 0
    gradient_checkpointing: bool = False
    fixed = ("patch_size", "channels", "widths", "depths", "heads", "reductions", "mlp_ratios", "qkv_bias")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stages(self, "widths", "heads", "reductions", "mlp_ratios")
        if self.reduction_eps <= 0:
            raise UsageError("reduction_eps must be greater than 0.")

    @property
    def merges(self) -> tuple[Merge, ...]:
        return tuple(Merge(P, P) for P in self.patch_sizes)

    @property
    def patch_sizes(self) -> tuple[int, ...]:
        return self.patch_size, *(2 for _ in self.depths[1:])

    @property
    def key_merges(self) -> tuple[Merge | Pool, ...]:
        return tuple(Merge(R, R) for R in self.reductions)

    def table_grid(self, key: str) -> Grid:
        return self.grids(*self.image_size)[int(key.split(".")[1])]  # embeds.2.positions.table


@dataclass(frozen=True)
class PVTv2Config(PVTConfig):
    """The same options; `patch_size` is the first stride S, of patches of 2S - 1 (sec. 3)."""

    linear: bool = False  # keys are pooled to 7 x 7 whatever the size, and `reductions` are not used: the paper's "Li"
    fixed = (*PVTConfig.fixed, "linear")

    @property
    def merges(self) -> tuple[Merge, ...]:
        return tuple(Merge(2 * S - 1, S, padding=S - 1) for S in self.patch_sizes)

    @property
    def key_merges(self) -> tuple[Merge | Pool, ...]:
        return (Pool(POOLED),) * len(self.depths) if self.linear else super().key_merges


WIDE: dict[str, Any] = dict(widths=(64, 128, 320, 512))
VARIANTS: dict[str, dict[str, Any]] = {  # of PVT; they differ in depth alone
    "tiny": dict(depths=(2, 2, 2, 2)),
    "small": dict(depths=(3, 4, 6, 3)),
    "medium": dict(depths=(3, 4, 18, 3)),
    "large": dict(depths=(3, 8, 27, 3)),
}
VARIANTS_V2: dict[str, dict[str, Any]] = {  # of PVT v2
    "b0": dict(widths=(32, 64, 160, 256), depths=(2, 2, 2, 2)),
    "b1": dict(**WIDE, depths=(2, 2, 2, 2)),
    "b2": dict(**WIDE, depths=(3, 4, 6, 3)),
    "b2_li": dict(**WIDE, depths=(3, 4, 6, 3), linear=True),
    "b3": dict(**WIDE, depths=(3, 4, 18, 3)),
    "b4": dict(**WIDE, depths=(3, 8, 27, 3)),
    "b5": dict(**WIDE, depths=(3, 6, 40, 3), mlp_ratios=(4, 4, 4, 4)),
}
SMALL_IMAGES: dict[str, Any] = dict(  # 16 x 16, 8 x 8 and 4 x 4 tokens with 4 x 4 keys each
    **dict(image_size=(32, 32), patch_size=2, classes=10, reductions=(4, 2, 1), mlp_ratios=(4, 4, 2)),
    **dict(widths=(48, 96, 192), depths=(2, 2, 2), heads=(1, 3, 6)),
)
MODELS = {
    **{f"pvt_{name}": PVTConfig(**variant) for name, variant in VARIANTS.items()},
    "pvt_cifar": PVTConfig(**SMALL_IMAGES),
}
MODELS_V2 = {
    **{f"pvt_v2_{name}": PVTv2Config(**variant) for name, variant in VARIANTS_V2.items()},
    "pvt_v2_cifar": PVTv2Config(**SMALL_IMAGES),
}


class ConvEmbed(nn.Module):
    """A map becomes tokens by one convolution, then a norm: patches side by side, or overlapping ones."""

    def __init__(self, channels: int, width: int, merge: Merge, eps: float):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, merge.kernel, stride=merge.stride, padding=merge.padding)
        self.norm = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:  # (B, C, H, W)
        return self.norm(to_tokens(self.proj(x)))  # (B, N, D), row by row


def conv_embeds(c: PVTConfig) -> nn.ModuleList:
    """One for each stage, of the pixels and then of the stage before."""
    sizes = zip((c.channels, *c.widths), c.widths, c.merges, strict=False)
    return nn.ModuleList(ConvEmbed(*size, c.merge_eps) for size in sizes)


class ConvMLP(nn.Module):
    """D -> hidden -> D with a 3 x 3 convolution of each hidden channel between, which tells tokens of their neighbours
    and, by the zeros around the map, where they stand (PVT v2, sec. 3).
    """

    def __init__(self, width: int, hidden: int, *, activation: Activation, dropout: float, relu: bool):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.relu = relu  # before the convolution: with linear attention
        self.conv = nn.Conv2d(hidden, hidden, kernel_size=3, padding=1, groups=hidden)
        self.activation = ACTIVATIONS[activation]
        self.fc2 = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, at: Reduced, trace: LayerTrace | None = None) -> Tensor:  # (B, N, D)
        x = mark(trace, "fc1_pre", self.fc1(x))  # (B, N, hidden)
        x = mark(trace, "fc1", F.relu(x) if self.relu else x)
        x = self.activation(to_tokens(self.conv(to_map(x, at.grid))))
        x = mark(trace, "mlp_conv", self.dropout(x))  # (B, N, hidden)
        return mark(trace, "fc2", self.dropout(self.fc2(x)))  # (B, N, D)


def reduced_attention(c: PVTConfig, stage: int) -> ReducedAttention:
    return ReducedAttention(
        *(c.widths[stage], c.heads[stage], c.key_merges[stage]),
        qkv_bias=c.qkv_bias,
        eps=c.reduction_eps,
        attention_dropout=c.attention_dropout,
        dropout=c.dropout,
        path=c.attention,
    )


def pvt_block(c: PVTConfig, stage: int, stochastic_depth: float) -> GridBlock:
    """Attention to reduced keys, and an MLP; PVT v2's with a convolution."""
    width = c.widths[stage]
    hidden, options = width * c.mlp_ratios[stage], dict[str, Any](activation=c.activation, dropout=c.dropout)
    conv = isinstance(c, PVTv2Config)
    mlp = ConvMLP(width, hidden, **options, relu=c.linear) if conv else MLP(width, hidden, **options)
    return GridBlock(reduced_attention(c, stage), mlp, width, eps=c.eps, stochastic_depth=stochastic_depth)


def pvt_stages(c: PVTConfig) -> nn.ModuleList:
    rates = depth_rates(c.depths, c.stochastic_depth)
    return nn.ModuleList(
        nn.ModuleList(pvt_block(c, stage, next(rates)) for _ in range(depth)) for stage, depth in enumerate(c.depths)
    )


def reduced_places(c: PVTConfig, height: int, width: int, *, prefix: int = 0) -> tuple[Reduced, ...]:
    """Where the tokens of each block lie; `prefix`: tokens that join in the last stage."""
    return tuple(
        Reduced(grid, c.key_merges[stage], prefix=prefix if stage == len(c.depths) - 1 else 0)
        for stage, grid in enumerate(c.grids(height, width))
        for _ in range(c.depths[stage])
    )


class PVT(Hierarchy):
    """Patches with positions; then blocks; and so on, each stage from the map of the one before. A class token
    joins in the last stage.
    """

    family = "pvt"
    config: PVTConfig
    prefix = ("class",)
    block_kinds = ("position_embedding", "positions", *REDUCED_KINDS)

    def __init__(self, config: PVTConfig):
        super().__init__(config)
        c, last = config, len(config.depths) - 1
        if c.reductions[-1] != 1:
            raise UsageError(
                f"reductions={list(c.reductions)}: PVT's last stage must have 1, for the class token is on no grid."
            )
        self.embeds = conv_embeds(c)
        for stage, (embed, width) in enumerate(zip(self.embeds, c.widths, strict=True)):
            grid = c.grids(*c.image_size)[stage]
            embed.positions = LearnedPositions(grid, width, prefix=int(stage == last), rule=c.table_rule)
        class_token = nn.Parameter(torch.zeros(1, 1, c.widths[-1]))
        nn.init.trunc_normal_(class_token, std=0.02)
        self.embeds[last].class_token = class_token
        self.dropout = nn.Dropout(c.dropout)
        self.stages = pvt_stages(c)
        self.norm = nn.LayerNorm(c.widths[-1], eps=c.eps)
        self.apply(init_matrices)  # convolutions as torch starts them
        self.head = new_head(c.widths[-1], c.classes)

    def places(self, height: int, width: int) -> tuple[Reduced, ...]:
        return reduced_places(self.config, height, width, prefix=1)

    def run(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        x = images  # (B, C, H, W)
        for stage, (steps, grid) in enumerate(self.steps(images, trace)):
            embed: Any = self.embeds[stage]
            z = mark_embed(stage, embed(x), trace, steps)  # (B, N, D)
            if stage == len(self.stages) - 1:
                z = torch.cat([embed.class_token.expand(z.shape[0], -1, -1), z], dim=1)  # (B, 1 + N, D)
            table = mark(steps[0].at, "position_embedding", embed.positions(grid, like=z))  # (1, N, D)
            z = self.dropout(mark(steps[0].at, "positions", z + table))
            for step in steps:
                z = self.run_block(step, z)
            yield z, grid
            x = to_map(z[:, -grid[0] * grid[1] :], grid)  # (B, D, rows, columns)


class PVTv2(Hierarchy):
    """Overlapping patches; then blocks, then a norm; and so on, each stage from the map of the one before."""

    family = "pvt_v2"
    config: PVTv2Config
    norm = None  # every stage has its own
    block_kinds = tuple(
        found for kind in (*REDUCED_KINDS, "stage_norm") for found in (("mlp_conv", kind) if kind == "fc2" else (kind,))
    )

    def __init__(self, config: PVTv2Config):
        super().__init__(config)
        c = config
        self.embeds = conv_embeds(c)
        self.stages = pvt_stages(c)
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=c.eps) for width in c.widths)
        self.apply(init_matrices).apply(init_convolutions)
        self.head = new_head(c.widths[-1], c.classes)

    def places(self, height: int, width: int) -> tuple[Reduced, ...]:
        return reduced_places(self.config, height, width)

    def run(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        x = images  # (B, C, H, W)
        for stage, (steps, grid) in enumerate(self.steps(images, trace)):
            z = mark_embed(stage, self.embeds[stage](x), trace, steps)  # (B, N, D)
            for step in steps:
                z = self.run_block(step, z)
            z = mark(steps[-1].at, "stage_norm", self.norms[stage](z))
            yield z, grid
            x = to_map(z, grid)  # (B, D, rows, columns)

    def norm_after(self, stage: int) -> nn.Module:
        return self.norms[stage]


def _entry(name: str, config: PVTConfig) -> Entry:
    """The paper's name is PVT-Tiny, the hub's pvt-tiny-224."""
    if config.image_size != (224, 224):
        return Entry(name, "pvt", config, HALF)
    paper = name.replace("_", "-")
    return Entry(name, "pvt", config, IMAGENET_CROP, (paper, f"{paper}-224"))


def _entry_v2(name: str, config: PVTv2Config) -> Entry:
    if config.image_size != (224, 224):
        return Entry(name, "pvt_v2", config, HALF)
    paper = name.replace("pvt_v2", "pvtv2").replace("_", "-")  # PVTv2-B2-Li
    return Entry(name, "pvt_v2", config, IMAGENET_CROP, (paper,))


PAPER = Paper("pvt", PVTConfig, PVT, [_entry(name, config) for name, config in MODELS.items()])
PAPER_V2 = Paper("pvt_v2", PVTv2Config, PVTv2, [_entry_v2(name, config) for name, config in MODELS_V2.items()])
