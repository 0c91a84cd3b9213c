"""A batch is the same wherever its pictures come from, and as the model's own preprocess would make it."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.images.preprocess import Preprocess
from vitlab.images.randomness import permutation
from vitlab.images.sources.dataset import ArrayDataset, FileDataset
from vitlab.training import batches as module
from vitlab.training.batches import ORDER, BatchDataset, ImageSet, Plan
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
