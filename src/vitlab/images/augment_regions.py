"""Augmentation that moves an image and what is marked on it together: large-scale jitter, flip; then colours.

    view = augment.view((480, 640), index, seed=0, epoch=3)   # where the model looks: see RegionView
    images = augment(pixels, indices, seed=0, epoch=3)        # views (B, C, h, w) uint8 -> normalised, colours changed

Large-scale jitter (arXiv:2012.07177): the image as in evaluation, times a random factor, at a random place of the view.
Everything random is a function of (seed, epoch, sample), as in augment.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.images.augment import CROP, Augment, AugmentOptions
from vitlab.images.preprocess import Geometry, Preprocess
from vitlab.images.randomness import uniform
from vitlab.images.regions import RegionView

NOT_MOVED = ("randaugment", "erasing")  # change the image alone


class RegionAugment:
    """Of images of any size, for a model with this preprocess."""

    def __init__(self, options: AugmentOptions, preprocess: Preprocess) -> None:
        if options.crop not in ("none", "scaled"):
            raise UsageError(
                f"augment.crop={options.crop} does not move masks and boxes: augment.crop=scaled, or none."
            )
        for name in NOT_MOVED:
            if value := getattr(options, name):
                raise UsageError(f"augment.{name}={value:g} does not move masks and boxes: set augment.{name}=0.")
        pre = preprocess
        self.options, self.preprocess = options, pre
        options = replace(options, crop="none", scale=(1.0, 1.0))
        self.flips = Augment(options, pre.size, pre.mean, pre.std, scale=pre.scale)
        still = replace(options, flip=False, flip_in_turn=False)
        self.colours = Augment(still, pre.size, pre.mean, pre.std, scale=pre.scale)

    def view(self, size: tuple[int, int], index: int, *, seed: int, epoch: int, repeat: int = 0) -> RegionView:
        """Where the model looks at an image of this (H, W)."""
        geometry, one = self.preprocess.geometry(size), np.array([index])
        if self.options.crop == "scaled":
            numbers = uniform(seed, CROP, epoch, one, repeat, count=3)[0]
            geometry = scaled_geometry(geometry, self.preprocess.size, self.options.scale, numbers)
        flip = self.options.flip and bool(self.flips.mirrored(one, seed=seed, epoch=epoch, repeat=repeat)[0])
        return RegionView(geometry, self.preprocess.size, flip)

    def __call__(
        self, views: Tensor, indices: np.ndarray, *, seed: int, epoch: int, repeat: int | np.ndarray = 0
    ) -> Tensor:
        """(B, C, h, w) uint8, as they were cut -> float32, normalised."""
        return self.colours(views, indices, seed=seed, epoch=epoch, repeat=repeat)


def scaled_geometry(
    plain: Geometry, size: tuple[int, int], scale: tuple[float, float], numbers: np.ndarray
) -> Geometry:
    """The image times a factor, cropped or padded at random; numbers (3,): how large, how far down, how far right."""
    factor = scale[0] + (scale[1] - scale[0]) * numbers[0]
    resized = tuple(max(1, round(side * factor)) for side in plain.resized)
    top, left = (_start(big, small, n) for big, small, n in zip(resized, size, numbers[1:], strict=True))
    return Geometry(plain.original, (resized[0], resized[1]), top, left)


def _start(resized: int, side: int, number: float) -> int:
    """Where a view of `side` begins: within the image, or, where that is smaller, so that it lies within the view."""
    free = resized - side
    start = int(number * (abs(free) + 1))
    return start if free >= 0 else -start
