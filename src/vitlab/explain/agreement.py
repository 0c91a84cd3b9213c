"""How far two heat maps agree: the rank correlation of their values, patch by patch or, where the patches differ, on
the picture itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitlab.explain.draw.heatmap import spread
from vitlab.explain.views import View

RASTER = 64  # pixels along each side, where two models cut a picture differently


def agreement(
    first_views: Sequence[View], first: np.ndarray, second_views: Sequence[View], second: np.ndarray
) -> np.ndarray:
    """(B,): Spearman's rank correlation of each picture's two maps; nan where one of them is constant.

    Maps are (B, grid_h, grid_w). Pixels that one of the models never saw do not count.
    """
    from scipy.stats import rankdata

    found = []
    for a, one, b, other in zip(first_views, first, second_views, second, strict=True):
        if one.shape == other.shape and a.geometry == b.geometry and a.size == b.size:
            x, y = one.ravel(), other.ravel()
        else:
            x, y = (spread(m, v, (RASTER, RASTER), smooth=False).ravel() for m, v in ((one, a), (other, b)))
            both = np.isfinite(x) & np.isfinite(y)
            x, y = x[both], y[both]
        x, y = (v - v.mean() for v in (rankdata(x), rankdata(y)))
        length = np.sqrt((x**2).sum() * (y**2).sum()) if len(x) else 0.0
        found.append((x * y).sum() / length if length else np.nan)
    return np.array(found)
