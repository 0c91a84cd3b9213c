"""attention_maps: transformers' output_attentions, all layers and heads; who looks goes by pixel, number or name."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import vitlab
from vitlab.explain import attention_distance, attention_maps, rollout
from vitlab.explain.attention_maps import query_rows
from vitlab.layers import attention
from vitlab.layers.patches import patchify
from vitlab.layers.trace import Trace
from vitlab.models.vit import VisionTransformer

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
IMAGES = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def small(**options):
    model = vitlab.create("vit_base", **{**SMALL, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def test_every_row_is_that_of_transformers(pair):
    """In float32: all layers, all heads, from the class token and from patches."""
    ours, theirs, images = deepcopy(pair.ours).float(), deepcopy(pair.theirs).float(), pair.images.float()
    with torch.no_grad():
        expected = torch.stack(theirs(images, output_attentions=True).attentions, dim=1)  # (B, L, h, N, N)
    n = pair.prefix
    maps, mass = attention_maps(ours, images, query="class", prefix=True)
    assert maps.shape == (2, 3, 4, 4, 6) and mass.shape == (2, 3, 4, n)
    torch.testing.assert_close(torch.cat([mass, maps.flatten(-2)], -1), expected[..., 0, :], atol=1e-6, rtol=0)
    for patch in (0, 8, 23):
        maps = attention_maps(ours, images, query=patch)
        torch.testing.assert_close(maps.flatten(-2), expected[..., n + patch, n:], atol=1e-6, rtol=0)
    mean = attention_maps(ours, images, query="mean")
    torch.testing.assert_close(mean.flatten(-2), expected[..., n:, n:].mean(-2), atol=1e-6, rtol=0)
    part = attention_maps(ours, images, layers=[2, 0], heads=[3, 1])
    torch.testing.assert_close(part.flatten(-2), expected[:, [2, 0]][:, :, [3, 1], 0, n:], atol=1e-6, rtol=0)
    fused = attention_maps(ours, images, layers=[-1], heads="mean")
    torch.testing.assert_close(fused.flatten(-2), expected[:, 2:, :, 0, n:].mean(2, True), atol=1e-6, rtol=0)
    if ours.config.tokens.distill_token:
        maps = attention_maps(ours, images, query="distillation")
        torch.testing.assert_close(maps.flatten(-2), expected[..., 1, n:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["attention", "class_attention"])
def test_asking_changes_no_bit_of_the_logits(pair, kind):
    model, images = pair.ours, pair.images
    seen = []
    trace = Trace(kind, reduce=lambda weights, layer: seen.append((layer, weights.shape)))
    with torch.no_grad():
        assert torch.equal(model(images, trace=trace), model(images))
    assert [layer for layer, _ in seen] == [0, 1, 2]
    assert list(trace.items()) == []  # a reduction that gives None keeps nothing


def test_a_pixel_names_the_patch_that_holds_it():
    numbers = torch.arange(32 * 48).reshape(1, 1, 32, 48)
    holds = patchify(numbers, 8)[0]  # (24, 64): which pixels each patch is made of
    model = small()
    for x, y in [(0, 0), (7, 7), (8, 7), (47, 31), (40, 8), (13.5, 30.9)]:
        patch = int((holds == int(y) * 48 + int(x)).any(1).nonzero())
        assert query_rows(model, IMAGES, (x, y)) == query_rows(model, IMAGES, patch) == slice(1 + patch, 2 + patch)


@pytest.mark.parametrize("query", ["class", "mean", 5, None])
def test_a_batch_is_its_images_one_by_one(query):
    model = small(registers=2)
    together = attention_maps(model, IMAGES, query=query)
    alone = torch.cat([attention_maps(model, image[None], query=query) for image in IMAGES])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-5)
    in_twos = attention_maps(model, IMAGES, query=query, batch_size=2)
    torch.testing.assert_close(together, in_twos, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_finite_and_near(dtype):
    model = small(registers=2)
    exact = attention_maps(model, IMAGES, query="mean")
    maps = attention_maps(model.to(dtype), IMAGES, query="mean")
    assert maps.dtype == torch.float32 and bool(maps.isfinite().all())
    torch.testing.assert_close(maps, exact, atol=0.02, rtol=0)


def test_chance_is_off_and_modes_come_back():
    model = small(dropout=0.5, attention_dropout=0.5, patch_dropout=0.5, stochastic_depth=0.5)
    expected = attention_maps(model, IMAGES)
    model.train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    found = attention_maps(model, IMAGES)
    assert torch.equal(found, expected) and not found.requires_grad
    assert [m.training for m in model.modules()] == modes


def test_without_a_class_token_the_patches_look():
    model = small(class_token=False, pooling="mean", registers=1)
    assert torch.equal(attention_maps(model, IMAGES), attention_maps(model, IMAGES, query="mean"))
    with pytest.raises(ValueError, match=r"1 register token \+ 4 x 6 patches. Ask for 'mean'"):
        attention_maps(model, IMAGES, query="class")
    reads_patches = small(pooling="mean")  # it has a class token, which its head does not read
    assert torch.equal(attention_maps(reads_patches, IMAGES), attention_maps(reads_patches, IMAGES, query="mean"))


def test_first_patch_of_a_model_without_prefix_is_a_patch():
    model = small(class_token=False, pooling="mean")
    trace = Trace("attention", layers=[1])
    with torch.no_grad():
        model(IMAGES, trace=trace)
    found = attention_maps(model, IMAGES, layers=[1], query=0)
    assert torch.equal(found[:, 0].flatten(-2), trace["attention", 1][:, :, 0])


REFUSED = {
    "lies outside the model's input, which is 48 x 32": dict(query=(48, 0)),
    "must be one pixel": dict(query=(1, 2, 3)),
    "must be one pixel .x": dict(query=("1", "2")),
    "numbered 0 to 23": dict(query=24),
    "numbered 0 to 2": dict(query=-1),
    "Ask for 'class', 'mean'": dict(query="cls"),
    "a patch's number, or a pixel": dict(query=1.5),
    "layers 0 to 2": dict(layers=[3]),
    "heads 0 to 3": dict(heads=[4]),
    '"all", "mean" or a list': dict(heads="max"),
    "asks for nothing": dict(layers=[]),
    "batch_size=0": dict(batch_size=0),
}


@pytest.mark.parametrize(("says", "options"), REFUSED.items())
def test_what_cannot_be_asked_is_refused_in_words(says, options):
    with pytest.raises(ValueError, match=says):
        attention_maps(small(), IMAGES, **options)


class Windowed(VisionTransformer):
    """Stands for models whose attention is no N x N matrix."""

    @property
    def traceable(self):
        return tuple(kind for kind in super().traceable if "attention" not in kind)


@pytest.mark.parametrize("ask", [attention_maps, rollout, attention_distance])
def test_a_model_without_a_full_matrix_says_what_it_gives(ask):
    with pytest.raises(ValueError, match=r"cannot give 'attention'. .*It can give: patch_embed.*tokens"):
        ask(Windowed(small().config), IMAGES)


ONE_AT_A_TIME = {
    "maps": lambda model: attention_maps(model, IMAGES, query=3),
    "mean": lambda model: attention_maps(model, IMAGES, query="mean"),
    "rollout": lambda model: rollout(model, IMAGES, discard=0.5),
    "distance": lambda model: attention_distance(model, IMAGES),
}


@pytest.mark.parametrize("ask", ONE_AT_A_TIME.values(), ids=ONE_AT_A_TIME)
def test_one_layer_of_attention_at_a_time_is_in_memory(ask, monkeypatch):
    alive: list[StorageWeakRef] = []
    compute = attention.attention_weights

    def counted(*args):
        assert all(weights.expired() for weights in alive)
        weights = compute(*args)
        alive.append(StorageWeakRef(weights.untyped_storage()))
        return weights

    monkeypatch.setattr(attention, "attention_weights", counted)
    ask(small())
    assert len(alive) == 3
    assert all(weights.expired() for weights in alive)


@pytest.mark.parametrize("path", ["auto", "explicit"])
def test_a_kept_row_does_not_hold_the_matrix(path):
    model = small(attention=path)
    row = Trace("attention", reduce=lambda weights, layer: weights[:, :, 4])
    whole, of_class = Trace("attention"), Trace("class_attention")
    for trace in (row, whole, of_class):
        model(IMAGES, trace=trace)
    assert torch.equal(row["attention", 1], whole["attention", 1][:, :, 4])
    for kept in (row["attention", 1], of_class["class_attention", 1]):
        assert kept.untyped_storage().nbytes() == kept.nbytes
