"""Draws the numbers of `figure7_numbers`, a panel for each. A panel without numbers shows the reason."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.explain.draw.heatmap import heat_limits, overlay
from vitlab.explain.draw.sheet import INK, LINE, MARGIN, SOFT, Sheet
from vitlab.explain.scale import DEFAULT
from vitlab.explain.views import View

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITIONS = 16  # maps along each side of the grid of grids
SIDE, APART, HEAD, LEFT = 450, 110, 120, 46  # panels: their side; space between, above and left of them
FEW = 0.002  # share of patches; the paper finds 0.02 and more where registers help
LOG = 8  # times the median: longer tokens are drawn on a log scale
DASHED = "dashed: uniform attention"


def figure7(
    numbers: dict[str, Any], *, view: View | None = None, title: str = "Inside the model", scale: str = DEFAULT
) -> Figure:
    """The panels of `figure7_numbers`; `view` is the image on which token lengths are shown, by `scale`."""
    width = 2 * MARGIN + LEFT + 3 * SIDE + 2 * APART
    sheet = Sheet(width, 2 * MARGIN + 2 * (SIDE + HEAD) + 84, title + "".join(numbers["missing"].values()))
    sheet.text(MARGIN, MARGIN + 12, title, 12, INK)
    missing = numbers["missing"]
    panels = [
        ("filters", "Embedding filters", _draw_filters),
        ("similarity", "Position embedding similarity", _draw_similarity),
        ("distance", "Mean attention distance", _draw_distance),
        ("entropy", "Attention entropy", _draw_entropy),
        ("norms", "Token length", _draw_norms),
        ("norms", "Register test", partial(_draw_registers, view=view, scale=scale)),
    ]
    for number, (name, heading, draw) in enumerate(panels):
        row, column = divmod(number, 3)
        x, y = MARGIN + LEFT + column * (SIDE + APART), MARGIN + HEAD + row * (SIDE + HEAD + 20)
        sheet.text(x, y - 54, heading, 9.5, INK)
        if name in missing:
            _explain_missing(sheet, x, y, missing[name])
        else:
            draw(sheet, x, y, numbers)
    return sheet.figure


def _about(sheet: Sheet, x: float, y: float, text: str) -> None:
    sheet.text(x, y - 26, text, 7, SOFT)


def _explain_missing(sheet: Sheet, x: float, y: float, text: str) -> None:
    import textwrap

    sheet.outline(x, y, SIDE, SIDE, LINE, 0.8)
    lines = textwrap.wrap(text, 46)
    lines = [*lines[:14], "…"] if len(lines) > 15 else lines
    sheet.text(x + SIDE / 2, y + SIDE / 2, "\n".join(lines), 7.5, SOFT, ha="center", linespacing=1.6)


def _draw_filters(sheet: Sheet, x: float, y: float, numbers: dict[str, Any]) -> None:
    tiles = numbers["filters"] if "filters" in numbers else numbers["stem_filters"]  # (n, P, P, C)
    low, high = tiles.min((1, 2, 3), keepdims=True), tiles.max((1, 2, 3), keepdims=True)
    tiles = (tiles - low) / np.where(high > low, high - low, 1)
    tiles = tiles.repeat(3, axis=-1) if tiles.shape[-1] == 1 else tiles[..., :3]
    columns = math.ceil(len(tiles) ** 0.5)
    side, gap = (SIDE + 10) / columns - 10, 10
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        sheet.image(x + column * (side + gap), y + row * (side + gap), side, side, tile, interpolation="nearest")
    what = "principal components" if "filters" in numbers else "components of the stem's first layer"
    P = tiles.shape[1]
    _about(sheet, x, y, f"first {len(tiles)} {what}, {P} x {P} pixels")


def _draw_similarity(sheet: Sheet, x: float, y: float, numbers: dict[str, Any]) -> None:
    maps = numbers["similarity"]  # (rows, columns, rows, columns)
    rows, columns = maps.shape[:2]
    shown_rows, shown_columns = _every(rows), _every(columns)
    tall, wide = SIDE / len(shown_rows), SIDE / len(shown_columns)
    cell = min(tall, wide)
    gap = min(5.0, 0.12 * cell)
    for i, row in enumerate(shown_rows):
        for j, column in enumerate(shown_columns):
            at = (x + j * cell, y + i * cell, cell - gap, cell - gap)
            sheet.image(*at, maps[row, column], cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    part = "" if (len(shown_rows), len(shown_columns)) == (rows, columns) else ", some of them"
    _about(sheet, x, y, f"each of {rows} x {columns} positions{part} with all others: cosine")
    bottom = y + len(shown_rows) * cell + 14
    sheet.scale(x, bottom, ("-1", "1"), "viridis")


def _every(count: int) -> list[int]:
    """All indices, or POSITIONS evenly spaced ones."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, POSITIONS))})


def _draw_distance(sheet: Sheet, x: float, y: float, numbers: dict[str, Any]) -> None:
    axes = sheet.axes(x, y, SIDE, SIDE)
    _dots(axes, numbers["distance"], numbers["uniform_distance"])
    axes.set_ylim(0, max(1.12 * numbers["uniform_distance"], 1.05 * float(np.nanmax(numbers["distance"]))))
    axes.set_ylabel("pixels of the model's input", fontsize=7.5, color=SOFT)
    _about(sheet, x, y, f"a dot per head, mean of {_images(numbers)}; {DASHED}")


