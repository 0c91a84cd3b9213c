"""Randomness has coordinates: every random number is a function of (seed, where it is used), never of what came before.

    uniform(seed, epoch, indices, count=3)     # (B, 3): three numbers for each sample of this epoch

So a run killed at any step and resumed draws what it would have drawn, whatever the number of workers, and there is no
generator state to save. The numbers come from a hash of the coordinates (the finaliser of SplitMix64).
"""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: every bit of the input changes half the bits of the output."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(*coordinates: int | np.ndarray) -> np.ndarray:
    """One 64-bit number for each combination of coordinates; arrays broadcast."""
    with np.errstate(over="ignore"):
        state = np.zeros(1, dtype=np.uint64)
        for coordinate in coordinates:
            value = np.asarray(coordinate).astype(np.int64).astype(np.uint64)
            state = _mix(state * np.uint64(3) + GOLDEN + _mix(value + GOLDEN))
    return state


def uniform(*coordinates: int | np.ndarray, count: int) -> np.ndarray:
    """Numbers in [0, 1), float64, (B, count): `count` of them for each element of the coordinates."""
    per_sample = _hash(*coordinates).reshape(-1, 1)  # (B, 1)
    return (_hash(per_sample, np.arange(count)[None]) >> np.uint64(11)) * 2.0**-53


def permutation(n: int, *coordinates: int) -> np.ndarray:
    """The numbers 0 .. n-1 in an order that the coordinates alone decide."""
    return np.argsort(uniform(*coordinates, np.arange(n), count=1)[:, 0], kind="stable")


def torch_seed(*coordinates: int) -> int:
    """A seed for torch's own generators, for what a model draws itself: dropout, stochastic depth, masks."""
    return int(_hash(*coordinates)[0] >> np.uint64(1))
