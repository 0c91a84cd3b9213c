"""Every number of a block against NumPy that is written out from the weights, and against the network's own pass."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import vitlab
from vitlab.explain import block_view, forward_view, query_attention
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace

SIZE = dict(image_size=(12, 20), patch_size=4, channels=3, width=24, depth=3, heads=3, mlp_ratio=3.0, classes=5)


def create(**options):
    torch.manual_seed(4)
    model = vitlab.create("vit_digits", **{**SIZE, **options}).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)  # biases and norms are not trivial
    return model, torch.randn(1, 3, 12, 20)


def numbers(module) -> tuple[np.ndarray, np.ndarray]:
    return module.weight.detach().double().numpy(), module.bias.detach().double().numpy()


def layer_norm(x, module):
    weight, bias = numbers(module)
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + module.eps) * weight + bias


def linear(x, module):
    weight, bias = numbers(module)
    return x @ weight.T + bias


@pytest.mark.parametrize("options", [{}, dict(layer_scale=0.3, registers=2), dict(class_token=False, pooling="mean")])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_is_what_numpy_computes_from_its_weights(options, layer):
    model, x = create(**options)
    trace = Trace("positions", "tokens")
    with torch.no_grad():
        model(x, trace=trace)
    z = (trace["positions"] if layer == 0 else trace["tokens", layer - 1])[0].double().numpy()  # (N, D)
    block, token, head, d = model.blocks[layer], 7, 1, 8
    found = {
        name: value.double().numpy()
        for name, value in block_view(model, x, layer=layer, head=1, token=7).arrays().items()
    }

    norm1 = layer_norm(z, block.norm1)
    qkv = linear(norm1, block.attention.qkv).reshape(len(z), 3, 3, d)  # (N, qkv, h, d)
    scores = np.array(
        [sum(qkv[token, 0, head, c] * qkv[n, 1, head, c] for c in range(d)) / math.sqrt(d) for n in range(len(z))]
    )
    weights = np.exp(scores) / np.exp(scores).sum()
    all_scores = np.einsum("hd,nhd->hn", qkv[token, 0], qkv[:, 1]) / math.sqrt(d)
    by_head = np.exp(all_scores) / np.exp(all_scores).sum(-1, keepdims=True)
    heads = np.einsum("hn,nhd->hd", by_head, qkv[:, 2]).reshape(-1)
    proj = linear(heads, block.attention.proj)
    gamma = [
        getattr(block, f"scale{i}").gamma.detach().double().numpy() if "layer_scale" in options else 1.0 for i in (1, 2)
    ]
    after = z[token] + gamma[0] * proj
    norm2 = layer_norm(after, block.norm2)
    pre = linear(norm2, block.mlp.fc1)
    hidden = np.array([v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in pre])
    fc2 = linear(hidden, block.mlp.fc2)
    expected = dict(
        input=z[token], norm1=norm1[token], q=qkv[token, 0, head], keys=qkv[:, 1, head], values=qkv[:, 2, head],
        scores=scores, weights=weights, mixed=weights @ qkv[:, 2, head], weights_by_head=by_head, heads=heads,
        proj=proj, after_attention=after, norm2=norm2, fc1_pre=pre, fc1=hidden, fc2=fc2, output=after + gamma[1] * fc2,
    )  # fmt: skip
    assert set(found) == {*expected, *(("scale1", "scale2") if "layer_scale" in options else ())}
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "options",
    [
        dict(norm="post"),
        dict(mlp="swiglu"),
        dict(positions="relative", class_token=False, pooling="mean"),
        dict(positions="rotary", qk_norm=True),
    ],
)
def test_other_blocks_agree_with_the_pass_itself(options):
    """The scores are computed anew from queries, keys and bias: their softmax must be the attention of the pass."""
    model, x = create(**options)
    trace = Trace("attention", "heads", "tokens")
    with torch.no_grad():
        model(x, trace=trace)
    view = block_view(model, x, layer=1, head=2, token=-1)
    torch.testing.assert_close(view.weights_by_head, trace["attention", 1][0, :, -1], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(view.mixed, trace["heads", 1][0, -1].unflatten(0, (3, 8))[2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(view.output, trace["tokens", 1][0, -1])
    assert (view.norm1 is None) == (options.get("norm") == "post")
    assert (view.bias is None) == (options.get("positions") != "relative")


@pytest.mark.parametrize(
    "changes",
    [
        dict(temperature=2.5),
        dict(scale_by_sqrt_d=False),
        dict(drop_heads=[[1, 2], [0, 0]]),
        dict(mask_patches=[0, 3], positions="removed"),
        dict(positions="shuffled", seed=3, hide_patches=[2]),
    ],
)
@pytest.mark.parametrize("options", [{}, dict(positions="relative", class_token=False, pooling="mean")])
def test_an_edited_block_agrees_with_the_edited_pass(changes, options):
    model, x = create(**options)
    edit = Edit.from_json(changes)
    trace = Trace("attention", "heads", "tokens")
    with torch.no_grad():
        logits = model(x, trace=trace, edit=edit)
    view = block_view(model, x, layer=1, head=2, token=4, edit=edit)
    torch.testing.assert_close(view.scores.softmax(-1), trace["attention", 1][0, 2, 4], rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(view.output, trace["tokens", 1][0, 4])
    torch.testing.assert_close(view.heads, trace["heads", 1][0, 4])
    torch.testing.assert_close(query_attention(model, x, 4, edit), trace.stack("attention")[:, 0, :, 4])
    torch.testing.assert_close(forward_view(model, x, edit).logits, logits[0])


@pytest.mark.parametrize("name", ["eva02_tiny_patch14", "vit_pe_core_tiny_patch16", "dinov3_vits16", "beit_digits"])
def test_a_block_alone_is_the_block_of_the_pass_in_every_family(name):
    """Only the asked block is run, from stored tokens: rotary, relative and no positions, RMSNorm, gated MLPs."""
    P = vitlab.create(name, depth=1).config.patch_size
    model = vitlab.create(name, depth=2, image_size=(2 * P, 3 * P)).eval()
    x, trace = torch.randn(1, model.config.channels, 2 * P, 3 * P), Trace("tokens", "attention")
    with torch.no_grad():
        model(x, trace=trace)
    for layer in (0, 1):
        view = block_view(model, x, layer=layer, head=1, token=3)
        torch.testing.assert_close(view.output, trace["tokens", layer][0, 3])
        torch.testing.assert_close(view.weights_by_head, trace["attention", layer][0, :, 3], rtol=1e-5, atol=1e-6)


def test_an_edit_of_the_weights_themselves_is_followed():
    model, x = create()
    edit = Edit().uniform_attention(layer=1)
    found = block_view(model, x, layer=1, head=2, token=4, edit=edit)
    torch.testing.assert_close(found.weights, torch.full((16,), 1 / 16))
    assert not torch.allclose(query_attention(model, x, 4, edit)[0, 2], found.weights)


def test_the_rows_of_one_token_are_those_of_the_whole_attention():
    model, x = create(registers=1)
    trace = Trace("attention")
    with torch.no_grad():
        model(x, trace=trace)
    torch.testing.assert_close(query_attention(model, x, 5), trace.stack("attention")[:, 0, :, 5], rtol=1e-5, atol=1e-7)


def test_what_does_not_exist_is_told():
    model, x = create()
    for options, message in [
        (dict(layer=3), "layer 3"),
        (dict(layer=0, head=3), "head 3"),
        (dict(layer=0, token=16), "16, 0 to 15"),
    ]:
        with pytest.raises(ValueError, match=message):
            block_view(model, x, **options)
    with pytest.raises(ValueError, match="plain ViT"):
        block_view(vitlab.create("swin_cifar"), torch.randn(1, 3, 32, 32), layer=0)
