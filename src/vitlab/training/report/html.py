"""Text, numbers and images as the page shows them: everything escaped, the exact value in the markup."""

from __future__ import annotations

import base64
import html
import io
import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from vitlab.parsing import flat


def printable(value: object) -> str:
    """Control characters and the halves of file names that are not UTF-8 become U+FFFD."""
    return re.sub(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(value))


def escaped(value: object) -> str:
    """Anything -> text that is safe in HTML, also inside quotes."""
    return html.escape(printable(value), quote=True)


def name_html(value: object) -> str:
    return f'<bdi class="name">{escaped(value)}</bdi>'  # bdi: a right-to-left name does not turn its neighbours


def number(key: str, value: object) -> str:
    """As people read it; the exact value stays in the markup."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escaped("–" if value is None else value)
    if not math.isfinite(value):
        shown = str(value)
    elif key.split(".")[-1] in ("top1", "top5", "accuracy", "val_top1", "test_top1", "ece"):
        shown = percent(value, 2)
    elif key == "seconds":
        shown = duration(value)
    elif isinstance(value, int):
        shown = f"{value:,}" if key not in ("seed", "step") else str(value)
    else:
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f'<data value="{value!r}">{shown}</data>'


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """75 -> 1 min 15 s"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {s:02} s"


def section(title: str, chinese: str, content: str) -> str:
    if not content:
        return ""
    return f'<section>\n<h2>{title} <span lang="zh-CN">· {chinese}</span></h2>\n{content}\n</section>'


def table_of(values: Mapping[str, object]) -> str:
    rows = [f"<tr><th>{escaped(key)}</th><td>{number(key, value)}</td></tr>" for key, value in flat(values).items()]
    return f'<div class="wide"><table class="pairs">{"".join(rows)}</table></div>' if rows else ""


def ems(text: str) -> float:
    """About how wide a text is, in font sizes."""
    return sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.6 for c in text)


def cut(text: str, most: float) -> str:
    text = " ".join(text.split())
    if ems(text) <= most:
        return text
    while text and ems(text) > most - 1:
        text = text[:-1]
    return text + "…"


@dataclass(frozen=True)
class GalleryItem:
    """An image and what the model took it for (rightly or not)."""

    image: np.ndarray  # (H, W, C) or (H, W), uint8
    truth: str
    predicted: str
    confidence: float  # probability of `predicted`
    name: str  # where the image comes from


def gallery(items: list[GalleryItem], caption: str) -> str:
    figures = []
    for p in items:
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
    return f'<p>{caption}</p><div class="gallery">{"".join(figures)}</div>' if figures else ""


def data_url(image: np.ndarray, side: int = 224) -> str:
    """PNG, exact; photographs beyond thumbnail size as JPEG, no larger than `side`."""
    from PIL import Image

    assert image.dtype == np.uint8, image.dtype
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    pil, kind = Image.fromarray(image), "png"
    if max(pil.size) > 96 and pil.mode in ("L", "RGB"):
        pil.thumbnail((side, side), Image.Resampling.LANCZOS)
        kind = "jpeg"
    buffer = io.BytesIO()
    pil.save(buffer, kind, **({"quality": 90} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
