"""MultiCrop: two large and several small random views of every image, for DINO.

    multicrop = MultiCrop(MultiCropOptions(local_views=4, local_size=16), (32, 32), mean, std)
    views = multicrop(images, indices, seed=0, epoch=3)      # [(B, C, 32, 32), (B, C, 32, 32), (B, C, 16, 16), ...]

Multi-crop is SwAV's (arXiv:2006.09882), the colours are BYOL's (arXiv:2006.07733, appendix B), as DINO takes them. What
happens to a view depends on (seed, epoch, the image's index, its repeat, the view's number) alone. The order: crop,
flip, jitter, grey, blur, solarize, normalise. All is done on 8-bit pixels, many views at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.images import randaugment as ra
from vitlab.images.augment import (
    BOX_DRAWS,
    Augment,
    AugmentOptions,
    check_counts,
    check_ranges,
    check_shares,
    crop_boxes,
)
from vitlab.images.preprocess import RESAMPLING
from vitlab.images.randomness import uniform
from vitlab.images.scaled import Cut, Photo

BOX, COLOUR = 121, 122  # the coordinate that says what a number is for
EXACT = 2.0**14  # weights are multiples of 1 / EXACT: sums of weighted bytes are then exact in float32, in any order


@dataclass(frozen=True)
class MultiCropOptions:
    """Plain values; those of one number per kind of view stand for: first global, second global, local."""

    local_views: int = 8
    local_size: int = 96  # side in pixels
    global_scale: tuple[float, float] = (0.4, 1.0)  # part of the image's area
    local_scale: tuple[float, float] = (0.05, 0.4)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height
    flip: float = 0.5  # this and what follows: probabilities
    jitter: float = 0.8
    brightness: float = 0.4  # jitter: a factor of 1 +- this; the same for the next two
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1  # jitter: +- this part of the colour circle
    grey: float = 0.2
    blur: tuple[float, float, float] = (1.0, 0.1, 0.5)
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # in pixels of the view; meant for views of 224
    solarize: tuple[float, float, float] = (0.0, 0.2, 0.0)  # from level 128 up

    def __post_init__(self) -> None:
        for name in ("global_scale", "local_scale", "ratio", "blur", "blur_sigma", "solarize"):  # TOML gives lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_counts(self, local_views=0, local_size=1)
        check_ranges(self, global_scale=1.0, local_scale=1.0, ratio=1e6, blur_sigma=1e6)
        for name in ("blur", "solarize"):
            if len(getattr(self, name)) != 3:
                raise UsageError(f"{name}={getattr(self, name)} must be three: first global, second global, local.")
        check_shares(self, flip=1, jitter=1, brightness=1, contrast=1, saturation=1, grey=1, blur=1, solarize=1)
        if not 0 <= self.hue <= 0.5:
            raise UsageError(f"hue={self.hue} must lie in 0 .. 0.5: half of the colour circle either way.")


class MultiCrop:
    """size is (H, W) of the global views, the model's input; mean, std and scale are those of its Preprocess."""

    def __init__(
        self,
        options: MultiCropOptions,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str = "bicubic",
        scale: float = 1 / 255,
    ) -> None:
        if interpolation not in KERNELS:
            raise UsageError(f"interpolation={interpolation!r} must be one of {', '.join(KERNELS)}.")
        self.options, self.interpolation = options, interpolation
        self.plain = Augment(AugmentOptions(), size, mean, std, scale=scale)  # checks and normalises
        local = (options.local_size, options.local_size)
        self.sizes = [self.plain.size] * 2 + [local] * options.local_views  # (H, W) of every view
        kinds = [0, 1] + [2] * options.local_views
        self.blur, self.solarize = (np.array(p)[kinds] for p in (options.blur, options.solarize))  # (V,)

    def __call__(
        self,
        images: Tensor | Sequence[Tensor],
        indices: np.ndarray,
        *,
        seed: int,
        epoch: int,
        repeat: int | np.ndarray = 0,
        cropped: bool = False,
    ) -> list[Tensor]:
        """(B, C, H, W) uint8 -> a view each, (B, C, *size) float32, normalised; the two global ones first.

        cropped: `images` are the views already, (B, C, *size) uint8 each, cut from files by `boxes` and `cut`.
        """
        self._check(images, indices, cropped)
        numbers = self._numbers(indices, repeat, seed, epoch)
        boxes = None
        if isinstance(images, Tensor):
            sizes = np.broadcast_to(images.shape[2:], (len(images), 2))
            boxes = self.boxes(sizes, indices, seed=seed, epoch=epoch, repeat=repeat)
        views: list[Tensor] = []
        for members in (slice(0, 2), slice(2, len(self.sizes))):  # views of one size go together
            count = len(self.sizes[members])
            if not count:
                continue
            if isinstance(images, Tensor):
                assert boxes is not None
                x = resized_crops(images, boxes[members], self.sizes[members][0], self.interpolation)
            else:
                x = torch.cat(list(images[members]))  # (v*B, C, h, w)
            blur, solarize = (np.repeat(p[members], len(indices)) for p in (self.blur, self.solarize))
            x = colour(x, numbers[members].reshape(len(x), DRAWS), self.options, blur, solarize)
            views += self.plain.normalize(x).chunk(count)
        return views

    def boxes(
        self, sizes: np.ndarray, indices: np.ndarray, *, seed: int, epoch: int, repeat: int | np.ndarray = 0
    ) -> np.ndarray:
        """The crops of images of these (H, W), (B, 2) -> (V, B, 4) int64: left, top, right, bottom."""
        boxes = []
        for view in range(len(self.sizes)):
            area = self.options.global_scale if view < 2 else self.options.local_scale
            numbers = uniform(seed, BOX, epoch, indices, repeat, view, count=BOX_DRAWS)
            boxes.append(crop_boxes(numbers, np.asarray(sizes), area, self.options.ratio))
        return np.stack(boxes)

    @property
    def random_crops(self) -> list[tuple[int, tuple[float, float]]]:
        """As Augment's, of every view."""
        scales = [self.options.global_scale] * 2 + [self.options.local_scale] * self.options.local_views
        return [(max(size), scale) for size, scale in zip(self.sizes, scales, strict=True)]

    def cut(self, image: np.ndarray, boxes: np.ndarray) -> list[Tensor]:
        """One image of any size, (H, W, C) uint8, and its boxes (V, 4) -> its views, each (C, *size) uint8.

        For files: every view is cut from the whole image, so that a small crop is as sharp as the file is.
        """
        pil = Image.fromarray(image[:, :, 0] if image.shape[2] == 1 else image)
        pil = pil.convert("L" if len(self.plain.mean) == 1 else "RGB")
        views = []
        for (h, w), (left, top, right, bottom) in zip(self.sizes, boxes.tolist(), strict=True):
            view, kernel = pil.crop((left, top, right, bottom)), RESAMPLING[self.interpolation]
            view = view.resize((w, view.height), kernel).resize((w, h), kernel)  # in the order of `resized_crops`
            pixels = np.array(view)
            views.append(torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy()))
        return views

    def cut_photo(self, photo: Photo, boxes: np.ndarray) -> list[Tensor]:
        """`cut` of a photo that is decoded once, as sharp as its sharpest view needs it."""
        wanted = [
            Cut((left, top, right, bottom), size)
            for size, (left, top, right, bottom) in zip(self.sizes, boxes.tolist(), strict=True)
        ]
        return photo.views(wanted, RESAMPLING[self.interpolation], len(self.plain.mean))

    def _numbers(self, indices: np.ndarray, repeat: int | np.ndarray, seed: int, epoch: int) -> np.ndarray:
        """(V, B, DRAWS): what decides the colours."""
        views = range(len(self.sizes))
        return np.stack([uniform(seed, COLOUR, epoch, indices, repeat, view, count=DRAWS) for view in views])

    def _check(self, images: Tensor | Sequence[Tensor], indices: np.ndarray, cropped: bool) -> None:
        if cropped == isinstance(images, Tensor):
            actual, expected = ("one tensor", "a list of views") if cropped else ("a list", "one tensor (B, C, H, W)")
            raise UsageError(f"found {actual}, expected {expected}: cropped={cropped}.")
        for view in images if cropped else [images]:
            assert isinstance(view, Tensor)
            self.plain._check(view, indices, resizes=True)
        actual_sizes = [tuple(view.shape[2:]) for view in images] if cropped else self.sizes
        if actual_sizes != self.sizes:
            raise UsageError(f"found views of {actual_sizes}, expected {self.sizes}: cut them with `cut`.")


