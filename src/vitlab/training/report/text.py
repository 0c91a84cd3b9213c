"""Text and numbers as the page shows them: everything escaped, the exact value in the markup."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from typing import Any

from vitlab.training.runs import flat


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


def table_of(values: dict[str, Any]) -> str:
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
