"""Copies: the same file, the same pixels, or nearly the same image; and what of it is in two splits at once.

Nearly the same: neighbours by the encoder's features and by coarse colours (also mirrored) are candidates; those whose
details agree (matching.py) are copies. The work is done in blocks, so memory does not grow with n x n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data_check.matching import BATCH, copy_threshold, correlations
from vitlab.data_check.neighbours import nearest
from vitlab.data_check.reading import ImageContents

NEIGHBOURS = 4  # candidates of each image, by each of the three ways to find them
ALIKE = 0.4  # cosine of coarse colours below which no copy was seen: crops to 90 % of the sides had 0.55 or more
SPLITS = ("train", "val", "test")

Kind = Literal["same file", "same pixels", "near"]


@dataclass(frozen=True)
class Copy:
    """An image that is a copy of another."""

    image: int
    of: int
    kind: Kind
    similarity: float = 1.0
    mirrored: bool = False


@dataclass(frozen=True)
class Copies:
    """All copies of a dataset. Groups of copies are closed: copies of a copy belong to the group."""

    exact: list[Copy]  # each with the first of its group
    near: list[Copy]  # pairs of different images
    groups: np.ndarray  # (n,): equal for images of one group
    threshold: float  # correlation above which images are near copies; above 1: they are too alike to tell

    def leaks(self, splits: Sequence[str]) -> list[Copy]:
        """Images of val or test with their nearest copy in each split before theirs: train, then val."""
        rank, compared_pairs = {name: place for place, name in enumerate(SPLITS)}, self._direct()
        leaks = []
        for members in self._members():
            for image in members:
                for split in SPLITS[: rank[splits[image]]]:
                    if others := [other for other in members if splits[other] == split]:
                        leaks.append(_nearest(image, others, compared_pairs))
        return leaks

    def within(self, splits: Sequence[str]) -> list[Copy]:
        """Images that are copies of an earlier one of the same split."""
        compared_pairs, copies = self._direct(), []
        for members in self._members():
            for place, image in enumerate(members):
                if before := [other for other in members[:place] if splits[other] == splits[image]]:
                    copies.append(_nearest(image, before, compared_pairs))
        return copies

    def conflicts(self, labels: Sequence[str | None]) -> list[Copy]:
        """Copies that have different labels: at least one is wrong."""
        compared_pairs, conflicts = self._direct(), []
        for members in self._members():
            for place, image in enumerate(members):
                if others := [other for other in members[:place] if labels[other] != labels[image]]:
                    conflicts.append(_nearest(image, others, compared_pairs))
        return conflicts

    def _members(self) -> list[list[int]]:
        """Groups of two or more, in order of their first image."""
        order = np.argsort(self.groups, kind="stable")
        starts = np.flatnonzero(np.diff(self.groups[order])) + 1
        return sorted(part.tolist() for part in np.split(order, starts) if len(part) > 1)

    def _direct(self) -> dict[tuple[int, int], Copy]:
        return {(min(c.image, c.of), max(c.image, c.of)): c for c in (*self.exact, *self.near)}


def _nearest(image: int, others: list[int], compared_pairs: dict[tuple[int, int], Copy]) -> Copy:
    """The copy of `image` among others of its group that it is most like; they need not have been compared."""
    direct = [(other, compared_pairs.get((min(image, other), max(image, other)))) for other in others]
    compared = [(other, pair) for other, pair in direct if pair is not None]
    if not compared:  # a copy of a copy
        return Copy(image, others[0], "near", 0.0)
    other, pair = max(compared, key=lambda item: item[1].similarity)
    return Copy(image, other, pair.kind, pair.similarity, pair.mirrored)


def find_copies(
    contents: ImageContents, features: Tensor | None, indices: np.ndarray, progress: Callable[[int, int], object]
) -> Copies:
    """features (m, E): of the images `indices` (m,), which could be read. `progress(done, total)` counts pairs."""
    n = len(contents.sizes)
    exact = exact_copies(contents, indices)
    copied = {copy.image for copy in exact}
    kept = np.array([i for i in range(len(indices)) if int(indices[i]) not in copied], dtype=np.int64)
    numbers = indices[kept]  # one of each group of exact copies
    thumbnails = contents.thumbnails[numbers]
    threshold = copy_threshold(thumbnails)
    near: list[Copy] = []
    if threshold <= 1 and len(numbers) > 1:
        pairs, mirrored = candidates(contents.colours[numbers], None if features is None else features[kept])
        for start in range(0, len(pairs), 8 * BATCH):
            part = slice(start, start + 8 * BATCH)
            agreement = correlations(thumbnails, pairs[part], mirrored[part])
            for (a, b), similar, flip in zip(pairs[part], agreement, mirrored[part], strict=True):
                if similar >= threshold:
                    near.append(Copy(int(numbers[b]), int(numbers[a]), "near", float(similar), bool(flip)))
            progress(min(start + 8 * BATCH, len(pairs)), len(pairs))
    near = list({(c.of, c.image): c for c in sorted(near, key=lambda c: c.similarity)}.values())  # the better view
    near.sort(key=lambda c: -c.similarity)
    return Copies(exact, near, _groups(n, [*exact, *near]), threshold)


def exact_copies(contents: ImageContents, indices: np.ndarray) -> list[Copy]:
    """Images with the same pixels as an earlier one."""
    first: dict[bytes, int] = {}
    copies = []
    for index in map(int, indices):
        of = first.setdefault(contents.pixels[index], index)
        if of != index:
            same_file = contents.content[index] == contents.content[of]
            copies.append(Copy(index, of, "same file" if same_file else "same pixels"))
    return copies


def candidates(colours: np.ndarray, features: Tensor | None) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (P, 2), a < b, and whether b is to be mirrored (P,)."""
    upright, mirror = _unit(colours), _unit(colours[:, :, ::-1])
    pairs = [(nearest(upright, upright, NEIGHBOURS)[1], False), (nearest(mirror, upright, NEIGHBOURS)[1], True)]
    if features is not None:
        unit = F.normalize(features, dim=1)
        near = nearest(unit, unit, NEIGHBOURS)[1]
        pairs += [(near, False), (near, True)]
    candidates: set[tuple[int, int, bool]] = set()
    for rows, mirrored in pairs:
        for a, row in enumerate(rows.tolist()):
            candidates |= {(min(a, b), max(a, b), mirrored) for b in row}
    if not candidates:
        return np.zeros((0, 2), dtype=np.int64), np.zeros(0, dtype=bool)
    listed = np.array(sorted(candidates), dtype=np.int64)  # (P, 3)
    kept = torch.cat([_alike(upright, mirror, part) for part in torch.from_numpy(listed).split(2**16)]).numpy()
    return listed[kept, :2], listed[kept, 2].astype(bool)


def _alike(upright: Tensor, mirror: Tensor, pairs: Tensor) -> Tensor:
    """(P,) bool: whether the coarse colours of the pairs (P, 3) agree at all."""
    a, b, mirrored = pairs.T
    return (upright[a] * torch.where(mirrored[:, None] > 0, mirror[b], upright[b])).sum(dim=1) >= ALIKE


def _unit(colours: np.ndarray) -> Tensor:
    """(n, 192): coarse colours without the mean, of length 1."""
    vectors = torch.from_numpy(np.ascontiguousarray(colours)).flatten(1).float()
    return F.normalize(vectors - vectors.mean(dim=1, keepdim=True), dim=1)


def _groups(n: int, copies: list[Copy]) -> np.ndarray:
    """(n,): the first image of each image's group."""
    parent = np.arange(n)

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = int(parent[i])
        return i

    for copy in copies:
        a, b = root(copy.image), root(copy.of)
        parent[max(a, b)] = min(a, b)
    return np.array([root(i) for i in range(n)], dtype=np.int64)