# ---- crops: Pillow's resize as two products with matrices, one image's rows and columns by its own box


def _bilinear(x: Tensor) -> Tensor:
    return (1 - x.abs_()).clamp_min_(0)


def _bicubic(x: Tensor) -> Tensor:
    """Keys' kernel with a = -1/2: its far piece, -(x - 1)(x - 2)^2 / 2, and what the near one adds to it."""
    x = x.abs_()
    far = (2 - x).clamp_min_(0).square_().mul_(1 - x).mul_(0.5)
    return (1 - x).clamp_min_(0).square_().mul_(x.mul_(2).sub_(1)).add_(far)


KERNELS = {"bilinear": _bilinear, "bicubic": _bicubic}


def resized_crops(x: Tensor, boxes: np.ndarray, size: tuple[int, int], interpolation: str) -> Tensor:
    """Cut boxes (v, B, 4) out of the images (B, C, H, W) and resize them to `size`: (v*B, C, *size), view by view."""
    B, C, H, W = x.shape
    left, top, right, bottom = torch.from_numpy(boxes).to(x.device).float().flatten(0, 1).T  # (v*B,) each
    columns = _weights(left, right, W, size[1], interpolation)  # (v*B, w, W)
    rows = _weights(top, bottom, H, size[0], interpolation)  # (v*B, h, H)
    x = x.float().reshape(B, C * H, W)
    x = torch.cat([x @ part.mT for part in columns.split(B)])  # (v*B, C*H, w)
    x = _bytes(x).reshape(-1, C, H, size[1])  # across first and in bytes between, as Pillow
    return _bytes(rows[:, None] @ x).to(torch.uint8)  # (v*B, C, h, w)


