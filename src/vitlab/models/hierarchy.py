"""What networks of stages share (Swin, PVT, Twins): blocks on ever coarser grids of tokens, one norm, one linear head.

    maps = model.forward_pyramid(images)       # one map per stage, (B, C, H/4, W/4) to (B, C, H/32, W/32)
    model.pyramid                              # their strides and channels, for a detection or segmentation head

A paper's own file gives the stages; `places` says where the queries and keys of every layer stand, by which `explain`
lays attention on the image.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.block import BLOCK_KINDS, MLP, StochasticDepth, run
from vitlab.layers.edit import Edit
from vitlab.layers.patches import check_images
from vitlab.layers.reduced import Grid, Merge, Pool, Reduced, to_map
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import FROM_HEADS, LayerTrace, TokenLayout, Trace, mark
from vitlab.layers.windows import Windows
from vitlab.models.base import Capability, Network
from vitlab.models.config import Config, largest_divisor


@dataclass(frozen=True)
class Level:
    """One map of a pyramid: its side is the image's divided by `stride`."""

    stride: int
    channels: int


class StagedConfig(Config):
    """Base of the configs: `depths` has the number of blocks of each stage; blocks are counted through all stages."""

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

    @property
    def key_merges(self) -> tuple[Merge | Pool, ...]:
        """How the keys of each stage are made of its tokens; Merge(1, 1): they are its tokens."""
        return (Merge(1, 1),) * len(self.merges)

    def grids(self, height: int, width: int) -> tuple[Grid, ...]:
        """Rows and columns of tokens in each stage."""
        _, *grids = accumulate(self.merges, lambda grid, merge: merge.grid(grid), initial=(height, width))
        keys = [keys.grid(grid) for keys, grid in zip(self.key_merges, grids, strict=True)]
        if min(min(grid) for grid in (*grids, *keys)) < 1:
            least = next(n for n in range(1, 10**4) if self._fits(n))
            raise UsageError(
                f"images of {height} x {width} pixels leave a stage nothing to look at: each side must have at least "
                f"{least}."
            )
        return tuple(grids)

    def _fits(self, length: int) -> bool:
        for merge, keys in zip(self.merges, self.key_merges, strict=True):
            length = merge.size(length)
            if length < 1 or keys.size(length) < 1:
                return False
        return True


def check_stages(c: Any, *names: str) -> None:
    """What all of them refuse; `names` are the options with one whole number for each stage."""
    lists = {name: getattr(c, name) for name in ("depths", *names)}
    if not c.depths or len({len(values) for values in lists.values()}) > 1:
        given = ", ".join(f"{name}={list(values)}" for name, values in lists.items())
        raise UsageError(f"{given} must have a number for each stage, equally many.")
    least = {name: min(values) for name, values in lists.items()}
    least |= {"channels": c.channels, "patch_size": c.patch_size, "image_size": min(c.image_size)}
    for name, value in least.items():
        if value < 1:
            raise UsageError(f"{name}={getattr(c, name)} must be at least 1.")
    if c.classes < 0:
        raise UsageError(f"classes={c.classes} must be 0 (pooled features) or more.")
    for width, heads in zip(c.widths, c.heads, strict=True):
        if width % heads:
            fitting = largest_divisor(width, heads)
            raise UsageError(
                f"heads={list(c.heads)}: {heads} heads do not divide a stage's width of {width}: use {fitting} there."
            )
    if c.eps <= 0 or c.merge_eps <= 0:
        raise UsageError("eps and merge_eps must be greater than 0.")
    for name in ("dropout", "attention_dropout", "stochastic_depth"):
        if not 0 <= getattr(c, name) < 1:
            raise UsageError(f"{name}={getattr(c, name)} must be at least 0 and below 1.")
    c.grids(*c.image_size)  # refuses what is too small


