"""Images that the page offers: photos of the package, a cat first, then digits of scikit-learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from PIL import Image

from vitlab.images.photos import PHOTOS
from vitlab.images.samples import open_sample
from vitlab.serve.image_io import encode_png

DIGITS = (0, 1, 2)  # of the test images: three different digits


@dataclass(frozen=True)
class PageSample:
    licence: str
    media_type: str
    read: Callable[[], bytes]


@cache
def page_samples() -> dict[str, PageSample]:
    """By name, in the order in which they are shown."""
    samples = {p.name: PageSample(p.credit, "image/jpeg", p.path.read_bytes) for p in PHOTOS.values()}
    for number in DIGITS:
        digit = open_sample(f"digits#{number}")
        read = cache(lambda image=digit.image: encode_png(image.resize((64, 64), Image.Resampling.NEAREST)))
        samples[f"digit {digit.label}"] = PageSample("UCI digits, from scikit-learn", "image/png", read)
    return samples