def _weights(low: Tensor, high: Tensor, inputs: int, outputs: int, interpolation: str) -> Tensor:
    """Part that input pixel j of low .. high has in output pixel i: (b,), (b,) -> (b, outputs, inputs)."""
    low, high = low[:, None, None], high[:, None, None]
    scale = (high - low) / outputs  # input pixels for an output pixel
    wide = scale.clamp_min(1)  # the kernel grows where the crop shrinks: antialiased
    at = torch.arange(inputs, device=low.device) + 0.5  # their centres
    centre = low + (torch.arange(outputs, device=low.device)[:, None] + 0.5) * scale  # (b, outputs, 1)
    inside = (at > low) & (at < high)  # (b, 1, inputs)
    return _exact(KERNELS[interpolation]((at - centre).div_(wide)).mul_(inside))


def _exact(weights: Tensor) -> Tensor:
    """Rows that sum to 1. They are whole multiples of 1 / EXACT, so that no sum here or in the product with bytes
    depends on its order: an image comes out the same, to the bit, in any batch."""
    weights = weights.mul_(EXACT).round_()
    return weights.mul_(EXACT / weights.sum(dim=-1, keepdim=True)).round_().div_(EXACT)


def _bytes(x: Tensor) -> Tensor:
    """To whole levels, still as floats."""
    return x.add_(0.5).floor_().clamp_(0, 255)


# ---- colours: numbers (b, DRAWS) say whether, in what order and how far

FLIP, JITTER, GREY, BLUR, SIGMA, SOLARIZE, ORDER, FACTOR, DRAWS = 0, 1, 2, 3, 4, 5, 6, 10, 14


