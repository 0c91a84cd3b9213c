"""Augment: a batch of 8-bit images -> the floats a model trains on, randomly cropped, flipped, recoloured and erased.

    augment = Augment(AugmentOptions(crop="padded", flip=True, randaugment=2, erasing=0.25), (32, 32), mean, std)
    x = augment(images, indices, seed=0, epoch=3)

What happens to an image depends on (seed, epoch, its index in the dataset, its repeat) alone: not on the batch it is
in, the worker that loads it, or what was drawn before. The order: crop, flip, RandAugment, jitter, normalise, erase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.images import randaugment as ra
from vitlab.images.bands import PHOTO
from vitlab.images.preprocess import normalise
from vitlab.images.randomness import uniform

CROP, FLIP, RANDAUGMENT, JITTER, ERASING, NOISE = range(101, 107)  # the coordinate that says what a number is for
LARGEST = 10.0  # factor of a scaled crop
TRIES = 10  # boxes drawn until one fits, for crops and for erasing
BOX_DRAWS = 2 + 2 * TRIES  # random numbers for one box
ERASED_AREA, ERASED_RATIO = (0.02, 0.33), (0.3, 3.3)  # Table 1 of arXiv:1708.04896


@dataclass(frozen=True)
class AugmentOptions:
    """Plain values, everything off by default."""

    crop: Literal["none", "padded", "resized", "scaled"] = "none"  # scaled: with masks and boxes, see RegionAugment
    padding: int = 4  # padded: the image grows by this much on each side and is cropped back
    border: Literal["reflect", "zeros"] = "reflect"  # padded: what it grows by; zeros are black pixels
    scale: tuple[float, float] = (0.08, 1.0)  # resized: part of the image's area; scaled: factor of its sides
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # resized: width / height
    flip: bool = False  # left to right, one time in two
    flip_in_turn: bool = False  # mirrored in every second epoch, instead of by chance
    randaugment: int = 0  # N: operations per image
    magnitude: float = 9.0  # M, 0 to 10: how far they go
    magnitude_std: float = 0.0  # the spread of M around its value (normal, cut to 0..10)
    jitter: float = 0.0  # brightness, contrast and saturation by a factor of 1 +- jitter, in random order
    erasing: float = 0.0  # probability
    erasing_fill: Literal["noise", "zeros"] = "noise"  # after normalising: N(0, 1) per value, or the mean colour

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):  # TOML and JSON give lists
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        for name, choices in (
            ("crop", ("none", "padded", "resized", "scaled")),
            ("border", ("reflect", "zeros")),
            ("erasing_fill", ("noise", "zeros")),
            ("flip", (False, True)),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(f"{name}={getattr(self, name)!r} must be one of {', '.join(map(repr, choices))}.")
        if self.flip_in_turn and not self.flip:
            raise UsageError("flip_in_turn=True says when images are mirrored: set flip=True too.")
        check_counts(self, padding=1, randaugment=0)
        check_shares(self, magnitude=10, magnitude_std=10, jitter=1, erasing=1)
        check_ranges(self, scale=LARGEST if self.crop == "scaled" else 1.0, ratio=1e6)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_counts(options: object, **lowest: int) -> None:
    """Whole numbers, each at least this."""
    for name, low in lowest.items():
        value = getattr(options, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise UsageError(f"{name}={value!r} must be a whole number, at least {low}.")


def check_shares(options: object, **highest: float) -> None:
    """Numbers, or tuples of them, each from 0 to this."""
    for name, high in highest.items():
        value = getattr(options, name)
        if not all(_is_number(v) and 0 <= v <= high for v in (value if isinstance(value, tuple) else (value,))):
            raise UsageError(f"{name}={value!r} must be a number in 0 .. {high}.")  # also refuses nan


def check_ranges(options: object, **highest: float) -> None:
    """Pairs (low, high) above 0, up to this."""
    for name, most in highest.items():
        pair = getattr(options, name)
        numbers = isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_number, pair))
        if not (numbers and 0 < pair[0] <= pair[1] <= most):
            limit = " and at most 1" if most == 1 else ""
            raise UsageError(f"{name}={pair!r} must be (low, high) with low <= high, both above 0{limit}.")


class Augment:
    """size is (H, W) of the model's input; mean, std, scale and pixels are those of its Preprocess.

    What is not a photo has no colours: it is cropped, flipped and erased.
    """

    def __init__(
        self,
        options: AugmentOptions,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str = "bilinear",  # of the resized crop; RandAugment's geometry is always bilinear
        scale: float = 1 / 255,
        pixels: str = PHOTO,
    ) -> None:
        H, W = self.size = (int(size[0]), int(size[1]))
        if options.crop == "scaled":
            raise UsageError("crop='scaled' is for images with masks or boxes: use crop='resized'.")
        if options.crop == "padded" and options.border == "reflect" and options.padding >= min(H, W):
            raise UsageError(
                f"padding={options.padding} cannot be reflected from an image of {H}x{W}. "
                f'Use padding={min(H, W) - 1} or less, or border="zeros".'
            )
        if interpolation not in MODES:
            raise UsageError(f"interpolation={interpolation!r} must be one of {', '.join(MODES)}.")
        if (pixels == PHOTO and len(mean) not in (1, 3)) or len(mean) != len(std):
            raise UsageError(f"mean={tuple(mean)} and std={tuple(std)} must hold 1 or 3 numbers each.")
        for name in ("randaugment", "jitter"):
            if pixels != PHOTO and (value := getattr(options, name)):
                raise UsageError(f"augment.{name}={value:g} is for the colours of photos: set augment.{name}=0.")
        self.dtype = torch.uint8 if pixels == PHOTO else torch.float32
        self.options, self.interpolation, self.scale = options, interpolation, scale
        self.mean, self.std = tuple(mean), tuple(std)
        self.fill = (
            (torch.tensor(mean, dtype=torch.float32) / scale).round().clamp(0, 255).to(torch.uint8)
        )  # (C,): the mean colour

    def __call__(
        self,
        images: Tensor,
        indices: np.ndarray,
        *,
        seed: int,
        epoch: int,
        repeat: int | np.ndarray = 0,
        cropped: bool = False,
    ) -> Tensor:
        """(B, C, H, W) uint8 (stored values: float32) -> (B, C, *size) float32, normalised. cropped: the crop was made
        already, see `boxes`.
        """
        o = self.options
        self._check(images, indices, resizes=o.crop == "resized" and not cropped)
        fill = self.fill.to(images.device)

        def draw(purpose: int, count: int) -> np.ndarray:  # (B, count)
            return uniform(seed, purpose, epoch, indices, repeat, count=count)

        if o.crop == "padded" and not cropped:
            images = padded_crop(images, draw(CROP, 2), o.padding, o.border)
        if o.crop == "resized" and not cropped:
            sizes = np.broadcast_to(images.shape[2:], (len(images), 2))
            boxes = self.boxes(sizes, indices, seed=seed, epoch=epoch, repeat=repeat)
            images = resized_crop(images, boxes, self.size, self.interpolation)
        if o.flip:
            mirrored = torch.from_numpy(self.mirrored(indices, seed=seed, epoch=epoch, repeat=repeat))
            images = torch.where(mirrored[:, None, None, None].to(images.device), images.flip(-1), images)
        if o.randaugment:
            numbers = draw(RANDAUGMENT, ra.DRAWS * o.randaugment)
            images = ra.randaugment(images, numbers, o.magnitude, o.magnitude_std, fill)
        if o.jitter:
            images = jitter(images, draw(JITTER, 6), o.jitter, fill)
        x = self.normalize(images)
        if o.erasing:
            seeds = (draw(NOISE, 1)[:, 0] * 2**53).astype(np.int64)
            x = erase_(x, draw(ERASING, 3 + 2 * TRIES), o.erasing, seeds if o.erasing_fill == "noise" else None)
        return x

    def boxes(
        self, sizes: np.ndarray, indices: np.ndarray, *, seed: int, epoch: int, repeat: int | np.ndarray = 0
    ) -> np.ndarray:
        """The random resized crops of images of these (H, W), (B, 2) -> (B, 4) int64: left, top, right, bottom.

        For files of different sizes: a worker crops each with Pillow, and `cropped=True` continues from there.
        """
        if self.options.crop != "resized":
            raise UsageError(f'boxes are drawn for crop="resized" only; this is crop={self.options.crop!r}.')
        numbers = uniform(seed, CROP, epoch, indices, repeat, count=BOX_DRAWS)
        return crop_boxes(numbers, np.asarray(sizes), self.options.scale, self.options.ratio)

    @property
    def random_crops(self) -> list[tuple[int, tuple[float, float]]]:
        """What is cut from a file at random: the side it is resized to, and its part of the image's area."""
        return [(max(self.size), self.options.scale)] if self.options.crop == "resized" else []

    def mirrored(self, indices: np.ndarray, *, seed: int, epoch: int, repeat: int | np.ndarray = 0) -> np.ndarray:
        """(B,): which images are mirrored where flip is on; in turn: by chance in the first epoch, then by turns."""
        in_turn = self.options.flip_in_turn
        by_chance = uniform(seed, FLIP, 0 if in_turn else epoch, indices, repeat, count=1)[:, 0] < 0.5
        return by_chance ^ (in_turn and epoch % 2 == 1)

    def normalize(self, images: Tensor) -> Tensor:
        """(B, C, H, W) uint8 -> float32."""
        return normalise(images, self.mean, self.std, self.scale)

    def _check(self, images: Tensor, indices: np.ndarray, *, resizes: bool) -> None:
        if images.dtype != self.dtype or images.ndim != 4 or images.shape[1] != len(self.mean):
            actual = f"{tuple(images.shape)} {str(images.dtype).removeprefix('torch.')}"
            raise UsageError(
                f"found images {actual}, expected (B, {len(self.mean)}, H, W) "
                f"{str(self.dtype).removeprefix('torch.')}: augmentation works on pixels and normalises last."
            )
        if np.shape(indices) != (len(images),):
            raise UsageError(f"{len(images)} images need one dataset index each; found shape {np.shape(indices)}.")
        if not resizes and tuple(images.shape[2:]) != self.size:
            H, W = images.shape[2:]
            raise UsageError(
                f"found images of {H}x{W}, expected {self.size[0]}x{self.size[1]}. "
                'Resize them first, or use crop="resized".'
            )


