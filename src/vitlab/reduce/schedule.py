"""How many tokens each layer removes. Schedules are stateless functions of the layer and its number of patches.

Constant(13)                  # 13 in every layer, ToMe's plain schedule
Decreasing(13)                # the same total, from 26 in the first layer to 0 in the last
KeepRatio(0.7)                # EViT: keeps 70 % at 1/4, 1/2 and 3/4 of the depth
Same(EViT(KeepRatio(0.7)))    # as many as another reducer in every layer
Constant(r_for(0.5, patches=196, depth=12))
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from vitlab.errors import UsageError
from vitlab.layers.reducer import Reducer


class Schedule(Protocol):
    def removes(self, layer: int, depth: int, patches: int) -> int:
        """How many of `patches` this layer removes."""
        ...


@dataclass(frozen=True)
class Constant:
    r: int

    def __post_init__(self) -> None:
        _check_r(self.r)

    def removes(self, layer: int, depth: int, patches: int) -> int:
        return self.r


@dataclass(frozen=True)
class Decreasing:
    """Section 4.1 of ToMe (arXiv:2210.09461): early layers remove more, which is faster."""

    r: int  # on average

    def __post_init__(self) -> None:
        _check_r(self.r)

    def removes(self, layer: int, depth: int, patches: int) -> int:
        total, steps = self.r * depth, max(depth - 1, 1)
        if depth == 1:
            return total
        done = sum(self._share(i, steps) for i in range(layer))  # rounded cumulatively, so that the sum is r * depth
        return round(total * (done + self._share(layer, steps)) / depth) - round(total * done / depth)

    @staticmethod
    def _share(layer: int, steps: int) -> float:
        return 2 * (1 - layer / steps)  # of r: 2 in the first layer, 0 in the last


@dataclass(frozen=True)
class KeepRatio:
    """Section 3.1 of EViT (arXiv:2202.07800): some layers keep a share of the patches, the others all."""

    ratio: float
    layers: tuple[int, ...] | None = None  # -1: the last; None: at 1/4, 1/2 and 3/4 of the depth, as in the paper

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(f"ratio={self.ratio} must be above 0 and at most 1: the share of patches to keep.")

    def removes(self, layer: int, depth: int, patches: int) -> int:
        layers = (depth // 4, depth // 2, 3 * depth // 4) if self.layers is None else self.layers
        for n in layers:
            if not -depth <= n < depth:
                raise UsageError(f"layer {n} does not exist: this model has layers 0 to {depth - 1} (or -1, ...).")
        return patches - math.ceil(patches * self.ratio) if layer in {n % depth for n in layers} else 0


@dataclass(frozen=True)
class Same:
    """As many as another reducer, for comparison."""

    other: Reducer

    def removes(self, layer: int, depth: int, patches: int) -> int:
        return self.other.removes(layer, depth, patches, 0)


def r_for(share: float, *, patches: int, depth: int) -> int:
    """Tokens to remove per layer so that `depth` layers remove about this share of the patches."""
    return max(1, round(share * patches / depth))


def _check_r(r: int) -> None:
    if isinstance(r, bool) or not isinstance(r, int) or r < 0:
        raise UsageError(f"r={r!r} must be an integer, 0 or more: how many tokens a layer removes.")
