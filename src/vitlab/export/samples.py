"""Real images to compare exports on and to calibrate int8 with: from a data source, or crops of photographs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.errors import DataError, UsageError
from vitlab.images.datasets import Dataset, open_data
from vitlab.images.read import Source
from vitlab.images.sources.folder import images_under, open_unlabelled
from vitlab.models.base import Network
from vitlab.text.templates import fill, read_templates

PHOTOGRAPHS = ("china.jpg", "flower.jpg")  # bundled with scikit-learn
SUBJECTS = ("cat", "dog", "boat", "red flower", "old temple", "street at night", "child with a ball", "bowl of fruit")


def sample_images(
    count: int, *, channels: int = 3, source: str | None = None, path: str | None = None, calibrate: bool = False
) -> list[Source]:
    """Images spread over the test split (or val); to calibrate, over the train split. They need no classes."""
    if source is not None or channels == 1:
        try:
            data = open_data(source or "digits", path=path)
        except DataError:
            files = _unlabelled(source, calibrate) if source is not None else []
            if not files:
                raise
            return [files[n] for n in _spread(len(files), count)]
        split = data.train if calibrate else data.test or data.val
        return [_read_image(split, n) for n in _spread(len(split), count)]
    if channels != 3:
        raise UsageError(f"no photo has {channels} channels: name images of your own to compare with, --data FOLDER.")
    return [*_crops(count, seed=1 if calibrate else 0)]


def sample_texts(count: int) -> list[str]:
    """Sentences for the text tower of a CLIP."""
    return [fill(template, subject) for template in read_templates("held_out") for subject in SUBJECTS][:count]


def preprocess_batch(model: Network, images: Sequence[Source], size: tuple[int, int] | None = None) -> Tensor:
    """(B, C, H, W), as the model reads them; `size` (H, W) replaces its own."""
    if model.preprocess is None:
        raise UsageError("the model has no preprocess, so it cannot read images: set model.preprocess first.")
    preprocess = model.preprocess.at_one_size()
    preprocess = preprocess if size is None else preprocess.with_size(size)
    return torch.stack([preprocess(image) for image in images])


def _spread(length: int, count: int) -> list[int]:
    return [int(number) for number in np.linspace(0, length - 1, min(count, length))]


def _unlabelled(source: str, calibrate: bool) -> list[str]:
    """Half of the images of a folder without class folders: what int8 is calibrated on is not what it is judged by."""
    folder = Path(source).expanduser()
    if not folder.is_dir() or open_unlabelled(folder) is None:
        return []
    files = sorted(images_under(folder))
    return files[0 if calibrate else 1 :: 2] or files


def _read_image(split: Dataset, number: int) -> Source:
    pixels = split.read(number)  # (H, W, C)
    if split.stored is not None:
        return pixels
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def _crops(count: int, seed: int) -> list[Image.Image]:
    """Square crops of two photographs at random sizes and places, half of them mirrored."""
    from sklearn.datasets import load_sample_image

    photographs: list[Any] = [load_sample_image(name) for name in PHOTOGRAPHS]
    random = np.random.default_rng(seed)
    crops = []
    for number in range(count):
        pixels = photographs[number % len(photographs)]
        H, W = pixels.shape[:2]
        side = int(random.integers(H // 5, H + 1))
        top, left = int(random.integers(0, H - side + 1)), int(random.integers(0, W - side + 1))
        crop = pixels[top : top + side, left : left + side]
        crops.append(Image.fromarray(np.ascontiguousarray(crop[:, ::-1] if number % 4 < 2 else crop)))
    return crops
