"""What all variants share: weights by name, sizes by letter, and the recording of steps."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Sizes = dict[str, int]  # letter -> length; B, N, D and so on, as in the starter files
Note = Callable[[str, Tensor], Tensor]  # records a step by name and returns it


def no_record(name: str, value: Tensor) -> Tensor:
    return value


def with_prefix(w: Weights, prefix: str) -> Weights:
    return {key.removeprefix(prefix): value for key, value in w.items() if key.startswith(prefix)}


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{name}.weight"].flatten(1), w.get(f"{name}.bias"))