# ---- crops


def padded_crop(x: Tensor, numbers: np.ndarray, padding: int, border: str) -> Tensor:
    """Grow by `padding` on each side, crop back to (H, W) at a random place; numbers (B, 2): how far down, across."""
    H, W = x.shape[2:]
    start = np.floor(numbers * (2 * padding + 1)).astype(np.int64) - padding  # (B, 2): may be negative
    rows = start[:, :1] + np.arange(H)  # (B, H): where each output row comes from
    columns = start[:, 1:] + np.arange(W)
    source = _within(rows, H)[:, :, None] * W + _within(columns, W)[:, None]  # (B, H, W)
    flat = torch.from_numpy(source).to(x.device).flatten(1)[:, None]  # (B, 1, H*W)
    out = x.flatten(2).gather(2, flat.expand(-1, x.shape[1], -1)).view(x.shape)
    if border == "zeros":
        inside = ((rows >= 0) & (rows < H))[:, None, :, None] & ((columns >= 0) & (columns < W))[:, None, None]
        out *= torch.from_numpy(inside).to(x.device)
    return out


def _within(places: np.ndarray, side: int) -> np.ndarray:
    """Reflects places outside 0 .. side-1 at the first and the last pixel; the edge itself is not repeated."""
    places = np.abs(places)
    return np.clip(np.where(places < side, places, 2 * (side - 1) - places), 0, side - 1)


