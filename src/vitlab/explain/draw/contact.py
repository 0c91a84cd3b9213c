"""Search results with their scores, best first: a figure, or a self-contained HTML page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitlab.explain.draw.page import html_language
from vitlab.explain.draw.sheet import Heading, ImageCell, ImageRow, cut, image_grid
from vitlab.language import translate
from vitlab.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 5
SIDE = 320  # of a thumbnail
SMALL = 96  # images up to this size are stored as PNG and enlarged by whole pixels
GREY = (222, 225, 228)  # placeholder of a missing image


@dataclass
class SearchHit:
    """An image, or None where its file is missing; its name and score; a link to open it."""

    image: Image.Image | None
    name: str
    score: float
    link: str = ""


def contact_sheet(
    hits: Sequence[SearchHit], *, title: str, lines: Sequence[str] = (), query: Image.Image | None = None
) -> Figure:
    """`query` is the image that was searched with."""
    cells = [ImageCell(_pixels(one.image), caption=_caption(one)) for one in hits]
    rows = [ImageRow(cells[i : i + COLUMNS]) for i in range(0, len(cells), COLUMNS)] or [ImageRow([None])]
    heading = Heading(title, lines, cell=None if query is None else ImageCell(_pixels(query)))
    return image_grid(rows, [], heading, cell=200)


def contact_page(
    hits: Sequence[SearchHit], *, title: str, lines: Sequence[str] = (), query: Image.Image | None = None
) -> str:
    text = files("vitlab.explain.draw").joinpath("contact.html").read_text(encoding="utf-8")
    parts = {
        "lang": html_language(),
        "title": _escaped(translate(title)),
        "lines": "".join(f"<p>{_escaped(translate(line))}</p>" for line in lines),
        "asked": "" if query is None else _img_tag(query, translate("the query image")),
        "found": "\n".join(_item(one) for one in hits),
        "footer": f"vitlab {__version__}",
    }
    head, *rest = text.split("{{")  # split first, so that a name with {{ in it is not replaced
    return head + "".join(parts[name] + after for name, _, after in (part.partition("}}") for part in rest))


def _item(one: SearchHit) -> str:
    shown = translate("gone") if one.image is None else _img_tag(one.image, one.name)
    name = _escaped(one.name)
    name = f'<a href="{_escaped(one.link)}">{name}</a>' if one.link else name
    score = f'<data value="{one.score!r}">{one.score:.3f}</data>'
    return f'<li><div class="frame">{shown}</div><p><span>{name}</span>{score}</p></li>'


def _img_tag(image: Image.Image, name: str) -> str:
    small, buffer = _thumbnail(image), io.BytesIO()
    pixels = max(small.size) <= SMALL
    small.save(buffer, "png" if pixels else "jpeg", **({} if pixels else {"quality": 88}))
    kind = 'class="small" src="data:image/png' if pixels else 'src="data:image/jpeg'
    return f'<img {kind};base64,{base64.b64encode(buffer.getvalue()).decode()}" alt="{_escaped(name)}">'


def _escaped(text: str) -> str:
    """Replaces what is not valid UTF-8: a file name may be any bytes."""
    return html.escape(text.encode("utf-8", "replace").decode())


def _caption(one: SearchHit) -> str:
    gone = " (gone)" if one.image is None else ""
    return f"{cut(one.name, 14, end=True)} · {one.score:.3f}{gone}"


def _pixels(image: Image.Image | None) -> np.ndarray:
    if image is None:
        return np.full((3, 4, 3), GREY, dtype=np.uint8)
    small = _thumbnail(image)
    square = Image.new("RGB", (max(small.size), small.height), "white")  # a tall image would make its row tall
    square.paste(small, ((square.width - small.width) // 2, 0))
    return np.asarray(square)


def _thumbnail(image: Image.Image) -> Image.Image:
    small = image.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return small
