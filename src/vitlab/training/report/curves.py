"""The lines of log.jsonl as charts, in SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitlab.training.objectives import OBJECTIVES, objective_class
from vitlab.training.report.html import both

Points = list[tuple[float, float]]  # (step, value)
KINDS = {"train": "训练", "val": "验证", "test": "测试"}
W, H, LEFT, RIGHT, TOP, BOTTOM = 560, 270, 66, 16, 14, 34  # of a chart, in SVG units


@dataclass(frozen=True)
class Chart:
    title: str
    chinese: str
    key: str  # of the lines in log.jsonl
    percent: bool = False
    from_zero: bool = False
    smooth: bool = True  # a running mean over the noise of single batches


CHARTS = (
    Chart("Loss", "损失", "loss"),
    Chart("Accuracy", "准确率", "top1", percent=True),
    Chart("Learning rate", "学习率", "lr", from_zero=True, smooth=False),
    Chart("Images per second", "每秒图像数", "images_per_second", from_zero=True),
    Chart("Gradient norm", "梯度范数", "grad_norm", from_zero=True),
)


def charts(log: list[dict[str, Any]], labels: bool = True) -> str:
    """`labels`: they were learned. Otherwise the validation loss is that of k-NN, and is not drawn."""
    if not labels:  # MAE measures its own loss there
        log = [{**e, "loss": e.get("reconstruction")} if e["kind"] in ("val", "test") else e for e in log]
    last = max((event["step"] for event in log), default=0) or 1  # one scale for all, to compare them by eye
    own = [chart for name in OBJECTIVES for chart in objective_class(name).charts]
    drawn = [_chart(chart, series, last) for chart in (*CHARTS, *own) if (series := _series(log, chart.key))]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _series(log: list[dict[str, Any]], key: str) -> dict[str, Points]:
    """kind -> its points, for the kinds of line that hold this number."""
    series: dict[str, Points] = {}
    before: dict[str, Any] = {"images": 0, "seconds": 0.0}
    for event in log:
        value = event.get(key)
        if key == "images_per_second" and value is None and {"images", "seconds"} <= event.keys():
            passed = event["seconds"] - before["seconds"]  # both count from the start of the run
            value = (event["images"] - before["images"]) / passed if passed > 0 else None
            before = event
        if isinstance(value, int | float) and event["kind"] in ("train", "val", "test"):
            series.setdefault(event["kind"], []).append((event["step"], float(value)))
    return series


def _chart(chart: Chart, series: dict[str, Points], last_step: int) -> str:
    values = [y for points in series.values() for _, y in points if math.isfinite(y)] or [0.0]
    logarithmic = chart.key == "loss" and min(values) > 0 and max(values) > 100 * min(values)
    y_ticks = _decades(values) if logarithmic else _ticks(_low(values, chart.from_zero), max(values), 5)
    if chart.percent and max(values) <= 1:
        y_ticks = [tick for tick in y_ticks if tick < 1 + 1e-9]
    warp = math.log10 if logarithmic else float
    low_y, high_y = warp(y_ticks[0]), max(warp(y_ticks[-1]), warp(max(values)))

    def at(x: float, y: float) -> str:
        across = LEFT + x / last_step * (W - LEFT - RIGHT)
        down = H - BOTTOM - (warp(y) - low_y) / (high_y - low_y) * (H - TOP - BOTTOM)
        return f"{across:.2f},{down:.2f}"

    def label(value: float) -> str:
        return f"{100 * value:.4g} %" if chart.percent else _short(value)

    svg = [f'<svg viewBox="0 0 {W} {H}" role="img" aria-label="{chart.title} by step">']
    for tick in y_ticks:
        y = at(0, tick).split(",")[1]
        svg.append(f'<line class="grid" x1="{LEFT}" x2="{W - RIGHT}" y1="{y}" y2="{y}" />')
        svg.append(f'<text class="y tick" x="{LEFT - 8}" y="{y}" dy=".35em">{label(tick)}</text>')
    for tick in [t for t in _ticks(0, last_step, 6) if t <= last_step]:
        x = at(tick, y_ticks[0]).split(",")[0]
        svg.append(f'<text class="x tick" x="{x}" y="{H - BOTTOM + 22}">{_short(tick)}</text>')
    legend = []
    for kind, points in series.items():
        finite = [(x, y) for x, y in points if math.isfinite(y)]
        smooth = chart.smooth and len(finite) > 60
        line = (
            f'<path class="{kind}{" raw" if smooth else ""}" data-key="{chart.key}" d="{_path(_thin(points), at)}" />'
        )
        svg.append(line if finite else "")
        if smooth:
            svg.append(f'<path class="{kind} mean" d="{_path(_thin(_running_mean(finite)), at)}" />')
        for x, y in finite if len(finite) <= 60 else []:
            cx, cy = at(x, y).split(",")
            tooltip = f"{kind}, step {_short(x)}: {label(y)}"
            svg.append(f'<circle class="{kind}" cx="{cx}" cy="{cy}" r="3"><title>{tooltip}</title></circle>')
        broken = [(x, y) for x, y in points if not math.isfinite(y)]
        for x, y in broken[:20]:
            across = at(x, y_ticks[0]).split(",")[0]
            svg.append(f'<text class="broken" x="{across}" y="{TOP + 8}">×<title>step {x:g}: {y}</title></text>')
        legend.append(_legend(chart, kind, finite, len(broken), label))
    svg.append("</svg>")
    scale, chinese_scale = (" (logarithmic)", "（对数）") if logarithmic else ("", "")
    title = both(f"{chart.title}{scale}", f"{chart.chinese}{chinese_scale}")
    return f"<figure><h3>{title}</h3>{''.join(svg)}<figcaption>{' '.join(legend)}</figcaption></figure>"


def _legend(chart: Chart, kind: str, finite: Points, broken: int, label: Callable[[float], str]) -> str:
    english, chinese = [], []
    if finite:
        last = label(finite[-1][1])
        english.append(f"last {last}")
        chinese.append(f"最后 {last}")
    if finite and kind != "train" and chart.key in ("loss", "top1"):
        step, best = (min if chart.key == "loss" else max)(finite, key=lambda point: point[1])
        english.append(f"best {label(best)} at step {step:g}")
        chinese.append(f"最好 {label(best)}（第 {step:g} 步）")
    if broken:
        english.append(f"{broken} not finite (×)")
        chinese.append(f"{broken} 个不是有限数（×）")
    shown = both(f"<b>{kind}</b> {', '.join(english)}", f"<b>{KINDS[kind]}</b> {'，'.join(chinese)}")
    return f'<span class="key {kind}">{shown}</span>'


def _low(values: Sequence[float], from_zero: bool) -> float:
    low, high = min(values), max(values)
    return 0.0 if low >= 0 and (from_zero or low < high / 3) else low


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers around [low, high]."""
    if high <= low:
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    size = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(m * size for m in (1, 2, 2.5, 5, 10, 20) if (high - low) / (m * size) <= about)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _decades(values: Sequence[float]) -> list[float]:
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return [10.0**i for i in range(first, last + 1)]


