"""One picture, where the model's patches lie in it, and heat laid on it through the inverse of the preprocess."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from PIL import Image

from vitlab.explain.inputs import Batch, Images, as_batch, evaluating, grid_of, wide
from vitlab.images.preprocess import Box, Geometry
from vitlab.images.read import called

COLOURS = "inferno"
AGAINST, FOR = np.array([0.22, 0.56, 1.0]), np.array([1.0, 0.30, 0.20])  # blue, red
FAINT, STRONG, DIM = 0.3, 0.8, 0.6  # share of the colour where heat is lowest and highest; light of the grey picture
LARGEST = 1600  # longer side of a picture that is kept for drawing


@dataclass(frozen=True)
class View:
    """A picture and the model's view of it; `label` and `probability` are its top class, where it has classes."""

    picture: Image.Image  # upright; a large one may be kept smaller than geometry.original says
    geometry: Geometry
    size: tuple[int, int]  # (H, W) of the model's input
    patch_size: int
    name: str = ""
    label: str | None = None
    probability: float | None = None
    patches: tuple[int, int] | None = None  # rows and columns; None: as many as cover the input

    @property
    def grid(self) -> tuple[int, int]:
        return self.patches or self._covering

    @property
    def read(self) -> tuple[int, int]:
        """(H, W) of what the patches lie on: the input, or less where the network leaves a rest that fills none."""
        return min(self.size[0], self.grid[0] * self.patch_size), min(self.size[1], self.grid[1] * self.patch_size)

    @property
    def _covering(self) -> tuple[int, int]:
        return math.ceil(self.size[0] / self.patch_size), math.ceil(self.size[1] / self.patch_size)

    @property
    def said(self) -> str:
        """cat · 93 %"""
        return "" if self.label is None else f"{self.label} · {100 * (self.probability or 0):.0f} %"

    def patch_under(self, x: float, y: float) -> int:
        """The number of the patch (row by row) that shows pixel (x, y) of the original picture."""
        (H, W), (h, w) = self.geometry.original, self.read
        if not (0 <= x < W and 0 <= y < H):
            raise ValueError(
                f"{self.name or 'the picture'}: ({x:g}, {y:g}) lies outside the picture, which is {W} x {H} pixels: "
                f"x is 0 to {W - 1}, y is 0 to {H - 1}."
            )
        at_x, at_y = _to_model(self.geometry, math.floor(x) + 0.5, math.floor(y) + 0.5)
        if not (0 <= at_x < w and 0 <= at_y < h):
            first_x, first_y, end_x, end_y = (math.ceil(v - 0.5) for v in self.geometry.to_original((0, 0, w, h)))
            raise ValueError(
                f"{self.name or 'the picture'}: ({x:g}, {y:g}) was cut off before the model saw it: it sees "
                f"x from {max(0, first_x)} to {min(W, end_x) - 1} and y from {max(0, first_y)} to {min(H, end_y) - 1}."
            )
        return int(at_y // self.patch_size) * self.grid[1] + int(at_x // self.patch_size)

    def box(self, patch: int) -> Box:
        """Where a patch lies: left, top, right, bottom in pixels of the original; it may reach out of it."""
        row, column = divmod(patch, self.grid[1])
        return self.box_of((column, row, column + 1, row + 1))

    def box_of(self, patches: Sequence[int]) -> Box:
        """The same of all patches between left, top, right and bottom, counted in patches."""
        left, top, right, bottom = (n * self.patch_size for n in patches)
        return self.geometry.to_original((left, top, right, bottom))

    def kept(self, longest: int = LARGEST) -> View:
        """With a smaller copy of a large picture; geometry still speaks of the original."""
        return replace(self, picture=_at_most(self.picture, longest))


def views(model: Any, images: Images, names: Sequence[str] | None = None, *, batch_size: int = 8) -> list[View]:
    """A View of every image, with what the model takes it for. A tensor is shown as the picture it was made from."""
    batch = as_batch(model, images)
    if names is None:
        sources = images if isinstance(images, list | tuple) else [images]
        named = [called(s) if isinstance(s, str | PathLike) else f"image {i}" for i, s in enumerate(sources)]
        names = named if len(named) == len(batch) else [f"image {i}" for i in range(len(batch))]
    size = (batch.images.shape[-2], batch.images.shape[-1])
    pictures, geometries = batch.pictures, batch.geometries
    if pictures is None or geometries is None:
        pictures = [_picture(model, image) for image in batch.images]
        geometries = [Geometry(size, size, 0, 0)] * len(batch)
    answers = answers_of(model, batch, batch_size=batch_size)
    return [
        View(_at_most(picture, LARGEST), geometry, size, model.config.patch_size, name, *answer, grid_of(model, batch))
        for picture, geometry, name, answer in zip(pictures, geometries, names, answers, strict=True)
    ]


@torch.no_grad()
def answers_of(model: Any, batch: Batch, *, batch_size: int = 8) -> list[tuple[str | None, float | None]]:
    """Each image's top class and its probability; (None, None) for a model without classes, or with one to choose."""
    if model.config.classes < 2:
        return [(None, None)] * len(batch)
    with evaluating(model):
        logits = torch.cat([wide(model(part.images)) for part in batch.split(batch_size)])  # (B, classes)
    best = logits.softmax(-1).max(-1)
    labels = model.labels or []
    return [
        (labels[i] if i < len(labels) else f"class {i}", p)
        for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


def spread(heat: np.ndarray, view: View, shape: tuple[int, int] | None = None, *, smooth: bool = True) -> np.ndarray:
    """(grid_h, grid_w, ...) -> (H, W, ...) over the original picture, or over a copy of it resized to `shape`.

    nan where the model never looked. smooth: cubic between the patches' centres, within the values that they have;
    else every pixel has the value of the patch it lies in. Heat of the model's own pixels, (H, W), is laid out as well.
    """
    H, W = shape or view.geometry.original
    x, y = _to_model(
        replace(view.geometry, original=(H, W)), np.arange(W) + 0.5, np.arange(H) + 0.5
    )  # where each column and row of pixels lies in the model's input
    side = 1 if heat.shape[:2] == view.size else view.patch_size
    down = _weights(y / side, heat.shape[0], smooth)  # (H, grid_h)
    across = _weights(x / side, heat.shape[1], smooth)  # (W, grid_w)
    found = np.einsum("yi,ij...,xj->yx...", down, heat.astype(np.float64), across, optimize=True)
    found = found.clip(heat.min(axis=(0, 1)), heat.max(axis=(0, 1)))  # cubics overshoot
    height, width = view.size if side == 1 else view.read
    found[(y < 0) | (y >= height)] = np.nan
    found[:, (x < 0) | (x >= width)] = np.nan
    return found


def overlay(heat: np.ndarray, view: View, *, smooth: bool = True, signed: bool = False, side: int = 448) -> np.ndarray:
    """The picture under its heat, (h, w, 3) uint8: dark where there is least, bright where there is most.

    signed: above 0 is red and below 0 is blue, each as strong as the value. `side` is about the longer side of the
    result. What the model never saw is grey.
    """
    picture = drawn(view, side)
    laid = spread(heat, view, (picture.height, picture.width), smooth=smooth)  # (h, w)
    pixels = np.asarray(picture, dtype=np.float64) / 255  # (h, w, 3)
    grey = pixels.mean(axis=2, keepdims=True)
    if signed:
        place = np.nan_to_num(0.5 + 0.5 * laid / (np.nanmax(np.abs(laid)) or 1.0), nan=0.5)
    else:
        place = scaled(laid)  # (h, w), 0 .. 1
    strength = np.abs(2 * place - 1) if signed else place
    share = (FAINT + (STRONG - FAINT) * strength)[..., None]
    colour = colours_at(place, signed) * (0.85 + 0.3 * grey)
    seen = (1 - share) * DIM * grey + share * colour  # the picture is grey, so that all colour is heat
    return _bytes(np.where(np.isnan(laid)[..., None], 0.35 + 0.4 * grey, seen))


def colours_at(place: np.ndarray, signed: bool = False) -> np.ndarray:
    """(...) from 0 to 1 -> (..., 3): the colours of heat, or blue below 0.5 and red above it, black between them."""
    from matplotlib import colormaps

    if not signed:
        return colormaps[COLOURS](place)[..., :3]
    return np.where(place[..., None] > 0.5, FOR, AGAINST) * np.abs(2 * place - 1)[..., None]


def painted(colours: np.ndarray, view: View, *, smooth: bool = True, side: int = 448) -> np.ndarray:
    """(grid_h, grid_w, 3), 0 to 1, laid on the picture, of which the light and dark stay a little: (h, w, 3) uint8."""
    picture = drawn(view, side)
    laid = spread(colours, view, (picture.height, picture.width), smooth=smooth)
    grey = np.asarray(picture, dtype=np.float64).mean(axis=2, keepdims=True) / 255
    return _bytes(np.where(np.isnan(laid), 0.35 + 0.4 * grey, laid * (0.8 + 0.2 * grey)))


def cut_out(mask: np.ndarray, view: View, *, side: int = 448) -> np.ndarray:
    """The picture where the mask (grid_h, grid_w) is True, dimmed elsewhere: (h, w, 3) uint8."""
    picture = drawn(view, side)
    laid = np.nan_to_num(spread(mask.astype(np.float64), view, (picture.height, picture.width)), nan=0.0)[..., None]
    pixels = np.asarray(picture, dtype=np.float64) / 255
    dim = 0.1 + 0.22 * pixels.mean(axis=2, keepdims=True)
    return _bytes(np.where(laid > 0.5, pixels, dim))


def scaled(heat: np.ndarray) -> np.ndarray:
    """From 0 at its smallest value to 1 at its largest; nan and constants become 0."""
    finite = heat[np.isfinite(heat)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    if high <= low:
        return np.zeros_like(heat, dtype=np.float64)
    return np.nan_to_num((heat - low) / (high - low), nan=0.0)


def drawn(view: View, side: int) -> Image.Image:
    """The picture at about `side`: large ones smaller, small ones larger by a whole factor, so that pixels show."""
    picture = _at_most(view.picture.convert("RGB"), side)
    factor = side // max(picture.size)
    if factor < 2:
        return picture
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _at_most(picture: Image.Image, longest: int) -> Image.Image:
    factor = longest / max(picture.size)
    if factor >= 1:
        return picture
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    return picture.resize(size, Image.Resampling.LANCZOS)


def _to_model(geometry: Geometry, x: Any, y: Any) -> tuple[Any, Any]:
    """Places in the original picture -> in the model's input."""
    (H, W), (h, w) = geometry.original, geometry.resized
    return x * (w / W) - geometry.left, y * (h / H) - geometry.top


def _weights(places: np.ndarray, count: int, smooth: bool) -> np.ndarray:
    """(n, count): what each of `count` cells gives to each place; cell i reaches from i to i + 1."""
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


def _picture(model: Any, image: torch.Tensor) -> Image.Image:
    if model.preprocess is None:
        raise ValueError("the model has no preprocess, so what a tensor shows is unknown: pass pictures, or set it.")
    return model.preprocess.picture(image).convert("RGB")


def _bytes(pixels: np.ndarray) -> np.ndarray:
    return (pixels.clip(0, 1) * 255).round().astype(np.uint8)
