"""Shapes: 600 grey images of 16 x 16 pixels, each with one bright disc, square or cross on noise; made, not stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vitlab.errors import DataError
from vitlab.images.sources.dataset import ArrayDataset, Splits

CLASSES = ["cross", "disc", "square"]
SIDE, RADIUS = 16, 4


def open_shapes(name: str, path: Path | None, download: bool) -> Splits:
    if path is not None:
        raise DataError(f"{name}: are made here and need no path. Leave out {path}.")
    train, test = _draw(450, seed=1), _draw(150, seed=2)
    return Splits(
        CLASSES, ArrayDataset(*train, CLASSES, f"{name}/train"), None, ArrayDataset(*test, CLASSES, f"{name}/test")
    )


def _draw(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(N, H, W, 1) and (N,)."""
    draws = np.random.default_rng(seed)
    labels = np.arange(count) % len(CLASSES)
    centres = draws.integers(RADIUS, SIDE - RADIUS, (count, 2, 1, 1))
    down, across = np.abs(np.indices((SIDE, SIDE))[None] - centres).transpose(1, 0, 2, 3)  # each (N, H, W)
    near = np.maximum(down, across) <= RADIUS
    shapes = np.stack([near & (np.minimum(down, across) == 0), down**2 + across**2 <= RADIUS**2, near])  # (3, N, H, W)
    noise = draws.normal(60, 20, (count, SIDE, SIDE))
    images = np.where(shapes[labels, np.arange(count)], noise + 120, noise).clip(0, 255)
    return images.astype(np.uint8)[..., None], labels
