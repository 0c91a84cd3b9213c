"""Plots of studies: accuracy over the varied settings, with the spread over seeds.

One numeric setting gives a line, two settings a line for each value of the second; names, or more than two settings,
give a list of dots.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator, PercentFormatter
from matplotlib.transforms import ScaledTranslation

from vitlab.checkpoints.native import write_whole
from vitlab.images.fonts import families
from vitlab.study.grid import format_value, label
from vitlab.study.runner import Group

MOST_TICKS = 12  # values with a tick each
MAX_LENGTH = 60  # characters of a label


@contextmanager
def plots_file(
    path: Path, inches: tuple[float, float], texts: str, columns: int = 1, dpi: int = 150
) -> Iterator[list[Axes]]:
    """Axes side by side, saved as PNG afterwards; `texts` need a font that has their letters."""
    with rc_context({"font.family": families(texts), "text.usetex": False, "text.parse_math": False}):
        figure = Figure(figsize=inches, dpi=dpi, layout="constrained")  # no pyplot: no window, no global state
        axes = [figure.add_subplot(1, columns, number + 1) for number in range(columns)]
        yield axes
        for each in axes:
            each.spines[["top", "right"]].set_visible(False)
        write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))


@contextmanager
def plot_file(path: Path, inches: tuple[float, float], title: str, texts: str = "") -> Iterator[Axes]:
    """One plot with a title, saved as PNG afterwards."""
    with plots_file(path, inches, title + texts) as (axes,):
        axes.set_title(title, loc="left", fontsize=11)
        yield axes


def draw_groups(groups: list[Group], path: Path, title: str) -> Axes:
    """Draw all groups with a finished run."""
    groups = [g for g in groups if g.numbers("top1")]
    assert groups, "there is nothing to draw"
    keys = list(groups[0].values)
    dots = len(keys) not in (1, 2) or (len(keys) == 1 and not _is_numeric(groups, keys[0]))
    height = 1.3 + 0.34 * len(groups) if dots else 4.6
    with plot_file(path, (8, height), _heading(groups, title), "".join(label(g.values) for g in groups)) as axes:
        if dots:
            _draw_dots(axes, groups, best_first=len(keys) > 2)
        else:
            _draw_lines(axes, groups, keys)
    return axes


def percent(axis: Axis) -> None:
    axis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def legend_beside(axes: Axes, order: list[str] | None = None) -> None:
    """A legend to the right of the plot, each name once."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    names = [name for name in order or handles if name in handles]
    axes.legend([handles[n] for n in names], names, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def logarithmic(axes: Axes, sizes: list[int], title: str) -> None:
    """Logarithmic axes over the side of an image, with the exponents in the legend."""
    axes.set(xscale="log", yscale="log", xlabel="side of the image: pixels")
    axes.set_title(title, loc="left", fontsize=10)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    heading = "k of cost ~ pixels^k: over all sizes, between the two largest"
    sizes_of_text: dict[str, Any] = dict(fontsize=8, title_fontsize=8, alignment="left")
    axes.legend(title=heading, loc="upper left", bbox_to_anchor=(0, -0.16), frameon=False, **sizes_of_text)
    axes.grid(alpha=0.25)


def _draw_lines(axes: Axes, groups: list[Group], keys: list[str]) -> None:
    """A line for each value of the second key; a numeric key is preferred for the x axis."""
    along = next((key for key in keys if _is_numeric(groups, key)), keys[0])
    others = [key for key in keys if key != along]
    numeric = _is_numeric(groups, along)
    values = list({format_value(g.values[along]): g.values[along] for g in groups}.values())
    series: dict[str, list[Group]] = {}
    for g in groups:
        series.setdefault(label({key: g.values[key] for key in others}), []).append(g)
    apart = min(6.0, 40 / len(series))  # points between series, so that error bars do not overlap
    for i, (name, members) in enumerate(series.items()):
        if numeric:
            members = sorted(members, key=lambda g: g.values[along])
        spots = [g.values[along] if numeric else values.index(g.values[along]) for g in members]
        style = f"C{i % 10}", ("-", "--", ":", "-.")[i // 10 % 4] if numeric else ":"
        aside = ScaledTranslation(apart * (i - (len(series) - 1) / 2) / 72, 0, axes.figure.dpi_scale_trans)
        for artist in _draw_series(axes, spots, members, name, style):  # moved after the limits are set
            artist.set_transform(axes.transData + aside)
    if numeric and _is_geometric(values):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if not numeric:
        axes.set_xticks(range(len(values)), [shorten(format_value(value)) for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
    else:
        if len(values) <= MOST_TICKS:
            axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.07)
    axes.set(xlabel=along, ylabel=_measure(groups))
    percent(axes.yaxis)
    axes.grid(alpha=0.25)
    if others:
        legend_beside(axes)


def _draw_series(
    axes: Axes, spots: Sequence[float], members: list[Group], name: str, style: tuple[str, str]
) -> list[Artist]:
    means, below, above = _spread(members)
    several = any(len(g.numbers("top1")) > 1 for g in members)
    bars: dict[str, Any] = dict(yerr=[below, above], capsize=3, elinewidth=1.1) if several else {}
    bars |= dict(zip(("color", "linestyle"), style, strict=True), marker="o", markersize=5, linewidth=1.6)
    line, caps, stems = axes.errorbar(spots, means, label=shorten(name), **bars)
    drawn = [line, *caps, *stems]
    for spot, g in zip(spots, members, strict=True):
        tops = g.numbers("top1")
        drawn += axes.plot([spot] * len(tops), tops, "o", color=style[0], markersize=3, alpha=0.4)  # every seed
    return drawn


def _draw_dots(axes: Axes, groups: list[Group], best_first: bool) -> None:
    """A label and a dot for each group, from top to bottom."""
    if best_first:
        groups = sorted(groups, key=lambda g: -(g.mean("top1") or 0.0))
    rows = range(len(groups))
    means, below, above = _spread(groups)
    axes.errorbar(means, rows, xerr=[below, above], fmt="o", color="C0", markersize=6, elinewidth=1.4)
    beside: dict[str, Any] = dict(xytext=(8, 0), textcoords="offset points", va="center", fontsize=8.5, color="0.3")
    for row, g in enumerate(groups):
        tops = g.numbers("top1")
        axes.plot(tops, [row] * len(tops), "o", color="C0", markersize=3, alpha=0.4)  # every seed
        axes.annotate(f"{100 * means[row]:.2f} %", (max(tops), row), **beside)
    axes.set_yticks(rows, [shorten(label(g.values, between=", ") or "all seeds") for g in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel(_measure(groups))
    percent(axes.xaxis)
    axes.grid(axis="x", alpha=0.25)
    axes.tick_params(axis="y", length=0)


def _spread(groups: list[Group]) -> tuple[list[float], list[float], list[float]]:
    """Means, and the distances to the lowest and highest value."""
    tops = [g.numbers("top1") for g in groups]
    means = [math.fsum(top) / len(top) for top in tops]
    below = [max(mean - min(top), 0.0) for mean, top in zip(means, tops, strict=True)]
    return means, below, [max(max(top) - mean, 0.0) for mean, top in zip(means, tops, strict=True)]


def _heading(groups: list[Group], title: str) -> str:
    counts = sorted({len(g.numbers("top1")) for g in groups})
    if counts == [1]:
        return shorten(title)
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f"{shorten(title)}: mean of {seeds} seeds, bars from least to greatest"


def _measure(groups: list[Group]) -> str:
    splits = {outcome.result["split"] for g in groups for outcome in g.outcomes if outcome.result}
    return f"{splits.pop()} accuracy" if len(splits) == 1 else "accuracy"


def _is_numeric(groups: list[Group], key: str) -> bool:
    return all(isinstance(g.values[key], int | float) and not isinstance(g.values[key], bool) for g in groups)


def _is_geometric(values: list[float]) -> bool:
    """Whether the values are spaced by factors (1, 3, 10) rather than by differences (4, 6, 8)."""
    ordered = sorted(values)
    if len(ordered) < 3 or ordered[0] <= 0:
        return False
    differences = [b - a for a, b in pairwise(ordered)]
    factors = [math.log(b / a) for a, b in pairwise(ordered)]
    return max(factors) / min(factors) < max(differences) / min(differences)


def shorten(text: str, longest: int = MAX_LENGTH) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
