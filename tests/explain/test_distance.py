"""Attention distance and entropy: slow loops over transformers' attention, and closed forms on a row of patches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import vitlab
from vitlab.explain import attention_distance, attention_entropy, attention_statistics
from vitlab.explain.distance import patch_distances

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
IMAGES = torch.randn(5, 3, 32, 48, generator=torch.Generator().manual_seed(1))


def slow_distance(attentions, prefix, columns, patch_size):
    """Every query, key and image in turn: sum of weight times pixels, over the sum of weights on patches."""
    layers, images, heads, N, _ = attentions.shape
    found = np.zeros((layers, heads))
    for layer in range(layers):
        for h in range(heads):
            reaches = []
            for b in range(images):
                for i in range(prefix, N):
                    total = weights = 0.0
                    for j in range(prefix, N):
                        (r1, c1), (r2, c2) = divmod(i - prefix, columns), divmod(j - prefix, columns)
                        pixels = patch_size * math.sqrt((r1 - r2) ** 2 + (c1 - c2) ** 2)
                        total += attentions[layer, b, h, i, j] * pixels
                        weights += attentions[layer, b, h, i, j]
                    reaches.append(total / weights)
            found[layer, h] = np.mean(reaches)
    return found


def slow_entropy(attentions):
    layers, images, heads, N, _ = attentions.shape
    found = np.zeros((layers, heads))
    for layer in range(layers):
        for h in range(heads):
            rows = [-sum(w * math.log(w) for w in attentions[layer, b, h, i]) for b in range(images) for i in range(N)]
            found[layer, h] = np.mean(rows)
    return found


def test_equal_slow_loops_over_the_attention_of_transformers(pair):
    expected = slow_distance(pair.attentions, pair.prefix, 6, 8)
    distance = attention_distance(pair.ours, pair.images)
    np.testing.assert_allclose(distance.numpy(), expected, atol=1e-6, rtol=0)
    assert np.ptp(expected) > 1  # heads differ by more than a pixel
    entropy = attention_entropy(pair.ours, pair.images)
    np.testing.assert_allclose(entropy.numpy(), slow_entropy(pair.attentions), atol=1e-6, rtol=0)
    in_one_pass = attention_statistics(pair.ours, pair.images, batch_size=1)
    np.testing.assert_allclose(in_one_pass.distance.numpy(), expected, atol=1e-6, rtol=0)
    assert in_one_pass.max_entropy == pytest.approx(math.log(pair.prefix + 24))
    assert in_one_pass.images == 2


@pytest.mark.parametrize("options", [{}, dict(registers=3), dict(distill_token=True)], ids=str)
@pytest.mark.parametrize("n", [2, 5, 12])
def test_closed_forms_on_a_row_of_patches(known, options, n):
    """|i - j| is (n^2 - 1) / 3n on average over a row of n, and (n - 1) / 2 from its first patch."""
    prefix = {"registers": 4, "distill_token": 2}.get(next(iter(options), ""), 1)
    model = known("uniform", "self", prefix, grid=(1, n), patch_size=4, depth=2, **options)
    found = attention_statistics(model, torch.zeros(2, 3, 4, 4 * n))
    distance = torch.tensor([4 * (n * n - 1) / (3 * n), 0, 4 * (n - 1) / 2]).double()
    torch.testing.assert_close(found.distance, distance.expand(2, 3), atol=1e-6, rtol=1e-6)
    entropy = torch.tensor([math.log(prefix + n), 0, 0]).double()
    torch.testing.assert_close(found.entropy, entropy.expand(2, 3), atol=1e-6, rtol=0)
    assert found.uniform_distance == pytest.approx(float(distance[0]))
    assert found.max_entropy == pytest.approx(float(entropy[0]))


def test_rows_and_columns_are_not_mixed_up(known):
    """From the right end of the first row of a 3 x 5 grid, in pixels of 4."""
    model = known(1 + 4, grid=(3, 5), patch_size=4)
    by_hand = np.mean([4 * math.hypot(r, 4 - c) for r in range(3) for c in range(5)])
    assert attention_distance(model, torch.zeros(1, 3, 12, 20)).numpy() == pytest.approx(by_hand, abs=1e-5)
    between = patch_distances((3, 5), 16)
    assert between[0, 4] == 64 and between[0, 10] == 32 and between[14, 0] == pytest.approx(16 * math.sqrt(20))


def test_looking_at_no_patch_has_no_distance(known):
    found = attention_statistics(known("uniform", 0), torch.zeros(2, 3, 12, 20))
    assert bool(found.distance[:, 1].isnan().all()) and bool(found.distance[:, 0].isfinite().all())
    torch.testing.assert_close(found.entropy[:, 1], torch.zeros(3).double(), atol=1e-6, rtol=0)


def small(**options):
    model = vitlab.create("vit_base", **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def test_many_images_are_the_mean_of_each_alone():
    model = small(registers=2)
    alone = torch.stack([attention_distance(model, image[None]) for image in IMAGES]).mean(0)
    for batch_size in (1, 2, 8):
        found = attention_distance(model, IMAGES, batch_size=batch_size)
        torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_finite_and_near(dtype):
    model = small()
    exact = attention_statistics(model, IMAGES)
    found = attention_statistics(model.to(dtype), IMAGES)
    torch.testing.assert_close(found.distance, exact.distance, atol=0.2, rtol=0)
    torch.testing.assert_close(found.entropy, exact.entropy, atol=0.05, rtol=0)


def test_half_precision_stays_below_the_most_there_can_be(known):
    """Weights rounded to bfloat16 sum to other than 1; their entropy is still that of shares."""
    model = known("uniform", grid=(3, 7)).to(torch.bfloat16)
    found = attention_statistics(model, torch.zeros(1, 3, 12, 28))
    torch.testing.assert_close(found.entropy, torch.full((3, 1), math.log(22)).double(), atol=1e-6, rtol=0)
