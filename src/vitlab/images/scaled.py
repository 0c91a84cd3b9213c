"""Photos read at about the size that they are needed at: much less work than all of their pixels.

    with open_scaled("photo.jpg") as photo:
        photo.size                                           # (H, W) as it is seen, from the file's first bytes
        box = (10, 20, photo.size[1] - 10, photo.size[0])    # left, top, right, bottom
        (view,) = photo.views([Cut(box, (224, 224))], Image.Resampling.BICUBIC, channels=3)  # (C, h, w) uint8

A JPEG is decoded at 1/2, 1/4 or 1/8 of its size where the view is still ABUNDANCE times as large as asked for: the
decoder then adds up fewer cosines. Other formats are decoded as they are. The crop comes before any conversion, and
torch resizes it. `images/read.py` and `Preprocess` read exactly; a view shows the same region, alike in its pixels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from vitlab.images.bands import TURNED, naming
from vitlab.images.read import Source, called, open_file, orientation, read_image, to_rgb, undecoded

ABUNDANCE = 2.0  # decoded pixels for a pixel of the view, across and down, that are enough to resize well
SCALES = (8, 4, 2)  # of the decoder; other parts of 8 have no fast code
MODES = {  # what torch resizes bytes by, sooner than Pillow; others are Pillow's
    Image.Resampling.BILINEAR: "bilinear",
    Image.Resampling.BICUBIC: "bicubic",
}
Box = tuple[float, float, float, float]  # left, top, right, bottom
Pixels = np.ndarray | Image.Image  # (H, W, 3) uint8, or an image of Pillow's


class Cut(NamedTuple):
    box: Box  # in pixels of the image as it is seen
    size: tuple[int, int]  # (h, w) that it is resized to


class Photo(Protocol):
    """An image that views are cut from."""

    @property
    def size(self) -> tuple[int, int]: ...  # (H, W) of all of it, which boxes refer to

    def views(self, wanted: Sequence[Cut], kernel: Image.Resampling, channels: int) -> list[Tensor]: ...


@contextmanager
def open_scaled(source: Source, *, name: str | None = None) -> Iterator[ScaledPhoto]:
    """The photo of a path or bytes, of which only the header is read; arrays and open images are read as they are.

    What goes wrong inside with its bytes is an ImageError that begins with its name.
    """
    if isinstance(source, np.ndarray | Image.Image):
        yield ScaledPhoto(read_image(source, name=name))
        return
    with naming(name or called(source)), open_file(source) as stream, undecoded(stream) as image:
        yield ScaledPhoto(image, stream)


class ScaledPhoto:
    """A photo that is decoded once it is known at which scale."""

    def __init__(self, image: Image.Image, stream: BinaryIO | None = None):
        self.image, self.stream = image, stream
        if not isinstance(image, JpegImageFile):
            image.load()  # others turn themselves (TIFF), or say late how they are turned (PNG)
        self.turn = orientation(image)
        width, height = image.size
        self.size = (width, height) if self.turn >= 5 else (height, width)

    def views(self, wanted: Sequence[Cut], kernel: Image.Resampling, channels: int) -> list[Tensor]:
        """Each (C, h, w) uint8. All are cut from one decoded image, which suits the sharpest of them."""
        scale, results = self._scale(wanted), []
        pixels = self._decode(scale)
        for box, (h, w) in wanted:
            left, top, right, bottom = (side / scale for side in self._as_stored(box))
            place = (left, top, right, bottom)
            size = (w, h) if self.turn >= 5 else (h, w)  # as stored
            if place == (grid := _on_grid(place, pixels)):
                view = resize_bytes(_cut(pixels, grid, channels), size, kernel)
            else:
                view = _resize_exactly(pixels, place, size, kernel, channels)
            results.append(_turned(view, self.turn))
        return results

    def _scale(self, wanted: Sequence[Cut]) -> int:
        """The file's pixels for a decoded one, across and down."""
        if not isinstance(self.image, JpegImageFile):
            return 1
        shrink = min(min((box[2] - box[0]) / w, (box[3] - box[1]) / h) for box, (h, w) in wanted)
        return next((scale for scale in SCALES if scale * ABUNDANCE <= shrink), 1)

    def _decode(self, scale: int) -> Pixels:
        """All of it, as stored, at 1 / scale."""
        image = self.image
        if isinstance(image, JpegImageFile):
            if image.mode == "RGB" and self.stream is not None:
                pixels = _turbo(self.stream, image, scale)
                if pixels is not None:
                    return pixels
            if scale > 1:
                image.draft(image.mode, (image.width // scale, image.height // scale))
            image.load()
        return image

    def _as_stored(self, box: Box) -> Box:
        """A box of the upright image in the pixels of the file; see TURNS of images/read.py."""
        (left, top, right, bottom), (height, width) = box, self.size
        if self.turn in (2, 3, 6, 7):
            left, right = width - right, width - left
        if self.turn in (3, 4, 7, 8):
            top, bottom = height - bottom, height - top
        return (top, left, bottom, right) if self.turn >= 5 else (left, top, right, bottom)


@dataclass(frozen=True)
class ShrunkenPhoto:
    """A smaller copy of a photo (images/copies.py), cut as the photo is."""

    size: tuple[int, int]  # (H, W) of the photo
    pixels: np.ndarray  # (h, w, C) uint8

    def views(self, wanted: Sequence[Cut], kernel: Image.Resampling, channels: int) -> list[Tensor]:
        assert self.pixels.shape[2] == channels
        scale = (self.size[1] / self.pixels.shape[1], self.size[0] / self.pixels.shape[0])  # across, down
        results = []
        for box, size in wanted:
            place = (box[0] / scale[0], box[1] / scale[1], box[2] / scale[0], box[3] / scale[1])
            left, top, right, bottom = _on_grid(place, self.pixels)
            results.append(resize_bytes(self.pixels[top:bottom, left:right], size, kernel))
        return results


def whole(size: tuple[int, int]) -> Box:
    """All of an image of this (H, W)."""
    return (0, 0, size[1], size[0])


def _turbo(stream: BinaryIO, image: Image.Image, scale: int) -> np.ndarray | None:
    """(H, W, 3), equal to Pillow's, in less time. None where the file is odd: what it is, Pillow decides."""
    import simplejpeg

    stream.seek(0)
    data, (height, width) = stream.read(), (-(-image.height // scale), -(-image.width // scale))
    try:
        pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, min_factor=scale)
    except ValueError:
        return None
    return pixels if pixels.shape[:2] == (height, width) else None


def _on_grid(box: Box, pixels: Pixels) -> tuple[int, int, int, int]:
    """The nearest whole pixels of a decoded image, at least one."""
    height, width = pixels.shape[:2] if isinstance(pixels, np.ndarray) else (pixels.height, pixels.width)
    left, right = (min(round(x), width) for x in (box[0], box[2]))
    top, bottom = (min(round(y), height) for y in (box[1], box[3]))
    left, top = min(left, width - 1), min(top, height - 1)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _resize_exactly(pixels: Pixels, box: Box, size: tuple[int, int], kernel: Image.Resampling, channels: int) -> Tensor:
    """A box between the pixels, which Pillow resizes: (C, h, w) uint8."""
    left, top = math.floor(box[0]), math.floor(box[1])
    part = _image(_cut(pixels, (left, top, math.ceil(box[2]), math.ceil(box[3])), channels))
    right, bottom = min(box[2] - left, part.width), min(box[3] - top, part.height)
    view = part.resize((size[1], size[0]), kernel, box=(box[0] - left, box[1] - top, right, bottom))
    return torch.from_numpy(_channels_last(view)).permute(2, 0, 1)


def _turned(view: Tensor, turn: int) -> Tensor:
    """(C, h, w) as stored -> as it is seen."""
    if turn == 1:
        return view
    seen = TURNED[turn](view.permute(1, 2, 0).numpy())  # (H, W, C)
    return torch.from_numpy(np.ascontiguousarray(seen)).permute(2, 0, 1)


def _cut(pixels: Pixels, box: tuple[int, int, int, int], channels: int) -> np.ndarray:
    """(h, w, C): converted after the crop, except where the whole image says how (16 bits, floats)."""
    if isinstance(pixels, np.ndarray):
        left, top, right, bottom = box
        part = pixels[top:bottom, left:right]
        return part if channels == 3 else _channels_last(_image(part).convert("L"))
    deep = pixels.mode.startswith("I") or pixels.mode == "F"
    image = to_rgb(pixels).crop(box) if deep else to_rgb(pixels.crop(box))
    return _channels_last(image.convert("L") if channels == 1 else image)


def _image(pixels: np.ndarray) -> Image.Image:
    """(H, W, C) uint8"""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels))


def _channels_last(image: Image.Image) -> np.ndarray:
    array = np.array(image)
    return array[:, :, None] if array.ndim == 2 else array


def resize_bytes(pixels: np.ndarray, size: tuple[int, int], kernel: Image.Resampling) -> Tensor:
    """(H, W, C) uint8 -> (C, h, w) uint8, antialiased; in memory mostly as (h, w, C)."""
    if pixels.shape[:2] != size and kernel not in MODES:
        pixels = _channels_last(_image(pixels).resize((size[1], size[0]), kernel))
    x = torch.from_numpy(np.require(pixels, requirements="W")).permute(2, 0, 1)  # (C, H, W)
    return x if pixels.shape[:2] == size else F.interpolate(x[None], size, mode=MODES[kernel], antialias=True)[0]
