"""What networks of stages share (Swin, PVT, Twins): blocks on ever coarser grids of tokens, one norm, one linear head.

    maps = model.forward_pyramid(images)       # one map per stage, (B, C, H/4, W/4) to (B, C, H/32, W/32)
    model.pyramid                              # their strides and channels, for a detection or segmentation head

A paper's own file gives the stages; `places` says where the queries and keys of every layer stand, by which `explain`
lays attention on the picture.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitlab.layers.block import BLOCK_KINDS, MLP, StochasticDepth
from vitlab.layers.patches import check_images
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import FROM_HEADS, LayerTrace, TokenLayout, Trace, mark
from vitlab.models.config import Config

Grid = tuple[int, int]  # rows, columns of tokens


@dataclass(frozen=True)
class Merge:
    """How each place of a grid is made of the finer one before it, along one axis: what a convolution reads."""

    kernel: int
    stride: int
    padding: int = 0  # at either end
    fill: bool = False  # zeros at the far end, so that nothing is left over; otherwise the rest is not read

    def size(self, length: int) -> int:
        if self.fill:
            return -(-length // self.stride)
        return (length + 2 * self.padding - self.kernel) // self.stride + 1

    def grid(self, grid: Grid) -> Grid:
        return self.size(grid[0]), self.size(grid[1])


@dataclass(frozen=True)
class Level:
    """One map of a pyramid: its side is the image's divided by `stride`."""

    stride: int
    channels: int


class StagedConfig(Config):
    """Base of the configs: `depths` has the number of blocks of each stage; blocks are counted through all stages."""

    fixed = ()  # options that weights belong to: with others they are of another network
    resize_rule = "bilinear"  # of position tables, where there are any

    @property
    def stage_ends(self) -> tuple[int, ...]:
        """The last block of each stage: Trace("tokens", layers=config.stage_ends)."""
        return tuple(end - 1 for end in accumulate(cast("Any", self).depths))

    def stage_of(self, layer: int) -> int:
        return next(stage for stage, end in enumerate(self.stage_ends) if layer <= end)

    def place(self, layer: int) -> str:
        """Where a block stands: 4 is stages.1.1 where the first stage has 3."""
        stage = self.stage_of(layer)
        return f"stages.{stage}.{layer - self.stage_ends[stage] - 1 + cast('Any', self).depths[stage]}"

    @property
    @abstractmethod
    def merges(self) -> tuple[Merge, ...]:
        """How each stage's grid is made, the first one's of pixels."""

    def table_grid(self, key: str) -> Grid:
        """The grid that a table of positions, by its name in the weights, is made for."""
        raise NotImplementedError

    def grids(self, height: int, width: int) -> tuple[Grid, ...]:
        """Rows and columns of tokens in each stage."""
        found, grid = [], (height, width)
        for merge in self.merges:
            grid = merge.grid(grid)
            found.append(grid)
        if min(min(grid) for grid in found) < 1:
            least = next(n for n in range(1, 10**4) if _fits(self.merges, n))
            raise ValueError(
                f"images of {height} x {width} pixels leave the last stage nothing to look at: each side must have at "
                f"least {least}."
            )
        return tuple(found)


def _fits(merges: Sequence[Merge], length: int) -> bool:
    for merge in merges:
        length = merge.size(length)
    return length >= 1


def check_stages(c: Any, *names: str) -> None:
    """What all of them refuse; `names` are the options with one whole number for each stage."""
    lists = {name: getattr(c, name) for name in ("depths", *names)}
    if not c.depths or len({len(values) for values in lists.values()}) > 1:
        told = ", ".join(f"{name}={list(values)}" for name, values in lists.items())
        raise ValueError(f"{told} must have a number for each stage, equally many.")
    least = {name: min(values) for name, values in lists.items()}
    least |= {"channels": c.channels, "patch_size": c.patch_size, "image_size": min(c.image_size)}
    for name, value in least.items():
        if value < 1:
            raise ValueError(f"{name}={getattr(c, name)} must be at least 1.")
    if c.classes < 0:
        raise ValueError(f"classes={c.classes} must be 0 (pooled features) or more.")
    for width, heads in zip(c.widths, c.heads, strict=True):
        if width % heads:
            fitting = max(h for h in range(1, heads + 1) if width % h == 0)
            raise ValueError(
                f"heads={list(c.heads)}: {heads} heads do not divide a stage's width of {width}: use {fitting} there."
            )
    if c.eps <= 0 or c.merge_eps <= 0:
        raise ValueError("eps and merge_eps must be greater than 0.")
    for name in ("dropout", "attention_dropout", "stochastic_depth"):
        if not 0 <= getattr(c, name) < 1:
            raise ValueError(f"{name}={getattr(c, name)} must be at least 0 and below 1.")
    c.grids(*c.image_size)  # refuses what is too small


