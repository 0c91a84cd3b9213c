"""Outlier tokens, planted by hand in networks whose attention and lengths are known; rollout and attention without them
against loops over the smaller matrix."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab
from vitlab.errors import UsageError
from vitlab.explain import attention_maps, figures, open_subject, outlier_tokens, rollout
from vitlab.explain.outliers import LONG, SINK
from vitlab.layers.trace import Trace

CAT = Path(__file__).parents[2] / "docs/pictures/chelsea.jpg"
GRID = (5, 6)  # 30 patches: 95 % of them are all but one
IMAGES = torch.randn(2, 3, 20, 24, generator=torch.Generator().manual_seed(5))


def matrices(model, images) -> np.ndarray:
    """(layers, B, N, N), mean over heads, in float64."""
    trace = Trace("attention")
    with torch.no_grad():
        model(images, trace=trace)
    return trace.stack("attention").double().mean(2).numpy()


def rollout_of(W: np.ndarray, rows, patches) -> np.ndarray:
    """The definition, for (layers, n, n): the mean of the product's rows."""
    product = np.eye(W.shape[-1])
    for A in W:
        A = A / A.sum(-1, keepdims=True)
        A = A + np.eye(len(A))
        product = A / A.sum(-1, keepdims=True) @ product
    return product[rows].mean(0)[patches]


def small(**options):
    """Every head looks almost evenly, so that nothing stands out by itself."""
    torch.manual_seed(0)
    shape = dict(image_size=(20, 24), patch_size=4, channels=3, classes=5, depth=5, width=24, heads=3)
    model = vitlab.create("vit_digits", **(shape | options)).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.15)
    return model


# ------------------------------------------------------------------------------------------------------ which patches


def test_a_token_that_all_heads_look_at_is_a_sink(known):
    """Two uniform heads and one that looks at patch 13 only: it draws (2 / N + 1) / 3, the others 2 / 3N."""
    model = known("uniform", "uniform", 14, grid=GRID)  # token 14 is patch 13, behind the class token
    found = outlier_tokens(model, IMAGES)
    N = 31
    expected = ((2 / N + 1) / 3) / (2 / (3 * N))  # 16.5
    mask = torch.zeros(GRID, dtype=torch.bool)
    mask[2, 1] = True
    assert (found.mask == mask).all() and (found.sink == mask).all() and not found.long.any()
    torch.testing.assert_close(found.attention[:, :, 2, 1], torch.full((2, 3), expected), rtol=1e-4, atol=0)
    torch.testing.assert_close(found.attention[:, :, ~mask], torch.ones(2, 3, 29), rtol=1e-4, atol=0)
    (one,) = found.listed()[1]
    assert (one.row, one.column, one.sink, one.long) == (2, 1, True, False)
    assert one.attention == pytest.approx(expected, rel=1e-4) and "attention x 16" in str(one)
    assert found.to_dicts()[0][0]["attention"] == pytest.approx(expected, rel=1e-4)


def test_the_factor_decides(known):
    model = known("uniform", "uniform", 14, grid=GRID)
    assert not outlier_tokens(model, IMAGES, sink=16.6).mask.any()
    assert outlier_tokens(model, IMAGES, sink=16.4).mask.sum() == 2
    with pytest.raises(UsageError, match=r"sink=1 must be above 1"):
        outlier_tokens(model, IMAGES, sink=1)


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_long_token_is_named_by_its_length(known, factor):
    """Tokens are unit vectors that no block changes; one is made LONG times as long, a little less or more."""
    model = known("uniform", grid=GRID, depth=8)
    with torch.no_grad():
        model.positions.table[0, 1 + 22] *= LONG * factor
    found = outlier_tokens(model, IMAGES)
    assert found.length[0, 3, 4].item() == pytest.approx(LONG * factor)
    assert found.long.sum() == (2 if factor > 1 else 0) and not found.sink.any()
    if factor > 1:
        assert found.mask[:, 3, 4].all() and "length x 3.3" in str(found.listed()[0][0])


