"""Images of any number of channels, with the values that the file holds: satellites, microscopes, depth, X-rays.

    read_bands("field.tif")                    # (H, W, C): uint8, uint16, int16 or float32; also .npy, PNG, ...
    read_bands("field.npy", channels=5)        # tells (5, H, W) from (H, W, 5) where the shape alone does not

Photos are read by images/read.py: 8 bits a colour, as a viewer shows them. Here nothing is converted to 8 bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from vitlab.errors import DataError, ImageError
from vitlab.images.read import FORMATS, MAX_PIXELS, Source, TooLargeError, called, decode, open_file, to_rgb

PHOTO = "photo"  # Preprocess.pixels of what images/read.py reads
SCALES = {"uint8": 1 / 255, "uint16": 1 / 65535, "int16": 1 / 32767, "float32": 1.0}  # stored values -> about 0..1
EXACT = 2**24  # whole numbers up to here are exact in float32
MOST_VALUES = 4 * MAX_PIXELS  # of all channels together
ARRAY_EXTENSION = ".npy"
MAGIC = {b"\x93NUMPY": "npy", b"II*\0": "tiff", b"MM\0*": "tiff", b"II+\0": "tiff", b"MM\0+": "tiff"}
READABLE_COMPRESSIONS = (1, 8, 32946)  # none, and two numbers for deflate, which needs no further package
ORIENTATION = 274  # a TIFF tag; the next are values of others
MINISWHITE, MINISBLACK, PALETTE, CMYK, ALPHA = 0, 1, 3, 5, (1, 2)
MEASURED = 2_000  # training images that mean and std are measured on, spread evenly
SHOWN = 2.5  # standard deviations around the mean that a drawing shows
TURNED = {  # EXIF orientation -> the upright array, as `TURNS` of images/read.py
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[:, ::-1],
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[::-1],
}


@dataclass(frozen=True)
class StoredPixels:
    """What the files of a dataset hold."""

    kind: str  # a key of SCALES
    channels: int

    def __str__(self) -> str:
        return f"{self.channels} channel{'s' * (self.channels != 1)} of {self.kind}"


def read_bands(
    source: Source, *, channels: int | None = None, name: str | None = None, max_pixels: int = MAX_PIXELS
) -> np.ndarray:
    """(H, W, C), upright. `channels`: how many there are, which tells (C, H, W) from (H, W, C)."""
    name = name or called(source)
    with naming(name):
        if isinstance(source, np.ndarray):
            return _checked(channels_last(source, channels))
        if isinstance(source, Image.Image):
            return _checked(_from_pillow(source))
        with open_file(source) as stream:
            kind = _kind_of_file(stream)
            if kind == "npy":
                return _checked(channels_last(_read_npy(stream, max_pixels), channels))
            if kind == "tiff":
                return _checked(_read_tiff(stream, channels, max_pixels))
            return _checked(decode(stream, max_pixels, FORMATS, _from_pillow))


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Errors begin with the image's name."""
    try:
        yield
    except ImageError as error:
        raise type(error)(f"{name}: {error.why}", error.remedy) from None


def channels_last(array: np.ndarray, channels: int | None = None) -> np.ndarray:
    """(H, W), (H, W, C) or (C, H, W) -> (H, W, C).

    The channels are the axis of length `channels`, if it is known, and otherwise the shorter one of the first and the
    last. It must be the shortest of the three by far (at most half of the others): else an image could be taken for
    its own side view.
    """
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or 0 in array.shape:
        raise ImageError(f"must be (H, W), (H, W, C) or (C, H, W), not {array.shape}.")
    first, last = array.shape[0], array.shape[2]
    if channels is not None:
        if channels not in (first, last):
            raise ImageError(f"is {array.shape}, but {channels} channels are expected, first or last.")
        return array if last == channels else np.moveaxis(array, 0, 2)
    shorter, longer = min(first, last), max(first, last)
    if shorter != 1 and 2 * shorter > min(longer, array.shape[1]):
        raise ImageError(
            f"is {array.shape}: whether its channels come first or last does not show.",
            f"Say how many there are: data.channels={last}, for instance.",
        )
    return array if last <= first else np.moveaxis(array, 0, 2)


