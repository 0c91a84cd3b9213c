"""as_batch: what the model gets, and where it lies in the picture it came from."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.errors import CheckpointError, ImageError
from vitlab.explain.inputs import as_batch, batches, grid_of
from vitlab.models.base import evaluation_mode

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=1, heads=4, classes=7)


@pytest.fixture
def model():
    model = vitlab.create("vit_base", **SMALL)
    model.preprocess = replace(model.preprocess, how="crop", resize=None)
    return model


@pytest.fixture
def picture():
    pixels = np.random.default_rng(0).integers(0, 256, (90, 61, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def test_every_kind_of_picture_gives_the_models_own_input(model, picture, tmp_path):
    picture.save(tmp_path / "a.png")
    held = io.BytesIO()
    picture.save(held, "PNG")
    kinds = [tmp_path / "a.png", str(tmp_path / "a.png"), picture, np.asarray(picture), held.getvalue()]
    batch = as_batch(model, kinds)
    expected = model.preprocess(picture)
    assert batch.images.shape == (5, 3, 32, 48)
    assert all(torch.equal(image, expected) for image in batch.images)
    assert batch.originals is not None and all(p.tobytes() == picture.tobytes() for p in batch.originals)
    assert torch.equal(as_batch(model, tmp_path / "a.png").images[0], expected)
    assert as_batch(model, batch) is batch
    assert grid_of(model, batch) == grid_of(model, batch.images) == (4, 6)


def test_the_view_lies_where_the_geometry_says(model, picture):
    batch = as_batch(model, [picture])
    left, top, right, bottom = batch.geometries[0].to_original((0, 0, 48, 32))
    assert (left, right) == pytest.approx((0, 61))
    assert bottom - top == pytest.approx(61 * 32 / 48, rel=0.02) and top > 20


def test_a_camera_held_sideways_is_set_upright(model, picture, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to the right
    picture.save(tmp_path / "turned.png", exif=exif)
    batch = as_batch(model, tmp_path / "turned.png")
    turned = picture.transpose(Image.Transpose.ROTATE_270)
    assert batch.originals[0].tobytes() == turned.tobytes() and batch.geometries[0].original == (61, 90)
    assert torch.equal(batch.images[0], model.preprocess(turned))


def test_tensors_follow_the_model(model):
    images = torch.randn(5, 3, 32, 48)
    batch = as_batch(model.to(torch.bfloat16), images)
    assert batch.images.dtype == torch.bfloat16 and batch.originals is None
    assert [len(part) for part in batches(model, images, 2)] == [2, 2, 1]
    assert torch.equal(torch.cat([part.images for part in batches(model, images, 2)]), batch.images)


def test_pictures_in_parts_are_the_same_pictures(model, picture):
    pictures = [picture, picture.rotate(90, expand=True), picture.rotate(180)]
    whole = as_batch(model, pictures)
    parts = list(batches(model, iter(pictures), 2))
    assert torch.equal(torch.cat([part.images for part in parts]), whole.images)
    assert [g for part in parts for g in part.geometries] == whole.geometries
    assert [g for part in whole.split(2) for g in part.geometries] == whole.geometries


def test_modes_come_back_even_after_an_error(model):
    model.train()
    model.blocks[0].eval()
    modes = [m.training for m in model.modules()]
    with pytest.raises(RuntimeError), evaluation_mode(model):
        assert not any(m.training for m in model.modules())
        raise RuntimeError
    assert [m.training for m in model.modules()] == modes


def test_what_is_no_image_is_refused_in_words(model, tmp_path):
    with pytest.raises(ValueError, match=r"torch\.stack"):
        as_batch(model, [torch.randn(3, 32, 48)])
    with pytest.raises(ValueError, match=r"images\[None\]"):
        as_batch(model, torch.randn(3, 32, 48))
    with pytest.raises(ValueError, match="at least one"):
        as_batch(model, [])
    with pytest.raises(ValueError, match="at least one"):
        as_batch(model, torch.randn(0, 3, 32, 48))
    with pytest.raises(ValueError, match="found a int"):
        as_batch(model, 3)
    with pytest.raises(ImageError, match=r"none.png: no such file"):
        as_batch(model, [tmp_path / "none.png"])
    with pytest.raises(CheckpointError, match=r"vit\.pth"):
        as_batch("vit.pth", torch.randn(1, 3, 32, 48))
    with pytest.raises(ValueError, match="found a Linear"):
        as_batch(torch.nn.Linear(2, 2), torch.randn(1, 3, 32, 48))
    model.preprocess = None
    with pytest.raises(ValueError, match="no preprocess"):
        as_batch(model, tmp_path / "none.png")
