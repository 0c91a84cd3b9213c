"""Where the attention of a network in stages (Swin, PVT, Twins) lies on the image.

    stages = Stages(model, 224, 224)
    layer = stages.layers[3]
    row = layer.look(who, weights)             # from windows, shifts and reduced keys back to the tokens of the stage
    heat = stages.lay(row, layer.stage)        # and to the first stage's grid, whose tokens cover P x P pixels

A row has a weight for each token; `look` multiplies it by one layer's attention, `descend` by a merging. Padding is
left out, as query and as key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.explain.inputs import TokenModel, token_model, wide
from vitlab.layers.reduced import Grid, Merge, Pool, Reduced
from vitlab.layers.windows import Windows
from vitlab.models.hierarchy import Hierarchy
from vitlab.models.plain import PlainTransformer

Axes = tuple[Tensor, Tensor]  # rows and columns, each (coarse, fine): the share of a coarse cell in each fine one
Patches = tuple[int, int, int, int]  # left, top, right, bottom


def one_grid(model: ModelOrName, what: str) -> PlainTransformer | PromptClassifier:
    """The model, or the one that a name loads; raises for networks in stages."""
    model = token_model(model)
    if isinstance(model, Hierarchy):
        raise UsageError(
            f"{what} is defined for one grid of patches, and a {model.family} has one for each stage. Where its tokens "
            "look show attention_maps and rollout: vitlab explain attention --query X,Y."
        )
    return model


def heads_at(model: TokenModel, layer: int) -> int:
    """The number of heads of a layer."""
    return model.config.heads[model.config.stage_of(layer)] if isinstance(model, Hierarchy) else model.config.heads


def last_stage(model: TokenModel) -> range:
    """The layers whose tokens have the width that the head reads: all, or in stages those of the last one."""
    depth = len(model.blocks)
    return range(depth - model.config.depths[-1], depth) if isinstance(model, Hierarchy) else range(depth)


@dataclass(frozen=True)
class Layer:
    """The queries and keys of one layer's attention, (B, h, windows, n, m). A layer without windows has one window.

    Tokens are those of the stage: prefix tokens, then the grid row by row. Keys likewise, on a grid of their own.
    """

    stage: int
    grid: Grid
    prefix: int  # tokens before the grid
    queries: Tensor  # (windows, n): the query token; -1 is padding
    keys: Tensor  # (windows, m): the key; -1 is padding
    key_grid: Grid
    holds: Axes | None = None  # the tokens of each reduced key; None: keys are tokens
    in_windows: bool = False
    apart: Tensor | None = None  # (windows, n, m), True where the mask of a shifted window applies

    @property
    def tokens(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    def windowed(self, weights: Tensor) -> Tensor:
        """Traced weights in float32 at least, with an axis of windows if there is none: (B, h, 1, n, m)."""
        return wide(weights) if self.in_windows else wide(weights)[..., None, :, :]

    def real(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """(B, h, windows, n, m) without padding, rows normalised; and the weight of the padding, (B, h, windows, n)."""
        seen = weights * (self.keys >= 0).to(weights)[:, None]
        total = seen.sum(-1)
        return seen / total.clamp(min=torch.finfo(seen.dtype).tiny)[..., None], weights.sum(-1) - total

    def at_queries(self, row: Tensor) -> Tensor:
        """(..., tokens) -> (..., windows, n), 0 on padding."""
        return torch.cat([row, torch.zeros_like(row[..., :1])], dim=-1)[..., self.queries]

    def of_tokens(self, values: Tensor) -> Tensor:
        """(..., windows, n), a value for each query -> (..., tokens)."""
        by_token = values.new_zeros(*values.shape[:-2], self.tokens + 1)
        by_token[..., self.queries] = values
        return by_token[..., :-1]

    def look(self, row: Tensor, weights: Tensor) -> Tensor:
        """(..., tokens) through attention (..., windows, n, m): sum_i row_i A_ij, (..., tokens).

        The weight of a reduced key is spread evenly over its tokens, which keeps the sum.
        """
        weighted = (self.at_queries(row)[..., None, :] @ weights)[..., 0, :]  # (..., windows, m)
        height, width = self.key_grid
        count = self.prefix + height * width
        keys = torch.zeros(*weighted.shape[:-2], count + 1, dtype=weighted.dtype, device=weighted.device)
        keys = keys.index_add(-1, self.keys.flatten() % (count + 1), weighted.flatten(-2))[..., :count]
        if self.holds is None:
            return keys
        spread_out = spread(keys[..., self.prefix :].unflatten(-1, (height, width)), self.holds).flatten(-2)
        return torch.cat([keys[..., : self.prefix], spread_out], dim=-1)

    def window(self, token: int) -> Patches:
        """The tokens that a token can attend to, as a box on the grid: left, top, right, bottom."""
        if not self.in_windows:
            return 0, 0, self.grid[1], self.grid[0]
        ((window, place),) = (self.queries == token).nonzero()
        seen = self.keys[window] >= 0
        if self.apart is not None:
            seen &= ~self.apart[window, place]
        row, column = np.divmod(self.keys[window][seen].cpu().numpy(), self.grid[1])
        return int(column.min()), int(row.min()), int(column.max()) + 1, int(row.max()) + 1


def _evenly(weights: Tensor) -> Tensor:
    """Each row spread evenly over its nonzero cells; rows at the border may have fewer."""
    reached = (weights > 0).double()
    return reached / reached.sum(1, keepdim=True)


class Stages:
    """All layers of a network for one image size, and the maps between its grids."""

    def __init__(self, model: Hierarchy, height: int, width: int):
        config = model.config
        device = next(model.parameters()).device
        self.grids: tuple[Grid, ...] = config.grids(height, width)
        self.prefix = len(model.prefix)  # in the last stage
        self.layers = [_layer(at, config.stage_of(n), device) for n, at in enumerate(model.places(height, width))]
        merges = config.merges[1:]
        pairs = list(zip(pairwise(self.grids), merges, strict=True))
        self.reads: list[Axes] = [_axes(fine, merge) for (fine, _), merge in pairs]
        rows, columns = self.grids[0]
        stands: list[Axes] = [(torch.eye(rows, dtype=torch.float64), torch.eye(columns, dtype=torch.float64))]
        for (fine, _), merge in pairs:
            cell = Merge(merge.stride, merge.stride, fill=merge.fill or merge.padding > 0)
            down, across = _axes(fine, cell)
            stands.append((_evenly(down @ stands[-1][0]), _evenly(across @ stands[-1][1])))
        self.stands = stands  # the cells of each stage on the first stage's grid
        self.strides = [merge.stride for merge in merges]

    def descend(self, row: Tensor, stage: int) -> Tensor:
        """(..., N) of a stage -> of the one before: each token's weight in equal shares to its merged tokens."""
        return spread(row.unflatten(-1, self.grids[stage]), self.reads[stage - 1]).flatten(-2)

    def lay(self, row: Tensor, stage: int) -> Tensor:
        """(..., N) -> (..., grid_h, grid_w) of the first stage: each token's weight in equal shares to its cells."""
        return spread(row.unflatten(-1, self.grids[stage]), self.stands[stage])

    def paint(self, row: Tensor, stage: int) -> Tensor:
        """(..., N) -> (..., grid_h, grid_w) of the first stage: each token's value copied to its cells."""
        down, across = self.stands[stage]
        return spread(row.unflatten(-1, self.grids[stage]), (down > 0, across > 0))

    def token(self, patch: int, stage: int) -> int:
        """The token of a stage that contains a patch (of the first stage)."""
        row, column = divmod(patch, self.grids[0][1])
        for stride, (rows, columns) in zip(self.strides[:stage], self.grids[1:], strict=False):
            row, column = min(row // stride, rows - 1), min(column // stride, columns - 1)
        return row * self.grids[stage][1] + column

    def box(self, box: Patches, stage: int) -> Patches:
        """A box on a stage's grid, left, top, right, bottom, in patches of the first stage."""
        left, top, right, bottom = box
        down, across = self.stands[stage]
        rows, columns = down[top:bottom].sum(0).nonzero(), across[left:right].sum(0).nonzero()
        return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


class Sight(NamedTuple):
    """A query token and its attention window: boxes of patches, left, top, right, bottom."""

    who: Patches
    window: Patches | None  # None: everything


def sights(model: Hierarchy, size: tuple[int, int], patch: int, layers: Sequence[int] | None = None) -> list[Sight]:
    """The Sight of the token that contains a patch, for each layer and this image size; for `draw.attention`."""
    stages = Stages(model, *size)
    chosen = stages.layers if layers is None else [stages.layers[number] for number in layers]
    return [sight_of(stages, layer, patch) for layer in chosen]


def sight_of(stages: Stages, layer: Layer, patch: int) -> Sight:
    """The Sight of the token that contains a patch."""
    token = stages.token(patch, layer.stage)
    row, column = divmod(token, layer.grid[1])
    window = stages.box(layer.window(token), layer.stage) if layer.in_windows else None
    return Sight(stages.box((column, row, column + 1, row + 1), layer.stage), window)


def row_of(stages: Stages, layer: Layer, who: str | int | None) -> Tensor:
    """(tokens,) of a layer, summing to 1: a token by name, "mean", or the one that contains a patch. None: what the
    head reads, and in earlier stages all tokens."""
    row = torch.zeros(layer.tokens, dtype=torch.float64)
    if who == "mean" or (who is None and not layer.prefix):
        row[layer.prefix :] = 1 / (layer.tokens - layer.prefix)
    elif isinstance(who, int):
        row[layer.prefix + stages.token(who, layer.stage)] = 1
    elif layer.prefix:
        row[0] = 1
    else:
        raise UsageError(f"query={who!r}: only the last stage has that token. Ask for its layers, or for 'mean'.")
    return row


def head_counts(model: TokenModel, layers: str | Sequence[int] = "all") -> set[int]:
    """The numbers of heads that these layers have; several only in networks in stages."""
    depth = len(model.blocks)
    chosen = range(depth) if isinstance(layers, str) else [layer % depth for layer in layers if -depth <= layer < depth]
    return {heads_at(model, layer) for layer in chosen} if isinstance(model, Hierarchy) else {model.config.heads}


def heads_of(model: TokenModel, layers: str | Sequence[int] = "all") -> int:
    """The number of heads of the layers; raises if they differ."""
    config, counts = model.config, head_counts(model, layers)
    if len(counts) > 1:
        counted = "; ".join(
            f"{config.stage_ends[stage] + 1 - count} to {config.stage_ends[stage]} have {heads}"
            for stage, (count, heads) in enumerate(zip(config.depths, config.heads, strict=True))
        )
        raise UsageError(
            f'layers of several stages have unlike heads ({counted}): ask for heads="mean", or for one stage.'
        )
    return counts.pop() if counts else 0


def spread(values: Tensor, axes: Axes) -> Tensor:
    """(..., rows, columns) of a coarse grid -> of a fine grid."""
    down, across = (axis.to(values) for axis in axes)
    return down.mT @ values @ across


def _axes(grid: Grid, merge: Merge | Pool) -> Axes:
    """Equal shares for all cells that are merged into one."""
    axes = []
    for length in grid:
        axis = torch.zeros(merge.size(length), length, dtype=torch.float64)
        for place, (first, end) in enumerate(merge.spans(length)):
            axis[place, first:end] = 1 / (end - first)
        axes.append(axis)
    return axes[0], axes[1]


def _layer(at: Windows | Reduced, stage: int, device: torch.device) -> Layer:
    if isinstance(at, Windows):
        places = torch.from_numpy(at.places()).to(device)  # (windows, n)
        mask = at.mask(device)
        apart = None if mask is None else mask[:, 0] < 0
        return Layer(stage, at.grid, 0, places, places, at.grid, None, in_windows=True, apart=apart)
    queries, keys = (torch.arange(at.prefix + rows * columns, device=device) for rows, columns in (at.grid, at.keys))
    holds = None if at.keys == at.grid else _axes(at.grid, at.merge)
    return Layer(stage, at.grid, at.prefix, queries[None], keys[None], at.keys, holds)