def colour(x: Tensor, numbers: np.ndarray, o: MultiCropOptions, blur: np.ndarray, solarize: np.ndarray) -> Tensor:
    """(b, C, H, W) uint8 -> the same; blur and solarize (b,): their probabilities."""
    fill = x.new_zeros(x.shape[1])  # no operation here leaves a hole
    order = np.argsort(numbers[:, ORDER : ORDER + 4], axis=1)  # (b, 4)
    strength = np.array([o.brightness, o.contrast, o.saturation, o.hue])
    values = (2 * numbers[:, FACTOR : FACTOR + 4] - 1) * strength + np.array([1.0, 1.0, 1.0, 0.0])
    sigma = o.blur_sigma[0] + (o.blur_sigma[1] - o.blur_sigma[0]) * numbers[:, SIGMA]

    def jitter(part: Tensor, which: np.ndarray) -> Tensor:
        for turn in order[which].T:
            value = np.take_along_axis(values[which], turn[:, None], 1)[:, 0]
            part = ra.apply_grouped(part, (ra.brightness, ra.contrast, ra.color, turn_hue), turn, value, fill)
        return part

    x = _changed(x, numbers[:, FLIP] < o.flip, lambda part, _: part.flip(-1))
    x = _changed(x, numbers[:, JITTER] < o.jitter, jitter)
    x = _changed(x, numbers[:, GREY] < o.grey, lambda part, _: ra.grey(part).expand_as(part))
    x = _changed(x, numbers[:, BLUR] < blur, lambda part, which: gaussian_blur(part, sigma[which]))
    return _changed(x, numbers[:, SOLARIZE] < solarize, lambda part, _: torch.where(part >= 128, 255 - part, part))


def _changed(x: Tensor, chosen: np.ndarray, change: Callable[[Tensor, np.ndarray], Tensor]) -> Tensor:
    """With the chosen images (b,) changed; `change` is given them and their places."""
    which = np.flatnonzero(chosen)
    if not len(which):
        return x
    source = np.arange(len(x))
    source[which] = len(x) + np.arange(len(which))
    places, source = (torch.from_numpy(a).to(x.device) for a in (which, source))
    new = change(x.index_select(0, places), which)
    return torch.cat([x, new]).index_select(0, source)  # copies whole images: much faster than x[places] = new


def turn_hue(x: Tensor, value: Tensor, fill: Tensor) -> Tensor:
    """Turn the hue by a part of the colour circle, at the same value and chroma (HSV); one channel stays."""
    if x.shape[1] == 1:
        return x
    r, g, b = x.float().unbind(1)  # (b, H, W)
    low, high = torch.minimum(r, g).min(b), torch.maximum(r, g).max(b)
    chroma = high - low
    green = torch.where(high == g, b - r + 2 * chroma, r - g + 4 * chroma)  # 2 and 4: where their sectors begin
    hue = torch.where(high == r, g - b, green).div_(chroma.clamp_min(1))  # -1 .. 5, once around the circle
    hue += 6 * value.float()[:, None, None]
    hue -= 6 * (hue / 6).floor_()  # 0 .. 6
    parts = (hue - 3).abs_().sub_(1), 2 - (hue - 2).abs_(), 2 - (hue - 4).abs_()  # of red, green, blue
    channels = [part.clamp_(0, 1).mul_(chroma).add_(low) for part in parts]
    return torch.stack(channels, dim=1).round_().to(torch.uint8)


def gaussian_blur(x: Tensor, sigma: np.ndarray) -> Tensor:
    """Each image by its own sigma, in pixels; what would come from outside the image has no part."""
    b, C, H, W = x.shape
    across, down = (_gaussian(n, torch.from_numpy(sigma).to(x.device)) for n in (W, H))  # (b, n, n)
    y = _bytes(x.float().reshape(b, C * H, W) @ across.mT).reshape(b, C, H, W)
    return _bytes(down[:, None] @ y).to(torch.uint8)


def _gaussian(n: int, sigma: Tensor) -> Tensor:
    """Part that pixel j of n has in pixel i: (b,) -> (b, n, n)."""
    places = torch.arange(n, device=sigma.device, dtype=sigma.dtype)
    near = torch.exp(-0.5 * (places / sigma[:, None]) ** 2).float()  # (b, n), by distance
    return _exact(near[:, (places - places[:, None]).abs().long()])
