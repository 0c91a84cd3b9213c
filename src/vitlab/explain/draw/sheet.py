"""A matplotlib Figure laid out in pixels from its top left corner, for images, text and plots; and how it is saved.

No window and no global state. Text is never parsed as math, and fonts are chosen that have its characters.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.errors import UsageError
from vitlab.images.fonts import families
from vitlab.language import language, translate
from vitlab.optional import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vitlab.explain.views import View

KINDS = ("png", "svg", "pdf", "jpg", "webp")
DPI = 150
INK, SOFT, LINE, MARK = "#1c2126", "#646d78", "#d5d9dd", "#3ddcff"
MARGIN, GAP = 30, 8  # around the sheet; between images
CHINESE = "中文"  # characters that choose a font for our own words
POINT = DPI / 72  # pixels of one point of font size


class Sheet:
    """`figure` is the matplotlib Figure. `texts` are all characters to come, to choose fonts by."""

    def __init__(self, width: float, height: float, texts: str = ""):
        require("a figure", "matplotlib")
        from matplotlib.figure import Figure

        self.width, self.height = round(width), round(height)
        self.fonts = families(texts + CHINESE if language() == "zh" else texts)
        self.figure: Figure = Figure(figsize=(self.width / DPI, self.height / DPI), dpi=DPI, facecolor="white")
        self.canvas = self.figure.add_axes((0, 0, 1, 1), xlim=(0, self.width), ylim=(self.height, 0))
        self.canvas.set_autoscale_on(False)
        self.canvas.set_axis_off()

    def text(self, x: float, y: float, text: str, size: float = 8, colour: str = INK, **options: Any) -> None:
        """In the reader's language. `at`: the axes to write on; default: the sheet."""
        text = translate(text)
        at = options.pop("at", self.canvas)
        options = {"ha": "left", "va": "center", "linespacing": 1.3, **options}
        at.text(x, y, text, fontsize=size, color=colour, fontfamily=self.fonts, parse_math=False, **options)

    def image(self, x: float, y: float, w: float, h: float, pixels: np.ndarray, **options: Any) -> None:
        small = max(pixels.shape[:2]) < max(w, h)
        options = {"interpolation": "nearest" if small else "antialiased", **options}
        self.canvas.imshow(pixels, extent=(x, x + w, y + h, y), aspect="auto", **options)

    def outline(self, x: float, y: float, w: float, h: float, colour: str, width: float = 1.0) -> None:
        from matplotlib.patches import Rectangle

        self.canvas.add_patch(Rectangle((x, y), w, h, fill=False, edgecolor=colour, linewidth=width, zorder=3))

    def axes(self, x: float, y: float, w: float, h: float) -> Axes:
        """A plot on this part of the sheet, in our style."""
        place = (x / self.width, 1 - (y + h) / self.height, w / self.width, h / self.height)
        axes = self.figure.add_axes(place)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(LINE)
        axes.tick_params(labelsize=7, color=LINE, labelcolor=SOFT)
        axes.grid(color=LINE, alpha=0.5, linewidth=0.6)
        axes.set_axisbelow(True)
        return axes

    def scale(self, x: float, y: float, ends: tuple[str, str], colours: str, width: float = 120) -> None:
        """A thin colour bar with labels at its ends."""
        self.text(x, y, ends[0], 6.5, SOFT)
        left = x + width_of(ends[0], 6.5) + 4
        ramp = np.linspace(0, 1, 256)[None]
        self.canvas.imshow(ramp, cmap=colours, extent=(left, left + width, y + 6, y - 6), aspect="auto")
        self.text(left + width + 8, y, ends[1], 6.5, SOFT)


Mark = tuple[float, float, float, float]  # left, top, right, bottom, as shares of the image


@dataclass(frozen=True)
class ImageMarks:
    """What to outline in an image and its maps; `by_map` has for each map its own marks and frames."""

    marks: Sequence[Mark] = ()
    by_map: Sequence[tuple[Sequence[Mark], Sequence[Mark]]] | None = None

    def of_map(self, number: int) -> tuple[Sequence[Mark], Sequence[Mark]]:
        return (self.marks, ()) if self.by_map is None else self.by_map[number]


@dataclass
class ImageCell:
    """One image of a grid: pixels, patches to outline, a caption, and larger parts to frame with a thinner line."""

    pixels: np.ndarray | None  # (h, w, 3)
    marks: Sequence[Mark] = ()
    caption: str = ""
    frames: Sequence[Mark] = ()


@dataclass
class ImageRow:
    cells: Sequence[ImageCell | None]
    label: str = ""  # beside the row
    remark: str = ""  # below the label, smaller


