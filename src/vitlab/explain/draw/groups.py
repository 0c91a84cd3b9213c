"""Which patches a reducer kept, merged or dropped, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.explain.draw.maps import ROWS, short_name
from vitlab.explain.draw.sheet import Cell, Heading, Row, grid_of_pictures
from vitlab.explain.draw.view import View, drawn, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.explain.pruned import Pruned

ALONE, UNSEEN = -2.0, -3.0  # beside the numbers of tokens


def pruned(views: Sequence[View], found: Pruned, *, title: str = "Tokens left") -> Figure:
    """A row for each picture, a column for each layer that removes tokens.

    A patch that stands alone shows the picture; patches merged into one token have their mean colour, with a line round
    them; dropped ones are dark.
    """
    layers = found.changed or (found.depth - 1,)
    rows = []
    for i, view in enumerate(views[:ROWS]):
        cells: list[Cell | None] = [Cell(np.asarray(drawn(view, 320)))]
        for layer in layers:
            words = f"{found.tokens[i, layer]} tokens"
            cells.append(Cell(grouped(np.asarray(found.groups[i, layer]), view), caption=words))
        rows.append(Row(cells, view.said or short_name(view.name), short_name(view.name) if view.said else ""))
    lines = ["Dark: dropped. Mean colour inside a line: merged into one token."]
    if not found.changed:
        lines = ["No layer removes a token."]
    columns = ["", *(f"after layer {layer}" for layer in layers)]
    return grid_of_pictures(rows, columns, Heading(title, lines), cell=190 if len(layers) <= 5 else 140, apart=1)


def grouped(groups: np.ndarray, view: View, *, side: int = 320) -> np.ndarray:
    """(grid_h, grid_w) of token numbers, -1 where dropped -> the picture with merged patches in one colour."""
    picture = drawn(view, side)
    laid = spread(groups.astype(np.float64), view, (picture.height, picture.width), smooth=False)  # (h, w)
    pixels = np.asarray(picture, dtype=np.float64) / 255  # (h, w, 3)
    grey = pixels.mean(axis=2, keepdims=True)
    unseen, dropped = np.isnan(laid), laid == -1
    result = np.where(dropped[..., None], 0.12 + 0.12 * grey, pixels)
    lines = np.nan_to_num(laid, nan=UNSEEN)
    for token, patches in zip(*np.unique(groups[groups >= 0], return_counts=True), strict=True):
        here = laid == token
        if patches == 1:
            lines[here] = ALONE  # no line between patches that both stand alone
        elif here.any():
            result[here] = pixels[here].mean(axis=0)
    result[_edges(lines)] = 1.0
    return (np.where(unseen[..., None], 0.35 + 0.4 * grey, result).clip(0, 1) * 255).round().astype(np.uint8)


def _edges(labels: np.ndarray) -> np.ndarray:
    """True at the last pixel before other patches begin."""
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    edge[:-1] |= labels[:-1] != labels[1:]
    return edge
