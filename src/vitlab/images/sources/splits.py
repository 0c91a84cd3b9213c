"""Stratified splits and few-label subsets. Each choice is a function of (seed, class, sample).

Where images belong to groups (of one patient, one camera), a group is never on both sides of a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.errors import DataError, UsageError
from vitlab.images.randomness import permutation
from vitlab.images.sources.dataset import target_kind

SPLIT, FEW = 1, 2  # coordinates that keep the two choices apart under one seed


TENTHS, FEWEST = 10, 5  # parts of a range of numbers; images of a part


def strata(labels: np.ndarray) -> np.ndarray:
    """(N,) int64: the groups that splits and balanced draws share out: classes; of several labels the rarest that an
    image has, K for none; of numbers the tenths by size, or larger parts where a tenth has fewer than FEWEST images.
    """
    kind = target_kind(labels)
    if kind == "class":
        return labels
    if kind == "number":
        ranks = np.empty(len(labels), dtype=np.int64)
        ranks[np.argsort(labels, kind="stable")] = np.arange(len(labels))
        return ranks * max(1, min(TENTHS, len(labels) // FEWEST)) // max(len(labels), 1)
    counts = np.where(labels, labels.sum(axis=0), len(labels) + 1)  # (N, K)
    return np.where(labels.any(axis=1), counts.argmin(axis=1), labels.shape[1])


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


@dataclass(frozen=True)
class _Group:
    """The images of a group, and how many it has of each class that it has."""

    members: np.ndarray
    labels: np.ndarray
    counts: np.ndarray


class _Dealer:
    """Gives every group to one of the parts: the largest first, each where it brings the classes nearest to their
    shares, as scikit-learn's StratifiedGroupKFold does.
    """

    def __init__(self, labels: np.ndarray, groups: np.ndarray, shares: np.ndarray, seed: int):
        self.groups = _groups(labels, groups)
        self.order = permutation(len(self.groups), seed, SPLIT)
        self.target = np.maximum(shares[:, None] * np.bincount(labels), 1e-9)  # (parts, classes): images
        self.images, self.count = np.zeros_like(self.target), np.zeros(self.target.shape, dtype=np.int64)
        self.part = np.full(len(self.groups), -1)
        sizes = np.array([len(self.groups[g].members) for g in self.order])
        for g in self.order[np.argsort(-sizes, kind="stable")]:
            self.put(g, min(range(len(shares)), key=lambda part: self.cost(g, part)))

    def cost(self, g: int, part: int) -> float:
        """By how much (images - target)^2 / target grows where this group is added."""
        group = self.groups[g]
        aim, now = self.target[part, group.labels], self.images[part, group.labels]
        return float((group.counts * (2 * (now - aim) + group.counts) / aim).sum())

    def put(self, g: int, part: int) -> None:
        group, before = self.groups[g], self.part[g]
        for where, sign in ((before, -1), (part, 1)):
            if where >= 0:
                self.images[where, group.labels] += sign * group.counts
                self.count[where, group.labels] += sign
        self.part[g] = part

    def move_one(self, part: int, label: int | None, *, leave: int) -> bool:
        """Move a group (that has this class) to a part, if others keep `leave` groups of each of its classes."""
        movable = [
            g
            for g in self.order
            if self.part[g] != part
            and (label is None or label in self.groups[g].labels)
            and (self.count[self.part[g], self.groups[g].labels] > leave).all()
        ]
        if movable:
            self.put(min(movable, key=lambda g: self.cost(g, part)), part)
        return bool(movable)

    def members(self, part: int) -> np.ndarray:
        return _joined([self.groups[g].members for g in np.flatnonzero(self.part == part)])


def group_split(labels: np.ndarray, groups: np.ndarray, fractions: Sequence[float], seed: int) -> list[np.ndarray]:
    """Indices of each part, ascending: disjoint, together complete, no group in two parts; the classes shared out by
    the fractions as far as groups allow. The first part, which is trained on, has every class.
    """
    dealer = _Dealer(labels, groups, np.asarray(fractions, dtype=np.float64), seed)
    present, first_to_last = np.unique(labels), range(len(fractions))
    for part in first_to_last:  # what the shares alone have left out
        for label in present[dealer.count[part, present] == 0]:
            dealer.move_one(part, int(label), leave=min(part, 1))
        if not (dealer.part == part).any() and not dealer.move_one(part, None, leave=1):
            raise DataError(
                f"{len(dealer.groups)} groups are too few for {len(fractions)} parts that may share none and a first "
                "part with every class. Add images of other groups, or leave data.group out."
            )
    return [dealer.members(part) for part in first_to_last]


def group_folds(labels: np.ndarray, groups: np.ndarray, folds: int, seed: int) -> np.ndarray:
    """(n,): the fold of each image, that of its group; as many folds as there are groups, at most `folds`."""
    count = min(folds, len(np.unique(groups)))
    if count < 2:
        raise DataError(
            "all training images belong to one group, and cross-validation needs two. Add images of other groups, or "
            "leave data.group out."
        )
    dealer = _Dealer(labels, groups, np.full(count, 1 / count), seed)
    for fold in range(count):
        if not (dealer.part == fold).any():
            fullest = int(np.bincount(dealer.part, minlength=count).argmax())
            candidates = np.flatnonzero(dealer.part == fullest).tolist()
            dealer.put(min(candidates, key=lambda g: len(dealer.groups[g].members)), fold)
    result = np.zeros(len(labels), dtype=np.int64)
    for group, fold in zip(dealer.groups, dealer.part, strict=True):
        result[group.members] = fold
    return result


def _groups(labels: np.ndarray, groups: np.ndarray) -> list[_Group]:
    result = []
    for _, members in _by_class(groups):
        present, counts = np.unique(labels[members], return_counts=True)
        result.append(_Group(members, present, counts))
    return result


def few_labels(
    labels: np.ndarray,
    classes: list[str],
    seed: int,
    *,
    per_class: int | None = None,
    fraction: float | None = None,
    groups: np.ndarray | None = None,
) -> np.ndarray:
    """Indices of exactly `per_class` of each class, or of a `fraction` of each (at least one), ascending.

    With groups, `fraction` takes complete groups until it is reached and every class is there; `per_class` takes one
    group after the other, so that only the last may be incomplete. A smaller subset of the same seed is part of a
    larger one.
    """
    if per_class is not None:
        held = np.bincount(labels, minlength=len(classes))
        if held.min() < per_class:
            poorest = int(held.argmin())
            raise DataError(
                f"per_class={per_class}, but train holds only {held[poorest]} of class {classes[poorest]!r}. "
                + (f"Pass per_class={held[poorest]} or less." if held[poorest] else "Add images of it.")
            )
    if groups is not None:
        return _few_groups(labels, groups, seed, per_class, fraction)
    chosen = []
    for label, members in _by_class(labels):
        count = per_class or max(1, round(len(members) * (fraction or 1.0)))
        chosen.append(members[permutation(len(members), seed, FEW, label)[:count]])
    return _joined(chosen)


def _few_groups(
    labels: np.ndarray, groups: np.ndarray, seed: int, per_class: int | None, fraction: float | None
) -> np.ndarray:
    all_groups = _groups(labels, groups)
    ordered = [all_groups[g].members for g in permutation(len(all_groups), seed, FEW)]
    if per_class is not None:
        images = np.concatenate(ordered)
        return _joined([images[members[:per_class]] for _, members in _by_class(labels[images])])
    ends = np.cumsum([len(members) for members in ordered])
    enough = int(np.abs(ends - len(labels) * (fraction or 1.0)).argmin()) + 1
    present, firsts = np.unique(labels[np.concatenate(ordered)], return_index=True)
    every_class = int(np.searchsorted(ends, firsts.max(), side="right")) + 1 if len(present) else 0
    return _joined(ordered[: max(enough, every_class)])


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
