"""Which patches a reducer kept, merged or dropped, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.explain.draw.heatmap import drawn, spread
from vitlab.explain.draw.maps import ROWS, row_of
from vitlab.explain.draw.sheet import Heading, ImageCell, image_grid
from vitlab.explain.views import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.explain.pruned import Pruned

ALONE, UNSEEN = -2.0, -3.0  # labels of patches without a merged token


def pruned(views: Sequence[View], result: Pruned, *, title: str = "Tokens left") -> Figure:
    """A row for each image, a column for each layer that removes tokens.

    A single patch shows the image; patches merged into one token have their mean colour and an outline; dropped ones
    are dark.
    """
    layers = result.changed or (result.depth - 1,)
    rows = []
    for i, view in enumerate(views[:ROWS]):
        cells = [ImageCell(np.asarray(drawn(view, 320)))]
        for layer in layers:
            caption = f"{result.tokens[i, layer]} tokens"
            cells.append(ImageCell(grouped(np.asarray(result.groups[i, layer]), view), caption=caption))
        rows.append(row_of(view, cells))
    lines = ["Dark: dropped. Mean colour inside a line: merged into one token."]
    if not result.changed:
        lines = ["No layer removes a token."]
    columns = ["", *(f"after layer {layer + 1}" for layer in layers)]
    return image_grid(rows, columns, Heading(title, lines), cell=190 if len(layers) <= 5 else 140, apart=1)


def grouped(groups: np.ndarray, view: View, *, side: int = 320) -> np.ndarray:
    """(grid_h, grid_w) of token numbers, -1 where dropped -> the image with merged patches in one colour."""
    image = drawn(view, side)
    laid = spread(groups.astype(np.float64), view, (image.height, image.width), smooth=False)  # (h, w)
    pixels = np.asarray(image, dtype=np.float64) / 255  # (h, w, 3)
    grey = pixels.mean(axis=2, keepdims=True)
    unseen, dropped = np.isnan(laid), laid == -1
    result = np.where(dropped[..., None], 0.12 + 0.12 * grey, pixels)
    lines = np.nan_to_num(laid, nan=UNSEEN)
    for token, patches in zip(*np.unique(groups[groups >= 0], return_counts=True), strict=True):
        here = laid == token
        if patches == 1:
            lines[here] = ALONE  # no line between two single patches
        elif here.any():
            result[here] = pixels[here].mean(axis=0)
    result[_edges(lines)] = 1.0
    return (np.where(unseen[..., None], 0.35 + 0.4 * grey, result).clip(0, 1) * 255).round().astype(np.uint8)


def _edges(labels: np.ndarray) -> np.ndarray:
    """True at the last pixel before another label begins."""
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:, :-1] |= labels[:, :-1] != labels[:, 1:]
    edge[:-1] |= labels[:-1] != labels[1:]
    return edge
