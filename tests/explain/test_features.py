"""pca_rgb, patch_similarity, foreground_mask, nearest: against scikit-learn, NumPy loops and planted tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.metrics.pairwise import cosine_similarity

import vitlab
from vitlab.errors import ImageError
from vitlab.explain import features
from vitlab.explain.features import (
    foreground,
    foreground_mask,
    nearest,
    otsu,
    patch_similarity,
    pca_rgb,
    principal_components,
)

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
OPTIONS = [{}, {"registers": 3}, {"distill_token": True}, {"pooling": "mean", "class_token": False}, {"classes": 0}]


def small(**options):
    model = vitlab.create("vit_base", **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 32, 48, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def tokens_of(model, x) -> np.ndarray:
    """(B, N, D), patches only, without any of the code under test."""
    return model.forward_features(x)[:, len(model.config.prefix) :].double().numpy()


def stretched(values: np.ndarray) -> np.ndarray:
    return (values - values.min(0)) / (values.max(0) - values.min(0))


def same_up_to_sign(found: np.ndarray, expected: np.ndarray, atol: float) -> None:
    """A component that is turned around gives 1 - colour."""
    for channel in range(3):
        best = min(abs(found[:, channel] - e).max() for e in (expected[:, channel], 1 - expected[:, channel]))
        assert best < atol, channel


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_colours_are_scikit_learns_components(options):
    model, x = small(**options), images()
    tokens = tokens_of(model, x)
    expected = stretched(PCA(3, svd_solver="full").fit_transform(tokens.reshape(-1, 48)))
    same_up_to_sign(pca_rgb(model, x).reshape(-1, 3).double().numpy(), expected, 1e-4)
    alone = pca_rgb(model, x, joint=False)
    for i in range(3):
        expected = stretched(PCA(3, svd_solver="full").fit_transform(tokens[i]))
        same_up_to_sign(alone[i].reshape(-1, 3).double().numpy(), expected, 1e-4)
        torch.testing.assert_close(pca_rgb(model, x[i : i + 1])[0], alone[i], atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(200, 12), (9, 40), (5, 2)], ids=str)
def test_principal_components_in_float64(shape):
    """More rows than columns, fewer, and fewer directions than asked for."""
    values = torch.randn(*shape, dtype=torch.float64) @ torch.randn(shape[1], shape[1], dtype=torch.float64) + 3
    kept = min(3, shape[1])
    found, expected = principal_components(values, 3).numpy(), PCA(kept, svd_solver="full").fit(values.numpy())
    np.testing.assert_allclose(abs(found[:, :kept]), abs(expected.transform(values.numpy())), atol=1e-9)
    assert found.shape == (shape[0], 3) and not found[:, kept:].any()
    for n in range(kept):  # the same sign as the direction whose largest entry is positive
        direction = expected.components_[n] * np.sign(expected.components_[n][abs(expected.components_[n]).argmax()])
        np.testing.assert_allclose(found[:, n], (values.numpy() - values.numpy().mean(0)) @ direction, atol=1e-9)


def test_a_mask_of_the_foreground_decides_what_gets_colours():
    model, x = small(registers=2), images(2)
    mask = np.zeros((2, 4, 6), dtype=bool)
    mask[0, 1:3, 2:5] = mask[1, :, 4] = True
    found = pca_rgb(model, x, foreground=mask).double().numpy()
    tokens = tokens_of(model, x).reshape(2, 4, 6, 48)
    expected = stretched(PCA(3, svd_solver="full").fit_transform(tokens[mask]))
    same_up_to_sign(found[mask], expected, 1e-4)
    assert not found[~mask].any()
    own = foreground_mask(model, x, joint=True)
    assert torch.equal(pca_rgb(model, x, foreground=True), pca_rgb(model, x, foreground=own))
    assert not pca_rgb(model, x, joint=False, foreground=np.zeros((2, 4, 6), dtype=bool)).any()
    with pytest.raises(ValueError, match="foreground is"):
        pca_rgb(model, x, foreground=mask[:, :3])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_similarity_is_the_cosine_with_the_patch_under_the_pixel(options):
    model, x = small(**options), images()
    tokens = tokens_of(model, x)
    found = patch_similarity(model, x, at=(41.5, 17))  # column 5, row 2
    for i in range(3):
        expected = cosine_similarity(tokens[i, [2 * 6 + 5]], tokens[i]).reshape(4, 6)
        np.testing.assert_allclose(found[i].numpy(), expected, atol=1e-5)
        torch.testing.assert_close(patch_similarity(model, x[i : i + 1], at=17)[0], found[i], atol=1e-5, rtol=0)
    elsewhere = patch_similarity(model, x, at=(41.5, 17), of=1)
    for i in range(3):
        expected = cosine_similarity(tokens[1, [17]], tokens[i]).reshape(4, 6)
        np.testing.assert_allclose(elsewhere[i].numpy(), expected, atol=1e-5)
    with pytest.raises(ValueError, match="outside"):
        patch_similarity(model, x, at=(48, 0))
    with pytest.raises(ValueError, match="images 0 to 2"):
        patch_similarity(model, x, at=0, of=3)


def test_otsus_threshold_leaves_the_least_spread_within_the_halves():
    values = torch.cat([torch.randn(60, dtype=torch.float64), 4 + 0.5 * torch.randn(25, dtype=torch.float64)])
    ordered = values.sort().values.numpy()
    within = [ordered[:i].var() * i + ordered[i:].var() * (85 - i) for i in range(1, 85)]
    cut = int(np.argmin(within)) + 1
    assert ordered[cut - 1] < otsu(values) < ordered[cut]


@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize("joint", [True, False])
def test_a_planted_object_is_foreground_whichever_way_its_tokens_point(turned, joint, monkeypatch):
    """Tokens with an object in the middle of one image and off centre in the other."""
    tokens = 0.1 * torch.randn(2, 6, 7, 16)
    object_ = torch.zeros(2, 6, 7, dtype=torch.bool)
    object_[0, 2:4, 2:5] = object_[1, 1:3, 4:6] = True
    direction = torch.randn(16)
    tokens[object_] += turned * direction
    monkeypatch.setattr(features, "patch_tokens", lambda *args, **options: tokens)
    assert torch.equal(foreground_mask(None, None, joint=joint), object_)


def planted(monkeypatch, values: torch.Tensor):
    """foreground() of tokens that lie on one line: (B, grid_h, grid_w) along a direction."""
    tokens = values[..., None] * torch.tensor([0.6, -0.8, 0.0])
    monkeypatch.setattr(features, "patch_tokens", lambda *args, **options: tokens)
    return foreground(None, None)


def test_separation_and_margin_have_closed_forms(monkeypatch):
    """Two values: all variance lies between them. 0, 1, ..., n - 1: 3/4 n^2 / (n^2 - 1). Normal values: 2 / pi."""
    two = torch.zeros(9, 11)
    two[3:6, 4:8] = 1.0
    even = torch.arange(100.0)[torch.randperm(100)]
    inner = torch.zeros(10, 10, dtype=torch.bool)
    inner[1:-1, 1:-1] = True
    line = torch.empty(10, 10)
    line[inner], line[~inner] = torch.arange(36, 100.0), torch.arange(36.0)
    found = planted(monkeypatch, two[None].double())
    assert found.separation.item() == pytest.approx(1) and not found.unsure.any() and found.doubts() == [""]
    share = 12 / 99
    assert found.margin.item() == pytest.approx(share / (share * (1 - share)) ** 0.5)
    found = planted(monkeypatch, even.reshape(1, 10, 10).double())
    assert found.separation.item() == pytest.approx(0.75 * 1e4 / (1e4 - 1))
    found = planted(monkeypatch, line[None].double())
    assert found.margin.item() == pytest.approx((49.5 - 17.5) / np.std(np.arange(100)))
    normal = torch.randn(1, 80, 90, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found = planted(monkeypatch, normal)
    assert found.separation.item() == pytest.approx(2 / np.pi, abs=0.02)
    assert found.unsure.all() and "separation 0.6" in found.doubts()[0] and "margin 0.0" in found.doubts()[0]


def test_a_flat_image_has_no_sure_foreground(monkeypatch):
    found = planted(monkeypatch, torch.ones(2, 5, 7))
    assert found.unsure.all() and found.separation.tolist() == found.margin.tolist() == [0, 0]


def test_masks_of_a_batch_equal_one_by_one():
    model, x = small(), images()
    alone = torch.cat([foreground_mask(model, image[None]) for image in x])
    assert torch.equal(foreground_mask(model, x, batch_size=2), alone)
    assert alone.dtype == torch.bool and 0 < alone.sum() < alone.numel()


def test_nearest_pictures_of_a_folder(tmp_path):
    """Against scikit-learn on features taken by hand; deeper folders are searched too, other files are not."""
    model = small(classes=0)
    rng = np.random.default_rng(0)
    (tmp_path / "deep").mkdir()
    paths = [tmp_path / "deep" / f"{i}.png" if i % 2 else tmp_path / f"{i}.png" for i in range(7)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)).save(path)
    (tmp_path / "notes.txt").write_text("no picture", encoding="utf-8")
    query = Image.fromarray(rng.integers(0, 256, (32, 48, 3), dtype=np.uint8))
    found = nearest(model, [query, paths[3]], tmp_path, k=4, batch_size=3)
    with torch.no_grad():
        vectors = model(model.preprocess.batch([query, *paths])).numpy()
    likeness = cosine_similarity(vectors[[0, 4]], vectors[1:])
    for row, neighbours in enumerate(found):
        best = (-likeness[row]).argsort()[:4]
        assert [n.name for n in neighbours] == [str(paths[i]) for i in best]
        np.testing.assert_allclose([n.similarity for n in neighbours], likeness[row, best], atol=1e-5)
    assert found[1][0].name == str(paths[3]) and found[1][0].similarity == pytest.approx(1, abs=1e-5)

    listed = nearest(model, query, paths, k=2)[0]
    assert [paths[n.number] for n in listed] == [paths[i] for i in (-likeness[0]).argsort()[:2]]
    tensors = nearest(model, model.preprocess(query)[None], model.preprocess.batch(paths), k=99)[0]
    assert [n.number for n in tensors] == (-likeness[0]).argsort().tolist()
    assert tensors[0].name == f"image {tensors[0].number}"


def test_a_damaged_picture_stops_the_search_unless_it_may_be_left_out(tmp_path):
    model = small(classes=0)
    for i in range(3):
        Image.new("RGB", (48, 32), (90 * i, 20, 30)).save(tmp_path / f"{i}.png")
    (tmp_path / "1.png").write_bytes(b"broken")
    with pytest.raises(ImageError, match=r"1\.png"):
        nearest(model, tmp_path / "0.png", tmp_path)
    said: list[str] = []
    found = nearest(model, tmp_path / "2.png", tmp_path, skip=said.append)[0]
    assert [(n.name, n.number) for n in found] == [(str(tmp_path / "2.png"), 2), (str(tmp_path / "0.png"), 0)]
    assert len(said) == 1 and "1.png" in said[0]
    with pytest.raises(ValueError, match="k=0"):
        nearest(model, tmp_path / "0.png", tmp_path, k=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no images"):
        nearest(model, tmp_path / "0.png", tmp_path / "empty")


def test_half_precision_is_finite():
    model, x = small(registers=2).bfloat16(), images()
    for found in (pca_rgb(model, x), patch_similarity(model, x, at=(3, 3)), foreground_mask(model, x).float()):
        assert found.dtype == torch.float32 and found.isfinite().all()
    assert nearest(model, x, x, k=1)[2][0].number == 2


def test_the_model_stays_as_it_was():
    model = small(dropout=0.5).train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    first = pca_rgb(model, images())
    assert torch.equal(first, pca_rgb(model, images())) and not first.requires_grad
    patch_similarity(model, images(), at=0)
    nearest(model, images(), images(), k=1)
    assert [m.training for m in model.modules()] == modes
