"""Compares the steps of two forward passes: largest difference, its share of the largest value, cosine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.explain.inspect import step_name
from vitlab.layers.trace import FROM_HEADS, PARTIAL_KINDS, Trace
from vitlab.models.base import Network, evaluation_mode

Key = tuple[str, int | None]  # a step as Trace names it: kind and layer
Steps = dict[Key, Tensor]


@dataclass(frozen=True)
class StepDifference:
    """One step in A and in B."""

    step: str  # blocks.0.attention.qkv
    shape: tuple[int, ...]  # in A, without the batch
    other_shape: tuple[int, ...]  # in B
    largest: float  # |A - B|; infinite where the shapes differ
    relative: float  # its share of the largest value in either
    cosine: float  # of all values
    differs: bool  # relative is above the tolerance

    def to_dict(self) -> dict[str, Any]:
        return json_values(vars(self))


def json_values(values: Mapping[str, object]) -> dict[str, Any]:
    """With None for infinity and NaN, which JSON does not have."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


class Tally:
    """One step's statistics, accumulated over images."""

    def __init__(self) -> None:
        self.shapes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
        self.largest = self.scale = self.dot = self.aa = self.bb = 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        """a, b (B, ...)."""
        self.shapes = (tuple(a.shape[1:]), tuple(b.shape[1:]))
        if a.shape != b.shape:
            self.largest = math.inf
            return
        a, b = (t.detach().cpu().double() for t in (a, b))
        self.largest = _most(self.largest, (a - b).abs())
        self.scale = max(self.scale, _most(0.0, a.abs()), _most(0.0, b.abs()))
        self.dot += float((a * b).sum())
        self.aa += float(a.square().sum())
        self.bb += float(b.square().sum())

    def row(self, step: str, tolerance: float) -> StepDifference:
        relative = self.largest / self.scale if self.scale else self.largest
        lengths = math.sqrt(self.aa * self.bb)
        cosine = self.dot / lengths if lengths else 1.0 if self.aa == self.bb else 0.0
        cosine = math.nan if math.isinf(self.largest) else min(cosine, 1.0)  # rounding can pass 1
        differs = not relative <= tolerance  # NaN differs
        return StepDifference(step, *self.shapes, self.largest, relative, cosine, differs)


def _most(so_far: float, values: Tensor) -> float:
    """A maximum that keeps NaN, which Python's max does not."""
    largest = float(values.max()) if values.numel() else 0.0
    return largest if math.isnan(largest) else max(so_far, largest)


def run_steps(model: Network, images: Tensor) -> Steps:
    """Every traced step of one of our models, in order, for normalised `images`."""
    trace = Trace(*(kind for kind in model.traceable if kind not in (*FROM_HEADS, *PARTIAL_KINDS)))
    like = next(model.parameters())
    with evaluation_mode(model), torch.no_grad():
        model(images.to(like.device, like.dtype), trace=trace)
    return dict(trace.items())


def rows(a: Steps, b: Steps, tolerance: float) -> Iterator[tuple[Key, StepDifference]]:
    """Steps that both have, in B's order. Lazy, so that a search can stop at the first difference."""
    for key, value in b.items():
        if key in a:
            tally = Tally()
            tally.add(a[key], value)
            yield key, tally.row(step_name(*key), tolerance)


def first_difference(a: Steps, b: Steps, tolerance: float) -> tuple[int, StepDifference] | None:
    """Its index in B's order, and its numbers; None where all agree."""
    places = {key: place for place, key in enumerate(b)}
    return next(((places[key], row) for key, row in rows(a, b, tolerance) if row.differs), None)
