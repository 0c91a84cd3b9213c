"""A model reads the same bits wherever its images come from: predict, explain, evaluation, training and the server."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTImageProcessor

import vitlab
from vitlab.explain.inputs import as_batch
from vitlab.images.augment import Augment, AugmentOptions
from vitlab.images.preprocess import Preprocess
from vitlab.images.sources.dataset import FileDataset
from vitlab.serve.image_io import prepare
from vitlab.serve.settings import Settings
from vitlab.training.batches import BatchDataset, ImageSet, Plan
from vitlab.training.evaluate import evaluate_classifier

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize("scale", [1 / 255, 1 / 127.5])
@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), ((0.5,), (0.5,))], ids=["colour", "grey"])
def test_every_byte_becomes_the_same_float_in_all_places(tmp_path, mean, std, scale):
    rng, channels = np.random.default_rng(0), len(mean)
    pixels = np.stack([rng.permutation(256).reshape(16, 16) for _ in mean], axis=-1).astype(np.uint8)  # all 256 values
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    file = tmp_path / "image.png"
    image.save(file)
    model = vitlab.create("vit_digits", image_size=16, channels=channels, classes=1)
    model.preprocess = Preprocess((16, 16), mean=mean, std=std, scale=scale)
    inputs = []
    model.register_forward_pre_hook(lambda _, images: inputs.append(images[0].clone()))

    vitlab.predict(model, file)
    pictures = ImageSet(FileDataset([file], np.zeros(1, dtype=np.int64), ["a"]), model.preprocess)
    evaluate_classifier(model, pictures)
    augment = Augment(AugmentOptions(crop="none", flip=False), (16, 16), mean, std, scale=scale)
    plan = Plan(len(pictures), 1, epochs=1, seed=0)
    inputs.append(BatchDataset(pictures, plan, augment).batch(0, np.arange(1), np.zeros(1, dtype=np.int64)).images)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    inputs.append(prepare(model.preprocess, buffer.getvalue(), Settings()).tensor[None])
    inputs.append(as_batch(model, [image]).images)

    options = dict(do_resize=False, rescale_factor=scale, image_mean=list(mean), image_std=list(std))
    theirs = ViTImageProcessor(**options)(image.convert("RGB") if channels == 3 else pixels, return_tensors="pt")
    assert len(inputs) == 5
    for ours in inputs:
        assert torch.equal(ours, inputs[0])
    torch.testing.assert_close(inputs[0], theirs["pixel_values"], rtol=0, atol=1e-6)
