"""What happens inside a network: the logit lens, shares in a logit, ablation and activation patching.

Each function takes numbers. Tables of layers and heads are red above 0 and blue below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.explain.draw.heatmap import drawn, overlay, painted
from vitlab.explain.draw.maps import ROWS, WRAP, row_of, short_name
from vitlab.explain.draw.sheet import INK, LINE, MARGIN, SOFT, Heading, ImageCell, ImageRow, Sheet, cut, image_grid
from vitlab.explain.scale import DEFAULT, SCALES
from vitlab.explain.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#edc948", "#76b7b2", "#ff9da7")
OTHER = "#8d949c"  # all classes without a colour of their own
FAINT = 0.35  # brightness of a patch whose class has the probability 0
WIDE, TALL, APART, HEAD, LABELS = 470, 400, 110, 150, 130
SIGNED = "RdBu_r"
NOTHING = 1e-4  # of the way between two logits
WRITTEN = 150  # cells of a table in which the numbers are written


def lens(
    views: Sequence[View],
    classes: np.ndarray,
    probabilities: np.ndarray,
    names: Mapping[int, str],
    captions: Sequence[Sequence[str]],
    *,
    layers: Sequence[int],
    title: str = "Logit lens",
) -> Figure:
    """(B, layers, grid_h, grid_w): the class of each patch as a colour, the brighter the more probable.

    `names` are those of the classes, by number; `captions` say what the head reads after each layer.
    """
    weight = {number: float(probabilities[classes == number].sum()) for number in np.unique(classes).tolist()}
    shown = sorted(weight, key=lambda number: -weight[number])[: len(PALETTE)]
    colours = {number: _rgb(PALETTE[place]) for place, number in enumerate(shown)}
    legend = [(PALETTE[place], names[number]) for place, number in enumerate(shown)]
    legend += [(OTHER, "others")] if len(weight) > len(shown) else []

    def cell(i: int, place: int) -> ImageCell:
        hue = np.array([[colours.get(n, _rgb(OTHER)) for n in row] for row in classes[i, place].tolist()])
        bright = FAINT + (1 - FAINT) * probabilities[i, place][..., None]
        return ImageCell(painted(hue * bright, views[i], smooth=False, side=240), caption=captions[i][place])

    lines = ["Colour: the class that each patch would be read as; brightness: its probability."]
    names_of_layers = [f"after layer {layer + 1}" for layer in layers]
    if len(views) > 1:
        rows = [
            row_of(view, [ImageCell(np.asarray(drawn(view, 240))), *(cell(i, n) for n in range(len(layers)))])
            for i, view in enumerate(views[:ROWS])
        ]
        return image_grid(rows, ["", *names_of_layers], Heading(title, lines, legend=legend), cell=170, apart=1)
    cells = [cell(0, n) for n in range(len(layers))]
    for one, name in zip(cells, names_of_layers, strict=True):
        one.caption = f"{name}: {one.caption}"
    rows = [ImageRow(cells[start : start + WRAP]) for start in range(0, len(cells), WRAP)]
    view = views[0]
    image = ImageCell(np.asarray(drawn(view, 448)))
    heading = Heading(title, [short_name(view.name), *lines], view.prediction, image, legend=legend)
    return image_grid(rows, [], heading, cell=250)


def attribution(
    view: View,
    heads: np.ndarray,
    shares: Mapping[str, float],
    patches: np.ndarray,
    *,
    layers: Sequence[int],
    title: str = "Shares in a logit",
    lines: Sequence[str] = (),
    scale: str = DEFAULT,
) -> Figure:
    """One image: shares of the parts as bars, of heads (layers, h) as a table, and what heads took from each patch."""
    bars = max(TALL, 26 * len(shares) + 20)
    sheet = Sheet(2 * MARGIN + LABELS + 3 * WIDE + 2 * APART, 2 * MARGIN + HEAD + bars + 90, title + "".join(lines))
    _title(sheet, title, lines)
    x, y = MARGIN + LABELS, MARGIN + HEAD
    sheet.text(x, y - 20, "Parts, by layer", 9.5, INK)
    axes = sheet.axes(x, y, WIDE, bars)
    values = np.array(list(shares.values()))
    places = np.arange(len(values))
    axes.barh(places, values, color=["#c0392b" if value >= 0 else "#2f6fb0" for value in values], height=0.7)
    axes.set_yticks(places, list(shares), fontsize=7)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.axvline(0, color=SOFT, linewidth=0.8)
    axes.set_xlabel("share in the logit", fontsize=7.5, color=SOFT)
    x += WIDE + APART
    sheet.text(x, y - 20, "Heads", 9.5, INK)
    _table(sheet, x, y, WIDE, TALL, heads, [str(n + 1) for n in layers], _counted(heads.shape[1]))
    x += WIDE + APART
    sheet.text(x, y - 20, "By the patch that heads looked at", 9.5, INK)
    pixels = overlay(patches, view, signed=True, scale=scale)
    tall, wide = pixels.shape[:2]
    factor = min(WIDE / wide, TALL / tall)
    sheet.image(x, y, wide * factor, tall * factor, pixels)
    largest = float(np.abs(patches).max())
    text = f"red speaks for the class, blue against it; strongest: {largest:.3g}"
    sheet.text(x, y + tall * factor + 24, text, 7, SOFT)
    sheet.text(x, y + tall * factor + 44, SCALES[scale].signed, 7, SOFT)
    return sheet.figure


def ablation(
    heads: np.ndarray, halves: Mapping[str, np.ndarray], *, title: str = "Ablation", lines: Sequence[str] = ()
) -> Figure:
    """Changes without one head (L, h), and without one half of a block, (L,) each, as a table of layers."""
    layers, count = heads.shape
    gap = np.full((layers, 1), np.nan)
    values = np.concatenate([heads, gap, *(column[:, None] for column in halves.values())], axis=1)
    columns = [*_counted(count), "", *halves]
    wide = max(WIDE, 58 * values.shape[1])
    tall = max(220, min(34 * layers, 900))
    sheet = Sheet(max(2 * MARGIN + 70 + wide, 760), 2 * MARGIN + HEAD + tall + 110, title + "".join(lines))
    _title(sheet, title, lines)
    _table(sheet, MARGIN + 60, MARGIN + HEAD, wide, tall, values, _counted(layers), columns)
    return sheet.figure


def patching(
    views: Sequence[View],
    groups: Mapping[str, np.ndarray],
    heads: np.ndarray,
    patches: np.ndarray | None = None,
    *,
    title: str = "Activation patching",
    lines: Sequence[str] = (),
    scale: str = DEFAULT,
) -> Figure:
    """How far the logit moved, 0 to 1: curves over layers (L,), a table of heads (L, h), and maps of single patches."""
    layers = len(heads)
    cell, per_row = 150, 11
    rows = 0 if patches is None else -(-layers // per_row)
    maps = rows * (cell + 34) + 40 * (rows > 0)
    width = 2 * MARGIN + 60 + 2 * WIDE + APART + 300
    sheet = Sheet(width, 2 * MARGIN + HEAD + TALL + 110 + 26 * len(groups) + maps, title + "".join(lines))
    _title(sheet, title, lines)
    x, y = MARGIN, MARGIN + HEAD
    for view, label in zip(views, ("the image", "the other"), strict=True):
        pixels = np.asarray(drawn(view, 240))
        tall, wide = pixels.shape[:2]
        factor = min(240 / wide, 170 / tall)
        sheet.image(x, y, wide * factor, tall * factor, pixels)
        about = f"{label}: {view.prediction}" if view.prediction else label
        sheet.text(x, y + tall * factor + 16, cut(about, 19), 7, SOFT)
        y += tall * factor + 44
    x, y = MARGIN + 300 + 60, MARGIN + HEAD
    sheet.text(x, y - 20, "One part of a layer", 9.5, INK)
    axes = sheet.axes(x, y, WIDE, TALL)
    for place, (name, curve) in enumerate(groups.items()):
        axes.plot(range(1, layers + 1), curve, color=PALETTE[place], marker="o", markersize=4, linewidth=1.8)
        at = y + TALL + 80 + 26 * place
        sheet.canvas.plot([x, x + 26], [at, at], color=PALETTE[place], linewidth=1.8)
        sheet.text(x + 36, at + 5, name, 7.5, INK, va="baseline")
    for level in (0, 1):
        axes.axhline(level, color=SOFT, linestyle="--", linewidth=0.9)
    _layer_axis(axes, layers)
    axes.set_ylabel("how far the logit moved", fontsize=7.5, color=SOFT)
    x += WIDE + APART
    sheet.text(x, y - 20, "One head", 9.5, INK)
    _table(sheet, x, y, WIDE, TALL, heads, _counted(layers), _counted(heads.shape[1]))
    y += TALL + 90 + 26 * len(groups)
    if patches is not None:
        sheet.text(MARGIN, y + 10, f"One patch's token. {SCALES[scale].signed}".rstrip(), 9.5, INK)
        y += 40
    for layer in range(layers if patches is not None else 0):
        assert patches is not None
        row, column = divmod(layer, per_row)
        moved = np.where(np.abs(patches[layer]) < NOTHING, 0.0, patches[layer])  # or rounding would fill the colours
        pixels = overlay(moved, views[0], signed=True, side=240, scale=scale)
        tall, wide = pixels.shape[:2]
        factor = min(cell / wide, cell / tall)
        left, top = MARGIN + column * (cell + 8), y + row * (cell + 34)
        sheet.image(left, top, wide * factor, tall * factor, pixels)
        most = float(np.nanmax(np.abs(patches[layer]), initial=0.0))
        sheet.text(left, top + tall * factor + 14, f"layer {layer + 1}: up to {most:.2g}", 6, SOFT)
    return sheet.figure


def _title(sheet: Sheet, title: str, lines: Sequence[str]) -> None:
    room = (sheet.width - 2 * MARGIN) / 2.1
    sheet.text(MARGIN, MARGIN + 12, cut(title, room / 12), 12, INK)
    for number, line in enumerate(lines):
        sheet.text(MARGIN, MARGIN + 46 + 24 * number, cut(line, room / 7.5), 7.5, SOFT)


def _table(
    sheet: Sheet,
    x: float,
    y: float,
    w: float,
    h: float,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
) -> None:
    """Values (rows, columns) as colours around 0, with the numbers in them where they fit."""
    largest = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
    axes = sheet.axes(x, y, w, h)
    axes.grid(False)
    axes.imshow(values, cmap=SIGNED, vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.set_xlabel("head", fontsize=7.5, color=SOFT)
    axes.set_ylabel("layer", fontsize=7.5, color=SOFT)
    if values.size <= WRITTEN:
        for (row, column), value in np.ndenumerate(values):
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 * largest else INK
                axes.text(column, row, _rounded(value, largest), ha="center", va="center", fontsize=5.5, color=ink)
    sheet.scale(x, y + h + 60, (f"{-largest:.2g}", f"{largest:.2g}"), SIGNED)


def _counted(number: int) -> list[str]:
    """Layers and heads in words: from 1."""
    return [str(n + 1) for n in range(number)]


def _rounded(value: float, largest: float) -> str:
    """With as many decimals as tell it from the largest value of its table."""
    decimals = 2 if 0.1 <= largest < 10 else max(0, 1 - math.floor(math.log10(largest)))
    return f"{round(value, decimals) + 0.0:.{decimals}f}"  # + 0.0: no -0.00


def _layer_axis(axes: Axes, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer", fontsize=7.5, color=SOFT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.6, count + 0.4)
    axes.grid(color=LINE, alpha=0.5, linewidth=0.6)


def _rgb(colour: str) -> list[float]:
    return [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
