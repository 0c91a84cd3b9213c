"""Where a model runs: the device that --device and `device=` name."""

from __future__ import annotations

import torch

from vitlab.errors import UsageError


def pick_device(device: str, local_rank: int = 0) -> torch.device:
    """CUDA, then MPS, then CPU, unless one is given."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", local_rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device {device!r} is not known: use auto, cpu, cuda, cuda:1 or mps.")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        seen = f"{count} CUDA device{'s' if count > 1 else ''}" if count else "no CUDA device"
        raise UsageError(f"device {device}, but torch sees {seen} here: use auto or cpu.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise UsageError("device mps, but torch sees no MPS device here: use auto or cpu.")
    return torch.device("cuda", local_rank) if device == "cuda" else chosen
