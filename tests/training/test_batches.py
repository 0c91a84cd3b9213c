"""A batch is the same wherever its pictures come from, and as the model's own preprocess would make it."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.images.copies import remove_copies, stored_copies
from vitlab.images.datasets import Data
from vitlab.images.preprocess import Preprocess
from vitlab.images.randomness import permutation
from vitlab.images.sources.dataset import ArrayDataset, FileDataset
from vitlab.training import batches as module
from vitlab.training.batches import ORDER, BatchDataset, ImageSet, Plan, batches
from vitlab.training.job import steps_of
from vitlab.training.objectives.base import Objective
from vitlab.training.objectives.dino import SelfDistillation
from vitlab.training.recipe import Recipe, with_settings

PRE = Preprocess((24, 32))


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The same six pictures in memory and as files."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    small = [random.integers(0, 256, (6, 8, 3), dtype=np.uint8) for _ in range(6)]
    pixels = np.stack([np.asarray(Image.fromarray(p).resize((32, 24), Image.Resampling.BICUBIC)) for p in small])
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(folder / f"{number}.png")
    labels, classes = np.arange(6) % 2, ["a", "b"]
    paths = [folder / f"{number}.png" for number in range(6)]
    return ArrayDataset(pixels, labels, classes, "memory"), FileDataset(paths, labels, classes)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_crops_from_files_are_resized_as_those_in_memory(both, interpolation):
    recipe = with_settings(Recipe(), ["augment.crop=resized", "augment.scale=[0.3,0.9]", "augment.flip=true"])
    pre, plan = replace(PRE, interpolation=interpolation), Plan(n=6, batch_size=6, epochs=1, seed=0)
    augment = Objective.augmentation(recipe, pre)
    memory, files = (BatchDataset(ImageSet(data, pre), plan, augment)[0, 0].images for data in both)
    levels = (memory - files).abs() * 127.5  # Pillow and torch round in other places
    assert levels.max() < (0.5 if interpolation == "nearest" else 2.5) and levels.mean() < 0.5


@pytest.mark.parametrize("scale", [1 / 255, 1 / 127.5])
def test_training_and_judging_see_the_same_values(both, scale):
    pre = Preprocess((24, 32), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4), scale=scale)
    pictures, plan = ImageSet(both[0], pre), Plan(n=6, batch_size=6, epochs=1, seed=0)
    steps = BatchDataset(pictures, plan, Objective.augmentation(Recipe(), pre))
    judged, _ = pictures.normalised(np.arange(6))
    seen = steps.batch(0, np.arange(6), np.zeros(6, dtype=np.int64)).images
    torch.testing.assert_close(seen, judged)
    normalise = SelfDistillation.augmentation(with_settings(Recipe(), ["objective.name=dino"]), pre).plain.normalize
    torch.testing.assert_close(normalise(pictures.take(np.arange(6))[0]), judged)


def test_workers_can_be_spawned(both):
    """macOS and Windows do not fork: a worker gets its data as a pickle, and makes the same batches of it."""
    recipe = with_settings(Recipe(), ["augment.crop=resized", "augment.randaugment=2", "augment.flip=true"])
    plan, augment = Plan(n=6, batch_size=4, epochs=1, seed=0), Objective.augmentation(recipe, PRE)
    for data in both:
        steps = BatchDataset(ImageSet(data, PRE), plan, augment)
        again, start = pickle.loads(pickle.dumps((steps, module._ignore_first_signal)))
        assert callable(start) and torch.equal(again[0, 0].images, steps[0, 0].images)


def test_an_epoch_is_shuffled_once(monkeypatch):
    drawn = []

    def counted(n, *coordinates):
        drawn.append(coordinates)
        return permutation(n, *coordinates)

    monkeypatch.setattr(module, "permutation", counted)
    module._order.cache_clear()
    plan = Plan(n=103, batch_size=10, epochs=3, seed=7)
    for step in range(plan.total):
        epoch, indices, _ = plan.take(step, 0)
        expected = permutation(103, 7, ORDER, epoch)[10 * (step % 10) :][:10]
        assert indices.tolist() == expected.tolist()
        indices[:] = 0  # what a caller does with its part is its own business
    assert drawn == [(7, ORDER, epoch) for epoch in range(3)]


# ---- photos, decoded at about the size they are needed at


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Five JPEGs of different sizes, one of them turned by its EXIF tag; the fourth is cut off."""
    folder, random, paths = tmp_path_factory.mktemp("photos"), np.random.default_rng(1), []
    exif = Image.Exif()
    exif[0x0112] = 6
    for number, size in enumerate([(260, 170), (150, 230), (201, 303), (90, 80), (64, 48)]):
        blobs = Image.fromarray(random.integers(0, 256, (7, 9, 3), dtype=np.uint8))
        paths.append(folder / f"{number}.jpg")
        blobs.resize(size, Image.Resampling.BICUBIC).save(
            paths[-1], quality=97, exif=exif if number == 2 else Image.Exif()
        )
    paths[3].write_bytes(paths[3].read_bytes()[:900])
    return FileDataset(paths, np.arange(5) % 2, ["a", "b"])


