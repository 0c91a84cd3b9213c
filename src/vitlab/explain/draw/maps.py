"""Heat maps over images: a layer x head grid for one image, a row each for several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from vitlab.errors import UsageError
from vitlab.explain.draw.heatmap import cut_out, drawn, overlay, painted
from vitlab.explain.draw.sheet import Heading, ImageCell, ImageMarks, ImageRow, Mark, cut, image_grid, mark_of
from vitlab.explain.scale import DEFAULT, SCALES, check_scale
from vitlab.explain.views import View

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.explain.features import Neighbour
    from vitlab.explain.stages import Sight

# name -> maps, which may have their own views
Columns = Mapping[str, np.ndarray | tuple[Sequence[View], np.ndarray]]
ROWS = 100  # images that one sheet shows
WRAP = 6  # maps in a row


def attention(
    views: Sequence[View],
    maps: ArrayLike,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    title: str = "Attention",
    patches: Sequence[int | None] | None = None,
    sights: Sequence[Sequence[Sight]] | None = None,
    outliers: Sequence[Sequence[int]] | None = None,
    left_out: ArrayLike | None = None,
    note: str = "",
    scale: str = DEFAULT,
) -> Figure:
    """Maps of `attention_maps`, (B, layers, heads, grid_h, grid_w).

    One image: a row for each layer; a column for the mean over heads and for each head. Several: a row for each image,
    a column for each layer, mean over heads. `layers` and `heads` are their indices, if not 0, 1, ...
    (words count from 1); `patches` are
    the query patch of each image, to outline. For networks in stages, `sights` has the query token and its window for
    each image and layer. `outliers` are patches of each image to frame, `left_out` its maps without them, to draw
    beside the others.
    """
    maps = np.asarray(maps)
    _check(views, maps, 5)
    check_scale(scale)
    B, L, h = maps.shape[:3]
    depths = [f"layer {n + 1}" for n in (layers if layers is not None else range(L))]
    marks = [[] if p is None else [mark_of(v, p)] for v, p in zip(views, patches or [None] * B, strict=True)]
    by_map = [None] * B
    if sights is not None:
        by_map = [[_sight_marks(v, s) for s in row] for v, row in zip(views, sights, strict=True)]
    if outliers is not None and left_out is not None:
        frames = [[mark_of(v, p) for p in numbers] for v, numbers in zip(views, outliers, strict=True)]
        by_map = [[(m, f)] * (2 * L) for m, f in zip(marks, frames, strict=True)]
        left_out = np.asarray(left_out)
    else:
        left_out = None
    outlined = [ImageMarks(m, own) for m, own in zip(marks, by_map, strict=True)]
    if B > 1 or h == 1:
        columns = {name: maps[:, i].mean(1) for i, name in enumerate(depths)}
        if left_out is not None and B == 1:
            pairs = [(f"{name}, no outliers", left_out[:, i].mean(1)) for i, name in enumerate(depths)]
            columns = dict(pair for both in zip(columns.items(), pairs, strict=True) for pair in both)
        elif left_out is not None:
            views, outlined, columns = _rows_beside(views, outlined, columns, left_out.mean(2))
        note = "\n".join(filter(None, [note, "Mean over heads." if h > 1 else ""]))
        return heat(views, columns, title=title, marks=outlined, note=note, scale=scale)
    side = 320 if L * h <= 36 else 200
    view = views[0]

    def cells(layer: np.ndarray, number: int) -> list[ImageCell]:
        patch, window = outlined[0].of_map(number)
        beside = [] if left_out is None else [left_out[0, number].mean(0)]
        pixels = (overlay(values, view, side=side, scale=scale) for values in (layer.mean(0), *beside, *layer))
        return [ImageCell(one, patch, frames=window) for one in pixels]

    rows = [ImageRow(cells(layer, i), label=name) for i, (name, layer) in enumerate(zip(depths, maps[0], strict=True))]
    names = [
        "mean",
        *([] if left_out is None else ["no outliers"]),
        *(f"head {n + 1}" for n in (heads if heads is not None else range(h))),
    ]
    size = 190 if h <= 4 else 150 if h <= 7 else 122 if h <= 12 else 104
    lines = [*_about(view), *note.splitlines()]
    heading = Heading(
        title, lines, view.prediction, ImageCell(np.asarray(drawn(view, 448)), marks[0]), SCALES[scale].ends
    )
    return image_grid(rows, names, heading, cell=size, apart=1)


def _rows_beside(
    views: Sequence[View], marks: list[ImageMarks], columns: Mapping[str, np.ndarray], left_out: np.ndarray
) -> tuple[list[View], list[ImageMarks], dict[str, np.ndarray]]:
    """With a second row below each image that has outliers, for its maps (B, layers, grid_h, grid_w) without them."""
    rows = [i for i, own in enumerate(marks) for _ in range(1 + bool(own.by_map and own.by_map[0][1]))]
    second = [n > 0 and rows[n - 1] == i for n, i in enumerate(rows)]
    row_views = [
        replace(views[i], name="outliers left out", label=None) if beside else views[i]
        for i, beside in zip(rows, second, strict=True)
    ]
    stacked = {
        name: np.stack([(left_out[i, j] if beside else maps[i]) for i, beside in zip(rows, second, strict=True)])
        for j, (name, maps) in enumerate(columns.items())
    }
    return row_views, [marks[i] for i in rows], stacked


def heat(
    views: Sequence[View],
    columns: Columns,
    *,
    title: str,
    note: str = "",
    marks: Sequence[Sequence[Mark] | ImageMarks] | None = None,
    captions: Sequence[Sequence[str]] | None = None,
    signed: Sequence[str] = (),
    scale: str = DEFAULT,
) -> Figure:
    """Named maps of every image: (B, grid_h, grid_w) as heat, (B, grid_h, grid_w, 3) as colours, or bool as a mask.

    One image: it stands above its maps. Several: a row for each, the image first. `captions` are lines below the maps,
    for each image and map; `signed` names maps with values below 0. A value of `columns` may have its own views:
    (views, maps). `marks` are outlined in each image and its maps. `scale` is one of explain.scale.SCALES.
    """
    check_scale(scale)
    columns = with_views(views, columns)
    side = 448 if len(views) * len(columns) <= 24 else 240
    shown = range(min(len(views), ROWS))
    outlined = [m if isinstance(m, ImageMarks) else ImageMarks(m) for m in marks or [()] * len(views)]
    cells = [
        [
            ImageCell(
                _pixels(maps[i], own[i], name in signed, side, scale),
                outlined[i].of_map(j)[0],
                captions[i][j] if captions else "",
                outlined[i].of_map(j)[1],
            )
            for j, (name, (own, maps)) in enumerate(columns.items())
        ]
        for i in shown
    ]
    lines = note.splitlines()
    is_heat = [name for name, (_, maps) in columns.items() if maps.ndim == 3 and maps.dtype != bool]
    ends = SCALES[scale].ends if set(is_heat) - set(signed) else None
    if set(signed) & set(is_heat):
        lines += [f"Red speaks for the class, blue against it. {SCALES[scale].signed}".rstrip()]
    if len(views) == 1:
        image, names = ImageCell(np.asarray(drawn(views[0], 640)), outlined[0].marks), list(columns)
        beside = len(names) <= 2  # the image is as large as its maps
        lines = [*_about(views[0], *(own[0] for own, _ in columns.values())), *lines]
        heading = Heading(title, lines, views[0].prediction, None if beside else image, ends)
        if beside:
            size = 400 if len(names) == 1 else 320
            return image_grid([ImageRow([image, *cells[0]])], ["", *names], heading, cell=size)
        if len(names) <= WRAP:
            return image_grid([ImageRow(cells[0])], names, heading, cell=300 if len(names) == 3 else 230)
        captioned = [replace(c, caption=c.caption or name) for c, name in zip(cells[0], names, strict=True)]
        rows = [ImageRow(list(captioned[i : i + WRAP])) for i in range(0, len(captioned), WRAP)]
        return image_grid(rows, [], heading, cell=190)
    left = len(views) - len(shown)
    lines += [f"{left} more images are in the numbers only."] if left else []
    rows = [
        row_of(views[i], [ImageCell(np.asarray(drawn(views[i], side)), outlined[i].marks), *cells[i]]) for i in shown
    ]
    size = 240 if len(columns) <= 2 else 190 if len(columns) <= 6 else 150 if len(columns) <= 8 else 122
    heading = Heading(title, lines, scale=ends)
    return image_grid(rows, ["", *columns], heading, cell=size, apart=1)


def neighbours(
    views: Sequence[View], nearest: Sequence[Sequence[tuple[Neighbour, Image.Image]]], *, title: str
) -> Figure:
    """The most similar images of each: rows of (Neighbour, image), best first."""
    rows = []
    for view, row in list(zip(views, nearest, strict=True))[:ROWS]:
        cells = [ImageCell(np.asarray(drawn(view, 320)))]
        for one, image in row:
            caption = f"{one.similarity:.2f} · {cut(short_name(one.name), 9, end=True)}"
            small = View(image, view.geometry, view.size, view.patch_size)
            cells.append(ImageCell(np.asarray(drawn(small, 320)), caption=caption))
        rows.append(row_of(view, cells))
    k = max(len(row) for row in nearest)
    heading = Heading(title, ["By the cosine of what the classifier reads, which stands below each image."])
    return image_grid(rows, ["", *(f"nearest {i + 1}" for i in range(k))], heading, cell=190, apart=1)


def row_of(view: View, cells: Sequence[ImageCell]) -> ImageRow:
    """A row labelled with the image's prediction and name."""
    name = short_name(view.name)
    return ImageRow(cells, view.prediction or name, name if view.prediction else "")


