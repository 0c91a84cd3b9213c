"""Plots of studies: accuracy over the varied settings, with the spread over seeds.

One numeric setting gives a line, two settings a line for each value of the second; names, or more than two settings,
give a list of dots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator, PercentFormatter
from matplotlib.transforms import ScaledTranslation

from vitlab.checkpoints.native import write_whole
from vitlab.images.fonts import families
from vitlab.study.grid import format_value, label
from vitlab.study.scaling import ScalingStudy
from vitlab.study.ssl import HERE, SSLStudy
from vitlab.study.table import Group
from vitlab.study.tokens import ReducerResult, TokenStudy

MOST_TICKS = 12  # values with a tick each
MAX_LENGTH = 60  # characters of a label


def draw(groups: list[Group], path: Path, title: str) -> Figure:
    """Draw all groups with a finished run as PNG."""
    groups = [g for g in groups if g.numbers("top1")]
    assert groups, "there is nothing to draw"
    keys = list(groups[0].values)
    texts = title + "".join(label(g.values) for g in groups)
    with rc_context({"font.family": families(texts), "text.usetex": False, "text.parse_math": False}):
        dots = len(keys) not in (1, 2) or (len(keys) == 1 and not _is_numeric(groups, keys[0]))
        height = 1.3 + 0.34 * len(groups) if dots else 4.6
        figure = Figure(figsize=(8, height), dpi=150, layout="constrained")  # no pyplot: no window, no global state
        axes = figure.add_subplot()
        if dots:
            _draw_dots(axes, groups, best_first=len(keys) > 2)
        else:
            _draw_lines(axes, groups, keys)
        axes.set_title(_heading(groups, title), loc="left", fontsize=11)
        axes.spines[["top", "right"]].set_visible(False)
        write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))
    return figure


def draw_ssl(study: SSLStudy, path: Path) -> Figure:
    """Bars of each method: frozen features, fine-tuned, from scratch."""
    bars = {"k-NN": "knn", "linear probe": "probe", "fine-tuned": "fine_tuned", "from scratch": "from_scratch"}
    colours = dict(zip(bars, ("0.75", "0.55", "C0", "C1"), strict=True))
    title = f"{Path(study.source).name}, {study.labels:,} labels"
    with rc_context({"font.family": families(title), "text.usetex": False, "text.parse_math": False}):
        figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        for place, method in enumerate(study.methods):
            values = {name: value for name, key in bars.items() if (value := getattr(method, key)) is not None}
            for number, (name, value) in enumerate(values.items()):
                x = place + 0.2 * (number - (len(values) - 1) / 2)
                axes.bar(x, value, width=0.18, color=colours[name], label=name)
                axes.annotate(
                    f"{100 * value:.1f}", (x, value), (0, 2), textcoords="offset points", ha="center", fontsize=8
                )
        names = {"pixels": "pixels themselves", "mae": "MAE", "dino": "DINO"}
        places = ["" if m.encoder in ("", HERE) else f"\n{_shorten(m.encoder, 28)}" for m in study.methods]
        labels = [names[m.name] + place for m, place in zip(study.methods, places, strict=True)]
        axes.set_xticks(range(len(study.methods)), labels)
        axes.set_title(_shorten(title), loc="left", fontsize=11)
        axes.set_ylabel("test accuracy")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))  # each name once
        shown = [name for name in bars if name in handles]
        axes.legend(
            [handles[name] for name in shown], shown, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))
    return figure


def draw_tokens(study: TokenStudy, path: Path) -> Figure:
    """Accuracy over speed-up, a line per method, dotted for random baselines; dashed: all tokens."""
    full, *ways = study.ways
    lines: dict[str, list[ReducerResult]] = {}
    for way in ways:
        method, _, rest = way.name.partition(":")
        like = f" like {rest.removeprefix('like=').partition(':')[0]}" if rest.startswith("like=") else ""
        lines.setdefault(method + like + (", decreasing" if "decreasing" in rest else ""), []).append(way)
    with rc_context({"font.family": families(study.title), "text.usetex": False, "text.parse_math": False}):
        figure = Figure(figsize=(8, 4.6), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.axhline(full.top1, color="0.4", linestyle="--", linewidth=1)
        for name, members in lines.items():
            members = sorted(members, key=lambda way: -way.tokens)
            style = "o:" if name.startswith("random") else "o-"
            axes.plot([w.speedup for w in members], [w.top1 for w in members], style, markersize=5, label=name)
        axes.plot(1.0, full.top1, "s", color="0.2", label=full.name)
        axes.set(xlabel=f"speed-up, batch of {study.batch}", ylabel="accuracy")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
        axes.set_title(_shorten(study.title), loc="left", fontsize=11)
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))
    return figure


def draw_scaling(study: ScalingStudy, path: Path) -> Figure:
    """Measured time and memory, and counted MACs, over the image side; logarithmic axes."""
    sizes = sorted({point.size for point in study.points})
    text = "".join(study.models)
    with rc_context({"font.family": families(text), "text.usetex": False, "text.parse_math": False}):
        figure = Figure(figsize=(13, 6.2), dpi=130, layout="constrained")
        time_axes, memory_axes, macs_axes = figure.subplots(1, 3)
        for number, ((name, points), growth) in enumerate(zip(study.models.items(), study.growth, strict=True)):
            x = [point.size for point in points]
            style: dict[str, Any] = dict(color=f"C{number % 10}", marker="osD^v"[number % 5], markersize=4)
            style["linestyle"] = ("-", "--")[number % 2]  # so that overlapping lines are visible

            def legend(over_all: float, end: float | None, name: str = name) -> str:
                return f"{_shorten(name)}: {over_all:.2f}, {end:.2f}"

            low, median, high = ([1000 * p.quartiles[i] for p in points] for i in range(3))
            errors = [[b - a for a, b in zip(*pair, strict=True)] for pair in ((low, median), (median, high))]
            bars = dict(yerr=errors, capsize=2, label=legend(growth.time, growth.time_end))
            time_axes.errorbar(x, median, **bars, **style)
            if growth.memory is not None:
                most = [(p.peak or 0) / 1e6 for p in points]
                memory_axes.plot(x, most, label=legend(growth.memory, growth.memory_end), **style)
            macs_axes.plot(x, [p.macs / 1e9 for p in points], label=legend(growth.macs, growth.macs_end), **style)
            if growth.attention is not None:
                faint = {**style, "linestyle": ":", "marker": "", "label": f"its attention: {growth.attention:.2f}"}
                macs_axes.plot(x, [p.attention_macs / 1e9 for p in points], **faint)
        threads = f"{study.threads} thread{'s' if study.threads > 1 else ''}"
        batch = f"{study.batch} image{'s' if study.batch > 1 else ''}"
        titles = (f"time of {batch}, {threads}: ms", "memory of the pass: MB", "formula: GMACs")
        for axes, title in zip((time_axes, memory_axes, macs_axes), titles, strict=True):
            axes.set(xscale="log", yscale="log", xlabel="side of the image: pixels")
            axes.set_title(title, loc="left", fontsize=10)
            axes.xaxis.set_major_locator(FixedLocator(sizes))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
            below: dict[str, Any] = dict(loc="upper left", bbox_to_anchor=(0, -0.16), frameon=False, alignment="left")
            axes.legend(
                title="k of cost ~ pixels^k: over all sizes, between the two largest",
                fontsize=8,
                title_fontsize=8,
                **below,
            )
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25)
        write_whole(path, lambda temporary: figure.savefig(temporary, format="png"))
    return figure


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
        style = dict(color=f"C{i % 10}", linestyle=("-", "--", ":", "-.")[i // 10 % 4] if numeric else ":")
        aside = ScaledTranslation(apart * (i - (len(series) - 1) / 2) / 72, 0, axes.figure.dpi_scale_trans)
        for artist in _draw_series(axes, spots, members, name, style):  # moved after the limits are set
            artist.set_transform(axes.transData + aside)
    if numeric and _is_geometric(values):
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
    if not numeric:
        axes.set_xticks(range(len(values)), [_shorten(format_value(value)) for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
    else:
        if len(values) <= MOST_TICKS:
            axes.xaxis.set_major_locator(FixedLocator(sorted(values)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.margins(x=0.07)
    axes.set(xlabel=along, ylabel=_measure(groups))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    axes.grid(alpha=0.25)
    if others:
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _draw_series(
    axes: Axes, spots: Sequence[float], members: list[Group], name: str, style: dict[str, Any]
) -> list[Any]:
    means, below, above = _spread(members)
    several = any(len(g.numbers("top1")) > 1 for g in members)
    bars = dict(yerr=[below, above], capsize=3, elinewidth=1.1) if several else {}
    line, caps, stems = axes.errorbar(
        spots, means, marker="o", markersize=5, linewidth=1.6, label=_shorten(name), **bars, **style
    )
    drawn = [line, *caps, *stems]
    for spot, g in zip(spots, members, strict=True):
        tops = g.numbers("top1")
        drawn += axes.plot([spot] * len(tops), tops, "o", color=style["color"], markersize=3, alpha=0.4)  # every seed
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
    axes.set_yticks(rows, [_shorten(label(g.values, between=", ") or "all seeds") for g in groups])
    axes.set_ylim(len(groups) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel(_measure(groups))
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
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
        return _shorten(title)
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    return f"{_shorten(title)}: mean of {seeds} seeds, bars from least to greatest"


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


def _shorten(text: str, longest: int = MAX_LENGTH) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