@dataclass
class Heading:
    """What stands above the images: a title, lines below it, and an image at the left with its prediction."""

    title: str
    lines: Sequence[str] = ()
    prediction: str = ""  # top class and probability
    cell: ImageCell | None = None
    scale: tuple[str, str] | None = None  # the meaning of the lowest and highest colour
    colours: str = "inferno"
    legend: Sequence[tuple[str, str]] = ()  # colours and their names


def image_grid(
    rows: Sequence[ImageRow], columns: Sequence[str], heading: Heading, *, cell: int = 150, apart: int = 0
) -> Figure:
    """Rows of images of equal width with labels; names above the columns. A gap follows the first `apart` columns."""
    texts = [heading.title, heading.prediction, *heading.lines, *columns, *(name for _, name in heading.legend)]
    texts += [text for row in rows for text in (row.label, row.remark, *(c.caption for c in row.cells if c))]
    wide = max(len(row.cells) for row in rows)
    labels = max(max(width_of(cut(r.label, 16), 8), width_of(cut(r.remark, 20), 6.5)) for r in rows)
    left = MARGIN + (labels + 18 if labels else 0)
    heights = [_height(row.cells, cell) for row in rows]
    under = [26 if any(c and c.caption for c in row.cells) else 0 for row in rows]
    big = 0 if heading.cell is None or heading.cell.pixels is None else 190
    written = (
        34
        + 24 * len(heading.lines)
        + (30 if heading.prediction else 0)
        + (30 if heading.scale or heading.legend else 0)
    )
    top = MARGIN + max(big, written) + (24 if big else 10)
    head = 26 if any(columns) else 0
    beside = MARGIN + (1.6 * big + 22 if big else 0)
    longest = max([width_of(heading.title, 12), *(width_of(line, 7.5) for line in heading.lines), 420])
    longest = max(longest, sum(width_of(cut(name, 14), 7.5) + 46 for _, name in heading.legend))
    width = max(left + wide * (cell + GAP) - GAP + (GAP if apart else 0), min(beside + longest + 4, 1500)) + MARGIN
    height = top + head + sum(heights) + sum(under) + GAP * (len(rows) - 1) + MARGIN
    sheet = Sheet(width, height, "".join(texts))
    _head(sheet, heading, big)
    at = [left + j * (cell + GAP) + (GAP if apart and j >= apart else 0) for j in range(wide)]
    for x, name in zip(at, columns, strict=False):
        name = cut(name, cell / (7.5 * POINT))
        sheet.text(x + cell / 2, top + head - 10, name, 7.5, SOFT, ha="center", va="baseline")
    y = top + head
    for row, tall, below in zip(rows, heights, under, strict=True):
        if row.label or row.remark:
            middle = y + tall / 2 - (11 if row.remark else 0)
            sheet.text(left - 14, middle, cut(row.label, 16), 8, INK, ha="right")
            sheet.text(left - 14, y + tall / 2 + 13, cut(row.remark, 20, end=True), 6.5, SOFT, ha="right")
        for x, one in zip(at, row.cells, strict=False):
            if one is not None:
                _place(sheet, one, x, y, cell, tall)
        y += tall + below + GAP
    return sheet.figure


def _head(sheet: Sheet, heading: Heading, big: int) -> None:
    x = MARGIN
    if big and heading.cell is not None:
        x += _place(sheet, heading.cell, MARGIN, MARGIN, big * 1.6, big, centre=False) + 22
    room = (sheet.width - MARGIN - x) / POINT
    sheet.text(x, MARGIN + 12, cut(heading.title, room / 12), 12, INK)
    y = MARGIN + 46
    if heading.prediction:
        sheet.text(x, y + 2, cut(heading.prediction, room / 9.5), 9.5, INK)
        y += 30
    for line in heading.lines:
        sheet.text(x, y, cut(line, room / 7.5), 7.5, SOFT)
        y += 24
    if heading.scale:
        sheet.scale(x, y + 6, heading.scale, heading.colours)
    for colour, name in heading.legend:
        name = cut(name, 14)
        sheet.canvas.add_patch(_square(x, y, colour))
        sheet.text(x + 22, y + 7, name, 7.5, INK)
        x += 22 + width_of(name, 7.5) + 24


def _square(x: float, y: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), 14, 14, facecolor=colour, edgecolor="none")