class GridBlock(nn.Module):
    """Pre-norm block whose attention, and perhaps MLP, know the grid that the tokens stand on; eqs. 2-3 of ViT."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int, *, eps: float, stochastic_depth: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp
        self.depth_drop = StochasticDepth(stochastic_depth)

    def forward(self, z: Tensor, at: Any, trace: LayerTrace | None = None) -> Tensor:
        """z (B, N, D), row by row; `at` says where queries and keys stand."""
        y = self.attention(mark(trace, "norm1", self.norm1(z)), at, trace)
        z = mark(trace, "after_attention", z + self.depth_drop(y))
        y = mark(trace, "norm2", self.norm2(z))
        y = self.mlp(y, trace) if isinstance(self.mlp, MLP) else self.mlp(y, at, trace)
        return mark(trace, "tokens", z + self.depth_drop(y))


class Hierarchy(nn.Module):
    """A network of stages; what is left to a paper's file is `run` and `places`."""

    family: str
    stages: nn.ModuleList
    norm: nn.Module | None  # after the last stage, for the classifier
    prefix: tuple[str, ...] = ()  # tokens before the patches in the last stage

    def __init__(self, config: Any):
        super().__init__()
        self.config = config
        self.preprocess: Any = None  # how a picture becomes this model's input; create and load fill it in
        self.labels: list[str] | None = None  # class names, where they are known
        self.card: Any = None  # where the weights come from

    @abstractmethod
    def run(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        """The tokens that each stage gives, (B, N, D), and their grid."""

    @abstractmethod
    def places(self, height: int, width: int) -> tuple[Any, ...]:
        """For every block where its queries and keys stand, in images of this size."""

    @property
    def blocks(self) -> list[GridBlock]:
        """All blocks, counted through."""
        return [block for stage in cast("list[list[GridBlock]]", self.stages) for block in stage]

    @property
    def feature_width(self) -> int:
        """Width of what the classifier reads, and of the output when classes=0."""
        return self.config.widths[-1]

    @property
    def pyramid(self) -> tuple[Level, ...]:
        """What `forward_pyramid` gives."""
        strides = accumulate((merge.stride for merge in self.config.merges), lambda a, b: a * b)
        return tuple(Level(*row) for row in zip(strides, self.config.widths, strict=True))

    @property
    def traceable(self) -> tuple[str, ...]:
        """What a Trace can ask of this model; its layers are the blocks, counted through all stages."""
        inside = [kind for kind in FROM_HEADS if kind != "class_attention"]
        ends = (*(["norm"] if self.norm is not None else []), "pool", *(["head"] if self.config.classes else []))
        return ("patch_embed", "merge", *BLOCK_KINDS, *inside, *ends)

    def layout(self, height: int, width: int) -> TokenLayout:
        """The first stage's tokens, on whose grid explanations are laid."""
        return TokenLayout((), self.config.grids(height, width)[0])

    def forward(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        return self.forward_head(self.forward_features(images, trace=trace, reducer=reducer), trace=trace)

    def forward_features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        """The last stage's tokens after the final norm: (B, C, H, W) -> (B, N, D), row by row."""
        if reducer is not None:
            raise ValueError(f"{self.family} needs its tokens on a whole grid: use a reducer with a ViT.")
        *_, (z, _) = self.start(images, trace)
        return z if self.norm is None else mark(trace, "norm", self.norm(z))

    def forward_pyramid(self, images: Tensor, *, trace: Trace | None = None) -> list[Tensor]:
        """One map of each stage, (B, C, rows, columns), as `pyramid` states them; the classifier's norm is left out."""
        maps = []
        for z, grid in self.start(images, trace):
            z = z[:, -grid[0] * grid[1] :]  # without prefix tokens
            maps.append(z.transpose(1, 2).unflatten(2, grid))
        return maps

    def start(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        """`run`, after the images and the trace are checked."""
        check_images(images, self.config.channels, like=next(self.parameters()))
        size = tuple(images.shape[-2:])
        if trace is not None:
            layout, places = self.layout(*size), self.places(*size)
            trace.begin(depth=len(self.blocks), offers=self.traceable, layout=layout, places=places)
        return self.run(images, trace)

    def run_block(self, block: GridBlock, z: Tensor, at: Any, trace: LayerTrace | None) -> Tensor:
        if self.config.gradient_checkpointing and self.training and trace is None:
            return checkpoint(block, z, at, use_reentrant=False)
        return block(z, at, trace)

    def forward_head(self, tokens: Tensor, *, pre_logits: bool = False, trace: Trace | None = None) -> Tensor:
        """(B, N, D) -> logits (B, classes); `pre_logits=True` or classes=0 stops at the pooled features."""
        y = mark(trace, "pool", tokens[:, 0] if self.prefix else tokens.mean(dim=1))  # (B, D)
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def intermediate_features(
        self, images: Tensor, layers: Sequence[int] = (-1,), *, norm: bool = True, maps: bool = False
    ) -> list[Tensor]:
        """Tokens after the given blocks; of the last stage through the final norm unless norm=False. `maps`: each
        (B, D, rows, columns), without prefix tokens.
        """
        trace = Trace("tokens", layers=layers, gradients=torch.is_grad_enabled())
        *_, _ = self.start(images, trace)
        grids, found = self.config.grids(*images.shape[-2:]), []
        for layer in layers:
            z = trace["tokens", layer]
            stage = self.config.stage_of(layer % len(self.blocks))
            if norm and self.norm is not None and stage == len(grids) - 1:
                z = self.norm(z)
            if maps:
                rows, columns = grids[stage]
                z = z[:, -rows * columns :].transpose(1, 2).unflatten(2, grids[stage])
            found.append(z)
        return found

    def reset_classifier(self, classes: int) -> None:
        """A new, untrained head for another number of classes (0: none); everything else stays."""
        self.config = replace(self.config, classes=classes)
        like = next(self.parameters())
        self.head = new_head(self.feature_width, classes).to(like.device, like.dtype)
        self.labels = None


def depth_rates(c: Any) -> Iterator[float]:
    """Rates of stochastic depth, one for each block, growing linearly from 0."""
    blocks = sum(c.depths)
    return (c.stochastic_depth * layer / max(blocks - 1, 1) for layer in range(blocks))


def new_head(width: int, classes: int) -> nn.Module:
    if not classes:
        return nn.Identity()
    head = nn.Linear(width, classes)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head
