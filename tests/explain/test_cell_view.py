"""A number of a block and the sum behind it, against the block itself and against a loop over weights."""

from __future__ import annotations

import pytest
import torch

import vitlab
from vitlab.explain import block_view, cell_view
from vitlab.layers.edit import Edit

SIZE = dict(image_size=(12, 20), patch_size=4, channels=3, width=24, depth=3, heads=3, mlp_ratio=3.0, classes=5)
LAYER, TOKEN, HEAD, CHANNEL = 1, 7, 2, 5


def create(**options):
    torch.manual_seed(4)
    model = vitlab.create("vit_digits", **{**SIZE, **options}).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)  # biases and norms are not trivial
    return model, torch.randn(1, 3, 12, 20)


@pytest.mark.parametrize("options", [{}, dict(norm="post"), dict(mlp="swiglu", class_token=False, pooling="mean")])
@pytest.mark.parametrize("edit", [None, Edit().zero("heads", layer=0, heads=[1]).temperature(2.0)])
def test_every_product_of_a_block_is_its_sum(options, edit):
    model, x = create(**options)
    numbers = dict(layer=LAYER, token=TOKEN, edit=edit)
    block = block_view(model, x, head=HEAD, **numbers)
    expected = {"q": block.q, "k": block.keys[TOKEN], "v": block.values[TOKEN]}
    expected |= {"proj": block.proj, "fc1_pre": block.fc1_pre, "fc2": block.fc2}
    for step, values in expected.items():
        first = 8 * HEAD if len(step) == 1 else 0
        cell = cell_view(model, x, step=step, channel=first + CHANNEL, **numbers)
        assert cell.value == pytest.approx(float(values[CHANNEL]), abs=2e-6)
        assert cell.value == pytest.approx(sum((cell.inputs * cell.weights).tolist()) + cell.bias, abs=1e-5)


def test_weights_are_the_rows_of_the_matrix():
    model, x = create()
    block = model.blocks[LAYER]
    cell = cell_view(model, x, layer=LAYER, token=TOKEN, step="k", channel=9)
    torch.testing.assert_close(cell.weights, block.attention.qkv.weight[24 + 9].detach(), rtol=0, atol=1e-6)
    assert cell.bias == pytest.approx(block.attention.qkv.bias[24 + 9].item())
    assert "channel" in str(cell) and "<table" in cell._repr_html_()


def test_what_is_no_product_is_refused():
    model, x = create(positions="rotary")
    for step, channel, message in [("q", 0, "rotated"), ("softmax", 0, "fc1_pre"), ("fc2", 24, "0 to 23")]:
        with pytest.raises(ValueError, match=message):
            cell_view(model, x, layer=0, token=0, step=step, channel=channel)
