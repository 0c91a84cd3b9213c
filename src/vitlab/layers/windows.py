"""Attention inside windows: a grid of tokens is cut into windows, perhaps shifted, and put together again.

Swin (arXiv:2103.14030, sec. 3.2) shifts every second layer; Twins (arXiv:2104.13840) has windows without shift;
Swin v2 (models/swinv2.py) compares tokens by cosines.
`Windows` says where every token goes; the same object tells `explain` where it came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily  # no public way to leave the pass that counts MACs

from vitlab.layers.attention import Heads, Path, QVLinear, head_width
from vitlab.layers.positions import RelativeBias
from vitlab.layers.trace import LayerTrace, mark, mark_side_by_side

APART = -100.0  # added to the score of tokens that only a shift made neighbours; the released weights know this number


@dataclass(frozen=True)
class Windows:
    """How a grid of tokens is cut: filled up with zeros at the right and bottom to whole windows, rolled up and left by
    `shift`, cut row by row. n = window rows x window columns. `roll_first`: rolled before it is filled up.
    """

    grid: tuple[int, int]  # rows, columns of tokens
    window: tuple[int, int]
    shift: tuple[int, int] = (0, 0)
    roll_first: bool = False
    prefix: ClassVar[int] = 0  # tokens before the patches

    @property
    def padded(self) -> tuple[int, int]:
        (rows, columns), (high, wide) = self.grid, self.window
        return -(-rows // high) * high, -(-columns // wide) * wide

    @property
    def count(self) -> int:
        """Windows of an image."""
        return self.padded[0] // self.window[0] * (self.padded[1] // self.window[1])

    @property
    def moved(self) -> bool:
        """Whether tokens change their order; in one window that is not shifted they keep it."""
        return self.padded != self.window or self.shift != (0, 0)

    def cut(self, x: Tensor) -> Tensor:
        """(B, N, D), row by row -> (B * count, n, D)."""
        (rows, columns), (high, wide) = self.grid, self.padded
        if self.padded != self.grid:
            x = F.pad(torch.unflatten(x, 1, self.grid), (0, 0, 0, wide - columns, 0, high - rows)).flatten(1, 2)
        if self.moved:
            x = reorder(x, *self.orders(x.device))  # (B, count * n, D)
        return x.reshape(-1, self.window[0] * self.window[1], x.shape[-1])

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `cut`; what stands on padding is dropped."""
        x = x.reshape(-1, self.padded[0] * self.padded[1], x.shape[-1])
        if self.moved:
            x = reorder(x, *reversed(self.orders(x.device)))
        if self.padded != self.grid:
            x = torch.unflatten(x, 1, self.padded)[:, : self.grid[0], : self.grid[1]].flatten(1, 2)
        return x  # (B, N, D)

    def orders(self, device: torch.device) -> tuple[Tensor, ...]:
        """The order in which tokens of the padded grid stand in windows, and the way back."""
        return cached("orders", device, self.grid, self.window, self.shift, self.roll_first)

    def mask(self, device: torch.device) -> Tensor | None:
        """(count, 1, n, n): 0, and APART between tokens that the roll brought together from two ends of the grid
        (fig. 4); None where nothing is shifted.
        """
        return None if self.shift == (0, 0) else cached("mask", device, self.grid, self.window, self.shift)[0]

    def places(self) -> np.ndarray:
        """(count, n): which token of the grid, row by row, stands in each place of each window; -1 on padding."""
        row, column = np.divmod(_orders(self.grid, self.window, self.shift, self.roll_first)[0], self.padded[1])
        inside = (row < self.grid[0]) & (column < self.grid[1])
        return np.where(inside, row * self.grid[1] + column, -1).reshape(self.count, -1)