def short_name(name: str) -> str:
    """The file name without its folders."""
    return Path(name).name or name


def _sight_marks(view: View, sight: Sight) -> tuple[list[Mark], list[Mark]]:
    return [mark_of(view, sight.who)], [] if sight.window is None else [mark_of(view, sight.window)]


def _about(view: View, *others: View) -> list[str]:
    """The image's name and size; `others` are other models' views of it."""
    height, width = view.geometry.original
    grids = dict.fromkeys(f"{v.grid[0]} x {v.grid[1]}" for v in (view, *others))
    seen = f"{width} x {height} pixels, seen as {' and as '.join(grids)} patches"
    return [line for line in (short_name(view.name), seen) if line]


def _pixels(values: np.ndarray, view: View, signed: bool, side: int, scale: str) -> np.ndarray:
    if values.dtype == bool:
        return cut_out(values, view, side=side)
    if values.ndim == 3:
        return painted(values, view, side=side)
    return overlay(values, view, signed=signed, side=side, scale=scale)


def with_views(views: Sequence[View], columns: Columns) -> dict[str, tuple[Sequence[View], np.ndarray]]:
    """Every column with its own views, or with the common ones."""
    result = {}
    for name, column in columns.items():
        own, values = column if isinstance(column, tuple) else (views, column)
        result[name] = (own, np.asarray(values))
        _check(own, result[name][1], result[name][1].ndim)
    return result


def _check(views: Sequence[View], maps: np.ndarray, axes: int) -> None:
    if not len(views) or maps.ndim != axes or len(maps) != len(views):
        raise UsageError(f"maps are {maps.shape} for {len(views)} images: give one for each.")
