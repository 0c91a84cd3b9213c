"""Preprocess: how an image becomes a model's input, and how a place in that input maps back to the image.

It travels inside the checkpoint as JSON. Resizing is Pillow's, on 8-bit pixels, so it agrees with the image processors
that released weights were evaluated with. Images that are no photos (images/bands.py) keep the values and channels of
their files, and are resized as floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.errors import ImageError, UsageError
from vitlab.images.bands import PHOTO, SCALES, SHOWN, StoredPixels, cut_bands, naming, read_bands, resize_bands
from vitlab.images.read import FORMATS, MAX_PIXELS, Source, TooLargeError, called, read_image
from vitlab.images.scaled import Cut, Photo, whole

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
MAX_SIDE = 2**14  # pixels of a model's input
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Geometry:
    """Where the model's view lies: the image is resized to `resized`, then the view starts at (top, left)."""

    original: tuple[int, int]  # (H, W)
    resized: tuple[int, int]
    top: int  # negative where the view is larger than the resized image (padding)
    left: int

    def to_original(self, box: Box) -> Box:
        """A box in the model's pixels -> in the original image's; it may reach outside where the view was padded."""
        x, y = self.original[1] / self.resized[1], self.original[0] / self.resized[0]
        left, top, right, bottom = box
        return ((left + self.left) * x, (top + self.top) * y, (right + self.left) * x, (bottom + self.top) * y)


def normalise(pixels: Tensor, mean: Sequence[float], std: Sequence[float], scale: float) -> Tensor:
    """uint8 or stored values (..., C, H, W) -> float32: (pixels * scale - mean) / std. Prediction, evaluation, training
    and the server all come here, so that a model reads the same bits everywhere.
    """
    mean_std = torch.tensor([[*mean], [*std]], dtype=torch.float32, device=pixels.device)[..., None, None]
    x = pixels.to(torch.float32, copy=True).div_(1 / scale)  # 255 is exact in float32, 1 / 255 is not
    return x.sub_(mean_std[0]).div_(mean_std[1])


def _side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIDE


