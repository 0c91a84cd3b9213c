"""Each step's numbers against transformers' hidden states, costs against inspect, read-outs against its classifier."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import vitlab
from vitlab.explain import walk_through
from vitlab.explain.walk import as_numbers


def test_lengths_and_readouts_are_those_of_transformers(pair):
    walk = walk_through(pair.ours, pair.images[:1])
    blocks = [step for step in walk.steps if step.name.startswith("blocks.")]
    assert [b.shape for b in blocks] == [pair.hidden.shape[2:]] * 3
    for block, hidden in zip(blocks, pair.hidden[:, 0], strict=True):
        np.testing.assert_allclose(block.lengths.numpy(), np.linalg.norm(hidden, axis=-1), rtol=1e-6)
    with torch.no_grad():
        last = pair.theirs(pair.images[:1]).logits[0].softmax(-1)
    torch.testing.assert_close(walk.by_depth[-1], last, rtol=1e-6, atol=1e-8)
    assert len(walk.prefix) == pair.prefix and walk.grid == pair.grid


def test_an_early_readout_is_that_of_a_network_that_ends_there():
    model = vitlab.create("vit_digits", depth=3, classes=4).eval()
    x = torch.randn(1, model.config.channels, *model.config.image_size)
    found = walk_through(model, x).by_depth
    for depth in (1, 2, 3):
        short = vitlab.create("vit_digits", depth=depth, classes=4).eval()
        short.load_state_dict({k: v for k, v in model.state_dict().items() if k in short.state_dict()})
        torch.testing.assert_close(found[depth - 1], short(x)[0].softmax(-1))


def test_costs_add_up_to_the_whole_model():
    model = vitlab.create("vit_tiny", image_size=(32, 48), classes=5, depth=2, registers=2)
    walk = walk_through(model, torch.randn(1, 3, 32, 48))
    assert sum(step.parameters for step in walk.steps) == sum(p.numel() for p in model.parameters())
    assert sum(step.macs for step in walk.steps) == vitlab.inspect(model).macs
    shapes = {step.name: step.shape for step in walk.steps}
    assert shapes["picture"] == (3, 32, 48)
    assert shapes["patches"] == (6, 768)
    assert shapes["patch_embed"] == (6, 192)
    assert shapes["prefix"] == shapes["blocks.1"] == (9, 192)
    assert shapes["softmax"] == (5,)


@pytest.mark.parametrize(
    ("options", "equation"),
    [(dict(class_token=False, pooling="mean"), "mean of LN(z_L)"), ({}, "LN(z_L⁰)")],
)
def test_the_pooling_step_says_what_this_model_does(options, equation):
    walk = walk_through(vitlab.create("vit_digits", **options), torch.randn(1, 1, 8, 8))
    assert equation in next(step.equation for step in walk.steps if step.name == "pool")


def test_without_classes_nothing_is_read_out():
    walk = walk_through(vitlab.create("vit_digits", classes=0), torch.randn(1, 1, 8, 8))
    assert walk.by_depth is None
    assert walk.steps[-1].name == "pool"
    assert json.loads(json.dumps(as_numbers(walk)))["steps"][0]["shape"] == [1, 8, 8]


def test_what_cannot_be_walked_through_is_told():
    with pytest.raises(ValueError, match=r"plain ViT.*swin"):
        walk_through(vitlab.create("swin_cifar"), torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="one image, found 2"):
        walk_through(vitlab.create("vit_digits"), torch.randn(2, 1, 8, 8))
