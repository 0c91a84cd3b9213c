"""Figure 7 of ViT (arXiv:2010.11929) for any model: filters, position similarity, attention distance; and beside them
attention entropy, token lengths and the register test (arXiv:2309.16588).

What a model cannot give is said in its panel; the others are drawn.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.explain.distance import attention_statistics
from vitlab.explain.draw.sheet import INK, LINE, MARGIN, SOFT, Sheet
from vitlab.explain.draw.view import View, overlay
from vitlab.explain.inputs import Images, check_model
from vitlab.explain.stages import in_stages
from vitlab.explain.weights import filters, high_norm_tokens, position_similarity, stem_filters, token_norms
from vitlab.layers.patches import ConvStem

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILTERS = 28  # as in the paper
POSITIONS = 16  # maps along each side of the grid of grids
SIDE, APART, HEAD, LEFT = 450, 110, 120, 46  # of a panel: its side; what stands between, above and left of them
FEW = 0.002  # share of patches; the paper finds 0.02 and more where registers help
LOG = 8  # times the median: longer tokens are drawn on a log scale
DASHED = "dashed: uniform attention"
NO_IMAGES = "Give pictures to measure this: it depends on what the model sees."


def figure7_numbers(model: Any, images: Images | None = None, *, batch_size: int = 8) -> dict[str, Any]:
    """What the panels show, as arrays; for what cannot be had, the reason in words under `missing`.

    filters (n, P, P, C), or of a convolutional stem stem_filters (n, 3, 3, C); similarity (grid_h, grid_w, grid_h,
    grid_w); distance and entropy (layers, heads), with uniform_distance and max_entropy; norms (B, layers, tokens),
    high_norm (B, layers, grid_h, grid_w) and high_norm_share (layers,), threshold (layers,)
    """
    check_model(model)
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, ask in (("filters", _filters), ("similarity", _similarity)):
        try:
            found |= ask(model)
        except ValueError as error:
            missing[name] = str(error)
    if images is None:
        return {**found, "missing": {**missing, **dict.fromkeys(("distance", "entropy", "norms"), NO_IMAGES)}}
    try:
        statistics = attention_statistics(model, images, batch_size=batch_size)
        found |= {"distance": statistics.distance.numpy(), "entropy": statistics.entropy.numpy()}
        found |= {"uniform_distance": statistics.uniform_distance, "max_entropy": statistics.max_entropy}
        found |= {"images": statistics.images}
    except ValueError as error:
        missing |= {"distance": str(error), "entropy": str(error)}
    try:
        found["norms"] = token_norms(model, images, batch_size=batch_size).numpy()
        high = high_norm_tokens(model, images, batch_size=batch_size)
        found |= {"high_norm": high.mask.numpy(), "high_norm_share": high.share.numpy(), "judged": high.layers}
        found |= {"threshold": high.threshold.numpy(), "high_norm_found": high.found}
    except ValueError as error:
        missing["norms"] = str(error)
    return {**found, "missing": missing}


def figure7(found: dict[str, Any], *, view: View | None = None, title: str = "Inside the model") -> Figure:
    """The panels of `figure7_numbers`; `view` is the first picture, on which token lengths are laid."""
    width = 2 * MARGIN + LEFT + 3 * SIDE + 2 * APART
    sheet = Sheet(width, 2 * MARGIN + 2 * (SIDE + HEAD) + 84, title + "".join(found["missing"].values()))
    sheet.text(MARGIN, MARGIN + 12, title, 12, INK)
    missing = found["missing"]
    panels = [
        ("filters", "Embedding filters", _draw_filters),
        ("similarity", "Position embedding similarity", _draw_similarity),
        ("distance", "Mean attention distance", _draw_distance),
        ("entropy", "Attention entropy", _draw_entropy),
        ("norms", "Token length", _draw_norms),
        ("norms", "Register test", partial(_draw_registers, view=view)),
    ]
    for number, (name, heading, draw) in enumerate(panels):
        row, column = divmod(number, 3)
        x, y = MARGIN + LEFT + column * (SIDE + APART), MARGIN + HEAD + row * (SIDE + HEAD + 20)
        sheet.text(x, y - 54, heading, 9.5, INK)
        if name in missing:
            _say(sheet, x, y, missing[name])
        else:
            draw(sheet, x, y, found)
    return sheet.figure


def _filters(model: Any) -> dict[str, Any]:
    """Of the patches, or of the first layer of a convolutional stem."""
    if isinstance(getattr(model, "patch_embed", None), ConvStem):
        return {"stem_filters": stem_filters(model).numpy()}
    if in_stages(model):
        D, values = len(model.embeds[0].proj.weight), model.embeds[0].proj.weight[0].numel()
    else:
        D, values = model.config.width, model.config.patch_size**2 * model.config.channels
    return {"filters": filters(model, min(FILTERS, D - 1, values)).numpy()}


def _similarity(model: Any) -> dict[str, Any]:
    return {"similarity": position_similarity(model).numpy()}


def _about(sheet: Sheet, x: float, y: float, words: str) -> None:
    sheet.text(x, y - 26, words, 7, SOFT)


def _say(sheet: Sheet, x: float, y: float, words: str) -> None:
    import textwrap

    sheet.outline(x, y, SIDE, SIDE, LINE, 0.8)
    lines = textwrap.wrap(words, 46)
    lines = [*lines[:14], "…"] if len(lines) > 15 else lines
    sheet.text(x + SIDE / 2, y + SIDE / 2, "\n".join(lines), 7.5, SOFT, ha="center", linespacing=1.6)


def _draw_filters(sheet: Sheet, x: float, y: float, found: dict[str, Any]) -> None:
    tiles = found["filters"] if "filters" in found else found["stem_filters"]  # (n, P, P, C)
    low, high = tiles.min((1, 2, 3), keepdims=True), tiles.max((1, 2, 3), keepdims=True)
    tiles = (tiles - low) / np.where(high > low, high - low, 1)
    tiles = tiles.repeat(3, axis=-1) if tiles.shape[-1] == 1 else tiles[..., :3]
    columns = math.ceil(len(tiles) ** 0.5)
    side, gap = (SIDE + 10) / columns - 10, 10
    for i, tile in enumerate(tiles):
        row, column = divmod(i, columns)
        sheet.picture(x + column * (side + gap), y + row * (side + gap), side, side, tile, interpolation="nearest")
    what = "principal components" if "filters" in found else "components of the stem's first layer"
    P = tiles.shape[1]
    _about(sheet, x, y, f"first {len(tiles)} {what}, {P} x {P} pixels")


def _draw_similarity(sheet: Sheet, x: float, y: float, found: dict[str, Any]) -> None:
    maps = found["similarity"]  # (rows, columns, rows, columns)
    rows, columns = maps.shape[:2]
    shown_rows, shown_columns = _every(rows), _every(columns)
    tall, wide = SIDE / len(shown_rows), SIDE / len(shown_columns)
    cell = min(tall, wide)
    gap = min(5.0, 0.12 * cell)
    for i, row in enumerate(shown_rows):
        for j, column in enumerate(shown_columns):
            at = (x + j * cell, y + i * cell, cell - gap, cell - gap)
            sheet.picture(*at, maps[row, column], cmap="viridis", vmin=-1, vmax=1, interpolation="nearest")
    part = "" if (len(shown_rows), len(shown_columns)) == (rows, columns) else ", some of them"
    _about(sheet, x, y, f"each of {rows} x {columns} positions{part} with all others: cosine")
    bottom = y + len(shown_rows) * cell + 14
    sheet.scale(x, bottom, ("-1", "1"), "viridis")


def _every(count: int) -> list[int]:
    """All, or evenly some of them."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, POSITIONS))})


