"""What the tests of search share: the folder of pictures, the model, and the command in two processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
import vitlab.cli.main


@pytest.fixture
def photos(tmp_path) -> Path:
    """23 pictures in three folders, no two alike."""
    for number in range(23):
        noise(tmp_path / "photos" / ("a", "b/c", "海边 d")[number % 3] / f"{number:02d}.png", number)
    return tmp_path / "photos"


@pytest.fixture
def draw():
    return noise


def noise(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (11, 17, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=3, classes=4)
    return vitlab.save(model, tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def command_in_two(in_two_processes):
    """The command in two processes; their exit codes."""

    def call(args: list[object]) -> list[int]:
        return in_two_processes(lambda rank: vitlab.cli.main.app(list(map(str, args)), standalone_mode=False))

    return call
