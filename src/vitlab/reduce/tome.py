"""Token merging (ToMe, arXiv:2210.09461): in every layer the r most similar pairs of patches become one token each.

    model(images, reducer=ToMe(Constant(13)))

1. Patches are dealt in turns into two sets, A and B (bipartite soft matching, section 3).
2. Every token of A draws an edge to the token of B whose key, averaged over heads, points most nearly the same way.
3. The r best edges stay, and their ends are merged: a mean, weighted by how many patches each end stands for.
4. Later attention knows the sizes: softmax(q k^T / sqrt(d) + log s), eq. 1, as a key bias on the fused path.
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
    proportional: bool = True  # eq. 1; models that were trained with merging may do without
    needs: tuple[str, ...] = ("keys",)

    def removes(self, layer: int, depth: int, tokens: int, prefix: int) -> int:
        patches = tokens - prefix
        return min(self.schedule.removes(layer, depth, patches), patches // 2)  # each pair leaves one

    def reduce(self, tokens: Tensor, remove: int, prefix: int, sizes: Tensor, seen: dict[str, Tensor]) -> Reduction:
        with torch.no_grad():
            edges = match(seen["keys"].mean(dim=1)[:, prefix:], remove)
            merged, into = (places + prefix for places in edges)  # (B, r) each
        return merge(tokens, sizes, merged, into, proportional=self.proportional)


def match(keys: Tensor, r: int) -> tuple[Tensor, Tensor]:
    """Keys (B, N, d) -> the r best edges: places (B, r) in A, the odd ones, and in B, the even ones."""
    keys = F.normalize(keys, dim=-1)
    scores = keys[:, 1::2] @ keys[:, ::2].mT  # (B, |A|, |B|), cosines
    best, partner = scores.max(dim=-1)  # (B, |A|): one edge of each token in A
    chosen = best.topk(r, dim=-1, sorted=False).indices  # (B, r)
    return 2 * chosen + 1, 2 * partner.gather(1, chosen)


def merge(tokens: Tensor, sizes: Tensor, merged: Tensor, into: Tensor, *, proportional: bool) -> Reduction:
    """Tokens at places `merged` (B, r) join those at `into`; the others keep their order."""
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
    """(B, N) -> (B, count): where those that stay were. Not `nonzero`, whose size only a run can tell: a compiler
    would have to stop there.
    """
    B, N = stays.shape
    numbers = torch.arange(N, device=stays.device).expand(B, N)
    found = numbers.new_empty(B, count + 1).scatter(1, torch.where(stays, place, count), numbers)  # others go last
    return found[:, :count]
