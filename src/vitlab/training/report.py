"""A run -> report.html: one file that needs nothing else, neither network nor script, and can be mailed.

Curves and tables are SVG and HTML text, so the reader's own fonts draw every language; the page is also valid XML.
"""

from __future__ import annotations

import base64
import html
import io
import math
import re
import time
import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.training.runs import flat
from vitlab.version import __version__

REPORT = "report.html"
Points = list[tuple[float, float]]  # (step, value)


@dataclass(frozen=True)
class Mistake:
    """A picture and what the model took it for (rightly or not)."""

    image: np.ndarray  # (H, W, C) or (H, W), uint8
    truth: str
    predicted: str
    confidence: float  # probability of `predicted`
    name: str  # where the picture comes from


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
TILES = {  # key of result.json -> what it is called
    "top1": ("Top-1 accuracy", "准确率"),
    "top5": ("Top-5 accuracy", "前五准确率"),
    "loss": ("Loss", "损失"),
    "params": ("Parameters", "参数量"),
    "epochs": ("Epochs", "轮数"),
    "seconds": ("Training time", "训练用时"),
    "images_per_second": ("Images per second", "每秒图像数"),
}


def write_report(
    folder: Path,
    *,
    log: list[dict[str, Any]],
    recipe_text: str,
    result: dict[str, Any],
    classes: list[str],
    confusion: np.ndarray | None,
    mistakes: list[Mistake],
    samples: list[Mistake],
    environment: dict[str, Any],
) -> Path:
    """Write folder/report.html. `confusion` is (K, K), rows = truth; accuracies are shares of one."""
    from vitlab.checkpoints.native import write_whole

    folder = Path(folder)
    assert confusion is None or confusion.shape == (len(classes), len(classes)), (np.shape(confusion), len(classes))
    worst = sorted(mistakes, key=lambda m: -m.confidence)
    body = "\n".join(
        [
            _header(folder.resolve().name, log, recipe_text, result, len(classes)),
            _section("Curves", "曲线", _curves(log)),
            _section("Events", "事件", _events(log)),
            "" if confusion is None or not confusion.any() else _classes(confusion, classes),
            _section("Worst mistakes", "最严重的错误", _pictures(worst, "Wrong, and most sure of it, first.")),
            _section("Sample predictions", "预测示例", _pictures(samples, "Pictures the model was not trained on.")),
            _section("All numbers", "全部数值", _table_of(result)),
            _section("Recipe", "配方", f"<pre>{_text(recipe_text.strip())}</pre>" if recipe_text.strip() else ""),
            _section("Environment", "环境", _table_of(environment)),
        ]
    )
    page = PAGE.format(title=_text(folder.resolve().name), style=STYLE, body=body, version=_text(__version__))
    path = folder / REPORT
    write_whole(path, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return path


# ---------------------------------------------------------------------------------------------------- text and numbers


def _text(value: object) -> str:
    """Anything -> text that is safe in HTML, also inside quotes.

    What no page may hold (control characters, the halves of file names that are not UTF-8) becomes U+FFFD.
    """
    shown = re.sub(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", str(value))
    return html.escape(shown, quote=True)


def _name(value: object) -> str:
    return f'<bdi class="name">{_text(value)}</bdi>'  # bdi: a right-to-left name does not turn its neighbours


def _number(key: str, value: Any) -> str:
    """As people read it; the exact value stays in the markup."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _text("–" if value is None else value)
    if not math.isfinite(value):
        shown = str(value)
    elif key.split(".")[-1] in ("top1", "top5", "accuracy", "val_top1", "test_top1", "ece"):
        shown = _percent(value, 2)
    elif key == "seconds":
        shown = duration(value)
    elif isinstance(value, int):
        shown = f"{value:,}" if key not in ("seed", "step") else str(value)
    else:
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f'<data value="{value!r}">{shown}</data>'


def _percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def duration(seconds: float) -> str:
    """75 -> 1 min 15 s"""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {s:02} s"


def _section(title: str, chinese: str, content: str) -> str:
    if not content:
        return ""
    return f'<section>\n<h2>{title} <span lang="zh-CN">· {chinese}</span></h2>\n{content}\n</section>'


def _table_of(values: dict[str, Any]) -> str:
    rows = [f"<tr><th>{_text(key)}</th><td>{_number(key, value)}</td></tr>" for key, value in flat(values).items()]
    return f'<div class="wide"><table class="pairs">{"".join(rows)}</table></div>' if rows else ""


def _header(name: str, log: list[dict[str, Any]], recipe_text: str, result: dict[str, Any], classes: int) -> str:
    try:
        recipe = flat(tomllib.loads(recipe_text))
    except tomllib.TOMLDecodeError:
        recipe = {}
    about = [" on ".join(_name(recipe[key]) for key in ("model.name", "data.source") if recipe.get(key))]
    if "seed" in result:
        about.append(f"seed {_number('seed', result['seed'])}")
    if log and log[-1].get("time"):
        ended = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(log[-1]["time"]))
        about.append(f'<time datetime="{ended[:10]}T{ended[11:16]}Z">{ended}</time>')
    line = " · ".join(part for part in about if part)
    tiles = [
        f'<div><dt>{title} <span lang="zh-CN">{chinese}</span></dt><dd>{_number(key, result[key])}</dd></div>'
        for key, (title, chinese) in TILES.items()
        if key in result and not (key == "top5" and classes <= 10)  # five guesses of ten say little
    ]
    return f'<header>\n<h1>{_name(name)}</h1>\n<p>{line}</p>\n</header>\n<dl class="tiles">{"".join(tiles)}</dl>'


def _events(log: list[dict[str, Any]], most: int = 40) -> str:
    """What is neither a curve nor a start: notes, skipped pictures, resumes."""
    events = [e for e in log if e["kind"] not in ("train", "val", "test", "start", "result")]
    rows = []
    for event in events[:most]:
        rest = {k: v for k, v in event.items() if k not in ("kind", "step", "time", "text", "message")}
        words = [str(event[key]) for key in ("text", "message") if key in event]
        words += [f"{key}: {value}" for key, value in flat(rest).items()]
        kind, step = _text(event["kind"]), event["step"]
        rows.append(f'<tr><td>{step}</td><td>{kind}</td><td class="name">{_text("; ".join(words))}</td></tr>')
    if len(events) > most:
        rows.append(f"<tr><td></td><td></td><td>and {len(events) - most} more, in log.jsonl</td></tr>")
    head = "<tr><th>step</th><th>kind</th><th>what</th></tr>"
    return f'<div class="wide"><table class="events">{head}{"".join(rows)}</table></div>' if rows else ""


# ------------------------------------------------------------------------------------------------------------- curves

W, H, LEFT, RIGHT, TOP, BOTTOM = 560, 270, 66, 16, 14, 34  # of a chart, in SVG units


def _curves(log: list[dict[str, Any]]) -> str:
    last = max((event["step"] for event in log), default=0) or 1  # one scale for all, to compare them by eye
    charts = [_chart(chart, series, last) for chart in CHARTS if (series := _series(log, chart.key))]
    return f'<div class="charts">{"".join(charts)}</div>' if charts else ""


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
            told = f"{kind}, step {_short(x)}: {label(y)}"
            svg.append(f'<circle class="{kind}" cx="{cx}" cy="{cy}" r="3"><title>{told}</title></circle>')
        broken = [(x, y) for x, y in points if not math.isfinite(y)]
        for x, y in broken[:20]:
            across = at(x, y_ticks[0]).split(",")[0]
            svg.append(f'<text class="broken" x="{across}" y="{TOP + 8}">×<title>step {x:g}: {y}</title></text>')
        legend.append(_legend(chart, kind, finite, len(broken), label))
    svg.append("</svg>")
    scale = " (logarithmic)" if logarithmic else ""
    title = f'<h3>{chart.title}{scale} <span lang="zh-CN">· {chart.chinese}</span></h3>'
    return f"<figure>{title}{''.join(svg)}<figcaption>{' '.join(legend)}</figcaption></figure>"


def _legend(chart: Chart, kind: str, finite: Points, broken: int, label: Any) -> str:
    words = []
    if finite:
        words.append(f"last {label(finite[-1][1])}")
    if finite and kind != "train" and chart.key in ("loss", "top1"):
        step, best = (min if chart.key == "loss" else max)(finite, key=lambda point: point[1])
        words.append(f"best {label(best)} at step {step:g}")
    if broken:
        words.append(f"{broken} not finite (×)")
    return f'<span class="key {kind}"><b>{kind}</b> {", ".join(words)}</span>'


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


def _path(points: Points, at: Any) -> str:
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


# ------------------------------------------------------------------------------------------- classes and their pictures


def _classes(counts: np.ndarray, classes: list[str]) -> str:
    matrix = _section("Confusion matrix", "混淆矩阵", _confusion(counts, classes))
    table = _section("Accuracy per class", "各类准确率", _per_class(counts, classes))
    return f'<div class="{"pair" if len(classes) <= 12 else ""}">{matrix}{table}</div>'


def _confusion(counts: np.ndarray, classes: list[str]) -> str:
    total, right = int(counts.sum()), int(np.trace(counts))
    low, high = _wilson(right, total)
    caption = (
        f'<p>Rows are the truth, columns the prediction. <span lang="zh-CN">行为真实类别，列为预测类别。</span> '
        f"{right:,} of {total:,} right: {_percent(right / total, 2)}, "
        f"95 % interval {_percent(low)} to {_percent(high)}.</p>"
    )
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # of the row, that is of the truth
    drawing = _matrix(counts, shares, classes) if len(classes) <= 100 else _matrix_picture(shares)
    return f'{caption}<div class="wide">{drawing}</div>{_confused_pairs(counts, classes)}'


def _wilson(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval for a share, which holds near 0 and 1 where the plain one does not."""
    p, n = right / total, total
    middle, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max((middle - width) / (1 + z * z / n), 0.0), min((middle + width) / (1 + z * z / n), 1.0)


def _matrix(counts: np.ndarray, shares: np.ndarray, classes: list[str]) -> str:
    K = len(classes)
    cell = 42 if K <= 12 else 28 if K <= 25 else 18 if K <= 50 else 11
    font, shrink = min(12.0, cell * 0.8), 0.7 if K <= 25 else 1.0  # how far a phone may shrink it before it scrolls
    names = [_cut(name, 16) for name in classes]
    left = 10 + max(_ems(name) for name in names) * font
    flat_names = max(_ems(name) for name in names) * font <= cell - 4  # the names fit above their columns
    top = font + 10 if flat_names else left
    w, h = left + K * cell + 1, top + K * cell + 1
    svg = [
        f'<svg class="matrix" viewBox="0 0 {w:.0f} {h:.0f}" style="max-width:{w:.0f}px;min-width:{shrink * w:.0f}px" '
        f'font-size="{font:g}" role="img" aria-label="Confusion matrix">',
        f'<rect class="frame" x="{left:.1f}" y="{top:.1f}" width="{K * cell}" height="{K * cell}" />',
    ]
    for k, (name, whole) in enumerate(zip(names, classes, strict=True)):
        middle = (k + 0.5) * cell
        inner = f"{_text(name)}<title>{_text(whole)}</title>"
        svg.append(f'<text class="row" x="{left - 6:.1f}" y="{top + middle:.1f}" dy=".35em">{inner}</text>')
        kind = "column" if flat_names else "upright"
        svg.append(f'<text class="{kind}" x="{left + middle:.1f}" y="{top - 6:.1f}">{inner}</text>')
        if K > 25 and k and k % 10 == 0:  # to follow a row by eye
            x, y = left + k * cell, top + k * cell
            svg.append(f'<path class="grid" d="M{left:.1f},{y:.1f}h{K * cell}M{x:.1f},{top:.1f}v{K * cell}" />')
    for i, j in np.argwhere(counts > 0):
        x, y, n, share = left + j * cell, top + i * cell, int(counts[i, j]), float(shares[i, j])
        kind, strength = ("right", 0.08 + 0.52 * share) if i == j else ("wrong", 0.15 + 0.6 * math.sqrt(share))
        told = f"{classes[i]} → {classes[j]}: {n} ({_percent(share)})"
        svg.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{cell}" height="{cell}" '
            f'fill-opacity="{strength:.2f}" data-at="{i},{j}" data-n="{n}"><title>{_text(told)}</title></rect>'
        )
        if cell >= 28 and len(str(n)) * 7 < cell:
            svg.append(f'<text class="count" x="{x + cell / 2:.1f}" y="{y + cell / 2:.1f}" dy=".35em">{n}</text>')
    return "".join(svg) + "</svg>"


def _matrix_picture(shares: np.ndarray) -> str:
    """More classes than a page can name: a pixel each, see-through where nothing is, so it suits light and dark."""
    colour = np.zeros((*shares.shape, 4), np.uint8)  # (K, K, RGBA)
    colour[..., :3] = (209, 67, 43)
    colour[..., 3] = 255 * np.sqrt(shares)
    diagonal = np.arange(len(shares))
    colour[diagonal, diagonal, :3] = (31, 143, 111)
    return f'<img class="matrix pixels" alt="Confusion matrix" src="{_data_url(colour)}" />'


def _confused_pairs(counts: np.ndarray, classes: list[str], most: int = 12) -> str:
    wrong = counts - np.diag(np.diag(counts))
    if len(classes) <= 12 or not wrong.any():
        return ""
    rows = []
    for at in np.argsort(-wrong, axis=None, kind="stable")[:most]:
        i, j = np.unravel_index(at, wrong.shape)
        if wrong[i, j]:
            share = wrong[i, j] / counts[i].sum()
            rows.append(
                f"<tr><td>{_name(classes[i])}</td><td>{_name(classes[j])}</td>"
                f'<td class="n">{wrong[i, j]}</td><td class="n">{_percent(share)}</td></tr>'
            )
    head = '<tr><th>truth</th><th>taken for</th><th class="n">times</th><th class="n">of the class</th></tr>'
    return (
        '<h3>Most often confused <span lang="zh-CN">· 最易混淆</span></h3>'
        f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'
    )


def _per_class(counts: np.ndarray, classes: list[str]) -> str:
    """Worst first; classes without pictures last."""
    totals = counts.sum(axis=1)
    share = [counts[k, k] / totals[k] if totals[k] else math.inf for k in range(len(classes))]
    rows = []
    for k in sorted(range(len(classes)), key=lambda k: share[k]):
        others = counts[k].copy()
        others[k] = 0
        other = f"{_name(classes[int(others.argmax())])} ({others.max()})" if others.any() else ""
        known = bool(totals[k])
        bar = f'<span class="bar" style="--share:{share[k]:.4f}"></span>' if known else ""
        shown = f'<data value="{float(share[k])!r}">{_percent(share[k])}</data>' if known else "no pictures"
        rows.append(
            f"<tr><td>{_name(classes[k])}</td><td>{shown}{bar}</td>"
            f'<td class="n">{counts[k, k]} / {totals[k]}</td><td>{other}</td></tr>'
        )
    head = '<tr><th>class</th><th>accuracy</th><th class="n">right / all</th><th>taken for</th></tr>'
    table = f'<table class="classes"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="wide tall">{table}</div>'


def _pictures(pictures: list[Mistake], caption: str) -> str:
    figures = []
    for p in pictures:
        right = p.truth == p.predicted
        verdict = _name(p.predicted) if right else f"{_name(p.truth)} → <b>{_name(p.predicted)}</b>"
        mark = '<span class="yes">✓</span>' if right else '<span class="no">✗</span>'
        alt = _text(f"{p.name}: {p.truth}, predicted {p.predicted}")
        small = ' class="pixels"' if max(p.image.shape[:2]) <= 96 else ""
        figures.append(
            f'<figure><img{small} alt="{alt}" src="{_data_url(p.image)}" /><figcaption>{mark} {verdict} · '
            f'<data value="{float(p.confidence)!r}">{_percent(p.confidence)}</data>'
            f'<small title="{_text(p.name)}">{_name(p.name)}</small></figcaption></figure>'
        )
    return f'<p>{caption}</p><div class="pictures">{"".join(figures)}</div>' if figures else ""


def _data_url(image: np.ndarray, side: int = 224) -> str:
    """PNG, exact; photographs beyond thumbnail size as JPEG, no larger than `side`."""
    from PIL import Image

    assert image.dtype == np.uint8, image.dtype
    if image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    picture, kind = Image.fromarray(image), "png"
    if max(picture.size) > 96 and picture.mode in ("L", "RGB"):
        picture.thumbnail((side, side), Image.Resampling.LANCZOS)
        kind = "jpeg"
    buffer = io.BytesIO()
    picture.save(buffer, kind, **({"quality": 90} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _ems(text: str) -> float:
    """About how wide a text is, in font sizes."""
    return sum(1.0 if unicodedata.east_asian_width(c) in "WF" else 0.6 for c in text)


def _cut(text: str, most: float) -> str:
    text = " ".join(text.split())
    if _ems(text) <= most:
        return text
    while text and _ems(text) > most - 1:
        text = text[:-1]
    return text + "…"


# --------------------------------------------------------------------------------------------------------------- page

PAGE = """<!DOCTYPE html>
<html lang="en" xmlns="http://www.w3.org/1999/xhtml">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'" />
<title>{title} · vitlab</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
<footer>vitlab {version}</footer>
</main>
</body>
</html>
"""

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #f6f6f3; --card: #ffffff; --ink: #1c2126; --soft: #646d78; --line: #e2e4e6;
  --train: #2f6fd0; --val: #d4700c; --test: #1f8f6f; --right: #1f8f6f; --wrong: #d1432b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #111417; --card: #191d21; --ink: #e7e9ec; --soft: #98a2ad; --line: #2d3339;
    --train: #74a9ff; --val: #ffae63; --test: #56cfa8; --right: #45c79c; --wrong: #ff7a63;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "PingFang SC", "Microsoft YaHei",
    "Noto Sans CJK SC", "Source Han Sans SC", "WenQuanYi Micro Hei", sans-serif;
}
main { max-width: 1160px; margin: 0 auto; padding: 32px 20px 48px; }
header p { margin: 2px 0 0; color: var(--soft); }
h1 { margin: 0; font-size: 30px; line-height: 1.2; letter-spacing: -.01em; }
h2 { margin: 0 0 12px; font-size: 19px; }
h3 { margin: 0 0 6px; font-size: 14px; }
h2 span, h3 span, dt span, p span { color: var(--soft); font-weight: 400; }
section h3:not(figure h3) { margin-top: 20px; }
section, .tiles div {
  background: var(--card); border: 1px solid var(--line); border-radius: 12px; min-width: 0;
}
section { margin-top: 20px; padding: 20px 22px; }
section > p { margin: 0 0 12px; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 520px), 1fr)); column-gap: 20px; }
.name { overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(136px, 1fr)); gap: 12px; margin: 22px 0 0; }
.tiles div { padding: 12px 16px; }
.tiles div:first-child { border-left: 4px solid var(--train); }
dt { font-size: 12px; color: var(--soft); }
dt span { display: block; }
dd { margin: 2px 0 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
figure { margin: 0; min-width: 0; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 26px 30px; }
svg { display: block; width: 100%; height: auto; overflow: visible; font-family: inherit; }
svg text { fill: var(--soft); }
.tick { font-size: 12px; font-variant-numeric: tabular-nums; }
.y.tick { text-anchor: end; }
.x.tick { text-anchor: middle; }
.grid { stroke: var(--line); stroke-width: 1; vector-effect: non-scaling-stroke; }
path { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke; }
path.raw { opacity: .3; stroke-width: 1; }
path.train { stroke: var(--train); }
path.val { stroke: var(--val); }
path.test { stroke: var(--test); }
circle.train { fill: var(--train); }
circle.val { fill: var(--val); }
circle.test { fill: var(--test); }
svg .broken { fill: var(--wrong); font-size: 18px; text-anchor: middle; font-weight: 700; }
figcaption { font-size: 13px; color: var(--soft); font-variant-numeric: tabular-nums; }
.key { display: inline-block; margin-right: 14px; }
.key b { color: var(--ink); }
.key::before {
  content: ""; display: inline-block; width: 14px; height: 3px; border-radius: 2px; margin-right: 6px;
  vertical-align: middle; background: currentColor;
}
.key.train::before { background: var(--train); }
.key.val::before { background: var(--val); }
.key.test::before { background: var(--test); }
.wide { overflow-x: auto; }
.tall { max-height: 560px; overflow-y: auto; }
.frame { fill: none; stroke: var(--line); }
rect.right { fill: var(--right); }
rect.wrong { fill: var(--wrong); }
svg .row { text-anchor: end; }
svg .upright { text-anchor: end; writing-mode: vertical-rl; }
svg .column, svg .count { text-anchor: middle; }
svg .count { fill: var(--ink); font-variant-numeric: tabular-nums; pointer-events: none; }
img.matrix { width: 100%; max-width: 800px; border: 1px solid var(--line); }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; vertical-align: top; padding: 5px 18px 5px 0; border-bottom: 1px solid var(--line); }
tr:last-child > * { border-bottom: 0; }
th { font-weight: 600; white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--card); }
.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.pairs th { color: var(--soft); font-weight: 400; }
.pairs td { overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
.classes td { vertical-align: middle; }
.classes td:first-child, .classes td:last-child { min-width: 6em; }
.bar { display: block; width: 120px; height: 5px; border-radius: 3px; background: var(--line); overflow: hidden; }
.bar::before {
  content: ""; display: block; height: 100%; width: calc(100% * var(--share)); background: var(--right);
}
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(132px, 1fr)); gap: 18px 14px; }
.pictures img {
  display: block; width: 100%; aspect-ratio: 1; object-fit: contain; border-radius: 8px; background: var(--paper);
}
.pixels { image-rendering: pixelated; }
.pictures figcaption { margin-top: 6px; line-height: 1.35; overflow-wrap: anywhere; }
.pictures b { color: var(--ink); }
.pictures data { white-space: nowrap; }
.pictures small {
  display: block; font-size: 11px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis; opacity: .8;
}
.yes { color: var(--right); font-weight: 700; }
.no { color: var(--wrong); font-weight: 700; }
pre {
  margin: 0; columns: 260px; column-gap: 32px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "Noto Sans Mono CJK SC", monospace;
}
footer { margin-top: 20px; color: var(--soft); font-size: 13px; }
@media (max-width: 720px) {
  main { padding: 20px 12px 32px; }
  section { padding: 16px 14px; }
  h1 { font-size: 24px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tiles div:first-child:nth-last-child(odd) { grid-column: span 2; }
  dd { font-size: 19px; }
  .charts { grid-template-columns: minmax(0, 1fr); }
  .tick { font-size: 19px; }
  .bar { width: 60px; }
  th, td { padding-right: 12px; }
  th:last-child, td:last-child { padding-right: 0; }
  .classes td:first-child, .classes td:last-child { min-width: 4.5em; }
  .pictures { grid-template-columns: repeat(auto-fill, minmax(96px, 1fr)); }
}
@media print { .tall { max-height: none; } section { break-inside: avoid; } }
"""
