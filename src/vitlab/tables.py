"""Tables in which results show themselves: text for `print`, HTML for notebooks.

    table = Table(["class", "probability", ""], [["cat", "93.1 %", Bar(0.931)]], right=["probability"])
    print(table)
    table                                       # in a notebook

The HTML has no colours of its own, so it is light or dark as the notebook around it is. All text in it is escaped, its
styles are inline (viewers drop others), and it loads nothing.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from vitlab.language import language, translate
from vitlab.printable import one_line, printable

BAR_WIDTH = 20  # characters of a full bar
FOLDED = 20  # characters that a folded column needs
FAINT = "opacity:.65"
NUMBERS = "font-variant-numeric:tabular-nums"


@dataclass(frozen=True)
class Bar:
    """A cell that draws a share, 0 to 1."""

    share: float


@dataclass(frozen=True)
class Thumbnail:
    """A cell that shows a small image; empty in text, where it is not even read."""

    url: Callable[[], str]  # data:image/..., or "" where there is no image


Cell = str | Bar | Thumbnail


@dataclass(frozen=True)
class Table:
    titles: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    right: Container[str] = ()  # titles of right-aligned columns
    heading: Sequence[str] = ()  # lines above; the first is bold
    total: Sequence[Cell] | None = None  # a last, bold row
    notes: Sequence[str] = ()  # lines below
    prose: Container[str] = ()  # titles of columns that hold our own words, which are translated and may be folded
    strong: Container[int] = ()  # numbers of rows in bold
    droppable: Sequence[str] = ()  # titles of columns that a narrow terminal goes without, in this order

    def in_language(self) -> Table:
        """The table in the reader's language: all but names and numbers."""
        if language() == "en":
            return self
        return replace(
            self,
            titles=[translate(title) for title in self.titles],
            rows=[
                [self._translated(title, cell) for title, cell in zip(self.titles, row, strict=True)]
                for row in self.rows
            ],
            right=[translate(title) for title in self.titles if title in self.right],
            heading=[translate(line) for line in self.heading],
            total=None if self.total is None else [translate(c) if isinstance(c, str) else c for c in self.total],
            notes=[translate(line) for line in self.notes],
            prose=[translate(title) for title in self.titles if title in self.prose],
            droppable=[translate(title) for title in self.droppable],
        )

    def fitted(self, width: int) -> Table:
        """Without the droppable columns for which a terminal of this width has no room."""
        kept = list(range(len(self.titles)))
        for title in self.droppable:
            if sum(map(self._column_width, kept)) > width:
                kept = [column for column in kept if self.titles[column] != title]
        choose = lambda row: [row[column] for column in kept]
        total = None if self.total is None else choose(self.total)
        return replace(self, titles=choose(self.titles), rows=[choose(row) for row in self.rows], total=total)

    def _column_width(self, column: int) -> int:
        """With the gap to the next; prose may be folded."""
        cells = [self.titles[column], *(cell_text(row[column]) for row in self.rows)]
        width = max(map(display_width, cells))
        return (min(width, FOLDED) if self.titles[column] in self.prose else width) + 2

    def _translated(self, title: str, cell: Cell) -> Cell:
        return translate(cell) if isinstance(cell, str) and title in self.prose else cell

    def texts(self) -> list[list[str]]:
        """Titles, rows and total as text, without columns that are empty as text; [] without rows."""
        body = [*self.rows, *self._totals()]
        texts = [[cell_text(cell) for cell in row] for row in ([self.titles, *body] if body else [])]
        kept = [any(column) for column in zip(*texts, strict=True)]
        return [[text for text, keep in zip(row, kept, strict=True) if keep] for row in texts]

    def __str__(self) -> str:
        return self.in_language()._text()

    def _text(self) -> str:
        texts = self.texts()
        widths = [max(map(display_width, column)) for column in zip(*texts, strict=True)]
        lines = []
        for row in texts:
            cells = []
            for title, text, width in zip(texts[0], row, widths, strict=True):
                gap = " " * (width - display_width(text))
                cells.append(gap + text if title in self.right else text + gap)
            lines.append("  ".join(cells).rstrip())
        return "\n".join([*map(printable, self.heading), *filter(None, lines), *map(printable, self.notes)])

    def _repr_html_(self) -> str:
        return self.in_language()._html()

    def _html(self) -> str:
        first = [f"<div><b>{escaped(line)}</b></div>" for line in self.heading[:1]]
        above = [f'<div style="{FAINT}">{escaped(line)}</div>' for line in self.heading[1:]]
        below = [f'<div style="{FAINT}">{escaped(line)}</div>' for line in self.notes]
        head = self._row(self.titles, "th") if any(self.titles) else ""
        body = [self._row(row, "th" if number in self.strong else "td") for number, row in enumerate(self.rows)]
        body += [self._row(row, "th") for row in self._totals()]
        table = f'<table style="margin:.4em 0">{head}{"".join(body)}</table>' if body else ""
        return f'<div style="overflow-x:auto">{"".join([*first, *above, table, *below])}</div>'

    def _totals(self) -> list[Sequence[Cell]]:
        return [] if self.total is None else [self.total]

    def _row(self, cells: Sequence[Cell], tag: str = "td") -> str:
        parts = []
        for title, cell in zip(self.titles, cells, strict=True):
            align = f"right;{NUMBERS};white-space:nowrap" if title in self.right else "left"
            parts.append(f'<{tag} style="padding:.15em .6em;text-align:{align}">{cell_html(cell)}</{tag}>')
        return f"<tr>{''.join(parts)}</tr>"


class Tabular:
    """Base class for results that show themselves as a table, or as several."""

    def table(self) -> Table:
        raise NotImplementedError

    def tables(self) -> Sequence[Table]:
        return [self.table()]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables())


def escaped(text: str) -> str:
    """Text that is safe in HTML, also inside quotes; control characters are visible escapes."""
    return html.escape(one_line(text))


def cell_text(cell: Cell) -> str:
    if isinstance(cell, Bar):
        return "█" * round(BAR_WIDTH * cell.share)
    return "" if isinstance(cell, Thumbnail) else one_line(cell)


def cell_html(cell: Cell) -> str:
    if isinstance(cell, Bar):
        size = f"width:{8 * min(max(cell.share, 0), 1):.2f}em;height:.7em"
        return f'<div style="{size};background:currentColor;opacity:.5;border-radius:2px"></div>'
    if isinstance(cell, Thumbnail):
        url, size = html.escape(cell.url()), "height:3.5em;max-width:7em;object-fit:contain"
        return f'<img alt="" src="{url}" style="{size}">' if url else ""
    return escaped(cell)


def display_width(text: str) -> int:
    """Columns that a terminal needs; Chinese characters take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)


def by(size: Iterable[int]) -> str:
    """(224, 196) -> 224 x 196"""
    return " x ".join(map(str, size))


def count(n: int) -> str:
    """1234567 -> 1,234,567"""
    return f"{n:,}"


def short(n: float) -> str:
    """12345678 -> 12.35 M"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(int(n))