class Reorder(torch.autograd.Function):
    """See `reorder`. torch's own backward of indexing adds up, which takes several times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.orders = (back, order)
        return x.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        return reorder(slopes[0], *ctx.orders), None, None


def reorder(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """Tokens (B, N, D) in another order; `back` is its inverse."""
    return Reorder.apply(x, order, back)  # type: ignore[return-value]


def _orders(*about: Any) -> list[np.ndarray]:
    w = Windows(*about)
    (down, right), (rows, columns) = w.shift, w.grid if w.roll_first else w.padded
    tokens = np.arange(w.padded[0] * w.padded[1]).reshape(w.padded)
    tokens[:rows, :columns] = np.roll(tokens[:rows, :columns], (-down, -right), axis=(0, 1))
    order = _cut(w, tokens).reshape(-1)
    return [order, np.argsort(order)]


def _mask(*about: Any) -> list[np.ndarray]:
    w = Windows(*about)
    down, right = (np.arange(size) >= size - shift for size, shift in zip(w.padded, w.shift, strict=True))
    region = _cut(w, down[:, None] * 2 + right)  # after the roll: what came from the other end
    apart = region[:, :, None] != region[:, None, :]  # (count, n, n)
    return [np.where(apart, np.float32(APART), np.float32(0))[:, None]]


def _cut(w: Windows, values: np.ndarray) -> np.ndarray:
    """(padded rows, padded columns) -> (count, n)."""
    (high, wide), (tall, broad) = w.padded, w.window
    return values.reshape(high // tall, tall, wide // broad, broad).swapaxes(1, 2).reshape(w.count, -1)


def _offsets(window: tuple[int, int], table: tuple[int, int]) -> list[np.ndarray]:
    """(n, n): which entry of a bias table made for windows of size `table` each pair in a window, not larger, reads."""
    row, column = np.divmod(np.arange(window[0] * window[1]), window[1])
    down = row[:, None] - row[None, :] + table[0] - 1  # 0 .. 2 rows - 2
    right = column[:, None] - column[None, :] + table[1] - 1
    return [down * (2 * table[1] - 1) + right]


def _log_offsets(window: tuple[int, int], scale: tuple[int, int]) -> list[np.ndarray]:
    """((2 rows - 1)(2 columns - 1), 2): offsets down and right, in the order that `_offsets` counts, on a log scale
    where 1 is the largest in a window of size `scale` (eq. 4 of Swin v2, arXiv:2111.09883, as released: to base 8).
    """
    axes = [np.arange(1 - side, side) / max(whole - 1, 1) for side, whole in zip(window, scale, strict=True)]
    offsets = 8 * np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)  # -8 .. 8
    return [(np.sign(offsets) * np.log2(np.abs(offsets) + 1) / 3).astype(np.float32)]


def cached(what: str, device: torch.device, *about: tuple[int, int] | bool) -> tuple[Tensor, ...]:
    """Whole numbers and masks that depend on sizes alone: made once, kept for later passes."""
    return _cached(what, device, *about)


# Or torch.compile would follow how it is made. torch.compiler.assume_constant_result says the same, but imports the
# whole compiler for it, which takes as long as torch itself.
cached.__dict__["_dynamo_marked_constant"] = True


@lru_cache(maxsize=512)
def _cached(what: str, device: torch.device, *about: Any) -> tuple[Tensor, ...]:
    arrays = {"orders": _orders, "mask": _mask, "offsets": _offsets, "log_offsets": _log_offsets}[what](*about)
    with torch.inference_mode(False), unset_fake_temporarily():  # this pass may be one for inference, or to count
        return tuple(torch.as_tensor(array, device=device) for array in arrays)


class WindowAttention(Heads):
    """Every token looks at those of its window. With `relative`, SoftMax(Q K^T / sqrt(d) + B) V, eq. 4 of Swin."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        qkv_bias: bool | Literal["qv"] = True,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        path: Path = "auto",
        relative: RelativeBias | None = None,
    ):
        super().__init__(heads, head_width(width, heads), attention_dropout, path)
        self.qkv = QVLinear(width, width) if qkv_bias == "qv" else nn.Linear(width, 3 * width, bias=qkv_bias)
        self.relative = relative
        self.proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, at: Windows, trace: LayerTrace | None = None) -> Tensor:  # (B, N, D)
        inside = trace.in_windows(at.count) if trace is not None else None
        q, k, v = self.project(at.cut(x), inside)  # each (B * count, h, n, d)
        x = self.attend(q, k, v, self.bias(at), self.mask(at), inside)  # (B * count, h, n, d)
        x = mark_side_by_side(trace, "heads", at.join(x.transpose(1, 2).flatten(2)), self.heads)  # (B, N, D)
        return mark(trace, "proj", self.dropout(self.proj(x)))  # (B, N, D)

    def project(self, x: Tensor, trace: LayerTrace | None) -> list[Tensor]:
        """(B * count, n, D) -> q, k and v, each (B * count, h, n, d)."""
        return self.split(mark(trace, "qkv", self.qkv(x)), 3)

    def bias(self, at: Windows) -> Tensor | None:
        """B: (1, h, n, n)."""
        if self.relative is None:
            return None
        (index,) = cached("offsets", self.proj.weight.device, at.window, self.relative.grid)
        return self.relative(index, self.relative.grid).contiguous()

    def mask(self, at: Windows) -> Tensor | None:
        """Of shifted windows: (count, 1, n, n)."""
        mask = at.mask(self.proj.weight.device)
        return None if mask is None else mask.to(self.proj.weight.dtype)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        learns = torch.is_grad_enabled() and self.path == "auto"
        if bias is None or not bias.requires_grad or not learns:
            return super().fused(q, k, v, _for_all(bias, q))
        q, k, v = (torch.unflatten(part, 0, (-1, len(bias))) for part in (q, k, v))  # (B, count, h, n, d)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores += bias  # torch's kernel cannot learn a bias, and its way around copies more
        weights = F.dropout(scores.softmax(dim=-1), self.attention_dropout, self.training)
        return (weights @ v).flatten(0, 1)

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        return super().weights(q, k, _for_all(bias, q))


def _for_all(bias: Tensor | None, q: Tensor) -> Tensor | None:
    """(1 or count, h, n, n) -> (1 or B * count, h, n, n)."""
    if bias is None or bias.shape[0] == 1:
        return bias
    return bias.expand(q.shape[0] // bias.shape[0], *bias.shape).flatten(0, 1)  # of shapes: len() would fix a batch
