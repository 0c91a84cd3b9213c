"""stem="hybrid": its whitening against scikit-learn's PCA, its tokens, its way through training, files and export."""

import numpy as np
import pytest
import torch
from sklearn.decomposition import PCA

import vitlab
from vitlab.explain.weights import patch_filters, stem_filters
from vitlab.layers.hybrid_stem import HybridStem
from vitlab.layers.trace import Trace
from vitlab.training.loop import fit
from vitlab.training.optim import Muon, Optimisers
from vitlab.training.recipe import OptimRecipe, Recipe, with_settings

SMALL = {"stem": "hybrid", "width": 32, "depth": 2, "heads": 2, "class_token": False, "pooling": "mean"}


def small(**options):
    return vitlab.create("vit_cifar", **{**SMALL, **options})


def test_the_whitening_is_the_principal_components_of_scikit_learn():
    stem, images = HybridStem(4, 3, 32), torch.randn(40, 3, 12, 12).cumsum(-1).cumsum(-2)
    stem.whiten_by(images)
    patches = np.lib.stride_tricks.sliding_window_view(images.numpy(), (2, 2), axis=(2, 3))  # (n, C, 11, 11, 2, 2)
    patches = patches.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 12).astype(np.float64)
    pca = PCA(svd_solver="full").fit(patches)
    expected = pca.components_ / np.sqrt(pca.explained_variance_ + 5e-4)[:, None]
    rows = stem.whiten.weight.detach().flatten(1).double().numpy()
    signs = np.sign((rows[:12] * expected).sum(1, keepdims=True))
    np.testing.assert_allclose(signs * rows[:12], expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(rows[12:], -rows[:12])


def test_a_slow_forward_pass_gives_the_same_tokens():
    stem, images = HybridStem(4, 3, 16, eps=1e-5).eval(), torch.randn(2, 3, 8, 12)
    stem.init_filters()
    for norm in stem.batch_norms:
        torch.nn.init.normal_(norm.bias)
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    with torch.no_grad():
        x = np.pad(images.numpy(), ((0, 0), (0, 0), (0, 1), (0, 1)))
        x = gelu(convolve(x, stem.whiten.weight.numpy()) + stem.whiten.bias.numpy()[:, None, None])
        for number, (conv, norm) in enumerate(zip([*stem.filters, stem.proj], stem.batch_norms, strict=True)):
            x = convolve(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), conv.weight.numpy())
            if number % 2 == 0:
                B, C, H, W = x.shape
                x = x.reshape(B, C, H // 2, 2, W // 2, 2).max((3, 5))
            mean, var, bias = (v.numpy()[:, None, None] for v in (norm.running_mean, norm.running_var, norm.bias))
            x = (x - mean) / np.sqrt(var + 1e-5) + bias
            x = x if number == 3 else gelu(x)
        tokens = stem(images)
    assert tokens.shape == (2, 2 * 3, 16)
    np.testing.assert_allclose(tokens.numpy(), x.reshape(2, 16, 6).transpose(0, 2, 1), atol=2e-5)


def convolve(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    k = weight.shape[-1]
    windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), axis=(2, 3))  # (B, C, H', W', k, k)
    return np.einsum("bchwij,dcij->bdhw", windows, weight)


def gelu(x: np.ndarray) -> np.ndarray:
    return torch.nn.functional.gelu(torch.from_numpy(x)).numpy()


def test_its_filters_move_by_muon_as_matrices():
    shape = (8, 4, 3, 3)
    filters, matrix = torch.nn.Parameter(torch.randn(shape)), torch.nn.Parameter(torch.zeros(8, 36))
    matrix.data.copy_(filters.data.flatten(1))
    both = [Muon([filters], weight_decay=0.1), Muon([matrix], weight_decay=0.1)]
    for step in range(3):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        filters.grad, matrix.grad = gradient, gradient.flatten(1)
        for optimiser in both:
            optimiser.step()
    assert torch.equal(filters.flatten(1), matrix)
    optimisers = Optimisers(model := small(), OptimRecipe("muon"))
    by_muon = {optimisers.names[p] for group in optimisers.parts[0].param_groups for p in group["params"]}
    assert {"patch_embed.filters.0.weight", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight"} <= by_muon
    assert not any("whiten" in name or "batch_norm" in name for name in by_muon)
    assert "patch_embed.whiten.weight" not in optimisers.names.values()
    other = Optimisers(small(stem="conv"), OptimRecipe("muon"))
    assert not any("patch_embed" in other.names[p] for group in other.parts[0].param_groups for p in group["params"])
    assert model.patch_embed.whiten.bias.requires_grad


def test_a_run_measures_the_whitening_saves_it_and_does_not_move_it(tmp_path):
    options = [f"model.{name}={value}" for name, value in SMALL.items()]
    settings = [*options, "data.per_class=16", "data.batch_size=32", "augment.flip=true", "augment.flip_in_turn=true"]
    settings += ["augment.flip_at_test=true", "augment.shift_at_test=1", "optim.name=muon", "run.epochs=2"]
    fit(with_settings(Recipe(), settings), tmp_path)
    model = vitlab.load(tmp_path / "best")
    rows = model.patch_embed.whiten.weight.flatten(1)
    assert not torch.equal(rows[:4].abs(), torch.eye(4))
    data = vitlab.images.datasets.open_data("digits", per_class=16)
    pixels = np.stack(data.train.images)[..., 0].astype(np.float64)  # (160, 8, 8)
    pixels = (pixels / 255 - model.preprocess.mean[0]) / model.preprocess.std[0]
    patches = np.lib.stride_tricks.sliding_window_view(pixels, (2, 2), axis=(1, 2)).reshape(-1, 4)
    whitened = patches @ rows[:4].double().detach().numpy().T
    np.testing.assert_allclose(np.cov(whitened.T), np.eye(4), atol=0.05)


def test_it_is_a_vit_like_any_other(tmp_path):
    model, images = small().eval(), torch.randn(2, 3, 32, 32)
    trace = Trace("patch_embed", "attention")
    logits = model(images, trace=trace)
    assert trace["patch_embed"].shape == (2, 64, 32)
    vitlab.save(model, tmp_path / "saved")
    assert torch.equal(vitlab.load(tmp_path / "saved")(images), logits)
    assert vitlab.load(tmp_path / "saved", image_size=48)(torch.randn(1, 3, 48, 48)).shape == (1, 10)
    assert stem_filters(model).shape == (12, 2, 2, 3)
    with pytest.raises(ValueError, match=r"HybridStem.*stem_filters"):
        patch_filters(model)
    words = str(vitlab.inspect(model))
    assert "2x2 whitening, 4 x (3x3, norm, gelu)" in words
    with pytest.raises(ValueError, match=r'stem="hybrid" halves the image step by step.*not 6: use 4'):
        small(patch_size=6, image_size=36)
    with pytest.raises(ValueError, match="stem=hybrid"):
        vitlab.convert(model, tmp_path / "other", "hf")
