"""The self-contained page: it holds the attention the model has, stays small, and no name can break it."""

from __future__ import annotations

import json
import re
from base64 import b64decode

import numpy as np
import pytest
import torch

import vitlab
from vitlab.explain import draw
from vitlab.images.preprocess import Geometry
from vitlab.layers.trace import Trace


def small(**options):
    shape = dict(image_size=(32, 48), patch_size=8, channels=3, classes=4, depth=3, width=32, heads=4)
    return vitlab.create("vit_digits", **(shape | options)).eval()


@pytest.fixture(scope="module")
def two():
    torch.manual_seed(1)
    model, rng = small(), np.random.default_rng(0)
    pictures = [rng.integers(0, 256, size, dtype=np.uint8) for size in ((40, 60, 3), (80, 50, 3))]
    return model, pictures, draw.views(model, pictures, ["first.png", "second.png"])


def data_of(page: str) -> dict:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])


def rows_of(item: dict, layers: int, heads: int) -> np.ndarray:
    """(layers, heads, queries, patches), as the page's script reads them."""
    values = np.frombuffer(b64decode(item["values"]), np.uint8).reshape(layers, heads, item["queries"], -1)
    low, high = (
        np.frombuffer(b64decode(item[k]), "<f4").reshape(layers, heads, item["queries"], 1) for k in ("low", "high")
    )
    return low + (high - low) * (values / 255.0) ** 2


def test_the_page_holds_the_attention(two):
    model, pictures, views = two
    page, note = draw.attention_page(model, pictures, views)
    assert note == "" and "http" not in page.replace("http-equiv", "") and "src=" not in page
    data = data_of(page)
    batch = model.preprocess.batch(pictures)
    trace = Trace("attention")
    with torch.inference_mode():
        model(batch, trace=trace)
    weights = trace.stack("attention").transpose(0, 1).numpy()  # (B, L, h, N, N)
    for i, item in enumerate(data["items"]):
        assert item["heads"] == ["mean of heads", "head 1", "head 2", "head 3", "head 4"] and item["first"] == 0
        found = rows_of(item, 3, 5)
        np.testing.assert_allclose(found[:, 1:], weights[i][..., 1:], atol=1 / 255 * weights[i].max())
        np.testing.assert_allclose(found[:, 0], weights[i].mean(1)[..., 1:], atol=1 / 255 * weights[i].max())
        before = np.frombuffer(b64decode(item["before"]), "<f4").reshape(3, 5, 25, 1)
        np.testing.assert_allclose(before[:, 1:], weights[i][..., :1], rtol=1e-6)


def test_a_page_stays_small_and_says_what_it_leaves_out():
    torch.manual_seed(0)
    model = small(image_size=160, patch_size=4, depth=4, heads=2, width=16)  # 40 x 40 patches: 3.4 MB a layer and head
    picture = np.random.default_rng(0).integers(0, 256, (160, 160, 3), dtype=np.uint8)
    views = draw.views(model, [picture] * 3)
    page, note = draw.attention_page(model, [picture] * 3, views)
    assert len(page) < 5_000_000
    assert "single heads" in note and "layers 1, 2, 3" in note and "2 of 3 images" in note
    data = data_of(page)
    assert data["note"] == note and data["items"][0]["layers"] == ["layer 4"] and len(data["items"]) == 1
    with pytest.raises(ValueError, match="--image-size"):
        draw.attention_page(model, [picture], views[:1], limit=1_000_000)


def test_no_name_ends_the_script(two):
    _, _, views = two
    evil = "</script><script>alert(1)</script>{{data}}.png"
    named = [draw.View(v.image, v.geometry, v.size, v.patch_size, evil, "<b>", 0.5) for v in views]
    page = draw.maps_page(named, {"<i>": np.zeros((2, 4, 6))}, title="<u>&{{data}}")
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert data_of(page)["items"][0]["name"] == evil


def test_maps_of_two_models_share_a_page(two):
    _, pictures, views = two
    other = small(image_size=(64, 64))
    theirs = draw.views(other, pictures)
    a, b = np.random.default_rng(1).random((2, 4, 6)), np.random.default_rng(2).random((2, 8, 8))
    data = data_of(draw.maps_page(views, {"A": (views, a), "B": (theirs, b)}, title="t"))
    item = data["items"][0]
    assert item["layers"] == ["A", "B"] and item["grid"] == [43, 64] and item["box"] == [0, 0, 1, 1]
    found = rows_of(item, 2, 1)[:, 0, 0].reshape(2, 43, 64)
    whole = draw.View(views[0].image, Geometry((40, 60), (43, 64), 0, 0), (43, 64), 1)
    np.testing.assert_allclose(
        draw.spread(found[1], whole, smooth=False)[20, 30], draw.spread(b[0], theirs[0])[20, 30], atol=0.12
    )
