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

from vitlab.language import to_chinese
from vitlab.parsing import flat

PERCENT = (
    "top1",
    "top5",
    "accuracy",
    "val_top1",
    "test_top1",
    "ece",
    "map",
    "val_map",
    "f1_micro",
    "f1_macro",
    "baseline",
)


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
    if isinstance(value, bool):
        return both("yes", "是") if value else both("no", "否")
    if not isinstance(value, int | float):
        return escaped("–" if value is None else value)
    if not math.isfinite(value):
        shown = str(value)
    elif key.split(".")[-1] in PERCENT:
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


def both(english: str, chinese: str) -> str:
    """HTML in both languages; the page shows one of them."""
    if english == chinese:
        return english
    return f'<span lang="en">{english}</span><span lang="zh-CN">{chinese}</span>'


def translated(text: object) -> str:
    """A line of the log or of a result in both languages; without a translation it is English in both."""
    return both(escaped(text), escaped(to_chinese(str(text))))


def section(title: str, chinese: str, content: str) -> str:
    if not content:
        return ""
    return f"<section>\n<h2>{both(title, chinese)}</h2>\n{content}\n</section>"


def table_of(values: Mapping[str, object], names: Mapping[str, str] | None = None) -> str:
    """Every value under its key; `names`: what a key is called in Chinese."""
    names = names or {}
    rows = [
        f"<tr><th>{both(escaped(key), escaped(names.get(key, key)))}</th><td>{number(key, value)}</td></tr>"
        for key, value in flat(values).items()
    ]
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
    confidence: float | None  # probability of `predicted`; None: it has none
    name: str  # where the image comes from
    heat: np.ndarray | None = None  # where the model looked, (h, w, 3)
    remark: str = ""  # HTML


def gallery(items: list[GalleryItem], caption: str) -> str:
    """Images with a heat map come first, larger: the image and its map side by side."""
    pairs = [_figure(item) for item in items if item.heat is not None]
    without_heat = [_figure(item) for item in items if item.heat is None]
    parts = [f'<div class="gallery heat">{"".join(pairs)}</div>' if pairs else ""]
    parts.append(f'<div class="gallery">{"".join(without_heat)}</div>' if without_heat else "")
    return f"<p>{caption}</p>{''.join(parts)}" if items else ""


def _figure(p: GalleryItem) -> str:
    right = p.truth == p.predicted
    verdict = name_html(p.predicted) if right else f"{name_html(p.truth)} → <b>{name_html(p.predicted)}</b>"
    mark = '<span class="yes">✓</span> ' if right else '<span class="no">✗</span> '
    chance = ""
    if p.confidence is None:  # a number, which is neither right nor wrong
        mark = ""
    else:
        chance = f' · <data value="{float(p.confidence)!r}">{percent(p.confidence)}</data>'
    alt = escaped(f"{p.name}: {p.truth}, predicted {p.predicted}")
    small = ' class="pixels"' if max(p.image.shape[:2]) <= 96 else ""
    image = f'<img{small} alt="{alt}" src="{data_url(p.image)}" />'
    if p.heat is not None:
        image = f'<div class="beside">{image}<img alt="{alt}: heat map" src="{data_url(p.heat)}" /></div>'
    parts = printable(p.name).replace("\\", "/").split("/")
    name = p.name if len(p.name) <= 32 else f"…/{'/'.join(parts[-2:])}"  # a class folder and the file
    remark = f'<span class="remark">{p.remark}</span>' if p.remark else ""
    return (
        f"<figure>{image}<figcaption>{mark}{verdict}{chance}{remark}"
        f'<small title="{escaped(p.name)}">{name_html(name)}</small></figcaption></figure>'
    )


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
