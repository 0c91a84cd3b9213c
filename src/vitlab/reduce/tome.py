"""Token merging (ToMe, arXiv:2210.09461): every layer merges the r most similar pairs of patches.

    model(images, reducer=ToMe(Constant(13)))

1. Patches alternate between two sets, A and B (bipartite soft matching, section 3).
2. Every token of A has an edge to the token of B with the most similar key (cosine, averaged over heads).
3. The tokens of the r best edges are merged: a mean weighted by their number of patches.
4. Later attention uses the sizes s: softmax(q k^T / sqrt(d) + log s), eq. 1, as a key bias on the fused path.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.layers.patches import take_tokens
from vitlab.layers.reducer import Reduction
from vitlab.reduce.schedule import Schedule


@dataclass(frozen=True)
class ToMe:
    schedule: Schedule
    proportional: bool = True  # eq. 1; models trained with merging may not need it
    needs: tuple[str, ...] = ("keys",)

    def removes(self, layer: int, depth: int, tokens: int, prefix: int) -> int:
        patches = tokens - prefix
        return min(self.schedule.removes(layer, depth, patches), patches // 2)  # one of each pair

    def reduce(self, tokens: Tensor, remove: int, prefix: int, sizes: Tensor, seen: dict[str, Tensor]) -> Reduction:
        with torch.no_grad():
            edges = match(seen["keys"].mean(dim=1)[:, prefix:], remove)
            merged, into = (places + prefix for places in edges)  # (B, r) each
        return merge(tokens, sizes, merged, into, proportional=self.proportional)


def match(keys: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Keys (B, N, d) -> the r best edges: positions (B, r) in A, which are odd, and in B, which are even."""
    keys = F.normalize(keys, dim=-1)
    scores = keys[:, 1::2] @ keys[:, ::2].mT  # (B, |A|, |B|), cosines
    best, partner = scores.max(dim=-1)  # (B, |A|): one edge of each token in A
    chosen = best.topk(r, dim=-1, sorted=False).indices  # (B, r)
    return 2 * chosen + 1, 2 * partner.gather(1, chosen)


def merge(tokens: Tensor, sizes: Tensor, merged: Tensor, into: Tensor, *, proportional: bool) -> Reduction:
    """Merge tokens at positions `merged` (B, r) into those at `into`; the others keep their order."""
    B, N, D = tokens.shape
    M = N - merged.shape[1]
    stays = torch.ones(B, N, dtype=torch.bool, device=tokens.device).scatter(1, merged, False)
    place = stays.cumsum(dim=1) - 1  # of those that stay
    target = place.gather(1, into)  # (B, r)
    kept = _places_of(stays, place, M)  # (B, M), in order
    old, gone = sizes.gather(1, kept), sizes.gather(1, merged)
    new = old.scatter_add(1, target, gone)  # (B, M)
    x = take_tokens(tokens, kept) * old[..., None]
    joining = take_tokens(tokens, merged) * gone[..., None]
    x = x.scatter_add(1, target[..., None].expand(-1, -1, D), joining)
    assignment = place.scatter(1, merged, target)  # (B, N)
    return Reduction(x / new[..., None], assignment, new, new.log() if proportional else None)


def _places_of(stays: Tensor, place: Tensor, count: int) -> Tensor:
    """(B, N) -> (B, count): positions of the kept tokens. Not by `nonzero`, whose data-dependent size breaks graphs."""
    B, N = stays.shape
    numbers = torch.arange(N, device=stays.device).expand(B, N)
    kept = numbers.new_empty(B, count + 1).scatter(1, torch.where(stays, place, count), numbers)  # the others go last
    return kept[:, :count]
