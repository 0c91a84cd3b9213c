"""Which classes are taken for which: the confusion matrix and the accuracy of each class."""

from __future__ import annotations

import math

import numpy as np

from vitlab.training.report.html import both, cut, data_url, ems, escaped, name_html, percent, section
from vitlab.training.uncertainty import wilson


def class_tables(counts: np.ndarray, classes: list[str]) -> str:
    matrix = section("Confusion matrix", "混淆矩阵", _confusion(counts, classes))
    table = section("Accuracy per class", "各类准确率", _per_class(counts, classes))
    return f'<div class="{"pair" if len(classes) <= 12 else ""}">{matrix}{table}</div>'


def _confusion(counts: np.ndarray, classes: list[str]) -> str:
    total, right = int(counts.sum()), int(np.trace(counts))
    low, high = wilson(right / total, total)
    share, span = percent(right / total, 2), (percent(low), percent(high))
    english = (
        f"Rows are the truth, columns the prediction. {right:,} of {total:,} right: {share}, "
        f"95 % interval {span[0]} to {span[1]}."
    )
    chinese = (
        f"行为真实类别，列为预测类别。{total:,} 张中答对 {right:,} 张：{share}，95 % 置信区间 {span[0]} 到 {span[1]}。"
    )
    caption = f"<p>{both(english, chinese)}</p>"
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)  # of the row, that is of the truth
    drawing = _matrix(counts, shares, classes) if len(classes) <= 100 else _matrix_image(shares)
    return f'{caption}<div class="wide">{drawing}</div>{_confused_pairs(counts, classes)}'


def _matrix(counts: np.ndarray, shares: np.ndarray, classes: list[str]) -> str:
    K = len(classes)
    cell = 42 if K <= 12 else 28 if K <= 25 else 18 if K <= 50 else 11
    font, shrink = min(12.0, cell * 0.8), 0.7 if K <= 25 else 1.0  # how far a phone may shrink it before it scrolls
    names = [cut(name, 16) for name in classes]
    left = 10 + max(ems(name) for name in names) * font
    flat_names = max(ems(name) for name in names) * font <= cell - 4  # the names fit above their columns
    top = font + 10 if flat_names else left
    w, h = left + K * cell + 1, top + K * cell + 1
    svg = [
        f'<svg class="matrix" viewBox="0 0 {w:.0f} {h:.0f}" style="max-width:{w:.0f}px;min-width:{shrink * w:.0f}px" '
        f'font-size="{font:g}" role="img" aria-label="Confusion matrix">',
        f'<rect class="frame" x="{left:.1f}" y="{top:.1f}" width="{K * cell}" height="{K * cell}" />',
    ]
    for k, (name, full_name) in enumerate(zip(names, classes, strict=True)):
        middle = (k + 0.5) * cell
        inner = f"{escaped(name)}<title>{escaped(full_name)}</title>"
        svg.append(f'<text class="row" x="{left - 6:.1f}" y="{top + middle:.1f}" dy=".35em">{inner}</text>')
        kind = "column" if flat_names else "upright"
        svg.append(f'<text class="{kind}" x="{left + middle:.1f}" y="{top - 6:.1f}">{inner}</text>')
        if K > 25 and k and k % 10 == 0:  # to follow a row by eye
            x, y = left + k * cell, top + k * cell
            svg.append(f'<path class="grid" d="M{left:.1f},{y:.1f}h{K * cell}M{x:.1f},{top:.1f}v{K * cell}" />')
    for i, j in np.argwhere(counts > 0):
        x, y, n, share = left + j * cell, top + i * cell, int(counts[i, j]), float(shares[i, j])
        kind, strength = ("right", 0.08 + 0.52 * share) if i == j else ("wrong", 0.15 + 0.6 * math.sqrt(share))
        tooltip = f"{classes[i]} → {classes[j]}: {n} ({percent(share)})"
        svg.append(
            f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{cell}" height="{cell}" '
            f'fill-opacity="{strength:.2f}" data-at="{i},{j}" data-n="{n}"><title>{escaped(tooltip)}</title></rect>'
        )
        if cell >= 28 and len(str(n)) * 7 < cell:
            svg.append(f'<text class="count" x="{x + cell / 2:.1f}" y="{y + cell / 2:.1f}" dy=".35em">{n}</text>')
    return "".join(svg) + "</svg>"


def _matrix_image(shares: np.ndarray) -> str:
    """More classes than a page can name: a pixel each, see-through where nothing is, so it suits light and dark."""
    colour = np.zeros((*shares.shape, 4), np.uint8)  # (K, K, RGBA)
    colour[..., :3] = (209, 67, 43)
    colour[..., 3] = 255 * np.sqrt(shares)
    diagonal = np.arange(len(shares))
    colour[diagonal, diagonal, :3] = (31, 143, 111)
    return f'<img class="matrix pixels" alt="Confusion matrix" src="{data_url(colour)}" />'


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
                f"<tr><td>{name_html(classes[i])}</td><td>{name_html(classes[j])}</td>"
                f'<td class="n">{wrong[i, j]}</td><td class="n">{percent(share)}</td></tr>'
            )
    head = (
        f"<tr><th>{both('truth', '真实')}</th><th>{both('taken for', '误认为')}</th>"
        f'<th class="n">{both("times", "次数")}</th><th class="n">{both("of the class", "占该类")}</th></tr>'
    )
    return (
        f"<h3>{both('Most often confused', '最易混淆')}</h3>"
        f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'
    )


def _per_class(counts: np.ndarray, classes: list[str]) -> str:
    """Worst first; classes without images last."""
    totals = counts.sum(axis=1)
    share = [counts[k, k] / totals[k] if totals[k] else math.inf for k in range(len(classes))]
    rows = []
    for k in sorted(range(len(classes)), key=lambda k: share[k]):
        others = counts[k].copy()
        others[k] = 0
        other = f"{name_html(classes[int(others.argmax())])} ({others.max()})" if others.any() else ""
        present = bool(totals[k])
        bar = f'<span class="bar" style="--share:{share[k]:.4f}"></span>' if present else ""
        shown = (
            f'<data value="{float(share[k])!r}">{percent(share[k])}</data>'
            if present
            else both("no images", "没有图片")
        )
        rows.append(
            f"<tr><td>{name_html(classes[k])}</td><td>{shown}{bar}</td>"
            f'<td class="n">{counts[k, k]} / {totals[k]}</td><td>{other}</td></tr>'
        )
    head = (
        f"<tr><th>{both('class', '类别')}</th><th>{both('accuracy', '准确率')}</th>"
        f'<th class="n">{both("right / all", "答对 / 全部")}</th><th>{both("taken for", "误认为")}</th></tr>'
    )
    table = f'<table class="classes"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="wide tall">{table}</div>'