def _draw_distance(sheet: Sheet, x: float, y: float, found: dict[str, Any]) -> None:
    axes = sheet.axes(x, y, SIDE, SIDE)
    _dots(axes, found["distance"], found["uniform_distance"])
    axes.set_ylim(0, max(1.12 * found["uniform_distance"], 1.05 * float(np.nanmax(found["distance"]))))
    axes.set_ylabel("pixels of the model's input", fontsize=7.5, color=SOFT)
    _about(sheet, x, y, f"a dot per head, mean of {_images(found)}; {DASHED}")


def _draw_entropy(sheet: Sheet, x: float, y: float, found: dict[str, Any]) -> None:
    axes = sheet.axes(x, y, SIDE, SIDE)
    _dots(axes, found["entropy"], found["max_entropy"])
    axes.set_ylim(0, 1.12 * found["max_entropy"])
    axes.set_ylabel("nats", fontsize=7.5, color=SOFT)
    _about(sheet, x, y, f"a dot per head; line: their mean; {DASHED}")
    axes.plot(range(len(found["entropy"])), found["entropy"].mean(1), color=INK, linewidth=1.2, zorder=4)


def _draw_norms(sheet: Sheet, x: float, y: float, found: dict[str, Any]) -> None:
    axes = sheet.axes(x, y, SIDE, SIDE)
    grid = found["high_norm"].shape[-2:]
    patches = found["norms"][:, :, -grid[0] * grid[1] :]  # (B, layers, patches)
    prefix = found["norms"][:, :, : -grid[0] * grid[1]]
    layers = np.arange(patches.shape[1])
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


