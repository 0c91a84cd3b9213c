"""Drop random patches: the baseline of all reducers.

model(images, reducer=RandomDrop(KeepRatio(0.7)))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.layers.patches import keep_patches
from vitlab.layers.reducer import Reduction
from vitlab.reduce.schedule import Schedule


@dataclass(frozen=True)
class RandomDrop:
    schedule: Schedule
    seed: int | None = 0  # fixes the dropped patches; None: torch's global generator
    needs: tuple[str, ...] = ()

    def removes(self, layer: int, depth: int, tokens: int, prefix: int) -> int:
        patches = tokens - prefix
        return min(self.schedule.removes(layer, depth, patches), patches - 1)

    def reduce(self, tokens: Tensor, remove: int, prefix: int, sizes: Tensor, seen: dict[str, Tensor]) -> Reduction:
        B, N, _ = tokens.shape
        if self.seed is None:  # seeded by the training loop per (seed, step, rank, micro-step), as for dropout
            noise = torch.rand(B, N - prefix, device=tokens.device)
        else:
            noise = torch.rand(B, N - prefix, generator=torch.Generator().manual_seed(self.seed + N)).to(tokens.device)
        x, kept = keep_patches(tokens, prefix, noise.argsort(dim=1)[:, remove:].sort(dim=1).values)
        assignment = torch.full((B, N), -1, device=tokens.device)
        assignment.scatter_(1, kept, torch.arange(kept.shape[1], device=tokens.device).expand_as(kept))
        return Reduction(x, assignment, sizes.gather(1, kept))
