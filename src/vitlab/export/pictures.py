"""Real pictures to judge an export by and to calibrate int8 with: a data source's, or parts of photographs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.images.datasets import Dataset, open_data
from vitlab.images.preprocess import Preprocess
from vitlab.text.templates import fill, read_templates

PHOTOGRAPHS = ("china.jpg", "flower.jpg")  # scikit-learn brings them
WORDS = ("cat", "dog", "boat", "red flower", "old temple", "street at night", "child with a ball", "bowl of fruit")


def pictures(
    count: int, *, channels: int = 3, source: str | None = None, path: str | None = None, part: str = "judge"
) -> list[Image.Image]:
    """`part`: "judge" takes them from test (or val), "calibrate" from train. Spread over the whole split."""
    if source is not None or channels == 1:
        data = open_data(source or "digits", path=path)
        split = data.train if part == "calibrate" else data.test or data.val
        return [_picture(split, int(n)) for n in np.linspace(0, len(split) - 1, min(count, len(split)))]
    return _crops(count, seed=1 if part == "calibrate" else 0)


def texts(count: int) -> list[str]:
    """Sentences for the text tower of a CLIP."""
    found = [fill(template, word) for template in read_templates("held_out") for word in WORDS]
    return found[:count]


def prepared(preprocess: Preprocess, images: list[Image.Image]) -> Tensor:
    return torch.stack([preprocess(image) for image in images])  # (B, C, H, W)


def _picture(split: Dataset, number: int) -> Image.Image:
    pixels = split.read(number)  # (H, W, C)
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _crops(count: int, seed: int) -> list[Image.Image]:
    """Parts of two photographs, of many sizes and places, half of them mirrored."""
    from sklearn.datasets import load_sample_image

    photographs: list[Any] = [load_sample_image(name) for name in PHOTOGRAPHS]
    chance = np.random.default_rng(seed)
    found = []
    for number in range(count):
        pixels = photographs[number % len(photographs)]
        H, W = pixels.shape[:2]
        side = int(chance.integers(H // 5, H + 1))
        top, left = int(chance.integers(0, H - side + 1)), int(chance.integers(0, W - side + 1))
        crop = pixels[top : top + side, left : left + side]
        found.append(Image.fromarray(np.ascontiguousarray(crop[:, ::-1] if number % 4 < 2 else crop)))
    return found
