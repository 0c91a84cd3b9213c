"""Heat maps on pictures: a layer x head grid of one picture, or a row for each of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.explain.draw.sheet import Cell, Heading, Mark, Row, cut, grid_of_pictures, mark_of
from vitlab.explain.draw.view import View, cut_out, drawn, overlay, painted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.explain.features import Neighbour
    from vitlab.explain.stages import Sight

ROWS = 100  # pictures that one sheet shows
SCALE = ("each map's lowest value", "its highest")
WRAP = 6  # columns of a row that would be too long


def attention(
    views: Sequence[View],
    maps: Any,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    title: str = "Attention",
    patches: Sequence[int | None] | None = None,
    sights: Sequence[Sequence[Sight]] | None = None,
    note: str = "",
) -> Figure:
    """`maps` as attention_maps gives them, (B, layers, heads, grid_h, grid_w).

    One picture: a row for each layer, a column for each head, and before them their mean. Several: a row for each
    picture, a column for each layer, mean over heads. `layers` and `heads` are their numbers, where not 0, 1, ...;
    `patches` are outlined, one for each picture: who looks. Of networks in stages, `sights` gives for each picture and
    layer who looks, and the window that it is in.
    """
    maps = np.asarray(maps)
    _check(views, maps, 5)
    B, L, h = maps.shape[:3]
    depths = [f"layer {n}" for n in (layers if layers is not None else range(L))]
    marks = [[] if p is None else [mark_of(v, p)] for v, p in zip(views, patches or [None] * B, strict=True)]
    own = None if sights is None else [[_marked(v, s) for s in row] for v, row in zip(views, sights, strict=True)]
    if B > 1 or h == 1:
        columns = {name: maps[:, i].mean(1) for i, name in enumerate(depths)}
        note = " ".join(filter(None, [note, "Mean over heads." if h > 1 else ""]))
        return heat(views, columns, title=title, marks=marks, own_marks=own, note=note)
    side = 320 if L * h <= 36 else 200
    view, found = views[0], maps[0]

    def cells(layer: np.ndarray, number: int) -> list[Cell]:
        at = (marks[0], ()) if own is None else own[0][number]
        pixels = (overlay(values, view, side=side) for values in (layer.mean(0), *layer))
        return [Cell(one, at[0], frames=at[1]) for one in pixels]

    rows = [Row(cells(layer, i), label=name) for i, (name, layer) in enumerate(zip(depths, found, strict=True))]
    names = ["mean", *(f"head {n}" for n in (heads if heads is not None else range(h)))]
    size = 190 if h <= 4 else 150 if h <= 7 else 122 if h <= 12 else 104
    lines = [*_about(view), *([note] if note else [])]
    heading = Heading(title, lines, view.said, Cell(np.asarray(drawn(view, 448)), marks[0]), SCALE)
    return grid_of_pictures(rows, names, heading, cell=size, apart=1)


def heat(
    views: Sequence[View],
    columns: Mapping[str, Any],
    *,
    title: str,
    note: str = "",
    marks: Sequence[Sequence[Mark]] | None = None,
    own_marks: Sequence[Sequence[tuple[Sequence[Mark], Sequence[Mark]]]] | None = None,
    captions: Sequence[Sequence[str]] | None = None,
    signed: Sequence[str] = (),
    smooth: bool = True,
) -> Figure:
    """Named maps of every picture: (B, grid_h, grid_w) as heat, (B, grid_h, grid_w, 3) as colours, or bool as a mask.

    One picture: it stands above, its maps side by side. Several: a row for each, the picture first. `captions` are
    lines below the maps, for each picture and map; `signed` names maps in which 0 is neither high nor low. A value of
    `columns` may bring its own views: (views, maps). `marks` are outlined in all maps of a picture; `own_marks` has for
    each picture and map what to outline, and what to frame.
    """
    columns = with_views(views, columns)
    few = len(views) * len(columns) <= 24
    side = 448 if few else 240
    shown = range(min(len(views), ROWS))
    marks = marks or [()] * len(views)
    at = own_marks or [[(m, ())] * len(columns) for m in marks]
    cells = [
        [
            Cell(
                _laid(found[i], own[i], smooth, name in signed, side),
                at[i][j][0],
                captions[i][j] if captions else "",
                at[i][j][1],
            )
            for j, (name, (own, found)) in enumerate(columns.items())
        ]
        for i in shown
    ]
    lines = [note] if note else []
    is_heat = [name for name, (_, found) in columns.items() if found.ndim == 3 and found.dtype != bool]
    scale = SCALE if set(is_heat) - set(signed) else None
    lines += ["Red speaks for the class, blue against it."] if set(signed) & set(is_heat) else []
    if len(views) == 1:
        picture, names = Cell(np.asarray(drawn(views[0], 640)), marks[0]), list(columns)
        beside = len(names) <= 2  # the picture is as large as its maps
        lines = [*_about(views[0], *(own[0] for own, _ in columns.values())), *lines]
        heading = Heading(title, lines, views[0].said, None if beside else picture, scale)
        if beside:
            size = 400 if len(names) == 1 else 320
            return grid_of_pictures([Row([picture, *cells[0]])], ["", *names], heading, cell=size)
        if len(names) <= WRAP:
            return grid_of_pictures([Row(cells[0])], names, heading, cell=300 if len(names) == 3 else 230)
        named = [replace(c, caption=c.caption or name) for c, name in zip(cells[0], names, strict=True)]
        rows = [Row(list(named[i : i + WRAP])) for i in range(0, len(named), WRAP)]
        return grid_of_pictures(rows, [], heading, cell=190)
    left = len(views) - len(shown)
    lines += [f"{left} more pictures are in the numbers only."] if left else []
    rows = [
        Row(
            [Cell(np.asarray(drawn(views[i], side)), marks[i]), *cells[i]],
            label=views[i].said or short_name(views[i].name),
            remark=short_name(views[i].name) if views[i].said else "",
        )
        for i in shown
    ]
    size = 240 if len(columns) <= 2 else 190 if len(columns) <= 6 else 150 if len(columns) <= 8 else 122
    heading = Heading(title, lines, scale=scale)
    return grid_of_pictures(rows, ["", *columns], heading, cell=size, apart=1)


def neighbours(views: Sequence[View], found: Sequence[Sequence[tuple[Neighbour, Any]]], *, title: str) -> Figure:
    """The most alike pictures of each: rows of (Neighbour, picture), best first."""
    rows = []
    for view, row in list(zip(views, found, strict=True))[:ROWS]:
        cells: list[Cell | None] = [Cell(np.asarray(drawn(view, 320)))]
        for one, picture in row:
            words = f"{one.similarity:.2f} · {cut(short_name(one.name), 9, end=True)}"
            small = View(picture, view.geometry, view.size, view.patch_size)
            cells.append(Cell(np.asarray(drawn(small, 320)), caption=words))
        rows.append(Row(cells, view.said or short_name(view.name), short_name(view.name) if view.said else ""))
    k = max(len(row) for row in found)
    heading = Heading(title, ["By the cosine of what the classifier reads, which stands below each picture."])
    return grid_of_pictures(rows, ["", *(f"nearest {i + 1}" for i in range(k))], heading, cell=190, apart=1)


def short_name(name: str) -> str:
    """The file's name without its folders."""
    return Path(name).name or name


