"""How the values of a heat map become colours. All figures, pages and the server's PNG come here.

    low, high = limits(heat, "percentile")     # the values with the darkest and the brightest colour
    positions(heat, low, high)                 # 0 to 1; what lies outside the limits is clipped

A few tokens of a trained ViT can draw a hundred times the attention of the others (arXiv:2309.16588). From its lowest
value to its highest such a map is black with a dot, so the default leaves 1 % out at either end. Stored numbers are
never scaled. This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING

from vitlab.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

LOWEST, HIGHEST = 1, 99  # percentiles
DECADES = 3  # that a log scale spans at most: rounding errors around 0 would otherwise fill it


@dataclass(frozen=True)
class ScaleText:
    ends: tuple[str, str]  # beside the colour bar
    signed: str  # of maps with two colours, where it is not from 0 to the largest value


SCALES: dict[str, ScaleText] = {
    "percentile": ScaleText(
        (f"{LOWEST}st percentile of each map", f"{HIGHEST}th"),
        f"Full colour: the {HIGHEST}th percentile of each map's absolute values.",
    ),
    "log": ScaleText(
        (f"each map's lowest value, at least 1/{10**DECADES} of", "its highest, log scale"),
        f"Log scale, {DECADES} decades.",
    ),
    "minmax": ScaleText(("each map's lowest value", "its highest"), ""),
}
DEFAULT = "percentile"


def check_scale(scale: str) -> str:
    if scale not in SCALES:
        near = get_close_matches(str(scale), SCALES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"there is no scale {scale!r}.{hint} There are: {', '.join(SCALES)}.")
    return scale


def limits(values: np.ndarray, scale: str = DEFAULT, signed: bool = False) -> tuple[float, float]:
    """The values with the darkest and the brightest colour; nan and infinity are ignored. signed: -m and m.

    Where the two percentiles are equal, as in a map of zeros with one patch, all values count.
    """
    import numpy as np

    check_scale(scale)
    finite = values[np.isfinite(values)].astype(np.float64)
    finite = np.abs(finite) if signed else finite
    if not finite.size:
        return 0.0, 0.0
    low, high = float(finite.min()), float(finite.max())
    if scale == "percentile":
        inner = np.percentile(finite, (LOWEST, HIGHEST))
        low, high = (low, high) if inner[0] == inner[1] else (float(inner[0]), float(inner[1]))
    elif scale == "log" and high > 0:
        low = max(float(finite[finite > 0].min()), high / 10**DECADES)
    return (-high, high) if signed else (low, high)


def positions(values: np.ndarray, low: float, high: float, scale: str = DEFAULT, signed: bool = False) -> np.ndarray:
    """Each value's place between the colours of `low` and `high`, 0 to 1; nan and constant maps become 0.

    signed: 0.5 is 0, with both halves alike.
    """
    import numpy as np

    values = np.nan_to_num(values.astype(np.float64), nan=0.0 if signed else low, posinf=high, neginf=low)
    if signed:
        least = high / 10**DECADES if scale == "log" else 0.0
        size = positions(np.abs(values), least, high, scale)
        return 0.5 + 0.5 * np.sign(values) * size
    if high <= low:
        return np.zeros_like(values)
    inside = values.clip(low, high)
    if scale == "log" and low > 0:
        return np.log(inside / low) / np.log(high / low)
    return (inside - low) / (high - low)
