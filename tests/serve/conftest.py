"""What the tests of the server share: a small classifier, a small CLIP, pictures, and clients."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import vitlab
from vitlab.serve.app import create_app
from vitlab.serve.model_pool import ServedModel
from vitlab.serve.settings import Settings
from vitlab.text.tokenizer import Tokenizer

URL = "http://127.0.0.1:8000"


def small_model(**options):
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=3, classes=4, **options)
    model.head.weight.data.normal_(std=0.5)  # a new head gives every class the same chance
    model.labels = ["<b>fox</b>", "大熊猫", "dog", "plain"]
    return model


def small_clip():
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["a dog on a beach", "two cats", "一只狗在海边"], vocab=530, context=16)
    model = vitlab.create("clip_digits", **tokenizer.options)
    model.tokenizer = tokenizer
    return model


def served(**models) -> list[ServedModel]:
    return [ServedModel(name, model) for name, model in models.items()]


@pytest.fixture(scope="session")
def models():
    """Loaded once; the tests only ask them."""
    return {"small": small_model(), "clip": small_clip(), "mae": vitlab.create("mae_digits")}


@pytest.fixture
def shallow():
    """The small classifier with one block, which is exported sooner."""
    return small_model(depth=1)


@pytest.fixture(scope="module")
def client(models):
    with TestClient(create_app(served(**models)), URL) as found:
        yield found


@pytest.fixture
def serving(models):
    """A client of a server with other settings."""
    opened = []

    def start(**settings) -> TestClient:
        app = create_app(served(**models), Settings(**settings))
        opened.append(TestClient(app, URL, raise_server_exceptions=False))
        return opened[-1].__enter__()

    yield start
    for one in opened:
        one.__exit__()


def picture(seed: int, height: int = 31, width: int = 57, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Noise, so that no two are alike, as a file."""
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).convert(mode).save(file, kind)
    return file.getvalue()


def ask(client, path: str, image: bytes, name: str = "x.png", /, **fields):
    return client.post(path, files={"image": (name, image)}, data=fields)


@pytest.fixture(name="picture")
def _picture():
    return picture


@pytest.fixture(name="ask")
def _ask():
    return ask