def _sides(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(map(_side, value))


def _numbers(values: object) -> bool:
    """No NaN, no infinity, nothing that float32 cannot hold."""

    def valid(n: object) -> bool:
        return isinstance(n, int | float) and not isinstance(n, bool) and abs(n) < 1e30

    return isinstance(values, tuple) and all(map(valid, values))


@dataclass(frozen=True)
class Preprocess:
    """how: "stretch" to size; "crop" the centre after resizing; "fit" inside size, with padding of the mean colour;
    "aspect": every image keeps its own, in at most `max_patches` patches of `patch` x `patch` pixels (NaFlex).
    """

    size: tuple[int, int]  # (H, W) of the model's input
    how: Literal["stretch", "crop", "fit", "aspect"] = "stretch"
    resize: int | tuple[int, int] | None = None  # for crop: the shorter side, or (H, W) exactly; None: just covers size
    interpolation: str = "bilinear"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    scale: float = 1 / 255
    patch: int = 0  # for aspect, as is max_patches
    max_patches: int = 0
    pixels: str = PHOTO  # 8-bit colours, as a viewer shows them; or the type of stored values: uint8, uint16, ...

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std", "resize"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if _side(self.size):
            object.__setattr__(self, "size", (self.size, self.size))
        if not _sides(self.size):
            raise UsageError(f"size={self.size!r} must be (height, width) in whole numbers, each from 1 to {MAX_SIDE}.")
        if self.how not in ("stretch", "crop", "fit", "aspect"):
            raise UsageError(f'how={self.how!r} must be "stretch", "crop", "fit" or "aspect".')
        if self.how == "aspect" and not (_side(self.patch) and _side(self.max_patches)):
            raise UsageError(
                f'how="aspect" needs patch={self.patch!r} and max_patches={self.max_patches!r} to be whole numbers, '
                f"each from 1 to {MAX_SIDE}."
            )
        if not isinstance(self.interpolation, str) or self.interpolation not in RESAMPLING:
            raise UsageError(f"interpolation={self.interpolation!r} must be one of {', '.join(RESAMPLING)}.")
        if not (self.resize is None or _side(self.resize) or _sides(self.resize)):
            raise UsageError(f"resize={self.resize!r} must be None, the shorter side, or (height, width).")
        if not _numbers((self.scale,)) or self.scale <= 0:
            raise UsageError(f"scale={self.scale!r} must be a number above 0.")
        valid = _numbers(self.mean) and _numbers(self.std) and len(self.mean) == len(self.std)
        if self.pixels != PHOTO and self.pixels not in SCALES:
            raise UsageError(f"pixels={self.pixels!r} must be one of {', '.join([PHOTO, *SCALES])}.")
        number = "1 or 3 numbers" if self.pixels == PHOTO else "a number for each channel"
        if not valid or not self.mean or (self.pixels == PHOTO and len(self.mean) not in (1, 3)) or min(self.std) <= 0:
            raise UsageError(f"mean={self.mean!r} and std={self.std!r} must hold {number} each, std above 0.")

    @property
    def stored(self) -> StoredPixels | None:
        """What files must hold; None: photos, of any kind."""
        return None if self.pixels == PHOTO else StoredPixels(self.pixels, len(self.mean))

    def __call__(self, source: Source, *, name: str | None = None) -> Tensor:
        """One image (path, bytes, array or PIL image) -> (C, H, W), normalised."""
        return self.prepare(source, name=name)[0]

    def prepare(
        self, source: Source, *, name: str | None = None, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS
    ) -> tuple[Tensor, Image.Image]:
        """The model's input (C, H, W), and the upright image as it can be drawn; limits as in `read_image`."""
        name = name or called(source)
        if self.pixels == PHOTO:
            image = read_image(source, name=name, max_pixels=max_pixels, formats=formats)
            return self.normalize(self.view(image, name=name)), image
        stored = read_bands(source, channels=len(self.mean), name=name, max_pixels=max_pixels)
        values = torch.from_numpy(self.view_stored(stored, name=name)).permute(2, 0, 1).contiguous()  # (C, h, w)
        return normalise(values, self.mean, self.std, self.scale), self._drawn(stored)

    def batch(self, sources: Iterable[Source]) -> Tensor:
        """Several images -> (B, C, H, W)."""
        return torch.stack([self(source) for source in sources])

    def view(self, image: Image.Image, *, name: str = "the image", geometry: Geometry | None = None) -> Image.Image:
        """What the model sees, as an image of `size` (or of its own aspect), before normalising. `geometry`: where the
        view lies, if elsewhere than in evaluation.
        """
        image = image.convert("L" if len(self.mean) == 1 else "RGB")
        g = geometry or self.geometry((image.height, image.width))
        with naming(name):
            self._check_resized(g)
        if (image.height, image.width) != g.resized:
            image = image.resize((g.resized[1], g.resized[0]), RESAMPLING[self.interpolation])
        H, W = self.size
        if (g.top, g.left) == (0, 0) and (g.resized == self.size or self.how == "aspect"):
            return image
        fill = self._fill(padded=self.how == "fit" or geometry is not None)
        canvas = Image.new(image.mode, (W, H), tuple(fill) if len(fill) > 1 else fill[0])
        canvas.paste(image, (-g.left, -g.top))
        return canvas

    def view_scaled(self, photo: Photo) -> Tensor:
        """`view` of a photo that is decoded at about this size (images/scaled.py): (C, h, w) uint8."""
        g = self.geometry(photo.size)
        self._check_resized(g)
        kernel, (h, w) = RESAMPLING[self.interpolation], g.resized
        (resized,) = photo.views([Cut(whole(photo.size), g.resized)], kernel, len(self.mean))
        H, W = g.resized if self.how == "aspect" else self.size
        if (g.top, g.left, h, w) == (0, 0, H, W):
            return resized
        canvas = torch.tensor(self._fill(padded=self.how == "fit"), dtype=torch.uint8)[:, None, None].repeat(1, H, W)
        part = resized[:, max(g.top, 0) : g.top + H, max(g.left, 0) : g.left + W]
        top, left = max(-g.top, 0), max(-g.left, 0)
        canvas[:, top : top + part.shape[1], left : left + part.shape[2]] = part
        return canvas

    def _fill(self, *, padded: bool) -> list[int]:
        """What lies around an image that does not cover the view: the mean colour where it is padded, else black."""
        return [round(m / self.scale) if padded else 0 for m in self.mean]

    def view_stored(self, array: np.ndarray, box: Sequence[int] | None = None, name: str = "the image") -> np.ndarray:
        """What the model sees of stored values (H, W, C), in float32, before normalising. `box`: of this part,
        stretched to `size`; left, top, right, bottom.
        """
        stored = StoredPixels(str(array.dtype), array.shape[2])
        if stored != self.stored:
            raise ImageError(
                f"{name}: holds {stored}, and the model reads {self.stored}. Convert it as the training images were, "
                "or train on such images."
            )
        g = self.geometry((array.shape[0], array.shape[1]))
        if box is not None:
            left, top, right, bottom = box
            array, g = array[top:bottom, left:right], Geometry((bottom - top, right - left), self.size, 0, 0)
        with naming(name):
            self._check_resized(g)
        values = resize_bands(array, g.resized, RESAMPLING[self.interpolation])
        if self.how == "aspect" or box is not None:
            return values
        border = np.array(self.mean) / self.scale if self.how == "fit" else np.zeros(len(self.mean))
        return cut_bands(values, (g.top, g.left), self.size, border)

    def _drawn(self, array: np.ndarray) -> Image.Image:
        """Stored values (H, W, C) as an image for people: see `to_image`."""
        values = torch.from_numpy(array.astype(np.float32)).permute(2, 0, 1)
        return self.to_image(normalise(values, self.mean, self.std, self.scale))

    def _check_resized(self, g: Geometry) -> None:
        if g.resized[0] * g.resized[1] > MAX_PIXELS:
            raise TooLargeError(
                f"{g.original[1]} x {g.original[0]} pixels are too long and thin: resized for the crop they "
                f"would be {g.resized[1]} x {g.resized[0]}.",
                "Crop the image first.",
            )

    def normalize(self, image: Image.Image) -> Tensor:
        """An image of `size` -> (C, H, W)."""
        pixels = torch.from_numpy(np.array(image))  # (H, W) or (H, W, C)
        pixels = pixels[None] if pixels.ndim == 2 else pixels.permute(2, 0, 1).contiguous()  # (C, H, W)
        return normalise(pixels, self.mean, self.std, self.scale)

    def to_image(self, tensor: Tensor) -> Image.Image:
        """The inverse of `normalize`: (C, H, W) -> an image. Of stored values the first three channels are drawn, or
        the first alone: grey is their mean, black and white lie SHOWN standard deviations from it.
        """
        if self.pixels != PHOTO:
            shown = tensor.detach().cpu().float()[: _drawn_channels(len(self.mean))] / (2 * SHOWN) + 0.5
            array = (255 * shown).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()
            return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array).convert("RGB")
        mean, std = (torch.tensor(v)[:, None, None] for v in (self.mean, self.std))
        pixels = ((tensor.detach().cpu().float() * std + mean) / self.scale).round().clamp(0, 255).to(torch.uint8)
        array = pixels.permute(1, 2, 0).numpy()
        return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)

    def geometry(self, original: tuple[int, int]) -> Geometry:
        """How an image of this (H, W) is laid under the model's view."""
        (H, W), (h, w) = original, self.size
        if self.how == "stretch":
            return Geometry(original, self.size, 0, 0)
        if self.how == "aspect":
            return Geometry(original, aspect_size(original, self.patch, self.max_patches), 0, 0)
        if self.how == "fit":
            factor = min(h / H, w / W)
            resized = (min(h, max(1, round(H * factor))), min(w, max(1, round(W * factor))))
            return Geometry(original, resized, -((h - resized[0]) // 2), -((w - resized[1]) // 2))
        if isinstance(self.resize, tuple):
            resized = self.resize
        elif self.resize is None:  # the smallest image that covers the view
            resized = (h, int(h * W / H)) if h * W >= w * H else (int(w * H / W), w)
        else:
            short = self.resize
            resized = (short, int(short * W / H)) if H <= W else (int(short * H / W), short)
        return Geometry(original, resized, (resized[0] - h) // 2, (resized[1] - w) // 2)

    def patch_box(self, row: int, column: int, patch: int | tuple[int, int], original: tuple[int, int]) -> Box:
        """Where a patch (its side, or height and width) lies in an image of this (H, W): left, top, right, bottom."""
        tall, wide = (patch, patch) if isinstance(patch, int) else patch
        box = (column * wide, row * tall, (column + 1) * wide, (row + 1) * tall)
        return self.geometry(original).to_original(box)

    def with_size(self, size: tuple[int, int]) -> Preprocess:
        """The same for another input size; what is resized before a crop grows along."""
        new = replace(self, size=size)
        if self.how == "aspect":
            return replace(new, max_patches=max(1, new.size[0] // self.patch * (new.size[1] // self.patch)))
        if self.resize is None:
            return new
        if isinstance(self.resize, int):
            return replace(new, resize=round(self.resize * min(new.size) / min(self.size)))
        resize = tuple(round(r * n / o) for r, n, o in zip(self.resize, new.size, self.size, strict=True))
        return replace(new, resize=resize)

    def uncropped(self) -> Preprocess:
        """The same without a crop: the whole image is stretched to `size`."""
        return replace(self, how="stretch", resize=None) if self.how == "crop" else self

    def at_one_size(self) -> Preprocess:
        """The same, for those who need images of one size: "stretch" in place of "aspect"."""
        return replace(self, how="stretch", patch=0, max_patches=0) if self.how == "aspect" else self

    def to_dict(self) -> dict[str, Any]:
        others = () if self.how == "aspect" else ("patch", "max_patches")
        others += ("pixels",) if self.pixels == PHOTO else ()
        return {name: value for name, value in asdict(self).items() if name not in others}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Preprocess:
        names = {f.name for f in fields(cls)}
        if not isinstance(values, dict) or "size" not in values:
            raise UsageError(f"preprocess must be a table with a size in it; it can have {', '.join(sorted(names))}.")
        if unknown := set(values) - names:
            raise UsageError(f"preprocess has no option {sorted(unknown)[0]!r}; it has {', '.join(sorted(names))}.")
        return cls(**values)


def _drawn_channels(channels: int) -> int:
    return 3 if channels >= 3 else 1


def aspect_size(original: tuple[int, int], patch: int, max_patches: int) -> tuple[int, int]:
    """(H, W) of whole patches, at most so many: both sides scaled alike, then rounded up.

    The scale is found by halving an interval, from the same start and to the same precision as transformers' processor
    of SigLIP 2 does: which sides come out can depend on the last digits.
    """

    def scaled(scale: float) -> tuple[int, int]:
        rows, columns = (max(1, math.ceil(side * scale / patch)) for side in original)
        return rows, columns

    fits, exceeds = 1e-6, 100.0
    while exceeds - fits >= 1e-5:
        middle = (fits + exceeds) / 2
        rows, columns = scaled(middle)
        fits, exceeds = (middle, exceeds) if rows * columns <= max_patches else (fits, middle)
    rows, columns = scaled(fits)
    return rows * patch, columns * patch


def fit_preprocess(
    values: Mapping[str, Any],
    made_for: tuple[int, int],
    *,
    image_size: tuple[int, int],
    channels: int,
    keep_size: bool = False,
) -> Preprocess | None:
    """Values that were made for one image size, for a network of this image size and number of channels.

    `keep_size`: images are read at the size that the values state. None: no photo has so many channels.
    """
    values = {"size": made_for, **values}
    if channels not in (1, 3) and values.get("pixels", PHOTO) == PHOTO:
        return None
    for key in ("mean", "std"):
        given = set(values.get(key, ()))
        if len(values.get(key, ())) in {0, 1, 3} - {channels}:  # colours for a grey network, or the other way round
            values[key] = (given.pop() if len(given) == 1 else 0.5,) * channels
    preprocess = Preprocess(**values)
    return preprocess if keep_size else preprocess.with_size(image_size)