MODES = {  # antialiased as Pillow's resize, which makes the images the model is evaluated on
    "nearest": dict(mode="nearest-exact"),
    "bilinear": dict(mode="bilinear", antialias=True),
    "bicubic": dict(mode="bicubic", antialias=True),
}


def resized_crop(x: Tensor, boxes: np.ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """Cut out boxes (B, 4), each of its own shape, and resize them to `size`."""
    out = x.new_empty(*x.shape[:2], *size)
    for i, (left, top, right, bottom) in enumerate(boxes.tolist()):
        out[i] = F.interpolate(x[i : i + 1, :, top:bottom, left:right], size, **MODES[interpolation])[0]
    return out


def crop_boxes(
    numbers: np.ndarray, sizes: np.ndarray, area: tuple[float, float], ratio: tuple[float, float]
) -> np.ndarray:
    """numbers (B, BOX_DRAWS), sizes (B, 2) -> (B, 4): left, top, right, bottom, inside images of (H, W)."""
    boxes, fits = draw_boxes(numbers, sizes, area, ratio)
    (H, W), (narrow, wide) = sizes.T, ratio  # none fits: the largest centre crop of an allowed ratio
    h, w = np.minimum(H, np.rint(W / narrow)), np.minimum(W, np.rint(H * wide))
    h, w = np.maximum(h, 1).astype(np.int64), np.maximum(w, 1).astype(np.int64)
    top, left = (H - h) // 2, (W - w) // 2
    return np.where(fits[:, None], boxes, np.stack([left, top, left + w, top + h], axis=1))


def draw_boxes(
    numbers: np.ndarray, sizes: np.ndarray, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The first of TRIES boxes that fits in (H, W): uniform in its part of the area, log-uniform in width / height.

    numbers (B, BOX_DRAWS), sizes (B, 2) -> boxes (B, 4): left, top, right, bottom; and whether one did fit, (B,).
    """
    H, W = sizes[:, :1], sizes[:, 1:]  # (B, 1)
    place, areas, ratios = np.split(numbers, [2, 2 + TRIES], axis=1)
    areas = H * W * (area[0] + (area[1] - area[0]) * areas)  # (B, TRIES)
    ratios = np.exp(np.log(ratio[0]) + np.log(ratio[1] / ratio[0]) * ratios)
    h, w = np.rint(np.sqrt(areas / ratios)).astype(np.int64), np.rint(np.sqrt(areas * ratios)).astype(np.int64)
    fit = (h >= 1) & (h <= H) & (w >= 1) & (w <= W)
    first = fit.argmax(axis=1, keepdims=True)
    h, w = np.take_along_axis(h, first, 1), np.take_along_axis(w, first, 1)  # (B, 1)
    top = np.floor(place[:, :1] * (H - h + 1)).astype(np.int64)
    left = np.floor(place[:, 1:] * (W - w + 1)).astype(np.int64)
    return np.concatenate([left, top, left + w, top + h], axis=1), fit.any(axis=1)


# ---- colour and erasing


def jitter(x: Tensor, numbers: np.ndarray, strength: float, fill: Tensor) -> Tensor:
    """numbers (B, 6): the order of the three operations, and their factors."""
    order = np.argsort(numbers[:, :3], axis=1)  # (B, 3)
    factors = 1 + strength * (2 * numbers[:, 3:] - 1)  # (B, 3), by operation
    for which in order.T:
        value = np.take_along_axis(factors, which[:, None], 1)[:, 0]
        x = ra.apply_grouped(x, (ra.brightness, ra.contrast, ra.color), which, value, fill)
    return x


def erase_(x: Tensor, numbers: np.ndarray, probability: float, seeds: np.ndarray | None) -> Tensor:
    """Random Erasing (arXiv:1708.04896), in place: a box of noise, or of zeros without seeds, in some of the images.

    numbers (B, 3 + 2 TRIES): whether, where, what size; seeds (B,): each image's noise has its own generator.
    """
    sizes = np.broadcast_to(x.shape[2:], (len(x), 2))
    boxes, fits = draw_boxes(numbers[:, 1:], sizes, ERASED_AREA, ERASED_RATIO)
    generator = torch.Generator()
    for i in np.flatnonzero((numbers[:, 0] < probability) & fits):
        left, top, right, bottom = boxes[i].tolist()
        hole = x[i, :, top:bottom, left:right]
        if seeds is None:
            hole.zero_()
        else:
            hole.copy_(torch.randn(hole.shape, generator=generator.manual_seed(int(seeds[i]))))
    return x
