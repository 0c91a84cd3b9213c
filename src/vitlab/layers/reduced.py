"""Attention to fewer keys: every token asks, but keys stand on a coarser grid, each made of a block of tokens.

Spatial-reduction attention of PVT (arXiv:2102.12122, sec. 3), which PVT v2 and Twins have too. `Reduced` says where
queries and keys stand; the same object tells `explain` which tokens a key holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.layers.attention import Heads, Path, head_width
from vitlab.layers.trace import LayerTrace, mark, mark_side_by_side

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

    def spans(self, length: int) -> list[tuple[int, int]]:
        """For each place the finer ones that it is made of: from, and up to but without."""
        starts = [place * self.stride - self.padding for place in range(self.size(length))]
        return [(max(start, 0), min(start + self.kernel, length)) for start in starts]


@dataclass(frozen=True)
class Pool:
    """As `Merge`, but into `count` places whatever the length: as equal shares as there are, which may overlap."""

    count: int

    def size(self, length: int) -> int:
        return self.count

    def grid(self, grid: Grid) -> Grid:
        return self.count, self.count

    def spans(self, length: int) -> list[tuple[int, int]]:
        n = self.count
        return [(place * length // n, -(-(place + 1) * length // n)) for place in range(n)]


@dataclass(frozen=True)
class Reduced:
    """Where attention looks from and at: queries are all tokens, row by row; keys are made of them by `merge`.

    `prefix` tokens stand before both, and are neither merged nor on the grid.
    """

    grid: Grid
    merge: Merge | Pool = Merge(1, 1)
    prefix: int = 0

    @property
    def keys(self) -> Grid:
        return self.merge.grid(self.grid)


class ReducedAttention(Heads):
    """SRA, eqs. 1-4 of PVT: softmax(Q K^T / sqrt(d)) V, with K and V of SR(x), a convolution of R x R and a norm.

    With a Pool it is the linear attention of PVT v2 (sec. 3): the mean of each share, a matrix, norm and GELU.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        merge: Merge | Pool,
        *,
        qkv_bias: bool = True,
        eps: float = 1e-6,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        path: Path = "auto",
    ):
        super().__init__(heads, head_width(width, heads), attention_dropout, path)
        self.q = nn.Linear(width, width, bias=qkv_bias)
        self.pool = isinstance(merge, Pool)
        R = 1 if isinstance(merge, Pool) else merge.stride
        self.reduction = nn.Conv2d(width, width, kernel_size=R, stride=R) if self.pool or R > 1 else None
        self.norm = None if self.reduction is None else nn.LayerNorm(width, eps=eps)
        self.kv = nn.Linear(width, 2 * width, bias=qkv_bias)
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, at: Reduced, trace: LayerTrace | None = None) -> Tensor:  # (B, N, D)
        (q,) = self.split(mark(trace, "q", self.q(x)), 1)  # (B, h, N, d)
        y = x if self.reduction is None else mark(trace, "reduced", self.reduce(x, at))  # (B, M, D)
        k, v = self.split(mark(trace, "kv", self.kv(y)), 2)  # each (B, h, M, d)
        x = self.attend(q, k, v, None, None, trace)  # (B, h, N, d)
        x = mark_side_by_side(trace, "heads", x.transpose(1, 2).flatten(2), self.heads)  # (B, N, D)
        return mark(trace, "proj", self.dropout(self.proj(x)))  # (B, N, D)

    def reduce(self, x: Tensor, at: Reduced) -> Tensor:
        """SR(x), eq. 3: (B, N, D) -> (B, M, D)."""
        assert self.reduction is not None and self.norm is not None and not at.prefix
        x = to_map(x, at.grid)
        if self.pool:
            return F.gelu(self.norm(to_tokens(self.reduction(F.adaptive_avg_pool2d(x, at.keys)))))
        return self.norm(to_tokens(self.reduction(x)))


def to_map(tokens: Tensor, grid: Grid) -> Tensor:
    """(B, N, D), row by row -> (B, D, rows, columns); the memory stays as it is."""
    return torch.unflatten(tokens.transpose(1, 2), 2, grid)


def to_tokens(maps: Tensor) -> Tensor:
    """(B, D, rows, columns) -> (B, N, D), row by row."""
    return maps.flatten(2).transpose(1, 2)
