"""Plot of a claim: every seed or model as a dot, with the means. Arms with numbers are lines, others rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter

from vitlab.study.plot import legend_beside, percent, plot_file
from vitlab.study.reproduce.claim import Arm
from vitlab.study.reproduce.result import Result, number


def draw(result: Result, path: Path) -> None:
    claim = result.claim
    arms = [arm for arm in claim.arms if result.values.get(arm.name)]
    lines = all(arm.x is not None for arm in arms)
    height = 3.8 if lines else 1.2 + 0.42 * len(arms)
    with plot_file(path, (7, height), f"{claim.name}: {claim.paper.name}, n = {result.n}") as axes:
        if lines:
            _draw_lines(axes, arms, result)
        else:
            _draw_rows(axes, arms, result)
        along = axes.yaxis if lines else axes.xaxis
        along.set_label_text(claim.measured)
        if claim.scale == "accuracy":
            percent(along)
            if lines:
                axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
            else:
                axes.set_xlim(left=max(0.0, axes.get_xlim()[0]))
        axes.grid(alpha=0.25, axis="both" if lines else "x")
        axes.set_axisbelow(True)


def _draw_lines(axes: Axes, arms: Sequence[Arm], result: Result) -> None:
    for index, series in enumerate(dict.fromkeys(arm.series for arm in arms)):
        members = sorted((arm for arm in arms if arm.series == series), key=lambda arm: arm.x or 0.0)
        colour, x = f"C{index}", [arm.x or 0.0 for arm in members]
        axes.plot(x, [fmean(result.values[arm.name].values()) for arm in members], "o-", color=colour, label=series)
        for arm in members:
            values = list(result.values[arm.name].values())
            axes.plot([arm.x or 0.0] * len(values), values, "o", color=colour, markersize=3, alpha=0.4)
    axes.set_xlabel(result.claim.axis)
    axes.xaxis.set_major_locator(FixedLocator(sorted({arm.x or 0.0 for arm in arms})))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if any(arm.series for arm in arms):
        legend_beside(axes)


def _draw_rows(axes: Axes, arms: Sequence[Arm], result: Result) -> None:
    for row, arm in enumerate(arms):
        values = list(result.values[arm.name].values())
        mean = fmean(values)
        axes.plot([min(values), max(values)], [row, row], color="C0", linewidth=1.4)
        axes.plot([mean], [row], "o", color="C0", markersize=6)
        axes.plot(values, [row] * len(values), "o", color="C0", markersize=3, alpha=0.4)
        beside = {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 8.5, "color": "0.3"}
        axes.annotate(number(result.claim, mean), (max(values), row), **beside)
    axes.set_yticks(range(len(arms)), [arm.name for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.6)
    axes.margins(x=0.14)
    axes.tick_params(axis="y", length=0)
