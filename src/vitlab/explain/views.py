"""The model's view of an image: where its patches lie in the original, and which class it predicts.

view = views(model, "cat.jpg")[0]
view.prediction                            # "cat · 93 %"
view.patch_under(100, 60)                  # the patch that shows this pixel of cat.jpg
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TypeVar

import numpy as np
from PIL import Image
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, TokenModel, as_batch, grid_of, logits_of, token_model
from vitlab.images.preprocess import Box, Geometry
from vitlab.images.read import called, thumbnail_url
from vitlab.tables import Cell, Table, Tabular, Thumbnail

LARGEST = 1600  # longer side of an image that is kept for drawing
Coordinates = TypeVar("Coordinates", float, np.ndarray)


@dataclass(frozen=True)
class View(Tabular):
    """An image as the model sees it; `label` and `probability` are its top class, where the model has classes."""

    image: Image.Image  # upright; large ones are stored smaller than geometry.original
    geometry: Geometry
    size: tuple[int, int]  # (H, W) of the model's input
    patch_size: int
    name: str = ""
    label: str | None = None
    probability: float | None = None
    patches: tuple[int, int] | None = None  # rows and columns; None: enough to cover the input

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        if self.patches is not None:
            return self.patches
        return math.ceil(self.size[0] / self.patch_size), math.ceil(self.size[1] / self.patch_size)

    @property
    def read(self) -> tuple[int, int]:
        """(H, W) of the input that the patches cover. A network may ignore a remainder that fills no patch."""
        return min(self.size[0], self.grid[0] * self.patch_size), min(self.size[1], self.grid[1] * self.patch_size)

    @property
    def prediction(self) -> str:
        """The top class and its probability: "cat · 93 %"."""
        return "" if self.label is None else f"{self.label} · {100 * (self.probability or 0):.0f} %"

    def row(self) -> list[Cell]:
        return [Thumbnail(lambda: thumbnail_url(self.image)), self.name, self.prediction or "-"]

    def table(self) -> Table:
        (H, W), (rows, columns) = self.geometry.original, self.grid
        note = f"{W} x {H} pixels, seen as {rows} x {columns} patches"
        return Table(["", "image", "top class"], [self.row()], notes=[note])

    def patch_under(self, x: float, y: float) -> int:
        """The number of the patch (row by row) that shows pixel (x, y) of the original image."""
        (H, W), (h, w) = self.geometry.original, self.read
        if not (0 <= x < W and 0 <= y < H):
            raise UsageError(
                f"{self.name or 'the image'}: ({x:g}, {y:g}) lies outside the image, which is {W} x {H} pixels: "
                f"x is 0 to {W - 1}, y is 0 to {H - 1}."
            )
        at_x, at_y = to_model(self.geometry, math.floor(x) + 0.5, math.floor(y) + 0.5)
        if not (0 <= at_x < w and 0 <= at_y < h):
            first_x, first_y, end_x, end_y = (math.ceil(v - 0.5) for v in self.geometry.to_original((0, 0, w, h)))
            raise UsageError(
                f"{self.name or 'the image'}: ({x:g}, {y:g}) was cut off before the model saw it: it sees "
                f"x from {max(0, first_x)} to {min(W, end_x) - 1} and y from {max(0, first_y)} to {min(H, end_y) - 1}."
            )
        return int(at_y // self.patch_size) * self.grid[1] + int(at_x // self.patch_size)

    def box(self, patch: int) -> Box:
        """A patch in pixels of the original: left, top, right, bottom. It may extend beyond the image."""
        row, column = divmod(patch, self.grid[1])
        return self.box_of((column, row, column + 1, row + 1))

    def box_of(self, patches: Sequence[int]) -> Box:
        """The same for a rectangle of patches: left, top, right, bottom, counted in patches."""
        left, top, right, bottom = (n * self.patch_size for n in patches)
        return self.geometry.to_original((left, top, right, bottom))


def views(model: ModelOrName, images: Images, names: Sequence[str] | None = None, *, batch_size: int = 8) -> list[View]:
    """A View of every image, with its predicted class. A tensor is turned back into an image by the preprocess."""
    model = token_model(model)
    batch = as_batch(model, images)
    if names is None:
        sources = images if isinstance(images, list | tuple) else [images]
        names = [called(s) if isinstance(s, str | PathLike) else f"image {i}" for i, s in enumerate(sources)]
        names = names if len(names) == len(batch) else [f"image {i}" for i in range(len(batch))]
    size = (batch.images.shape[-2], batch.images.shape[-1])
    originals, geometries = batch.originals, batch.geometries
    if originals is None or geometries is None:
        originals = [_to_image(model, image) for image in batch.images]
        geometries = [Geometry(size, size, 0, 0)] * len(batch)
    predictions = top_classes(model, batch.images, batch_size=batch_size)
    return [
        View(shrink(image, LARGEST), geometry, size, model.config.patch_size, name, *top, grid_of(model, batch))
        for image, geometry, name, top in zip(originals, geometries, names, predictions, strict=True)
    ]


def top_classes(model: TokenModel, images: Tensor, *, batch_size: int = 8) -> list[tuple[str | None, float | None]]:
    """Each image's top class or label and its probability; (None, None) for a model with fewer than two."""
    if model.config.classes < 2:
        return [(None, None)] * len(images)
    best = model.task.scores(logits_of(model, images, batch_size)).max(-1)
    return [(model.label_of(i), p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def shrink(image: Image.Image, longest: int) -> Image.Image:
    """At most `longest` pixels on the longer side; smaller images stay as they are."""
    factor = longest / max(image.size)
    if factor >= 1:
        return image
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image.resize(size, Image.Resampling.LANCZOS)


def to_model(geometry: Geometry, x: Coordinates, y: Coordinates) -> tuple[Coordinates, Coordinates]:
    """Pixel coordinates of the original -> of the model's input."""
    (H, W), (h, w) = geometry.original, geometry.resized
    return x * (w / W) - geometry.left, y * (h / H) - geometry.top


def _to_image(model: TokenModel, image: Tensor) -> Image.Image:
    if model.preprocess is None:
        raise UsageError("the model has no preprocess, so what a tensor shows is unknown: pass images, or set it.")
    return model.preprocess.to_image(image).convert("RGB")