def test_only_the_last_quarter_of_the_layers_measures_length(known):
    """A token of length 9 until the sixth of eight blocks, which adds -8 to that entry of all tokens: then it has 1 and
    the others sqrt(65)."""
    model = known("uniform", grid=GRID, depth=8)
    with torch.no_grad():
        model.positions.table[0, 1 + 22] *= 9
        grown = torch.zeros(32)
        grown[1 + 22] = 8.0
        model.blocks[5].mlp.fc2.bias.copy_(-grown)
    found = outlier_tokens(model, IMAGES)
    assert found.length.max() == pytest.approx(1.0, abs=0.01) and not found.mask.any()


def test_an_image_is_judged_alone():
    model = small()
    together = outlier_tokens(model, IMAGES, batch_size=1)
    for i, image in enumerate(IMAGES.split(1)):
        alone = outlier_tokens(model, image)
        torch.testing.assert_close(alone.attention[0], together.attention[i])
        torch.testing.assert_close(alone.length[0], together.length[i])


@pytest.mark.parametrize("name", ["digits", "cifar10", "dino", "mae", "clip"])
def test_the_bundled_models_have_none(name):
    model = vitlab.load(f"bundled:{name}", encoder=True)
    found = outlier_tokens(model.encoder, ["digits#0", "digits#3", CAT])
    assert not found.mask.any() and found.attention.max() < SINK / 1.9 and found.length.max() < LONG


def test_networks_in_stages_are_refused():
    model = vitlab.create("swin_t", image_size=64, depths=(1, 1, 1, 1), width=12, heads=(1, 1, 1, 1), classes=2)
    with pytest.raises(UsageError, match="one grid of patches"):
        outlier_tokens(model, torch.zeros(1, 3, 64, 64))


# ---------------------------------------------------------------------------------------------------------- left out


@pytest.mark.parametrize("options", [{}, {"pooling": "mean"}, {"registers": 2}], ids=["class", "mean", "registers"])
def test_rollout_without_patches_is_that_of_the_smaller_matrix(options):
    model, images = small(**options), IMAGES.double()
    mask = torch.zeros(2, *GRID, dtype=torch.bool)
    mask[0, 2, 3], mask[0, 4, 5], mask[1, 0, 0] = True, True, True
    found = rollout(model, images, leave_out=mask, batch_size=1).numpy()
    W, prefix = matrices(model, images), len(model.layout(20, 24).prefix)
    for b in range(2):
        kept = np.flatnonzero(np.concatenate([np.ones(prefix, bool), ~mask[b].flatten().numpy()]))
        rows = [0] if model.config.pool_kind == "class" else np.arange(prefix, len(kept))
        expected = np.zeros(prefix + 30)
        expected[kept] = rollout_of(W[:, b][:, kept][:, :, kept], rows, slice(None))
        np.testing.assert_allclose(found[b].ravel(), expected[prefix:], rtol=1e-9, atol=1e-15)


def test_leaving_nothing_out_changes_nothing():
    model, none = small(), torch.zeros(2, *GRID, dtype=torch.bool)
    images = IMAGES.double()
    torch.testing.assert_close(rollout(model, images, leave_out=none), rollout(model, images))
    torch.testing.assert_close(attention_maps(model, images, leave_out=none), attention_maps(model, images))


def test_attention_without_patches_sums_to_one_with_the_prefix():
    model, images = small(registers=2), IMAGES.double()
    mask = torch.zeros(2, *GRID, dtype=torch.bool)
    mask[0, 2, 3], mask[1, 0, 0] = True, True
    maps, before = attention_maps(model, images, prefix=True)
    kept, kept_before = attention_maps(model, images, prefix=True, leave_out=mask)
    for b in range(2):
        weights = maps[b].clone()
        weights[..., mask[b]] = 0
        total = weights.sum((-2, -1)) + before[b].sum(-1)  # (L, h)
        torch.testing.assert_close(kept[b], weights / total[..., None, None])
        torch.testing.assert_close(kept_before[b], before[b] / total[..., None])


