"""Find where a learner's forward pass diverges from ours, by searching our steps among all tensors of their code."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from vitlab.learn.variants.base import Sizes

TOLERANCE = 1e-5  # of the largest value
NOT_LENGTHS = ("L", "learned", "mask percent")  # sizes of a case that are the length of no axis


@dataclass(frozen=True)
class Divergence:
    last: str | None  # our last step that they have; None if not even the first
    first: str | None  # our first step that they do not have; None if they have all
    factor: float | None = None  # one of their tensors is this multiple of the step
    shuffled: tuple[int, ...] | None = None  # shape of one of their tensors with the same numbers in another order


def distance(theirs: Tensor, ours: Tensor) -> float:
    """Largest difference relative to our largest value; infinite if shapes differ or a value is not finite."""
    if theirs.shape != ours.shape or not bool(torch.isfinite(theirs).all() and torch.isfinite(ours).all()):
        return float("inf")
    if ours.numel() == 0:
        return 0.0
    return float((theirs - ours).abs().max() / ours.abs().max().clamp_min(1e-12))


def close(theirs: Tensor, ours: Tensor) -> bool:
    return distance(theirs, ours) <= TOLERANCE


def find_divergence(ours: dict[str, Tensor], theirs: list[Tensor]) -> Divergence:
    """Steps may be missing (a fused kernel, a loop over heads) if a later one is present."""
    names = list(ours)
    have = [any(same_but_for_axes(t, ours[name]) for t in theirs) for name in names]
    last = max((i for i, there in enumerate(have) if there), default=-1)
    before = names[last] if last >= 0 else None
    if last == len(names) - 1:
        return Divergence(before, None)
    missing = ours[names[last + 1]]
    factor = next((f for t in reversed(theirs) if (f := scale_factor(t, missing)) is not None), None)
    shuffled = next((tuple(t.shape) for t in reversed(theirs) if same_numbers(t, missing)), None)
    return Divergence(before, names[last + 1], factor, shuffled)


def same_but_for_axes(theirs: Tensor, ours: Tensor) -> bool:
    """Equal up to a permutation of the axes, ignoring axes of length one."""
    if not _alike(theirs, ours):
        return False
    flat = ours.flatten()
    return any(close(theirs.permute(order).flatten(), flat) for order in permutations(range(theirs.ndim)))


def axes_order(theirs: Tensor, ours: Tensor) -> bool:
    """Another shape, but equal after a permutation of the axes."""
    return theirs.shape != ours.shape and theirs.ndim == ours.ndim and same_but_for_axes(theirs, ours)


def scale_factor(theirs: Tensor, ours: Tensor) -> float | None:
    """The factor of theirs = factor * ours, unless it is 1 or 0; of a single number it would say nothing."""
    if ours.numel() < 2 or theirs.shape != ours.shape or not bool(torch.isfinite(theirs).all()):
        return None
    factor = float((theirs * ours).sum() / (ours * ours).sum())
    if abs(factor - 1) < 1e-4 or abs(factor) < 1e-6:
        return None
    return factor if close(theirs / factor, ours) else None


def same_numbers(theirs: Tensor, ours: Tensor) -> bool:
    if not _alike(theirs, ours):
        return False
    return close(theirs.flatten().sort().values, ours.flatten().sort().values)


def _alike(theirs: Tensor, ours: Tensor) -> bool:
    """Cheap check before permuting axes: as many numbers with the same norm."""
    if theirs.numel() != ours.numel() or theirs.ndim > 6 or not bool(torch.isfinite(theirs).all()):
        return False
    a, b = float(theirs.norm()), float(ours.norm())
    return abs(a - b) <= 1e-4 * max(b, 1e-12)


def shape_in_letters(shape: tuple[int, ...], sizes: Sizes) -> str:
    """(2, 7, 15) -> (B, N, D) = (2, 7, 15)"""
    letters = {size: letter for letter, size in reversed(sizes.items()) if letter not in NOT_LENGTHS}
    if "N" in sizes:
        letters.setdefault(sizes["N"] + 1, "N + 1")
    if "D" in sizes:
        letters.setdefault(3 * sizes["D"], "3D")
    if {"C", "P"} <= sizes.keys():
        letters.setdefault(sizes["C"] * sizes["P"] ** 2, "C*P*P")
    numbers = ", ".join(map(str, shape))
    if any(n not in letters for n in shape) or not shape:
        return f"({numbers})"
    return f"({', '.join(letters[n] for n in shape)}) = ({numbers})"