def kind_of(dtype: np.dtype) -> str:
    """uint8, uint16 and int16 stay; all other numbers are float32."""
    name = dtype.newbyteorder("=").name
    return name if name in SCALES else "float32"


def _checked(array: np.ndarray) -> np.ndarray:
    """In one of the kinds, with all values intact."""
    if array.dtype.kind not in "biuf":
        raise ImageError(f"holds {array.dtype}: pixels are numbers.")
    kind = kind_of(array.dtype)
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise ImageError("holds NaN, infinity, or more than float32 can.", "Fill the gaps with a number first.")
    elif kind == "float32" and array.size and (int(array.max()) > EXACT or int(array.min()) < -EXACT):
        raise ImageError(f"holds {array.dtype} beyond ±{EXACT:,}, which float32 cannot tell apart.")
    return np.ascontiguousarray(array, dtype=kind)


def _check_size(height: int, width: int, values: int, max_pixels: int) -> None:
    if height * width > max_pixels or values > MOST_VALUES:
        raise TooLargeError(
            f"{width} x {height} pixels, {values:,} values, are more than the limit of {max_pixels:,} pixels and "
            f"{MOST_VALUES:,} values.",
            "Cut the image into tiles first.",
        )


def _kind_of_file(stream: BinaryIO) -> str | None:
    start = stream.read(8)
    stream.seek(0)
    return next((kind for magic, kind in MAGIC.items() if start.startswith(magic)), None)


def _read_npy(stream: BinaryIO, max_pixels: int) -> np.ndarray:
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise ImageError(f"holds {dtype}: pixels are numbers.")
        if len(shape) in (2, 3):
            height, width = sorted(shape)[-2:]
            _check_size(height, width, math.prod(shape), max_pixels)
        stream.seek(0)
        return np.load(stream, allow_pickle=False)
    except ImageError:
        raise
    except Exception as error:  # damaged bytes raise several kinds
        raise ImageError(f"damaged or cut off ({error}).", "Write the file again.") from None


@contextmanager
def _open_tiff(stream: BinaryIO) -> Iterator[Any]:
    """The first series of a TIFF: an image in one page or several."""
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # what is odd in a file is said in an error, or harmless
    try:
        with tifffile.TiffFile(stream) as file:
            yield file.series[0]
    except ImageError:
        raise
    except Exception as error:  # damaged bytes raise nearly anything
        raise ImageError(f"damaged or cut off ({error}).", "Fetch the file again.") from None


def _read_tiff(stream: BinaryIO, channels: int | None, max_pixels: int) -> np.ndarray:
    """The first image: its samples, planes or pages are the channels."""
    with _open_tiff(stream) as series:
        page, axes = series.keyframe, series.axes
        _check_size(page.imagelength, page.imagewidth, math.prod(series.shape), max_pixels)
        if int(page.compression) not in READABLE_COMPRESSIONS:
            name = getattr(page.compression, "name", str(page.compression))
            raise ImageError(
                f"is compressed with {name}, and of a TIFF with these values only deflate and none are read.",
                "Write it again: gdal_translate -co COMPRESS=DEFLATE in.tif out.tif",
            )
        array, turn = series.asarray(), TURNED.get(int(page.tags.valueof(ORIENTATION, 1)))
    single = [axis for axis, length in enumerate(array.shape) if length == 1 and axes[axis] not in "YX"]
    array, axes = array.squeeze(tuple(single)), "".join(a for i, a in enumerate(axes) if i not in single)
    of_channels = next((axes.index(axis) for axis in "SC" if axis in axes), None)
    if array.ndim == 3 and of_channels is not None:
        array = np.moveaxis(array, of_channels, 2)
    else:
        array = channels_last(array, channels)
    return array if turn is None else turn(array)


