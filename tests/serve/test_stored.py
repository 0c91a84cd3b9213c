"""A model of five channels behind the server: arrays and TIFFs are uploaded as photos are."""

import io

import numpy as np
import pytest
import tifffile
import torch
from starlette.testclient import TestClient

import vitlab
from vitlab.images.preprocess import Preprocess
from vitlab.serve.app import create_app
from vitlab.serve.model_pool import ServedModel

URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=5, classes=2, depth=1)
    model.head.weight.data.normal_(std=0.5)
    model.preprocess = Preprocess((16, 24), mean=(0.5,) * 5, std=(0.3,) * 5, scale=1 / 65535, pixels="uint16")
    model.labels = ["a", "b"]
    return model


def test_arrays_and_tiffs_are_answered_and_drawn_and_photos_refused(model, ask, picture):
    array = np.random.default_rng(0).integers(0, 65536, (30, 41, 5), dtype=np.uint16)
    as_npy, as_tiff = io.BytesIO(), io.BytesIO()
    np.save(as_npy, array)
    tifffile.imwrite(as_tiff, array, photometric="minisblack", planarconfig="contig")
    (offline,) = vitlab.predict(model, array)
    with TestClient(create_app([ServedModel("five", model)]), URL) as client:
        for file in (as_npy, as_tiff):
            scores = ask(client, "/predict", file.getvalue()).json()["scores"]
            assert [s["label"] for s in scores] == [label for label, _ in offline.scores]
            assert [s["probability"] for s in scores] == pytest.approx([p for _, p in offline.scores], abs=1e-6)
        drawn = ask(client, "/explain?method=rollout", as_npy.getvalue())
        expected = vitlab.explain.rollout(model, array)[0]
        np.testing.assert_allclose(drawn.json()["map"], expected, atol=1e-5)
        refused = ask(client, "/predict", picture(1))
        assert 400 <= refused.status_code < 500 and "the model reads 5 channels of uint16" in refused.text
