"""Compare a model.json with the names and shapes of its weights, before a network is built from it.

Building 10**6 blocks takes minutes, and a layer 10**9 wide cannot be built at all. A network whose tensors are all in
one file is no larger than that file, which bounds every number of its config.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import Tensor

from vitlab.checkpoints.schema import shown
from vitlab.errors import CheckpointError

STACKED = ("depth", "depths", "layers")  # options that count equal parts, which the weights number
NOT_IN_WEIGHTS = ("image_size", "patch_size", "window", "reductions", "sinkhorn")  # need not show in any shape
MAX_NOT_IN_WEIGHTS = 2**14
MAX_LISTED = 16  # stages; the published networks have 4
TENSORS_OF_A_BLOCK = 8  # at least: two norms, and matrices for attention and MLP


def check_plausible(config: dict[str, Any], tensors: dict[str, Tensor], weights: str) -> None:
    """ValueError where a number of the config is larger than anything that the file `weights` holds.

    What passes may still not fit: whoever builds the network compares every name and shape.
    """
    widest = max(side for tensor in tensors.values() for side in (*tensor.shape, 1))
    longest = min(max(_stacks(tensors).values(), default=0), 1 + len(tensors) // TENSORS_OF_A_BLOCK)
    for name, value in _numbers(config):
        if name in STACKED:
            most, what = longest, f"{weights} has at most {longest} blocks in a row"
        elif name in NOT_IN_WEIGHTS:
            most, what = MAX_NOT_IN_WEIGHTS, f"{MAX_NOT_IN_WEIGHTS} is the most that is read"
        else:
            most, what = widest, f"the longest side of a tensor in {weights} is {widest}"
        if value > most:
            raise CheckpointError(
                f"{name} is {shown(value)}, but {what}: config and weights do not belong together. Fetch or save the "
                "checkpoint again."
            )


def _stacks(tensors: dict[str, Tensor]) -> dict[str, int]:
    """blocks.0.norm.weight, blocks.1.norm.weight -> {"blocks": 2}: how many numbers follow each beginning of a name."""
    numbers: dict[str, set[str]] = defaultdict(set)
    for key in tensors:
        parts = key.split(".")
        for place, part in enumerate(parts):
            if part.isascii() and part.isdigit():
                numbers[".".join(parts[:place])].add(part)
    return {start: len(found) for start, found in numbers.items()}


def _numbers(value: Any, name: str = "") -> list[tuple[str, float]]:
    """Every number that gives a size, with its option's name. The nesting of JSON is limited, so recursion ends."""
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in _numbers(inner, key)]
    if isinstance(value, list):
        if len(value) > MAX_LISTED:
            raise CheckpointError(f"{name} has {len(value)} entries, and at most {MAX_LISTED} are read.")
        return [found for inner in value for found in _numbers(inner, name)]
    size = (isinstance(value, int) and not isinstance(value, bool)) or (
        name == "mlp_ratio" and isinstance(value, float)
    )
    return [(name, value)] if size else []
