"""Images and what the model took them for, inside the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np

from vitlab.training.report.text import escaped, name_html, percent


@dataclass(frozen=True)
class GalleryItem:
    """An image and what the model took it for (rightly or not)."""

    image: np.ndarray  # (H, W, C) or (H, W), uint8
    truth: str
    predicted: str
    confidence: float  # probability of `predicted`
    name: str  # where the image comes from


def gallery(pictures: list[GalleryItem], caption: str) -> str:
    figures = []
    for p in pictures:
        right = p.truth == p.predicted
        verdict = name_html(p.predicted) if right else f"{name_html(p.truth)} → <b>{name_html(p.predicted)}</b>"
        mark = '<span class="yes">✓</span>' if right else '<span class="no">✗</span>'
        alt = escaped(f"{p.name}: {p.truth}, predicted {p.predicted}")
        small = ' class="pixels"' if max(p.image.shape[:2]) <= 96 else ""
        figures.append(
            f'<figure><img{small} alt="{alt}" src="{data_url(p.image)}" /><figcaption>{mark} {verdict} · '
            f'<data value="{float(p.confidence)!r}">{percent(p.confidence)}</data>'
            f'<small title="{escaped(p.name)}">{name_html(p.name)}</small></figcaption></figure>'
        )
    return f'<p>{caption}</p><div class="pictures">{"".join(figures)}</div>' if figures else ""


def data_url(image: np.ndarray, side: int = 224) -> str:
    """PNG, exact; photographs beyond thumbnail size as JPEG, no larger than `side`."""
    from PIL import Image

    assert image.dtype == np.uint8, image.dtype
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    picture, kind = Image.fromarray(image), "png"
    if max(picture.size) > 96 and picture.mode in ("L", "RGB"):
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
        kind = "jpeg"
    buffer = io.BytesIO()
    picture.save(buffer, kind, **({"quality": 90} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
