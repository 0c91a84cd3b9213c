"""rollout: a slow loop over transformers' attention, from Abnar and Zuidema's definition; and three closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import vitlab
from vitlab.explain import rollout

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
IMAGES = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def slow_rollout(attentions, prefix, rows, grid, *, discard=0.0, start=0, fuse=np.mean):
    """Loops in float64 over one image, one weight at a time."""
    layers, images, heads, N, _ = attentions.shape
    maps = np.zeros((images, *grid))
    for b in range(images):
        product = np.eye(N)
        for layer in range(start, layers):
            W = np.zeros((N, N))
            for i in range(N):
                for j in range(N):
                    W[i, j] = fuse([attentions[layer, b, h, i, j] for h in range(heads)])
            at_patches = sorted((W[i, j], i, j) for i in range(N) for j in range(prefix, N))
            for _, i, j in at_patches[: int(discard * len(at_patches))]:
                W[i, j] = 0
            for i in range(N):
                W[i, i] += 1
                W[i] /= sum(W[i])
            product = np.array([[W[i] @ product[:, j] for j in range(N)] for i in range(N)])
        for patch in range(N - prefix):
            where = divmod(patch, grid[1])
            maps[b][where] = np.mean([product[i, prefix + patch] for i in rows])
    return maps


CASES = {
    "figure 6": ({}, {}),
    "discard": (dict(discard=0.7), dict(discard=0.7)),
    "later start": (dict(start_layer=1), dict(start=1)),
    "max of heads": (dict(heads="max", discard=0.25), dict(fuse=np.max, discard=0.25)),
    "min of heads": (dict(heads="min", start_layer=-2), dict(fuse=np.min, start=1)),
}
QUERIES = {"patch": (9, [9]), "pixel": ((25, 9), [9]), "all patches": ("mean", range(24))}


@pytest.mark.parametrize(("options", "slow"), CASES.values(), ids=CASES)
def test_equals_a_slow_loop_over_the_attention_of_transformers(pair, options, slow):
    expected = slow_rollout(pair.attentions, pair.prefix, [0], pair.grid, **slow)
    found = rollout(pair.ours, pair.images, **options)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6, rtol=0)
    assert np.ptp(expected, axis=(1, 2)).min() > 1e-3  # a flat map would agree with anything


@pytest.mark.parametrize(("query", "patches"), QUERIES.values(), ids=QUERIES)
def test_from_patches_it_equals_the_slow_loop_too(pair, query, patches):
    rows = [pair.prefix + patch for patch in patches]
    expected = slow_rollout(pair.attentions, pair.prefix, rows, pair.grid, discard=0.3)
    found = rollout(pair.ours, pair.images, discard=0.3, query=query)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-6, rtol=0)


def test_the_classes_column_survives_any_discard(known):
    """With nearly all attention to patches gone, what is left is the identity and the prefix tokens' columns."""
    model = known("uniform", registers=2)
    found = rollout(model, torch.zeros(1, 3, 12, 20), discard=0.999, query=4)
    W = np.zeros((18, 18))
    W[:, :3] = 1 / 18
    A = (W + np.eye(18)) / (W + np.eye(18)).sum(1, keepdims=True)
    kept = np.linalg.matrix_power(A, 3)[3 + 4, 3:].reshape(3, 5)
    np.testing.assert_allclose(found[0].numpy(), kept, atol=1e-6)


@pytest.mark.parametrize("options", [{}, dict(registers=2), dict(distill_token=True)], ids=str)
def test_closed_forms(known, options):
    """A = J/N or 1 e_f^T is idempotent, so ((A + I) / 2)^L = I / 2^L + (1 - 1 / 2^L) A."""
    images, moved = torch.zeros(2, 3, 12, 20), 1 - 1 / 2**3
    model = known("uniform", **options)
    N = 15 + len(model.config.prefix)
    torch.testing.assert_close(rollout(model, images), torch.full((2, 3, 5), moved / N), atol=1e-7, rtol=0)
    from_patch = torch.full((2, 3, 5), moved / N)
    from_patch[:, 1, 2] += 1 / 2**3
    torch.testing.assert_close(rollout(model, images, query=7), from_patch, atol=1e-7, rtol=0)

    itself = rollout(known("self", **options), images, query=7)
    assert torch.equal(itself, torch.eye(15)[7].reshape(1, 3, 5).expand(2, 3, 5))
    assert torch.equal(rollout(known("self", **options), images), torch.zeros(2, 3, 5))

    fixed = torch.zeros(2, 3, 5)
    fixed[:, 2, 1] = moved
    at_one = known(N - 15 + 11, **options)
    torch.testing.assert_close(rollout(at_one, images), fixed, atol=1e-7, rtol=0)
    mean = fixed + 1 / 2**3 / 15  # every patch also keeps itself
    torch.testing.assert_close(rollout(at_one, images, query="mean"), mean, atol=1e-7, rtol=0)


def test_the_head_decides_who_looks(known):
    images = torch.zeros(1, 3, 12, 20)
    model = known("uniform", class_token=False, pooling="mean")
    torch.testing.assert_close(rollout(model, images), torch.full((1, 3, 5), 1 / 15), atol=1e-7, rtol=0)
    with pytest.raises(ValueError, match="Ask for 'mean'"):
        rollout(model, images, query="class")
    with_class = known("uniform", pooling="mean")
    assert torch.equal(rollout(with_class, images), rollout(with_class, images, query="mean"))


def test_rows_stay_shares(pair):
    """What reaches the class token adds up to 1 with what the prefix tokens bring."""
    total = rollout(pair.ours, pair.images).sum((1, 2))
    assert bool((total < 1).all()) and bool((total > 0.2).all())


def small(**options):
    model = vitlab.create("vit_base", **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@pytest.mark.parametrize("discard", [0.0, 0.6])
def test_a_batch_is_its_images_one_by_one(discard):
    model = small(registers=2)
    together = rollout(model, IMAGES, discard=discard)
    for batch_size in (1, 2):
        parts = rollout(model, IMAGES, discard=discard, batch_size=batch_size)
        torch.testing.assert_close(parts, together, atol=1e-6, rtol=1e-5)
    turned = rollout(model, IMAGES.flip(0), discard=discard)
    torch.testing.assert_close(turned.flip(0), together, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("heads", ["mean", "max", "min"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_finite_and_near(dtype, heads):
    model = small()
    exact = rollout(model, IMAGES, heads=heads)
    found = rollout(model.to(dtype), IMAGES, heads=heads)
    assert found.dtype == torch.float32 and bool(found.isfinite().all())
    torch.testing.assert_close(found, exact, atol=0.01, rtol=0.1)


def test_another_size_than_the_stored_one():
    model = small()
    assert rollout(model, torch.randn(2, 3, 56, 16)).shape == (2, 7, 2)


REFUSED = {
    "discard=1": dict(discard=1),
    "discard=-0.1": dict(discard=-0.1),
    'must be "mean", "max" or "min"': dict(heads="all"),
    "layer 3 does not exist": dict(start_layer=3),
    "numbered 0 to 23": dict(query=99),
}


@pytest.mark.parametrize(("says", "options"), REFUSED.items())
def test_what_cannot_be_asked_is_refused_in_words(says, options):
    with pytest.raises(ValueError, match=says):
        rollout(small(), IMAGES, **options)
