"""Filters against scikit-learn's PCA, position similarity against loops and a formula, norms against transformers."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

import vitlab
from vitlab.explain import filters, high_norm_tokens, position_similarity, stem_filters, token_norms

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)


def small(**options):
    return vitlab.create("vit_base", **{**SMALL, **options}).eval()


@pytest.mark.parametrize("options", [{}, dict(channels=1), dict(width=208), dict(patch_norms=True)], ids=str)
def test_filters_are_the_principal_components(options):
    model = small(**options).double()
    embed = model.patch_embed
    with torch.no_grad():
        E = embed.proj.weight.normal_(mean=0.3).detach().flatten(1)
        if embed.norm_in is not None:
            E = E * embed.norm_in.weight.normal_(mean=1.0, std=0.2)
    expected = PCA(12, svd_solver="full").fit(E.numpy()).components_.reshape(12, -1, 8, 8)
    found = filters(model, 12).numpy()
    assert found.shape == (12, 8, 8, expected.shape[1])
    for mine, theirs in zip(found, expected.transpose(0, 2, 3, 1), strict=True):
        sign = np.sign((mine * theirs).sum())
        np.testing.assert_allclose(mine, sign * theirs, atol=1e-8)
        assert mine.flat[np.abs(mine).argmax()] > 0


def test_filters_of_half_precision_and_of_too_many():
    assert bool(filters(small().to(torch.bfloat16)).isfinite().all())
    with pytest.raises(ValueError, match="48 filters of 192 values have 1 to 47"):
        filters(small(), 48)
    with pytest.raises(ValueError, match=r"ConvStem.*stem_filters"):
        filters(small(stem="conv"))


@pytest.mark.parametrize(("channels", "most"), [(3, 5), (1, 5)])
def test_filters_of_a_stem_are_those_of_its_first_layer(channels, most):
    """A stem of 48 / 2^2 = 12, 24, 48 channels; 12 filters have at most 11 components, of one channel 9."""
    model = small(stem="conv", channels=channels).double()
    E = model.patch_embed.convs[0].weight.detach().flatten(1).numpy()
    found = stem_filters(model).numpy()
    assert found.shape == (min(11, 9 * channels), 3, 3, channels)
    expected = PCA(most, svd_solver="full").fit(E).components_.reshape(most, channels, 3, 3).transpose(0, 2, 3, 1)
    for mine, theirs in zip(found, expected, strict=False):
        np.testing.assert_allclose(mine, np.sign((mine * theirs).sum()) * theirs, atol=1e-8)
    with pytest.raises(ValueError, match=r"12 filters of .* values have 1 to"):
        stem_filters(model, 12)
    with pytest.raises(ValueError, match=r"no convolutional stem.*filters\(model\)"):
        stem_filters(small())


def test_position_similarity_is_the_cosine_in_a_slow_loop(pair):
    """From the table as transformers holds it; the stored grid of the model with registers is square."""
    theirs = next(p for name, p in pair.theirs.named_parameters() if name.endswith("position_embeddings"))
    rows, columns = pair.ours.config.grid
    table = theirs.detach().numpy()[0, -rows * columns :]
    expected = np.zeros((rows, columns, rows, columns))
    for a in range(rows * columns):
        for b in range(rows * columns):
            dot = sum(x * y for x, y in zip(table[a], table[b], strict=True))
            lengths = math.sqrt(sum(x * x for x in table[a])) * math.sqrt(sum(x * x for x in table[b]))
            expected[(*divmod(a, columns), *divmod(b, columns))] = dot / lengths
    np.testing.assert_allclose(position_similarity(pair.ours).numpy(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("options", [{}, dict(registers=2, prefix_positions="all")], ids=str)
def test_sincos_positions_are_alike_by_their_offset_alone(options):
    """sin a sin b + cos a cos b = cos(a - b): the mean over both axes and all speeds w of cos(offset * w)."""
    found = position_similarity(small(positions="sincos", **options))
    speeds = 10000.0 ** -(np.arange(12) / 12)
    for r in range(4):
        for c in range(6):
            by_hand = (np.cos((r - 1) * speeds).mean() + np.cos((c - 4) * speeds).mean()) / 2
            assert float(found[1, 4, r, c]) == pytest.approx(by_hand, abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "says"), [("rotary", "attention_distance"), ("relative", r"relative\.table"), ("none", "no position")]
)
def test_positions_that_are_no_vectors_say_what_they_give(kind, says):
    with pytest.raises(ValueError, match=says):
        position_similarity(small(positions=kind))


def test_token_norms_are_those_of_transformers(pair):
    expected = np.sqrt((pair.hidden**2).sum(-1)).transpose(1, 0, 2)  # (B, L, N)
    found = token_norms(pair.ours, pair.images)
    assert found.shape == (2, 3, pair.prefix + 24)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    one_by_one = token_norms(pair.ours, pair.images, batch_size=1)
    np.testing.assert_allclose(one_by_one.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, dict(registers=2), dict(distill_token=True)], ids=str)
def test_planted_high_norm_tokens_are_found(known, options):
    """Two of 15 patches are ten times as long as the others, of length 1; so are registers, which do not count."""
    model = known("uniform", depth=9, **options)
    with torch.no_grad():
        table = model.positions.table
        table[0, -15 + 3] *= 10
        table[0, -15 + 14] *= 10
        if model.register_tokens is not None:
            model.register_tokens *= 10
    found = high_norm_tokens(model, torch.zeros(2, 3, 12, 20))
    torch.testing.assert_close(found.share, torch.full((9,), 2 / 15).double())
    assert found.mean_share == pytest.approx(2 / 15) and found.layers == (7, 8)
    assert found.mask.shape == (2, 9, 3, 5)
    assert found.mask[1, 8].nonzero().tolist() == [[0, 3], [2, 4]]
    torch.testing.assert_close(found.threshold, torch.full((9,), 3.0))
    by_length = high_norm_tokens(model, torch.zeros(2, 3, 12, 20), threshold=11.0)
    assert by_length.mean_share == 0
    with pytest.raises(ValueError, match="above 1"):
        high_norm_tokens(model, torch.zeros(2, 3, 12, 20), factor=1)


def test_half_precision_norms_are_finite(known):
    model = known("uniform").to(torch.float16)
    with torch.no_grad():
        model.positions.table *= 300  # its square is beyond float16
    norms = token_norms(model, torch.zeros(1, 3, 12, 20))
    torch.testing.assert_close(norms[:, :, 1:], torch.full((1, 3, 15), 300.0))


DOOR = """
import os, sys, vitlab, vitlab.explain
assert "torch" not in sys.modules
import torch
if os.fork():
    assert os.wait()[1] == 0
else:
    from vitlab.explain.rollout import rollout
names = "attention_maps rollout attention_distance attention_entropy position_similarity filters token_norms".split()
for _ in range(2):
    assert [callable(getattr(vitlab.explain, name)) for name in names] == [True] * 7
from vitlab.explain import rollout
assert callable(rollout)
"""


def test_the_door_gives_functions_whatever_was_imported_first():
    subprocess.run([sys.executable, "-c", DOOR], check=True)


def test_the_door_names_what_it_has():
    with pytest.raises(AttributeError, match="attention_maps"):
        vitlab.explain.rollouts  # noqa: B018
