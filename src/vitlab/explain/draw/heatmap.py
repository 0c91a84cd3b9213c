"""Heat maps blended over an image. The inverse of the preprocess puts them where the model looked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from PIL import Image

from vitlab.explain.scale import DEFAULT, limits, positions
from vitlab.explain.views import View, shrink, to_model
from vitlab.optional import require

COLOURS = "inferno"
AGAINST, FOR = np.array([0.22, 0.56, 1.0]), np.array([1.0, 0.30, 0.20])  # blue, red
FAINT, STRONG, DIM = 0.3, 0.8, 0.6  # opacity of the lowest and the highest heat; brightness of the grey image


def spread(heat: np.ndarray, view: View, shape: tuple[int, int] | None = None, *, smooth: bool = True) -> np.ndarray:
    """(grid_h, grid_w, ...) -> (H, W, ...) over the original image, or over a copy of it resized to `shape`.

    nan where the model saw nothing. smooth: cubic interpolation between patch centres, clipped to their values; else
    every pixel has the value of its patch. `heat` may also be (H, W) of the model's input.
    """
    x, y = _places(view, shape or view.geometry.original)
    side = 1 if heat.shape[:2] == view.size else view.patch_size
    down = _weights(y / side, heat.shape[0], smooth)  # (H, grid_h)
    across = _weights(x / side, heat.shape[1], smooth)  # (W, grid_w)
    pixels = np.einsum("yi,ij...,xj->yx...", down, heat.astype(np.float64), across, optimize=True)
    pixels = pixels.clip(heat.min(axis=(0, 1)), heat.max(axis=(0, 1)))  # cubics overshoot
    height, width = view.size if side == 1 else view.read
    pixels[(y < 0) | (y >= height)] = np.nan
    pixels[:, (x < 0) | (x >= width)] = np.nan
    return pixels


def overlay(
    heat: np.ndarray,
    view: View,
    *,
    smooth: bool = True,
    signed: bool = False,
    side: int = 448,
    scale: str = DEFAULT,
) -> np.ndarray:
    """The image under its heat map, (h, w, 3) uint8: dark is low, bright is high, by `scale`.

    signed: red above 0, blue below. `side` is about the longer side of the result. What the model did not see is grey.
    """
    low, high = heat_limits(heat, view, signed=signed, scale=scale)
    image = drawn(view, side)
    places = positions(heat, low, high, scale, signed)  # clipped before it is smoothed, or a spike would be a disc
    laid = spread(places, view, (image.height, image.width), smooth=smooth)  # (h, w), 0 .. 1
    pixels = np.asarray(image, dtype=np.float64) / 255  # (h, w, 3)
    grey = pixels.mean(axis=2, keepdims=True)
    place = np.nan_to_num(laid, nan=0.5 if signed else 0.0)
    strength = np.abs(2 * place - 1) if signed else place
    share = (FAINT + (STRONG - FAINT) * strength)[..., None]
    colour = colours_at(place, signed) * (0.85 + 0.3 * grey)
    seen = (1 - share) * DIM * grey + share * colour  # the image is grey, so that all colour is heat
    return _bytes(np.where(np.isnan(laid)[..., None], 0.35 + 0.4 * grey, seen))


def heat_limits(heat: np.ndarray, view: View, *, signed: bool = False, scale: str = DEFAULT) -> tuple[float, float]:
    """The values with the darkest and the brightest colour in `overlay`. Patches that show padding do not count."""
    x, y = _places(view, view.geometry.original)
    side = 1 if heat.shape[:2] == view.size else view.patch_size
    height, width = view.size if side == 1 else view.read
    rows = np.unique(y[(y >= 0) & (y < height)] // side).astype(int)
    columns = np.unique(x[(x >= 0) & (x < width)] // side).astype(int)
    return limits(heat[np.ix_(rows, columns)], scale, signed)


def colours_at(place: np.ndarray, signed: bool = False) -> np.ndarray:
    """(...) from 0 to 1 -> (..., 3): the heat colours; signed: blue below 0.5, black at 0.5, red above."""
    require("a heat map", "matplotlib")
    from matplotlib import colormaps

    if not signed:
        return colormaps[COLOURS](place)[..., :3]
    return np.where(place[..., None] > 0.5, FOR, AGAINST) * np.abs(2 * place - 1)[..., None]


def painted(colours: np.ndarray, view: View, *, smooth: bool = True, side: int = 448) -> np.ndarray:
    """Colours (grid_h, grid_w, 3), 0 to 1, over the image, whose brightness shows a little: (h, w, 3) uint8."""
    image = drawn(view, side)
    laid = spread(colours, view, (image.height, image.width), smooth=smooth)
    grey = np.asarray(image, dtype=np.float64).mean(axis=2, keepdims=True) / 255
    return _bytes(np.where(np.isnan(laid), 0.35 + 0.4 * grey, laid * (0.8 + 0.2 * grey)))


def cut_out(mask: np.ndarray, view: View, *, side: int = 448) -> np.ndarray:
    """The image where the mask (grid_h, grid_w) is True, dimmed elsewhere: (h, w, 3) uint8."""
    image = drawn(view, side)
    laid = np.nan_to_num(spread(mask.astype(np.float64), view, (image.height, image.width)), nan=0.0)[..., None]
    pixels = np.asarray(image, dtype=np.float64) / 255
    dim = 0.1 + 0.22 * pixels.mean(axis=2, keepdims=True)
    return _bytes(np.where(laid > 0.5, pixels, dim))


def drawn(view: View, side: int) -> Image.Image:
    """The image at about `side` pixels. Small ones are enlarged by a whole factor, so that their pixels show."""
    image = shrink(view.image.convert("RGB"), side)
    factor = side // max(image.size)
    if factor < 2:
        return image
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)


def _places(view: View, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Where each column and each row of pixels lies in the model's input, of the original resized to `shape`."""
    H, W = shape
    return to_model(replace(view.geometry, original=shape), np.arange(W) + 0.5, np.arange(H) + 0.5)


def _weights(places: np.ndarray, count: int, smooth: bool) -> np.ndarray:
    """(n, count): the interpolation weight of each cell at each place; cell i spans i to i + 1."""
    weights = np.zeros((len(places), count))
    if not smooth:
        weights[np.arange(len(places)), np.floor(places).astype(int).clip(0, count - 1)] = 1.0
        return weights
    first = np.floor(places - 0.5)
    t = places - 0.5 - first  # 0 .. 1 between two centres
    cubic = ((2 - t) * t - 1) * t / 2, ((3 * t - 5) * t**2 + 2) / 2, ((4 - 3 * t) * t + 1) * t / 2, (t - 1) * t**2 / 2
    for step, weight in zip((-1, 0, 1, 2), cubic, strict=True):  # Catmull-Rom; cells beyond the border repeat it
        cell = (first + step).astype(int).clip(0, count - 1)
        np.add.at(weights, (np.arange(len(places)), cell), weight)
    return weights


def _bytes(pixels: np.ndarray) -> np.ndarray:
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)