def _place(sheet: Sheet, cell: ImageCell, x: float, y: float, w: float, h: float, centre: bool = True) -> float:
    """The image as large as fits into the box; returns its width."""
    if cell.pixels is None:
        return 0.0
    tall, wide = cell.pixels.shape[:2]
    factor = min(w / wide, h / tall)
    pw, ph = wide * factor, tall * factor
    if cell.caption:
        caption = cut(cell.caption, w / (6.5 * POINT), end=True)
        sheet.text(x + w / 2, y + h + 13, caption, 6.5, SOFT, ha="center")
    if centre:
        x, y = x + (w - pw) / 2, y + (h - ph) / 2
    sheet.image(x, y, pw, ph, cell.pixels)
    looks = [*(("white", 0.9, frame) for frame in cell.frames), *((MARK, 1.1, mark) for mark in cell.marks)]
    for colour, thick, box in looks:
        left, top, right, bottom = (min(max(share, 0), 1) for share in box)
        place = (x + left * pw, y + top * ph, (right - left) * pw, (bottom - top) * ph)
        sheet.outline(*place, "black", 2 * thick)
        sheet.outline(*place, colour, thick)
    return pw


def _height(cells: Sequence[ImageCell | None], width: int) -> float:
    shapes = [c.pixels.shape for c in cells if c is not None and c.pixels is not None]
    return width * min(max((tall / wide for tall, wide, *_ in shapes), default=1.0), 1.5)


def mark_of(view: View, patch: int | Sequence[int]) -> Mark:
    """A patch by number, or a rectangle of patches (left, top, right, bottom), as shares of the image."""
    (H, W), box = view.geometry.original, view.box(patch) if isinstance(patch, int) else view.box_of(patch)
    left, top, right, bottom = box
    return left / W, top / H, right / W, bottom / H


# ------------------------------------------------------------------------------------------------------------- text


def ems(text: str) -> float:
    """Approximate width of a text, in font sizes."""
    return sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.6 for c in text)


def width_of(text: str, size: float) -> float:
    """Approximate width in pixels."""
    return ems(text) * size * POINT


def cut(text: str, most: float, *, end: bool = False) -> str:
    """Truncated to a width in font sizes, unprintable characters as ?. `end` keeps the end, which tells files apart."""
    text = "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))
    if ems(text) <= most:
        return text
    while text and ems(text) > most - 1:
        text = text[1:] if end else text[:-1]
    return f"…{text}" if end else f"{text}…"


# ------------------------------------------------------------------------------------------------------------- files


def check_kind(path: str | Path) -> str:
    """The format by the file's suffix."""
    path = Path(path)
    kind = path.suffix.lstrip(".").lower()
    if path.is_dir():
        raise UsageError(f"{path}: is a folder. Name a .png, .svg or .pdf file in it.")
    if kind not in KINDS:
        raise UsageError(f"{path}: cannot draw {'.' + kind if kind else 'that'}. Name a .png, .svg or .pdf file.")
    return kind


def save(
    figure: Figure | None,
    path: str | Path,
    *,
    numbers: Mapping[str, Any] | None = None,
    page: str | None = None,
    page_path: str | Path | None = None,
) -> list[Path]:
    """Write a figure by its suffix, numbers as .npz and a page as .html beside it. All files appear together.

    Without a figure, only the others are written. `page_path`: where else the page goes.
    """
    from vitlab.checkpoints.native import write_together

    path = Path(path).expanduser()
    writes: dict[Path, Callable[[Path], object]] = {}
    if figure is not None:
        kind = check_kind(path)
        writes[path] = lambda temporary: write_figure(figure, temporary, kind)
    if page is not None:
        place = path.with_suffix(".html") if page_path is None else Path(page_path).expanduser()
        writes[place] = lambda temporary: temporary.write_text(page, encoding="utf-8")
    if numbers is not None:
        writes[path.with_suffix(".npz")] = lambda temporary: _write_numbers(numbers, temporary)
    for file in writes:
        file.parent.mkdir(parents=True, exist_ok=True)
    write_together(writes)
    return list(writes)


def write_figure(figure: Figure, path: Any, kind: str) -> None:
    """To a path or an open file; what axes and legends say is in the reader's language."""
    from matplotlib import rc_context
    from matplotlib.text import Text

    if language() == "zh":
        for text in figure.findobj(Text):
            english = text.get_text()
            if (chinese := translate(english)) != english:
                text.set(text=chinese, fontfamily=families(chinese))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "vitlab"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # no installed font has the character
        figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)


def _write_numbers(numbers: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as file:  # numpy adds .npz to a path, not to a file
        arrays: dict[str, Any] = {key: np.asarray(value) for key, value in numbers.items()}
        np.savez_compressed(file, **arrays)