def _short(value: float) -> str:
    """12000 -> 12k, 0.00025 -> 2.5e-4"""
    if abs(value) >= 1e6:
        return f"{value / 1e6:.4g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.4g}k"
    if 0 < abs(value) < 0.01:
        return re.sub(r"\.?0*e-0?", "e-", f"{value:.3e}")
    return f"{value:.4g}"


def _path(points: Points, at: Callable[[float, float], str]) -> str:
    """SVG path; a value that is not finite breaks the line."""
    pieces, pen = [], "M"
    for x, y in points:
        if math.isfinite(y):
            pieces.append(pen + at(x, y))
        pen = "L" if math.isfinite(y) else "M"
    return "".join(pieces)


def _thin(points: Points, most: int = 600) -> Points:
    """Of a long curve, the lowest and the highest point of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return points
    kept = {0, len(points) - 1} | {i for i, (_, y) in enumerate(points) if not math.isfinite(y)}
    for stretch in np.array_split(np.arange(len(points)), most // 2):
        heights = np.nan_to_num([points[i][1] for i in stretch])
        kept |= {int(stretch[heights.argmin()]), int(stretch[heights.argmax()])}
    return [points[i] for i in sorted(kept)]


def _running_mean(points: Points) -> Points:
    """Mean over a window around each point; at the ends the window is cut, not filled."""
    y = np.array([value for _, value in points])
    total = np.concatenate([[0.0], np.cumsum(y)])
    half = max(len(points) // 50, 2)
    i = np.arange(len(points))
    first, last = np.maximum(i - half, 0), np.minimum(i + half + 1, len(points))
    mean = (total[last] - total[first]) / (last - first)
    return [(x, float(m)) for (x, _), m in zip(points, mean, strict=True)]