def test_outliers_by_name_are_those_that_are_found(known):
    """A head that looks at one patch owns the map; without it the others have equal shares, by symmetry."""
    model = known("uniform", "uniform", 14, grid=GRID)
    plain, without = rollout(model, IMAGES), rollout(model, IMAGES, leave_out="outliers")
    assert plain.flatten(1).argmax(1).tolist() == [13, 13] and plain[0, 2, 1] > 15 * plain[0, 0, 0]
    assert (without[:, 2, 1] == 0).all()
    left = rollout_of(np.full((3, 30, 30), 1 / 30), [0], slice(1, None))  # the class token and 29 patches
    torch.testing.assert_close(np.delete(without[0].numpy().ravel(), 13), left.astype(np.float32))


@pytest.mark.parametrize(
    ("leave_out", "message"),
    [
        ("sinks", 'must be "outliers"'),
        (torch.ones(2, *GRID), "leaves a patch of each image"),
        (torch.zeros(2, 4, 4), "but the patches are"),
        (torch.zeros(30), "is a mask"),
    ],
    ids=["word", "all", "grid", "flat"],
)
def test_what_cannot_be_left_out(leave_out, message):
    with pytest.raises(UsageError, match=message):
        rollout(small(), IMAGES.double(), leave_out=leave_out)


def test_a_query_that_is_left_out_is_refused():
    mask = torch.zeros(2, *GRID, dtype=torch.bool)
    mask[:, 0, 3] = True
    with pytest.raises(UsageError, match="the query is a patch that is left out"):
        rollout(small(), IMAGES.double(), query=3, leave_out=mask)


# ------------------------------------------------------------------------------------------------------------ figures


@pytest.fixture
def subject(known):
    from vitlab.images.preprocess import Preprocess

    model = known("uniform", "uniform", 14, grid=GRID)
    model.preprocess = Preprocess((20, 24))
    rng = np.random.default_rng(0)
    return lambda count: open_subject(model, [rng.integers(0, 256, (50, 60, 3), dtype=np.uint8) for _ in range(count)])


def words_of(figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("count", [1, 2])
def test_figures_name_outliers_and_draw_both_maps(subject, count):
    explanation = figures.rollout(subject(count))
    words = words_of(explanation.figure())
    assert "Outliers left out" in words
    said = "at row, column 2, 1." if count == 1 else "in 2 of 2 images."
    assert f"White: outlier tokens, {said}" in words
    assert [[(o["row"], o["column"]) for o in found] for found in explanation.results["outliers"]] == [[(2, 1)]] * count
    assert explanation.numbers["outliers"].sum() == count and explanation.numbers["maps_left_out"][0, 2, 1] == 0
    assert explanation.results["scale"] == "percentile" and len(explanation.notes) == 1
    page = explanation.page()
    assert "Outliers left out" in page and "White: outlier tokens" in page


@pytest.mark.parametrize(
    ("count", "heads", "expected"),
    [(1, None, "no outliers"), (1, "mean", "layer 2, no outliers"), (2, None, "outliers left out")],
)
def test_attention_is_drawn_without_outliers_too(subject, count, heads, expected):
    explanation = figures.attention(subject(count), heads=heads)
    assert expected in words_of(explanation.figure())
    left_out = explanation.numbers["maps_left_out"]
    assert left_out.shape == explanation.numbers["maps"].shape and (left_out[..., 2, 1] == 0).all()
    total = left_out.sum((-2, -1))  # of three heads, one looked at the outlier alone: nothing is left of it
    assert ((total > 0.9) & (total < 1)).sum() >= count * 3


def test_without_outliers_nothing_is_added():
    explanation = figures.rollout(open_subject("bundled:digits", ["digits#3"]))
    assert explanation.results["outliers"] == [[]] and not explanation.notes
    assert "maps_left_out" not in explanation.numbers and not explanation.numbers["outliers"].any()
    assert not any("outlier" in word.lower() for word in words_of(explanation.figure()))
