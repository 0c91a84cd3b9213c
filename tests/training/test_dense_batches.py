"""Batches of images with masks and boxes: an image and what is marked on it are moved alike, by coordinates alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.errors import UsageError
from vitlab.images.augment import AugmentOptions
from vitlab.images.augment_regions import RegionAugment
from vitlab.images.datasets import FileOptions, open_data
from vitlab.images.preprocess import Preprocess
from vitlab.models.dense import VOID
from vitlab.training.batches import BatchDataset, ImageSet, Plan

PRE = Preprocess((32, 40), how="stretch", interpolation="nearest", mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Red objects on blue: the objects can be read off the picture."""
    place, rng = tmp_path_factory.mktemp("objects"), np.random.default_rng(0)
    for name in ("images", "instances"):
        (place / name).mkdir()
    for number in range(8):
        ids = np.zeros((48, 60), dtype=np.uint16)
        for k in range(1 + number % 3):
            top, left = rng.integers(0, 30, 2)
            ids[top : top + 12, left : left + 16] = k + 1
        colours = np.where(ids[..., None] > 0, [255, 0, 0], [0, 0, 255]).astype(np.uint8)
        Image.fromarray(colours).save(place / "images" / f"{number}.png")
        Image.fromarray(ids).save(place / "instances" / f"{number}.png")
    return place


def steps(folder, kind, **options):
    data = open_data(str(folder), files=FileOptions(marks=kind))
    plan = Plan(n=len(data.train), batch_size=3, epochs=3, seed=5)
    return BatchDataset(ImageSet(data.train, PRE), plan, RegionAugment(AugmentOptions(**options), PRE))


@pytest.mark.parametrize("options", [{}, {"flip": True}, {"flip": True, "crop": "scaled", "scale": (0.4, 2.5)}])
def test_the_marked_pixels_are_those_of_the_object(folder, options):
    views = []
    for step in range(4):
        masks, classes = steps(folder, "instance", **options)[step, 0], steps(folder, "semantic", **options)[step, 0]
        assert torch.equal(masks.images, classes.images)
        for image, target, semantic in zip(masks.images, masks.targets, classes.targets, strict=True):
            red = (image[0] > 0.5) & (image[2] < -0.5)
            blue = (image[2] > 0.5) & (image[0] < -0.5)
            assert torch.equal(target.masks.any(dim=0), red)
            assert torch.equal(semantic.semantic, torch.where(red, 1, torch.where(blue, 0, VOID)))
            assert torch.equal(semantic.masks.sum(dim=0) == 1, semantic.semantic != VOID)
            for box, mask in zip(target.boxes, target.masks, strict=True):
                rows, columns = (mask.any(dim=side).nonzero() for side in (1, 0))
                x, y, w, h = (box * torch.tensor([40, 32, 40, 32])).tolist()
                assert (x - w / 2, x + w / 2) == pytest.approx((int(columns[0]), int(columns[-1]) + 1), abs=1e-3)
                assert (y - h / 2, y + h / 2) == pytest.approx((int(rows[0]), int(rows[-1]) + 1), abs=1e-3)
        views.append(masks.images)
    if "crop" in options:
        assert any(bool((view.abs() < 0.01).all(dim=1).any()) for view in views)  # padding: the mean colour


def test_boxes_alone_are_those_of_the_masks(folder):
    scaled = {"flip": True, "crop": "scaled", "scale": (0.5, 2.0)}
    boxes, masks = steps(folder, "detect", **scaled)[1, 0], steps(folder, "instance", **scaled)[1, 0]
    found = 0
    for ours, theirs in zip(boxes.targets, masks.targets, strict=True):
        if len(ours.labels) == len(theirs.labels):
            torch.testing.assert_close(ours.boxes, theirs.boxes, atol=1.1 / 32, rtol=0)
            found += len(ours.labels)
    assert found


def test_views_are_a_function_of_seed_epoch_and_sample(folder):
    options = {"flip": True, "crop": "scaled", "scale": (0.5, 2.0), "jitter": 0.2}
    first, again = steps(folder, "instance", **options), steps(folder, "instance", **options)
    for _ in range(3):
        again[2, 0]  # what was drawn before changes nothing
    assert torch.equal(first[1, 0].images, again[1, 0].images)
    one, other = (first.batch(epoch, np.array([4]), np.zeros(1, dtype=np.int64)) for epoch in (0, 1))
    assert not torch.equal(one.images, other.images)


def test_what_does_not_move_masks_is_refused():
    for options in ({"crop": "resized"}, {"randaugment": 2}, {"erasing": 0.5}):
        with pytest.raises(UsageError, match="does not move masks and boxes"):
            RegionAugment(AugmentOptions(**options), PRE)


def test_an_image_with_a_wrong_mask_is_skipped(folder, tmp_path):
    for name in ("images", "instances"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.open(folder / name / f"{number}.png").save(tmp_path / name / f"{number}.png")
    for number in range(4):
        Image.fromarray(np.zeros((5, 7), dtype=np.uint16)).save(tmp_path / "instances" / f"{number}.png")
    batch = steps(tmp_path, "instance")[0, 0]
    assert len(batch.skipped) == 3 and len(batch.indices) == 0 and len(batch.targets) == len(batch.images) == 1
    assert "is 60 x 48 pixels, and its mask" in next(iter(batch.skipped.values()))
