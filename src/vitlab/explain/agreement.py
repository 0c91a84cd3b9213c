"""Rank correlation of two heat maps, patch by patch or, where the patches differ, pixel by pixel."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vitlab.explain.draw.heatmap import spread
from vitlab.explain.views import View

RASTER = 64  # pixels along each side, where two models have different patches


def agreement(
    first_views: Sequence[View], first: np.ndarray, second_views: Sequence[View], second: np.ndarray
) -> np.ndarray:
    """(B,): Spearman's rank correlation of each image's two maps; nan where one of them is constant.

    Maps are (B, grid_h, grid_w). Pixels that one of the models did not see are left out.
    """
    from scipy.stats import rankdata

    correlations = []
    for a, one, b, other in zip(first_views, first, second_views, second, strict=True):
        if one.shape == other.shape and a.geometry == b.geometry and a.size == b.size:
            x, y = one.ravel(), other.ravel()
        else:
            x, y = (spread(m, v, (RASTER, RASTER), smooth=False).ravel() for m, v in ((one, a), (other, b)))
            both = np.isfinite(x) & np.isfinite(y)
            x, y = x[both], y[both]
        x, y = (v - v.mean() for v in (rankdata(x), rankdata(y)))
        length = np.sqrt((x**2).sum() * (y**2).sum()) if len(x) else 0.0
        correlations.append((x * y).sum() / length if length else np.nan)
    return np.array(correlations)