CROPS = ["augment.crop=resized", "augment.scale=[0.2,1.0]", "augment.flip=true"]
DINO = ["objective.name=dino", "objective.local_views=2", "objective.local_size=16"]


@pytest.fixture
def steps_for(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path))

    def steps(*settings: str) -> BatchDataset:
        recipe = with_settings(Recipe(), ["data.batch_size=5", "run.epochs=3", *settings])
        data = Data("photos", ["a", "b"], photos, photos, None)
        return steps_of(recipe, data, replace(PRE, interpolation="bicubic"))

    return steps


@pytest.mark.parametrize("copies", [0, 4])
@pytest.mark.parametrize("settings", [CROPS, ["augment.flip=true"], DINO], ids=["crops", "whole", "views"])
def test_fast_decoding_shows_the_same_crops(steps_for, settings, copies):
    exact, fast = steps_for("data.decode=exact", *settings), steps_for(f"data.copies_gb={copies}", *settings)
    assert not exact.image_set.fast and exact.image_set.copies is None
    assert fast.image_set.fast and (fast.image_set.copies is None) == (copies == 0)
    for step in range(3):
        one, other = exact[step, 0], fast[step, 0]
        assert torch.equal(one.indices, other.indices) and len(other.indices) == 4
        assert list(other.skipped) == list(one.skipped) and "3.jpg: damaged" in str(other.skipped)
        for a, b in zip(one.views or [one.images], other.views or [other.images], strict=True):
            off, unlike = (a - b).abs().mean(), (a - b.flip(0)).abs().mean()
            assert off < 0.15 * unlike  # what lies between two photos


@pytest.mark.parametrize("settings", [CROPS, ["augment.crop=padded"], DINO], ids=["crops", "whole", "views"])
def test_batches_do_not_depend_on_what_was_read_before(steps_for, settings):
    """A run that was killed and resumed, after its copies were deleted, on another number of workers."""
    unbroken = [batch.images for batch in batches(steps_for(*settings), 0, workers=0)]
    assert len(stored_copies()) == 1
    resumed = [batch.images for batch in batches(steps_for(*settings), 1, workers=2)]
    remove_copies(stored_copies())
    from_files = [batch.images for batch in batches(steps_for(*settings), 2, workers=0)]
    assert len(unbroken) == 3
    for image, again in zip(unbroken[1:] + unbroken[2:], resumed + from_files, strict=True):
        assert torch.equal(image, again)


def test_copies_are_for_several_epochs_and_data_that_fit(steps_for, both):
    assert steps_for(*CROPS).image_set.copies is not None
    for setting in ("run.epochs=1", "data.copies_gb=0", "data.copies_gb=0.00001", "data.decode=exact"):
        assert steps_for(*CROPS, setting).image_set.copies is None
    assert ImageSet(both[0], PRE, "fast").decode == "exact"  # in memory there is nothing to decode
