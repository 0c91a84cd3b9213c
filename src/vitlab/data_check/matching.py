"""Are two images copies of each other? Their details are correlated, after one is laid over the other as a crop.

Thumbnails lose their coarse shades first: many photos are bright above and dark below, but only copies agree in their
details. One image may be the other, or 79 % or more of its height and width, anywhere in it, mirrored or not; JPEG
compression, another size, brightness or contrast change little. A crop that has another shape is not looked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.images.randomness import permutation

COPY = 0.70  # correlation of copies; benchmarks/check.py: copies 0.73 or more, other photos 0.57 or less
PROMISING = 0.45  # at half the resolution, below which full resolution is not tried
SPREADS = 6.0  # and a copy stands out from this dataset's own pairs by so many standard deviations
BACKGROUND = 400  # pairs of images that show what is usual
FLAT = 1.0  # grey levels: an image with less detail than this matches nothing
BATCH = 256  # pairs at a time
DRAW = 11  # coordinate of the draw of background pairs


@dataclass(frozen=True)
class Resolution:
    """How thumbnails of one size are compared."""

    scales: tuple[float, ...]  # of height and width, that a part may have
    fine: float  # sigma in pixels: finer grain is lost, which compression changes
    coarse: float  # sigma: wider shades are lost


FULL = Resolution((1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79), 0.8, 3.0)
HALF = Resolution((1.0, 0.94, 0.88, 0.82), 0.5, 2.0)


def correlations(thumbnails: np.ndarray, pairs: np.ndarray, mirrored: np.ndarray) -> np.ndarray:
    """(P,): how well the details of each pair (P, 2) agree, at most 1; `mirrored` (P,): against the mirror image.

    Pairs that do not agree even at half the resolution get that lower figure.
    """
    result = np.zeros(len(pairs), dtype=np.float32)
    for start in range(0, len(pairs), BATCH):
        part = slice(start, start + BATCH)
        a, b = (torch.from_numpy(thumbnails[column]).float() for column in pairs[part].T)  # (B, SIDE, SIDE)
        b = torch.where(torch.from_numpy(mirrored[part])[:, None, None], b.flip(-1), b)
        half = [F.avg_pool2d(x, 2) for x in (a, b)]
        agreement = _best(half[0], half[1], HALF)
        again = agreement >= PROMISING
        if again.any():
            agreement[again] = _best(a[again], b[again], FULL)
        result[part] = agreement.numpy()
    return result


def copy_threshold(thumbnails: np.ndarray) -> float:
    """COPY, or more where all images are alike: digits, or photos in the same frame. Above 1: cannot be told."""
    n = len(thumbnails)
    if n < 3:
        return COPY
    count, order = min(BACKGROUND, n * (n - 1) // 2), permutation(n, 0, DRAW)
    place, turn = np.arange(count) % n, np.arange(count) // n
    pairs = np.stack([order[place], order[(place + turn + 1) % n]], axis=1)  # in each turn with another
    usual = correlations(thumbnails, pairs, np.zeros(count, dtype=bool))
    middle = np.median(usual)
    spread = 1.4826 * np.median(np.abs(usual - middle))  # the standard deviation of a normal distribution
    return max(COPY, float(middle + SPREADS * spread))


def _best(a: Tensor, b: Tensor, at: Resolution) -> Tensor:
    """(B,): the best agreement of b as a part of a, and of a as a part of b."""
    return torch.maximum(_as_part(a, b, at), _as_part(b, a, at))


def _as_part(a: Tensor, b: Tensor, at: Resolution) -> Tensor:
    """(B,): the normalised correlation of b, made smaller, with the best place in a, both (B, side, side)."""
    side = a.shape[-1]
    details = _details(a, at)
    spectrum = torch.fft.rfft2(details)
    sums = F.pad((details * details).cumsum(1).cumsum(2), (1, 0, 1, 0))  # (B, side + 1, side + 1)
    best = torch.full((len(a),), -1.0)
    for n in sorted({round(side * scale) for scale in at.scales}):
        small = _details(F.interpolate(b[:, None], size=(n, n), mode="bilinear", antialias=True)[:, 0], at)  # (B, n, n)
        products = torch.fft.irfft2(spectrum * torch.fft.rfft2(small, s=(side, side)).conj(), s=(side, side))
        places = products[:, : side - n + 1, : side - n + 1]  # where it lies inside
        energy = sums[:, n:, n:] - sums[:, :-n, n:] - sums[:, n:, :-n] + sums[:, :-n, :-n]
        own = (small * small).sum(dim=(1, 2))[:, None, None]
        flat = (own < FLAT**2 * n * n) | (energy < FLAT**2 * n * n)
        agreement = (places / (energy * own).clamp_min(1e-6).sqrt()).masked_fill(flat, 0.0)
        best = torch.maximum(best, agreement.amax(dim=(1, 2)))
    return best


def _details(x: Tensor, at: Resolution) -> Tensor:
    return _blurred(x, at.fine) - _blurred(x, at.coarse)


def _blurred(x: Tensor, sigma: float) -> Tensor:
    reach = max(1, round(3 * sigma))
    kernel = torch.exp(-(torch.arange(-reach, reach + 1) ** 2) / (2 * sigma**2))
    kernel = kernel / kernel.sum()
    x = F.pad(x[:, None], (reach,) * 4, mode="replicate")
    return F.conv2d(F.conv2d(x, kernel.view(1, 1, -1, 1)), kernel.view(1, 1, 1, -1))[:, 0]
