"""Pictures that a search has found, best first, with their scores: a sheet, or one HTML file that needs no other."""

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

from vitlab.explain.draw.sheet import Cell, Heading, Row, cut, grid_of_pictures
from vitlab.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = 5
SIDE = 320  # of a thumbnail
SMALL = 96  # pictures up to this size are shown with their pixels
GREY = (222, 225, 228)  # in place of a picture that cannot be shown


@dataclass
class Found:
    """A picture, or None where it is gone; its name; its score; where it can be opened."""

    picture: Image.Image | None
    name: str
    score: float
    link: str = ""


def contact_sheet(
    found: Sequence[Found], *, title: str, lines: Sequence[str] = (), asked: Image.Image | None = None
) -> Figure:
    """`asked` is the picture that was searched with."""
    cells = [Cell(_pixels(one.picture), caption=_caption(one)) for one in found]
    rows = [Row(cells[i : i + COLUMNS]) for i in range(0, len(cells), COLUMNS)] or [Row([None])]
    heading = Heading(title, lines, cell=None if asked is None else Cell(_pixels(asked)))
    return grid_of_pictures(rows, [], heading, cell=200)


def contact_page(
    found: Sequence[Found], *, title: str, lines: Sequence[str] = (), asked: Image.Image | None = None
) -> str:
    text = files("vitlab.explain.draw").joinpath("contact.html").read_text(encoding="utf-8")
    parts = {
        "title": _escaped(title),
        "lines": "".join(f"<p>{_escaped(line)}</p>" for line in lines),
        "asked": "" if asked is None else _image(asked, "the picture that was searched with"),
        "found": "\n".join(_item(one) for one in found),
        "footer": f"vitlab {__version__}",
    }
    head, *rest = text.split("{{")  # names are put in once, so that none of them is taken for a place
    return head + "".join(parts[name] + after for name, _, after in (part.partition("}}") for part in rest))


def _item(one: Found) -> str:
    shown = "gone" if one.picture is None else _image(one.picture, one.name)
    name = _escaped(one.name)
    name = f'<a href="{_escaped(one.link)}">{name}</a>' if one.link else name
    score = f'<data value="{one.score!r}">{one.score:.3f}</data>'
    return f'<li><div class="frame">{shown}</div><p><span>{name}</span>{score}</p></li>'


def _image(picture: Image.Image, name: str) -> str:
    small, buffer = _thumbnail(picture), io.BytesIO()
    pixels = max(small.size) <= SMALL
    small.save(buffer, "png" if pixels else "jpeg", **({} if pixels else {"quality": 88}))
    kind = 'class="small" src="data:image/png' if pixels else 'src="data:image/jpeg'
    return f'<img {kind};base64,{base64.b64encode(buffer.getvalue()).decode()}" alt="{_escaped(name)}">'


def _escaped(text: str) -> str:
    """Also what is no text at all: a file's name may be any bytes."""
    return html.escape(text.encode("utf-8", "replace").decode())


def _caption(one: Found) -> str:
    gone = " (gone)" if one.picture is None else ""
    return f"{cut(one.name, 14, end=True)} · {one.score:.3f}{gone}"


def _pixels(picture: Image.Image | None) -> np.ndarray:
    if picture is None:
        return np.full((3, 4, 3), GREY, dtype=np.uint8)
    small = _thumbnail(picture)
    square = Image.new("RGB", (max(small.size), small.height), "white")  # a tall picture would make its row tall
    square.paste(small, ((square.width - small.width) // 2, 0))
    return np.asarray(square)


def _thumbnail(picture: Image.Image) -> Image.Image:
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return small
