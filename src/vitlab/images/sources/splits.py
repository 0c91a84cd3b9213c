"""Stratified splits and few-label subsets. Each choice is a function of (seed, class, sample)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from vitlab.errors import DataError, UsageError
from vitlab.images.randomness import permutation

SPLIT, FEW = 1, 2  # coordinates that keep the two choices apart under one seed


def stratified_split(labels: np.ndarray, fractions: Sequence[float], seed: int) -> list[np.ndarray]:
    """Indices of each part, ascending: disjoint, together complete, every class shared out by the fractions.

    Each part gets at least one of every class where there are enough; where there are not, the earlier parts do.
    """
    shares = np.asarray(fractions, dtype=np.float64)
    if len(shares) == 0 or shares.min() <= 0 or abs(shares.sum() - 1) > 1e-6:
        raise UsageError(f"fractions={list(fractions)} must each be above 0 and add up to 1.")
    parts: list[list[np.ndarray]] = [[] for _ in shares]
    for label, members in _by_class(labels):
        shuffled = members[permutation(len(members), seed, SPLIT, label)]
        ends = np.cumsum(_counts(len(members), shares))[:-1]
        for part, chosen in zip(parts, np.split(shuffled, ends), strict=True):
            part.append(chosen)
    return [_joined(part) for part in parts]


def few_labels(
    labels: np.ndarray, classes: list[str], seed: int, *, per_class: int | None = None, fraction: float | None = None
) -> np.ndarray:
    """Indices of exactly `per_class` of each class, or of a `fraction` of each (at least one), ascending.

    A smaller subset of the same seed is part of a larger one.
    """
    if per_class is not None:
        held = np.bincount(labels, minlength=len(classes))
        if held.min() < per_class:
            poorest = int(held.argmin())
            raise DataError(
                f"per_class={per_class}, but train holds only {held[poorest]} of class {classes[poorest]!r}. "
                + (f"Pass per_class={held[poorest]} or less." if held[poorest] else "Add images of it.")
            )
    chosen = []
    for label, members in _by_class(labels):
        count = per_class or max(1, round(len(members) * (fraction or 1.0)))
        chosen.append(members[permutation(len(members), seed, FEW, label)[:count]])
    return _joined(chosen)


def _counts(n: int, shares: np.ndarray) -> np.ndarray:
    """n things shared out by largest remainder, no part left empty while another holds two."""
    if n <= len(shares):
        return (np.arange(len(shares)) < n).astype(np.int64)
    exact = n * shares
    counts = np.floor(exact + 1e-9).astype(np.int64)
    neediest = np.argsort(counts - exact, kind="stable")
    counts[neediest[: n - counts.sum()]] += 1
    for empty in np.flatnonzero(counts == 0):
        counts[counts.argmax()] -= 1
        counts[empty] = 1
    return counts


def _by_class(labels: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(class, its indices), for each class that occurs."""
    order = np.argsort(labels, kind="stable")
    present, starts = np.unique(labels[order], return_index=True)
    for label, members in zip(present, np.split(order, starts[1:]), strict=True):
        yield int(label), members


def _joined(chosen: list[np.ndarray]) -> np.ndarray:
    return np.sort(np.concatenate(chosen)) if chosen else np.zeros(0, dtype=np.int64)
