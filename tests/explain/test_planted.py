"""A tiny ViT learns the colour of one bright square on noise; then the methods have to say where the square is.

Chance is about 1 in 9 on 24 x 24 (a square of 8 x 8), less on larger pictures. Positions are drawn anew for every
picture and tell nothing of the class, so a map that points at the square has found what the answer came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitlab.explain.faithfulness import compare_methods
from vitlab.explain.inputs import as_batch
from vitlab.explain.methods import METHODS
from vitlab.explain.relevance import grad_cam, relevance
from vitlab.images.preprocess import Preprocess
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

PATCH, SQUARE = 4, 8
COLOURS = np.array([(235, 70, 70), (70, 235, 70), (70, 70, 235), (235, 235, 70)])
SIZES = {"square": (24, 24), "non-square": (24, 40)}
PREPROCESS = Preprocess(size=(24, 24))


@dataclass
class Planted:
    pixels: np.ndarray  # (n, H, W, 3) uint8
    labels: Tensor  # (n,)
    boxes: np.ndarray  # (n, 4): left, top, right, bottom

    @property
    def images(self) -> Tensor:
        return torch.stack([PREPROCESS.normalize(Image.fromarray(p)) for p in self.pixels])


def planted(count: int, size: tuple[int, int], seed: int, side: int = SQUARE, margin: tuple[int, int] = (0, 0)):
    """Noise with one square of a colour, anywhere at least `margin` (rows, columns) from the border."""
    rng = np.random.default_rng(seed)
    (H, W), (my, mx) = size, margin
    pixels = rng.normal(110, 40, (count, H, W, 3))
    labels = rng.integers(len(COLOURS), size=count)
    top, left = rng.integers(my, H - side - my + 1, count), rng.integers(mx, W - side - mx + 1, count)
    for i in range(count):
        pixels[i, top[i] : top[i] + side, left[i] : left[i] + side] = COLOURS[labels[i]] + rng.normal(0, 20, 3)
    boxes = np.stack([left, top, left + side, top + side], axis=1)
    return Planted(pixels.clip(0, 255).astype(np.uint8), torch.from_numpy(labels), boxes)


@pytest.fixture(scope="module", params=["class", "mean"])
def model(request) -> VisionTransformer:
    """Trained in seconds, on both sizes by turns."""
    torch.manual_seed(0)
    config = ViTConfig(image_size=(24, 24), patch_size=PATCH, width=32, depth=2, heads=4, classes=4)
    model = VisionTransformer(config.with_options(positions="sincos", mlp_ratio=2.0, pooling=request.param))
    model.preprocess = PREPROCESS
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = [planted(1024, size, seed) for seed, size in enumerate(SIZES.values())]
    data = [(d.images, d.labels) for d in data]
    for step in range(240):
        images, labels = data[step % 2]
        picked = torch.randint(len(images), (32,))
        loss = F.cross_entropy(model(images[picked]), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def hits(maps: Tensor, boxes: np.ndarray) -> float:
    """The share of images in which the centre of the highest patch lies on the square."""
    peaks = maps.flatten(1).argmax(1).numpy()
    y, x = (peaks // maps.shape[2] + 0.5) * PATCH, (peaks % maps.shape[2] + 0.5) * PATCH
    left, top, right, bottom = boxes.T
    return float(((left <= x) & (x <= right) & (top <= y) & (y <= bottom)).mean())
