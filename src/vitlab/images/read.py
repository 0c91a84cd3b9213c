"""Bytes, a path or an array -> an upright 8-bit image; what is not an image is refused by name.

EXIF rotation is applied; grey, palette, alpha (shown on white), CMYK, 16-bit and animated files (first frame) all come
out as plain RGB.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from vitlab.errors import ImageError
from vitlab.special_files import special_kind

T = TypeVar("T")
Source = str | PathLike[str] | bytes | np.ndarray | Image.Image
MAX_PIXELS = 100_000_000  # a 100-megapixel photo passes, a decompression bomb does not
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "AVIF", "ICO", "JPEG2000")  # EPS would run a program
TURNS = {  # EXIF orientation -> what sets it right
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class NotAnImageError(ImageError):
    """Not an image format that is supported."""


class TooLargeError(ImageError):
    """More pixels than are allowed."""


def read_image(
    source: Source,
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = FORMATS,
) -> Image.Image:
    """An upright RGB image. `name` stands for the source in messages; default: its path.

    Its size is known from the file's first bytes, so one that is too large is refused before it is decoded. Threads
    may read at the same time.
    """
    try:
        if isinstance(source, np.ndarray):
            return to_rgb(_from_array(source))
        with open_file(source) as stream:
            return decode(stream, max_pixels, formats, to_rgb)
    except ImageError as error:
        raise type(error)(f"{name or called(source)}: {error.why}", error.remedy) from None


def _silence() -> None:
    """Pillow warns of large sizes and odd metadata; our own limit decides.

    warnings.catch_warnings is not safe with threads, so the filter is added once and stays.
    """
    global _quiet
    if _quiet not in warnings.filters:
        warnings.filterwarnings("ignore", module=r"PIL\.")
        _quiet = warnings.filters[0]


_quiet: Any = None  # the filter, once it is there


def orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 to 8; 1, as it is seen, where nothing says another."""
    try:
        number = image.getexif().get(ExifTags.Base.Orientation, 1)
        return number if number in TURNS else 1
    except Exception:  # broken EXIF says nothing about orientation, in any kind of error; the pixels are good
        return 1


def upright(image: Image.Image) -> Image.Image:
    """Turned as the camera was held (EXIF orientation); the tag is removed, so that nothing is turned twice."""
    turn = TURNS.get(orientation(image))
    image = image.copy() if turn is None else image.transpose(turn)
    for key in ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp"):  # where Pillow looks for it
        image.info.pop(key, None)
    return image


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB, so that it looks as a viewer would show it."""
    if image.mode.startswith("I") or image.mode == "F":  # 16-bit and float grey: Pillow's own conversion would clip
        return Image.fromarray(_to_8_bit(np.asarray(image))).convert("RGB")
    if image.has_transparency_data:  # an alpha channel, or one colour of the others is transparent
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


@cache
def _readable(formats: tuple[str, ...]) -> list[str]:
    """The formats that this Pillow was built with."""
    Image.init()
    return [name for name in formats if name in Image.OPEN]


def called(source: Source) -> str:
    """Name of an image in messages, where none was given."""
    if isinstance(source, bytes):
        return f"{len(source)} bytes"
    if isinstance(source, Image.Image):
        return str(getattr(source, "filename", "") or "the image")
    return "the array" if isinstance(source, np.ndarray) else fspath(source) or "''"


def open_file(source: str | PathLike[str] | bytes | Image.Image) -> Any:
    """Context manager of a binary stream; an open image is passed through."""
    if isinstance(source, Image.Image):
        return nullcontext(source)
    if isinstance(source, bytes):
        return io.BytesIO(source)
    if not fspath(source):
        raise ImageError("is empty, and no file's name.", "Is a shell variable unset?")
    path = Path(source)
    if kind := special_kind(path):
        raise ImageError(f"is {kind}, not an image file.", "Copy what it holds into a file, and name that.")
    try:
        if path.is_dir():
            raise IsADirectoryError
        return path.open("rb")
    except IsADirectoryError:
        raise ImageError("is a folder.", "Name the image files in it.") from None
    except FileNotFoundError:
        raise ImageError("no such file.") from None
    except OSError as error:
        raise ImageError(f"cannot be opened ({error.strerror}).") from None
    except ValueError:
        raise ImageError("no such file: its name holds a NUL character.") from None


def decode(
    stream: BinaryIO | Image.Image, max_pixels: int, formats: Sequence[str], convert: Callable[[Image.Image], T]
) -> T:
    """The upright image of a stream or an open image, converted; an error in whatever the bytes are wrong."""
    with undecoded(stream, max_pixels, formats) as image:
        image.load()
        return convert(upright(image))


@contextmanager
def undecoded(
    stream: BinaryIO | Image.Image, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS
) -> Iterator[Image.Image]:
    """An image of which the header is read, and not too large; what goes wrong with its pixels inside is an ImageError
    as well.
    """
    _silence()
    try:
        if isinstance(stream, Image.Image):
            image = stream
        else:
            image = Image.open(stream, formats=_readable(tuple(formats)))
            if image.width * image.height > max_pixels:
                raise TooLargeError(
                    f"{image.width} x {image.height} pixels are more than the limit of {max_pixels:,}.",
                    "Shrink the image first, or pass a larger max_pixels.",
                )
        yield image
    except ImageError:
        raise
    except UnidentifiedImageError:
        extensions = ", ".join(e[1:] for e in EXTENSIONS)
        raise NotAnImageError("not an image that can be read.", f"Expected one of {extensions}.") from None
    except Image.DecompressionBombError as error:  # Pillow's own limit, of 179 million pixels
        raise TooLargeError(str(error), "Shrink the image first.") from None
    except Exception as error:  # damaged bytes raise nearly anything in Pillow's decoders
        raise ImageError(f"damaged or cut off ({error}).", "Fetch the file again.") from None


def _from_array(array: np.ndarray) -> Image.Image:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4); whole numbers 0..255, 16-bit, or fractions 0..1."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)) or 0 in array.shape:
        hint = (
            " Put channels last: array.transpose(1, 2, 0)." if array.ndim == 3 and array.shape[0] in (1, 3, 4) else ""
        )
        raise ImageError(f"must be (H, W) or (H, W, 1|3|4), not {array.shape}.{hint}")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(_to_8_bit(array))


def _to_8_bit(array: np.ndarray) -> np.ndarray:
    """16-bit values keep their upper 8 bits; fractions 0..1 are spread over 0..255; others are clipped."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if array.dtype.kind not in "iuf":
        raise ImageError(f"holds {array.dtype}. Pixels are whole numbers 0..255, 16-bit, or fractions 0..1.")
    if not np.isfinite(array).all():
        raise ImageError("holds NaN or infinity.")
    if np.issubdtype(array.dtype, np.floating):
        scale = 255.0 if array.size == 0 or array.max() <= 1.0 else 1.0
        return np.clip(np.rint(array * scale), 0, 255).astype(np.uint8)
    if array.dtype.newbyteorder("=") == np.uint16 or array.max() > 255:
        return np.clip(array >> 8, 0, 255).astype(np.uint8)
    return np.clip(array, 0, 255).astype(np.uint8)


def thumbnail_url(image: Image.Image, side: int = 96) -> str:
    """A small copy as a data URL, for HTML that needs no other file. Small images keep their pixels."""
    small = image.convert("RGB")
    small.thumbnail((side, side))
    file = io.BytesIO()
    kind = "PNG" if max(image.size) <= side else "JPEG"
    small.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"
