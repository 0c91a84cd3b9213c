"""The size of the images that a model reads, which its position grid need not have."""

from __future__ import annotations

from typing import Any


def input_size(model: Any) -> tuple[int, int]:
    """(H, W) that its preprocess gives; config.image_size, the size of the position grid, where it has no preprocess.

    The released DINOv2 weights have positions for 518 x 518 pixels and read 224 x 224.
    """
    preprocess = getattr(model, "preprocess", None)
    height, width = model.config.image_size if preprocess is None else preprocess.size
    return height, width