def _marked(view: View, sight: Sight) -> tuple[list[Mark], list[Mark]]:
    return [mark_of(view, sight.who)], [] if sight.window is None else [mark_of(view, sight.window)]


def _about(view: View, *others: View) -> list[str]:
    """The picture's name and size; `others` are other models' views of it."""
    height, width = view.geometry.original
    grids = dict.fromkeys(f"{v.grid[0]} x {v.grid[1]}" for v in (view, *others))
    seen = f"{width} x {height} pixels, seen as {' and as '.join(grids)} patches"
    return [line for line in (short_name(view.name), seen) if line]


def _laid(values: np.ndarray, view: View, smooth: bool, signed: bool, side: int) -> np.ndarray:
    if values.dtype == bool:
        return cut_out(values, view, side=side)
    if values.ndim == 3:
        return painted(values, view, smooth=smooth, side=side)
    return overlay(values, view, smooth=smooth, signed=signed, side=side)


def with_views(views: Sequence[View], columns: Mapping[str, Any]) -> dict[str, tuple[Sequence[View], np.ndarray]]:
    """Every column with the views it is laid by: its own, or those of all."""
    result = {}
    for name, found in columns.items():
        own, values = found if isinstance(found, tuple) else (views, found)
        result[name] = (own, np.asarray(values))
        _check(own, result[name][1], result[name][1].ndim)
    return result


def _check(views: Sequence[View], maps: np.ndarray, axes: int) -> None:
    if not len(views) or maps.ndim != axes or len(maps) != len(views):
        raise ValueError(f"maps are {maps.shape} for {len(views)} pictures: give one for each.")
