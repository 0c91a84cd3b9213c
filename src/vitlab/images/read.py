"""Bytes, a path or an array -> an upright 8-bit picture; what is not a picture is refused by name.

EXIF rotation is applied; grey, palette, alpha (shown on white), CMYK, 16-bit and animated files (first frame) all come
out as plain RGB.
"""

from __future__ import annotations

import io
import warnings
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

Source = str | PathLike[str] | bytes | np.ndarray | Image.Image
MAX_PIXELS = 100_000_000  # a 100-megapixel photo passes, a decompression bomb does not
EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


class ImageError(ValueError):
    """A file that cannot be used as a picture; the message names it and says why."""


def read_image(source: Source, *, name: str | None = None, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """An upright RGB picture. `name` is what messages call the source; a path is called by its path."""
    if isinstance(source, Image.Image):
        return to_rgb(upright(source))
    if isinstance(source, np.ndarray):
        return to_rgb(_from_array(source))
    called = name or (f"{len(source)} bytes" if isinstance(source, bytes) else str(source))
    stream: Any = io.BytesIO(source) if isinstance(source, bytes) else _open(Path(source), called)
    with stream, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of large sizes and odd metadata; our own limit decides
        try:
            with Image.open(stream) as image:
                if image.width * image.height > max_pixels:
                    raise ImageError(
                        f"{called}: {image.width} x {image.height} pixels are more than the limit of "
                        f"{max_pixels:,}. Shrink the picture first, or pass a larger max_pixels."
                    )
                image.load()
                return to_rgb(upright(image))
        except ImageError:
            raise
        except UnidentifiedImageError:
            raise ImageError(
                f"{called}: not a picture that can be read. Expected one of {', '.join(e[1:] for e in EXTENSIONS)}."
            ) from None
        except Image.DecompressionBombError as error:
            raise ImageError(f"{called}: {error}") from None
        except (OSError, SyntaxError, ValueError, EOFError, IndexError, MemoryError) as error:
            raise ImageError(f"{called}: damaged or cut off ({error}). Fetch the file again.") from None


def upright(image: Image.Image) -> Image.Image:
    """Turned as the camera was held (EXIF orientation)."""
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, TypeError, KeyError, ZeroDivisionError):
        return image  # broken EXIF says nothing about orientation; the pixels are good


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to RGB, so that it looks as a viewer would show it."""
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I") or image.mode == "F":  # 16-bit and float grey: Pillow's own conversion would clip
        return Image.fromarray(_to_8_bit(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(paper, image).convert("RGB")
    return image.convert("RGB")


def _open(path: Path, called: str):
    if path.is_dir():
        raise ImageError(f"{called}: is a folder. Name the picture files in it.")
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise ImageError(f"{called}: no such file.") from None
    except OSError as error:
        raise ImageError(f"{called}: cannot be opened ({error.strerror}).") from None


def _from_array(array: np.ndarray) -> Image.Image:
    """(H, W), (H, W, 1), (H, W, 3) or (H, W, 4); whole numbers 0..255, 16-bit, or fractions 0..1."""
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)) or 0 in array.shape:
        hint = (
            " Put channels last: array.transpose(1, 2, 0)." if array.ndim == 3 and array.shape[0] in (1, 3, 4) else ""
        )
        raise ImageError(f"an image array must be (H, W) or (H, W, 1|3|4), not {array.shape}.{hint}")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return Image.fromarray(_to_8_bit(array))


def _to_8_bit(array: np.ndarray) -> np.ndarray:
    """16-bit values keep their upper 8 bits; fractions 0..1 are spread over 0..255; others are clipped."""
    if array.dtype == np.uint8:
        return array
    if array.dtype == bool:
        return array.astype(np.uint8) * 255
    if not np.isfinite(array).all():
        raise ImageError("the image array holds NaN or infinity.")
    if np.issubdtype(array.dtype, np.floating):
        scale = 255.0 if array.size == 0 or array.max() <= 1.0 else 1.0
        return np.clip(np.rint(array * scale), 0, 255).astype(np.uint8)
    if array.dtype == np.uint16 or array.max() > 255:
        return np.clip(array >> 8, 0, 255).astype(np.uint8)
    return np.clip(array, 0, 255).astype(np.uint8)