class GridBlock(nn.Module):
    """Pre-norm block whose attention, and perhaps MLP, know the grid that the tokens stand on; eqs. 2-3 of ViT."""

    pre_norm = True

    def __init__(self, attention: nn.Module, mlp: nn.Module, width: int, *, eps: float, stochastic_depth: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = mlp
        self.depth_drop = StochasticDepth(stochastic_depth)

    def forward(self, z: Tensor, at: Windows | Reduced, trace: LayerTrace | None = None) -> Tensor:
        """z (B, N, D), row by row; `at` says where queries and keys stand."""
        y = self.attention(mark(trace, "norm1", self.norm1(z)), at, trace)
        y = mark(trace, "attention_out", self.depth_drop(y))
        z = mark(trace, "after_attention", z + y)
        y = mark(trace, "norm2", self.norm2(z))
        y = self.mlp(y, trace) if isinstance(self.mlp, MLP) else self.mlp(y, at, trace)
        y = mark(trace, "mlp_out", self.depth_drop(y))
        return mark(trace, "tokens", z + y)


class BlockStep(NamedTuple):
    """One block of a pass."""

    block: GridBlock
    place: Windows | Reduced  # where its queries and keys stand
    at: LayerTrace | None


class Hierarchy(Network):
    """A network of stages; what is left to a paper's file is `run` and `places`."""

    stages: nn.ModuleList
    norm: nn.Module | None  # after the last stage, for the classifier
    prefix: tuple[str, ...] = ()  # tokens before the patches in the last stage
    block_kinds: tuple[str, ...] = BLOCK_KINDS  # what blocks show, and what comes before and after them

    def __init__(self, config: StagedConfig):
        super().__init__()
        self.config = config

    @abstractmethod
    def run(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        """The tokens that each stage gives, (B, N, D), and their grid."""

    @abstractmethod
    def places(self, height: int, width: int) -> tuple[Windows | Reduced, ...]:
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
        return ("patch_embed", "merge", *self.block_kinds, *inside, *ends)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | {Capability.TOKENS, Capability.PYRAMID}

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.layout(*size).grid

    def layout(self, height: int, width: int) -> TokenLayout:
        """The first stage's tokens, on whose grid explanations are laid."""
        return TokenLayout((), self.config.grids(height, width)[0])

    def forward(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        trace = with_edit(trace, edit)
        return self.forward_head(self.forward_features(images, trace=trace, reducer=reducer), trace=trace)

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """The last stage's tokens after the final norm: (B, C, H, W) -> (B, N, D), row by row."""
        if reducer is not None:
            raise UsageError(f"{self.family} needs its tokens on a whole grid: use a reducer with a ViT.")
        trace = with_edit(trace, edit)
        *_, (z, _) = self.start(images, trace)
        return z if self.norm is None else mark(trace, "norm", self.norm(z))

    def forward_pyramid(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> list[Tensor]:
        """One map of each stage, (B, C, rows, columns), as `pyramid` states them; the classifier's norm is left out."""
        return [patch_map(z, grid) for z, grid in self.start(images, with_edit(trace, edit))]

    def start(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[Tensor, Grid]]:
        """`run`, after the images and the trace are checked."""
        check_images(images, self.config.channels, like=next(self.parameters()))
        size = tuple(images.shape[-2:])
        if trace is not None:
            layout, places = self.layout(*size), self.places(*size)
            trace.begin(depth=len(self.blocks), offers=self.traceable, layout=layout, places=places)
        yield from self.run(images, trace)
        if trace is not None:
            trace.finish()

    def steps(self, images: Tensor, trace: Trace | None) -> Iterator[tuple[list[BlockStep], Grid]]:
        """What to run: of each stage its blocks, and its grid."""
        size, layer = images.shape[-2:], 0
        places = self.places(*size)
        for blocks, grid in zip(cast("list[list[GridBlock]]", self.stages), self.config.grids(*size), strict=True):
            steps: list[BlockStep] = []
            for block in blocks:
                steps.append(BlockStep(block, places[layer], trace.at(layer) if trace is not None else None))
                layer += 1
            yield steps, grid

    def run_block(self, step: BlockStep, z: Tensor) -> Tensor:
        recompute = self.config.gradient_checkpointing and self.training and step.at is None
        return run(step.block, z, step.place, step.at, recompute=recompute)

    def forward_head(self, tokens: Tensor, *, pre_logits: bool = False, trace: Trace | None = None) -> Tensor:
        """(B, N, D) -> logits (B, classes); `pre_logits=True` or classes=0 stops at the pooled features."""
        y = mark(trace, "pool", tokens[:, 0] if self.prefix else tokens.mean(dim=1))  # (B, D)
        return y if pre_logits or not self.config.classes else mark(trace, "head", self.head(y))  # (B, classes)

    def intermediate_features(
        self, images: Tensor, layers: Sequence[int] = (-1,), *, norm: bool = True, maps: bool = False
    ) -> list[Tensor]:
        """Tokens after the given blocks; of the last stage through the final norm, of PVT v2 each through its stage's,
        unless norm=False. `maps`: each (B, D, rows, columns), without prefix tokens.
        """
        trace = Trace("tokens", layers=layers, gradients=torch.is_grad_enabled())
        *_, _ = self.start(images, trace)
        grids, features = self.config.grids(*images.shape[-2:]), list[Tensor]()
        for layer in layers:
            z = trace["tokens", layer]
            stage = self.config.stage_of(layer % len(self.blocks))
            after = self.norm_after(stage)
            if norm and after is not None:
                z = after(z)
            features.append(patch_map(z, grids[stage]) if maps else z)
        return features

    def norm_after(self, stage: int) -> nn.Module | None:
        """The norm that the tokens of a stage go through at its end."""
        return self.norm if stage == len(self.stages) - 1 else None

    def reset_classifier(self, classes: int) -> None:
        """A new, untrained head for another number of classes (0: none); everything else stays."""
        self.config = replace(self.config, classes=classes)
        like = next(self.parameters())
        self.head = new_head(self.feature_width, classes).to(like.device, like.dtype)
        self.labels = None


def patch_map(z: Tensor, grid: Grid) -> Tensor:
    """Tokens (B, N, D) -> (B, D, rows, columns), without prefix tokens."""
    return to_map(z[:, -grid[0] * grid[1] :], grid)


def depth_rates(depths: Sequence[int], last: float) -> Iterator[float]:
    """Rates of stochastic depth, one for each block, growing linearly from 0 to `last`."""
    blocks = sum(depths)
    return (last * layer / max(blocks - 1, 1) for layer in range(blocks))


def mark_embed(stage: int, z: Tensor, trace: Trace | None, steps: list[BlockStep]) -> Tensor:
    """Show the tokens that a stage begins with: "patch_embed" of the first, "merge" at a later one's first block."""
    return mark(trace, "patch_embed", z) if stage == 0 else mark(steps[0].at, "merge", z)


def init_matrices(module: nn.Module) -> None:
    """As Swin, PVT and Twins start: matrices by a normal of 0.02, biases at zero."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        _zero_bias(module)


def init_convolutions(module: nn.Module) -> None:
    """As PVT v2 and Twins start: by the number of values that each input value goes to; biases at zero."""
    if isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=(2.0 / fan_out) ** 0.5)
        _zero_bias(module)


def _zero_bias(module: nn.Linear | nn.Conv2d) -> None:
    if module.bias is not None:
        nn.init.zeros_(module.bias)


def new_head(width: int, classes: int) -> nn.Module:
    if not classes:
        return nn.Identity()
    head = nn.Linear(width, classes)
    nn.init.trunc_normal_(head.weight, std=0.02)
    nn.init.zeros_(head.bias)
    return head
