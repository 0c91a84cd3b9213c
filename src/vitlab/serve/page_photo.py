"""The photo that a server's page opens with: `vitlab try` gives it the user's own. It is the first of the samples."""

from __future__ import annotations

import io
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path

from PIL import Image

from vitlab.images.read import Source, called, read_image
from vitlab.images.samples import replace_sample

SHOWN = ("JPEG", "PNG", "WEBP", "GIF")  # by every browser
MAX_BYTES = 10_000_000  # of a file that is sent as it is
LARGEST = 1600  # longer side of any other image


@dataclass(frozen=True)
class PagePhoto:
    name: str  # as the page lists it: "cat.jpg"
    content: bytes
    media_type: str


def open_photo(source: Source) -> PagePhoto:
    """The file itself where browsers can show it, so that the page computes the same numbers; else a PNG of it."""
    name = Path(fspath(source)).name if isinstance(source, str | PathLike) else called(source)
    source = replace_sample(source)
    image = read_image(source)
    if isinstance(source, str | PathLike) and Path(source).expanduser().stat().st_size <= MAX_BYTES:
        content = Path(source).expanduser().read_bytes()
        with Image.open(io.BytesIO(content)) as opened:
            if opened.format in SHOWN:
                return PagePhoto(name, content, Image.MIME[opened.format])
    image.thumbnail((LARGEST, LARGEST))
    file = io.BytesIO()
    image.save(file, "PNG")
    return PagePhoto(name, file.getvalue(), "image/png")
