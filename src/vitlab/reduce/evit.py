"""EViT (arXiv:2202.07800): patches with little attention from the class token are fused into one token.

    model(images, reducer=EViT(KeepRatio(0.7)))

The score of a patch is the class token's attention to it, averaged over heads (section 3.1). The best are kept in
order; the others are fused into one token after them, weighted by their attention (eq. 4). Gradients flow through the
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.layers.patches import take_tokens
from vitlab.layers.reducer import Reduction
from vitlab.reduce.schedule import Schedule


@dataclass(frozen=True)
class EViT:
    schedule: Schedule
    fuse: bool = True  # False: drop inattentive patches, as in the paper's ablation
    needs: tuple[str, ...] = ("class_attention",)

    @property
    def gradients(self) -> bool:
        return self.fuse  # dropping has no gradient

    def removes(self, layer: int, depth: int, tokens: int, prefix: int) -> int:
        patches = tokens - prefix
        leaves = min(self.schedule.removes(layer, depth, patches), patches - 1)
        return max(leaves - 1, 0) if self.fuse else leaves  # the fused token counts

    def reduce(self, tokens: Tensor, remove: int, prefix: int, sizes: Tensor, seen: dict[str, Tensor]) -> Reduction:
        scores = seen["class_attention"].mean(dim=1)[:, prefix:]  # (B, patches)
        patches = scores.shape[1]
        keep = patches - remove - self.fuse
        order = scores.argsort(dim=1, descending=True, stable=True)
        kept = order[:, :keep].sort(dim=1).values + prefix  # (B, keep)
        others = order[:, keep:] + prefix
        first = torch.arange(prefix, device=tokens.device).expand(tokens.shape[0], prefix)
        stay = torch.cat([first, kept], dim=1)  # (B, prefix + keep)
        assignment = torch.full(tokens.shape[:2], -1, device=tokens.device)
        assignment.scatter_(1, stay, torch.arange(stay.shape[1], device=tokens.device).expand_as(stay))
        x, new = take_tokens(tokens, stay), sizes.gather(1, stay)
        if self.fuse:
            weights = scores.gather(1, others - prefix).to(tokens.dtype)  # they do not sum to 1, as in the paper
            x = torch.cat([x, (weights[..., None] * take_tokens(tokens, others)).sum(dim=1, keepdim=True)], dim=1)
            new = torch.cat([new, sizes.gather(1, others).sum(dim=1, keepdim=True)], dim=1)
            assignment.scatter_(1, others, prefix + keep)
        return Reduction(x, assignment, new)