def _draw_entropy(sheet: Sheet, x: float, y: float, numbers: dict[str, Any]) -> None:
    axes = sheet.axes(x, y, SIDE, SIDE)
    _dots(axes, numbers["entropy"], numbers["max_entropy"])
    axes.set_ylim(0, 1.12 * numbers["max_entropy"])
    axes.set_ylabel("nats", fontsize=7.5, color=SOFT)
    _about(sheet, x, y, f"a dot per head; line: their mean; {DASHED}")
    axes.plot(range(len(numbers["entropy"])), numbers["entropy"].mean(1), color=INK, linewidth=1.2, zorder=4)


def _draw_norms(sheet: Sheet, x: float, y: float, numbers: dict[str, Any]) -> None:
    axes = sheet.axes(x, y, SIDE, SIDE)
    grid = numbers["high_norm"].shape[-2:]
    patches = numbers["norms"][:, :, -grid[0] * grid[1] :]  # (B, layers, patches)
    prefix = numbers["norms"][:, :, : -grid[0] * grid[1]]
    layers = 1 + np.arange(patches.shape[1])
    low, middle, high = np.quantile(patches, (0.01, 0.5, 0.99), axis=(0, 2))
    axes.fill_between(layers, low, high, color="C0", alpha=0.18, linewidth=0, label="98 % of patches")
    axes.plot(layers, middle, color="C0", linewidth=1.8, label="median patch")
    axes.plot(layers, patches.max((0, 2)), color="C3", linewidth=1.2, linestyle="--", label="longest patch")
    if prefix.shape[-1]:
        axes.plot(layers, np.median(prefix, (0, 2)), color="C2", linewidth=1.2, label="tokens before the patches")
    far = patches.max() > LOG * np.median(patches)
    if far:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.25 * patches.max())
    _layers(axes, len(layers))
    axes.legend(fontsize=6.5, frameon=False, loc="upper left", labelcolor=SOFT)
    _about(sheet, x, y, f"after each block{', log scale' if far else ''}")


def _draw_registers(sheet: Sheet, x: float, y: float, numbers: dict[str, Any], view: View | None, scale: str) -> None:
    share, last = numbers["high_norm_found"], numbers["judged"]
    which = f"layer {last[0] + 1}" if len(last) == 1 else f"layers {last[0] + 1} to {last[-1] + 1}"
    _about(sheet, x, y, f"{100 * share:.1f} % of patches above 3 x the median, {which}")
    verdict = "No patch token is far longer than the rest."
    if share >= FEW:
        verdict = "Some patch tokens are far longer than the rest (arXiv:2309.16588)."
    if view is None:
        axes = sheet.axes(x, y, SIDE, SIDE)
        axes.bar(range(1, len(numbers["high_norm_share"]) + 1), 100 * numbers["high_norm_share"], color="C3")
        axes.set_ylim(0, max(1.0, 120 * numbers["high_norm_share"].max()))
        axes.set_ylabel("% of patches", fontsize=7.5, color=SOFT)
        _layers(axes, len(numbers["high_norm_share"]))
        sheet.text(x, y + SIDE + 76, verdict, 7.5, INK)
        return
    rows, columns = numbers["high_norm"].shape[-2:]
    lengths = numbers["norms"][0, -1, -rows * columns :].reshape(rows, columns)
    pixels = overlay(lengths, view, smooth=False, scale=scale)
    tall, wide = pixels.shape[:2]
    factor = min(SIDE / wide, (SIDE - 60) / tall)
    sheet.image(x, y, wide * factor, tall * factor, pixels)
    low, high = heat_limits(lengths, view, scale=scale)
    by = "" if scale == "minmax" else f" ({scale})"
    below = (f"token length, layer {last[-1] + 1}: {low:.3g}", f"{high:.3g}{by}")
    sheet.scale(x, y + tall * factor + 22, below, "inferno", 80)
    sheet.text(x, y + tall * factor + 50, verdict, 7.5, INK)
    if sinks := int(numbers["sinks"].sum()) if "sinks" in numbers else 0:
        many = "1 patch is" if sinks == 1 else f"{sinks} patches are"
        sheet.text(x, y + tall * factor + 76, f"{many} where all tokens look (attention sinks).", 7.5, INK)


def _dots(axes: Axes, values: np.ndarray, uniform: float) -> None:
    """(layers, heads): a dot for each head, and a line for uniform attention."""
    layers, heads = values.shape
    axes.axhline(uniform, color=SOFT, linestyle="--", linewidth=0.9)
    x = 1 + np.arange(layers)[:, None].repeat(heads, 1)
    axes.scatter(x, values, color="C0", s=24, alpha=0.6, linewidth=0, zorder=3)
    _layers(axes, layers)


def _layers(axes: Axes, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer", fontsize=7.5, color=SOFT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(0.4, count + 0.6)


def _images(numbers: dict[str, Any]) -> str:
    return f"{numbers['images']} image{'s' if numbers['images'] > 1 else ''}"
