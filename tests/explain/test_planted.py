"""A tiny ViT learns which textures one bright square on noise can have; then the methods have to say where it is.

Squares lie anywhere, also across patches, and their place tells nothing of the class; their light and dark parts change
places by lot, so no class shows in a mean of pixels. In training a picture has none to three of them and the network
says of each texture whether it is there: with just one to name, the final norm is soon full of it, and the logit's
gradient no longer points anywhere.

Measured, one block: relevance 100 %, Grad-CAM 100 %, rollout, which is class-blind, 100 % on a single square; of two
squares rollout finds the one asked for in 40 to 61 %, relevance in 100 %, Grad-CAM in 97 to 100 %. With three blocks
relevance stays at 99.7 to 100 %, and Grad-CAM in the last block falls to 36 to 42 %: there all tokens hold the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.explain.faithfulness import compare_methods
from vitlab.explain.inputs import as_batch
from vitlab.explain.methods import METHODS
from vitlab.images.preprocess import Preprocess
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

PATCH, SIDE = 4, 8
SIZES = {"square": (24, 24), "non-square": (24, 40)}
STEPS = {1: 600, 3: 400}  # of training, by depth
WEIGHTS = Path(__file__).parents[1] / "data" / "planted"
BARS = np.arange(SIDE) // 2 % 2 * 2 - 1
TEXTURES = [np.tile(BARS[:, None], SIDE), np.tile(BARS, (SIDE, 1)), BARS[:, None] * BARS]  # rows, columns, chequers


@dataclass
class Planted:
    pixels: np.ndarray  # (n, H, W, 3) uint8
    there: np.ndarray  # (n, textures), which squares there are
    boxes: np.ndarray  # (n, textures, 4): left, top, right, bottom

    @property
    def images(self) -> Tensor:
        preprocess = Preprocess(size=self.pixels.shape[1:3])
        return torch.stack([preprocess.normalize(Image.fromarray(p)) for p in self.pixels])

    def boxes_of(self, classes: np.ndarray) -> np.ndarray:
        return self.boxes[np.arange(len(self.boxes)), classes]


def planted(count: int, size: tuple[int, int], seed: int, squares: int | None = None, margin=(0, 0), scale: int = 1):
    """Noise with this many squares (None: each with a chance of 0.4), `margin` (rows, columns) from the border."""
    rng = np.random.default_rng(seed)
    (H, W), (down, right), side = size, margin, SIDE * scale
    pixels = rng.normal(110, 40, (count, H, W, 3))
    there, boxes = np.zeros((count, 3), dtype=bool), np.zeros((count, 3, 4), dtype=int)
    for i in range(count):
        chosen = np.flatnonzero(rng.random(3) < 0.4) if squares is None else rng.permutation(3)[:squares]
        places: list[tuple[int, int]] = []
        while len(places) < len(chosen):  # no two on each other; a corner that is too full starts again
            y, x = rng.integers(down, H - side - down + 1), rng.integers(right, W - side - right + 1)
            if all(abs(y - b) >= side or abs(x - a) >= side for b, a in places):
                places.append((y, x))
            elif rng.random() < 0.05:
                places = []
        for texture, (y, x) in zip(chosen, places, strict=True):
            bars = np.kron(TEXTURES[texture] * rng.choice([-1, 1]), np.ones((scale, scale)))
            pixels[i, y : y + side, x : x + side] = (160 + 80 * bars + rng.normal(0, 10, bars.shape))[..., None]
            there[i, texture], boxes[i, texture] = True, (x, y, x + side, y + side)
    return Planted(pixels.clip(0, 255).astype(np.uint8), there, boxes)


@cache
def lessons() -> list[tuple[Tensor, Tensor]]:
    data = [planted(2048, size, seed) for seed, size in enumerate(SIZES.values())]
    return [(d.images, torch.from_numpy(d.there).float()) for d in data]


def untrained(depth: int) -> VisionTransformer:
    torch.manual_seed(1)
    config = ViTConfig(image_size=(24, 24), patch_size=PATCH, width=32, depth=depth, heads=4, classes=3)
    return VisionTransformer(config.with_options(positions="sincos"))


def train(depth: int, steps: int) -> VisionTransformer:
    """In seconds on one thread, alternating between both sizes."""
    model = untrained(depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.5, fused=True)
    for step in range(steps):
        images, there = lessons()[step % 2]
        picked = torch.randint(len(images), (32,))
        loss = F.binary_cross_entropy_with_logits(model(images[picked]), there[picked])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def trained(depth: int) -> VisionTransformer:
    """The weights that train(depth, STEPS[depth]) gave: `python tests/explain/test_planted.py` makes them again."""
    model = untrained(depth)
    model.load_state_dict(load_file(WEIGHTS / f"depth{depth}.safetensors"))
    return model.eval()


@pytest.fixture(scope="module")
def model() -> VisionTransformer:
    return trained(depth=1)


@pytest.fixture(scope="module")
def deeper() -> VisionTransformer:
    return trained(depth=3)


def hits(maps: Tensor, boxes: np.ndarray) -> float:
    """The share of images in which the centre of the highest patch lies on the square."""
    peaks = maps.flatten(1).argmax(1).numpy()
    y, x = (peaks // maps.shape[2] + 0.5) * PATCH, (peaks % maps.shape[2] + 0.5) * PATCH
    return float(inside(x, y, boxes).mean())


def inside(x: np.ndarray, y: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    left, top, right, bottom = boxes.T
    return (left <= x) & (x <= right) & (top <= y) & (y <= bottom)


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_peak_falls_on_the_square(model, deeper, size):
    test = planted(300, size, seed=99, squares=1)
    x, classes = test.images, test.there.argmax(1)
    with torch.no_grad():
        assert (model(x).argmax(1).numpy() == classes).mean() >= 0.99
    found = {name: hits(method(model, x, None), test.boxes_of(classes)) for name, method in METHODS.items()}
    assert min(found["relevance"], found["grad_cam"], found["rollout"]) >= 0.95 and found["random"] < 0.25
    with torch.no_grad():
        assert (deeper(x).argmax(1).numpy() == classes).mean() >= 0.99
    assert hits(METHODS["relevance"](deeper, x, None), test.boxes_of(classes)) >= 0.95


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_of_two_squares_the_class_asked_for_is_found(model, size):
    test = planted(300, size, seed=98, squares=2)
    x = test.images
    first, second = np.array([np.flatnonzero(there) for there in test.there]).T
    for name in ("relevance", "grad_cam", "gradient_x_input"):
        assert min(hits(METHODS[name](model, x, c), test.boxes_of(c)) for c in (first, second)) >= 0.95, name
    assert max(hits(METHODS["rollout"](model, x, c), test.boxes_of(c)) for c in (first, second)) <= 0.75  # class-blind


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_deletion_beats_random(model, size):
    test = planted(50, size, seed=97, squares=1)
    for row in compare_methods(model, test.images, kinds=["deletion", "insertion", "road"], steps=8):
        margin = {"deletion": 0.3, "insertion": 0.08, "road": 0.2}[row.kind]  # of the area, less than random's
        found = row.to_dict()
        assert row.method == "random" or (found["gain"] >= margin and found["wins"] >= 0.85), found


@pytest.mark.parametrize(("original", "size"), [((60, 80), (24, 24)), ((60, 100), (24, 40))], ids=SIZES)
def test_in_a_cropped_picture_the_peak_maps_back_onto_the_square(model, original, size):
    """Twice as large, resized by half, and the middle cut out: margins differ by axis."""
    model.preprocess = Preprocess(size=size, how="crop", resize=30, interpolation="nearest")
    margin = ((60 - 2 * size[0]) // 2, (original[1] - 2 * size[1]) // 2)
    test = planted(200, original, seed=96, squares=1, margin=margin, scale=2)
    classes = test.there.argmax(1)
    batch = as_batch(model, [Image.fromarray(p) for p in test.pixels])
    boxes = test.boxes_of(classes) + np.array([-1, -1, 1, 1])  # halving moves an edge by up to a pixel
    for name in ("relevance", "grad_cam"):
        maps = METHODS[name](model, batch, classes)
        rows, columns = np.divmod(maps.flatten(1).argmax(1).numpy(), maps.shape[2])
        patches = [model.preprocess.patch_box(r, c, PATCH, original) for r, c in zip(rows, columns, strict=True)]
        left, top, right, bottom = np.array(patches).T
        back = inside((left + right) / 2, (top + bottom) / 2, boxes).mean()
        stretched = inside(
            (columns + 0.5) * original[1] / maps.shape[2], (rows + 0.5) * original[0] / maps.shape[1], boxes
        ).mean()
        assert back >= 0.95 and stretched < 0.85, (name, back, stretched)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for depth, steps in STEPS.items():
        save_file(train(depth, steps).state_dict(), WEIGHTS / f"depth{depth}.safetensors")
