"""Masks and boxes drawn on an image: `drawn(image, regions)`, for previews, predictions and reports."""

from __future__ import annotations

import colorsys

import numpy as np
from PIL import Image, ImageDraw

from vitlab.images.regions import VOID, Regions

SHARE = 0.5  # of a mask's colour
TURN = 0.618034  # of the colour circle from one number to the next: neighbours differ much


def colour_of(number: int) -> np.ndarray:
    """(3,) uint8, always the same for a number."""
    bright = 1.0 if number % 2 == 0 else 0.75
    return np.array(
        [round(255 * part) for part in colorsys.hsv_to_rgb(number * TURN % 1, 0.85, bright)], dtype=np.uint8
    )


def drawn(image: np.ndarray, regions: Regions, *, classes: bool = False) -> np.ndarray:
    """(H, W, C) uint8 -> (H, W, 3): objects in a colour each and boxes in that of their class; or a colour for each
    class of pixels (`classes`, and where no objects are known), void as it is.
    """
    canvas = np.repeat(image, 3, axis=2) if image.shape[2] == 1 else image.copy()
    if classes or (regions.semantic is not None and not len(regions.labels)):
        for number in np.setdiff1d(np.unique(regions.painted), [VOID]):
            _tint(canvas, regions.painted == number, colour_of(int(number)))
        return canvas
    for number, shape in enumerate(regions.shapes or ()):
        _tint(canvas, shape.mask(regions.size), colour_of(number))
    picture = Image.fromarray(canvas)
    pen, width = ImageDraw.Draw(picture), max(1, min(regions.size) // 200)
    for label, (left, top, right, bottom) in zip(regions.labels, regions.boxes.tolist(), strict=True):
        corners = (left, top, max(right - 1, left), max(bottom - 1, top))
        pen.rectangle(corners, outline=tuple(colour_of(int(label)).tolist()), width=width)
    return np.asarray(picture)


def _tint(canvas: np.ndarray, mask: np.ndarray, colour: np.ndarray) -> None:
    canvas[mask] = ((1 - SHARE) * canvas[mask] + SHARE * colour).astype(np.uint8)
