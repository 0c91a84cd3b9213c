"""Faithfulness curves: the probability of the class while patches are removed or inserted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vitlab.explain.draw.sheet import INK, MARGIN, SOFT, Sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.explain.faithfulness import MethodScore

ABOUT = {
    "deletion": ("Deletion", "most important patches away first; lower is better"),
    "insertion": ("Insertion", "most important patches in first; higher is better"),
    "road": ("ROAD", "taken patches filled in from around them; lower is better"),
}
WIDE, TALL, APART = 440, 360, 90
ENOUGH = 4  # images for a standard error


def faithfulness(scores: Sequence[MethodScore], *, title: str = "Faithfulness") -> Figure:
    """A panel for each kind of test, a line for each method: the mean over images; bands are its standard error."""
    kinds = list(dict.fromkeys(score.kind for score in scores))
    images = len(scores[0].curves)
    width = max(2 * MARGIN + 40 + len(kinds) * (WIDE + APART) - APART, 660)
    sheet = Sheet(
        width, 2 * MARGIN + TALL + 210 + 22 * _longest(scores), title + "".join(score.method for score in scores)
    )
    sheet.text(MARGIN, MARGIN + 12, title, 12, INK)
    about = f"probability of the class, mean of {images} image{'s' if images > 1 else ''}"
    about += "; bands: standard error" if images >= ENOUGH else ": not a study of the methods" if images == 1 else ""
    sheet.text(MARGIN, MARGIN + 46, about, 7.5, SOFT)
    for number, kind in enumerate(kinds):
        x, y = MARGIN + 40 + number * (WIDE + APART), MARGIN + 140
        name, label = ABOUT[kind]
        sheet.text(x, y - 46, name, 9.5, INK)
        sheet.text(x, y - 20, label, 7, SOFT)
        axes = sheet.axes(x, y, WIDE, TALL)
        axes.set(xlim=(0, 1), ylim=(0, 1))
        axes.set_xlabel(
            f"share of patches {'put in' if kind == 'insertion' else 'taken away'}", fontsize=7.5, color=SOFT
        )
        mine = [score for score in scores if score.kind == kind]
        best_first = sorted(mine, key=lambda score: float(score.areas.mean()), reverse=kind == "insertion")
        for i, score in enumerate(mine):
            curve = score.curves.numpy()  # (B, steps + 1)
            share, middle = np.linspace(0, 1, curve.shape[1]), curve.mean(0)
            chance = score.method == "random"
            colour, style = (SOFT, "--") if chance else (f"C{i % 10}", "-")
            axes.plot(share, middle, color=colour, linestyle=style, linewidth=1.2 if chance else 1.8)
            if images >= ENOUGH:
                band = curve.std(0, ddof=1) / images**0.5
                axes.fill_between(share, middle - band, middle + band, color=colour, alpha=0.12, linewidth=0)
            place = y + TALL + 84 + 22 * best_first.index(score)
            sheet.canvas.plot([x, x + 26], [place, place], color=colour, linestyle=style, linewidth=1.8)
            sheet.text(x + 36, place + 5, score.method, 7.5, INK, va="baseline")
            label = f"area {float(score.areas.mean()):.3f}"
            sheet.text(x + WIDE, place + 5, label, 7.5, SOFT, ha="right", va="baseline")
    return sheet.figure


def _longest(scores: Sequence[MethodScore]) -> int:
    """The number of methods in the longest panel."""
    return max(sum(score.kind == kind for score in scores) for kind in {score.kind for score in scores})