def _draw_registers(sheet: Sheet, x: float, y: float, found: dict[str, Any], view: View | None) -> None:
    share, last = found["high_norm_found"], found["judged"]
    which = f"layer {last[0]}" if len(last) == 1 else f"layers {last[0]} to {last[-1]}"
    _about(sheet, x, y, f"{100 * share:.1f} % of patches above 3 x the median, {which}")
    verdict = "No patch token is far longer than the rest."
    if share >= FEW:
        verdict = "Some patch tokens are far longer than the rest (arXiv:2309.16588)."
    if view is None:
        axes = sheet.axes(x, y, SIDE, SIDE)
        axes.bar(range(len(found["high_norm_share"])), 100 * found["high_norm_share"], color="C3")
        axes.set_ylim(0, max(1.0, 120 * found["high_norm_share"].max()))
        axes.set_ylabel("% of patches", fontsize=7.5, color=SOFT)
        _layers(axes, len(found["high_norm_share"]))
        sheet.text(x, y + SIDE + 76, verdict, 7.5, INK)
        return
    rows, columns = found["high_norm"].shape[-2:]
    lengths = found["norms"][0, -1, -rows * columns :].reshape(rows, columns)
    pixels = overlay(lengths, view, smooth=False)
    tall, wide = pixels.shape[:2]
    factor = min(SIDE / wide, (SIDE - 60) / tall)
    sheet.picture(x, y, wide * factor, tall * factor, pixels)
    below = (f"token length after the last layer: {lengths.min():.3g}", f"{lengths.max():.3g}")
    sheet.scale(x, y + tall * factor + 22, below, "inferno", 80)
    sheet.text(x, y + tall * factor + 50, verdict, 7.5, INK)


def _dots(axes: Axes, values: np.ndarray, everywhere: float) -> None:
    """(layers, heads): a dot for each head, and a line where attention to all alike would put it."""
    layers, heads = values.shape
    axes.axhline(everywhere, color=SOFT, linestyle="--", linewidth=0.9)
    x = np.arange(layers)[:, None].repeat(heads, 1)
    axes.scatter(x, values, color="C0", s=24, alpha=0.6, linewidth=0, zorder=3)
    _layers(axes, layers)


def _layers(axes: Axes, count: int) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("layer", fontsize=7.5, color=SOFT)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(-0.6, count - 0.4)


def _images(found: dict[str, Any]) -> str:
    return f"{found['images']} picture{'s' if found['images'] > 1 else ''}"
