"""Images that the page offers: a cat first, then photos and digits of scikit-learn, which are on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from PIL import Image

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
    cat = files("vitlab.serve") / "samples" / "cat.jpg"
    samples = {"cat": PageSample("CC0 1.0, Stéfan van der Walt", "image/jpeg", cat.read_bytes)}
    for name, author in (("china", "danielbuechele"), ("flower", "vultilion")):
        photo = files("sklearn.datasets.images") / f"{name}.jpg"
        samples[name] = PageSample(f"CC BY 2.0, {author}", "image/jpeg", photo.read_bytes)
    for number in DIGITS:
        digit = open_sample(f"digits#{number}")
        read = cache(lambda image=digit.image: encode_png(image.resize((64, 64), Image.Resampling.NEAREST)))
        samples[f"digit {digit.label}"] = PageSample("UCI digits, from scikit-learn", "image/png", read)
    return samples