def _from_pillow(image: Image.Image) -> np.ndarray:
    """16-bit and float grey as stored; photos as they are seen, in 8 bits."""
    if not (_is_deep(image) or image.mode in ("L", "RGB", "RGBA")):
        image = to_rgb(image)
    array = np.asarray(image)
    return array[:, :, None] if array.ndim == 2 else array


def _is_deep(image: Image.Image) -> bool:
    return image.mode.startswith("I") or image.mode == "F"


def resize_bands(array: np.ndarray, size: tuple[int, int], kernel: Image.Resampling) -> np.ndarray:
    """(H, W, C) -> (h, w, C) in float32; Pillow resizes one channel after the other, without rounding."""
    if array.shape[:2] == size:
        return array.astype(np.float32)
    bands = (Image.fromarray(array[:, :, c].astype(np.float32)) for c in range(array.shape[2]))
    return np.stack([np.asarray(band.resize((size[1], size[0]), kernel)) for band in bands], axis=2)


def cut_bands(array: np.ndarray, start: tuple[int, int], size: tuple[int, int], border: np.ndarray) -> np.ndarray:
    """The part (h, w, C) of an image that begins at this row and column, which may lie outside; `border` (C,)."""
    cut = np.empty((*size, array.shape[2]), dtype=np.float32)
    cut[:] = border
    (top, left), (skip_y, skip_x) = (max(-n, 0) for n in start), (max(n, 0) for n in start)
    part = array[skip_y:, skip_x:][: size[0] - top, : size[1] - left]
    cut[top : top + part.shape[0], left : left + part.shape[1]] = part
    return cut


# ------------------------------------------------------------------------------------------------- of a whole dataset


def stored_pixels(path: str | Path, channels: int | None = None) -> StoredPixels:
    array = read_bands(path, channels=channels)
    return StoredPixels(str(array.dtype), array.shape[2])


def is_photo(path: str | Path) -> bool:
    """Whether 8-bit colours are all that a file holds. An array is no photo, nor are 16-bit grey or five bands."""
    with naming(called(path)), open_file(path) as stream:
        kind = _kind_of_file(stream)
        return kind != "npy" and (_is_photo_tiff(stream) if kind == "tiff" else not _is_deep_png(stream))


def _is_deep_png(stream: BinaryIO) -> bool:
    """16-bit grey; of 16-bit colours Pillow gives the upper 8 bits."""
    try:
        return _is_deep(Image.open(stream, formats=["PNG"]))
    except Exception:  # another format; or damaged, which is reported when it is read
        return False


def _is_photo_tiff(stream: BinaryIO) -> bool:
    """8-bit grey, palette or colours, perhaps with alpha; further pages are further photos."""
    with _open_tiff(stream) as series:
        page, axes = series.keyframe, series.axes.removeprefix("I")
        if page.photometric == PALETTE or page.dtype == bool:
            return True
        if page.dtype != np.uint8 or axes not in ("YX", "YXS", "SYX"):
            return False
        colours = {MINISWHITE: 1, MINISBLACK: 1, CMYK: 4}.get(page.photometric, 3)
        extra = page.samplesperpixel - colours
        return extra == 0 or (extra == 1 and tuple(page.extrasamples)[:1] in (ALPHA[:1], ALPHA[1:]))


def measure_pixels(arrays: Iterable[np.ndarray], channels: int, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (C,) of all pixels of all images (H, W, C), in stored values times `scale`."""
    count, mean, squares = 0, np.zeros(channels), np.zeros(channels)
    for array in arrays:  # parts are joined as in Chan, Golub and LeVeque (1983): no large sum of squares is subtracted
        values = array.reshape(-1, channels).astype(np.float64) * scale  # (HW, C)
        n, own = len(values), values.mean(axis=0)
        step = own - mean
        squares += ((values - own) ** 2).sum(axis=0) + step**2 * count * n / (count + n)
        mean, count = mean + step * n / (count + n), count + n
    if not count:
        raise DataError("there is no image that can be read to measure mean and std on.")
    return mean, np.sqrt(squares / count)
