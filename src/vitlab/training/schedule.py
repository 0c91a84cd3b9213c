"""The learning rate's factor at every step: warm-up, then cosine or linear decay, or constant."""

from __future__ import annotations

import math


def lr_factor(step: int, total: int, *, warmup: int, schedule: str, final: float) -> float:
    """Factor of the base rate at `step` of `total`, counted from 0. The warm-up rises linearly and ends at 1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)  # 0 .. 1
    if schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return final + (1 - final) * (1 - progress)
    return 1.0
