"""Deletion, insertion and ROAD curves equal slow loops; imputation equals a dense solve; areas are closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.ndimage import gaussian_filter

import vitlab
from vitlab.explain import faithfulness
from vitlab.explain.faithfulness import area, compare_methods, curves, impute
from vitlab.explain.methods import METHODS, find_method
from vitlab.explain.relevance import relevance

SMALL = dict(image_size=(16, 24), patch_size=8, width=24, depth=2, heads=2, classes=5)


def small(**options):
    model = vitlab.create("vit_base", **{**SMALL, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def images(count: int = 3) -> torch.Tensor:
    return torch.randn(count, 3, 16, 24, generator=torch.Generator().manual_seed(1))


def maps(count: int = 3) -> torch.Tensor:
    return torch.rand(count, 2, 3, generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def curve_by_loops(model, image, heat, steps, kind) -> list[float]:
    """One patch after another, one image at a time."""
    P = model.config.patch_size
    target = int(model(image[None])[0].argmax())
    patches = sorted((float(-heat[r, c]), r, c) for r in range(2) for c in range(3))
    blurred = torch.from_numpy(np.stack([gaussian_filter(c, P, mode="nearest") for c in image.numpy()]))
    found = []
    for step in range(steps + 1):
        count = round(step * 6 / steps)
        changed = blurred.clone() if kind == "insertion" else image.clone()
        for _, r, c in patches[:count]:
            place = (slice(None), slice(r * P, r * P + P), slice(c * P, c * P + P))
            changed[place] = image[place] if kind == "insertion" else 0
        found.append(float(model(changed[None])[0].softmax(-1)[target]))
    return found


@pytest.mark.parametrize("kind", ["deletion", "insertion"])
@pytest.mark.parametrize("steps", [6, 4, 11])
def test_curves_equal_a_slow_loop(kind, steps):
    model, x, heat = small(), images(), maps()
    found = curves(model, x, heat, steps=steps, kind=kind, batch_size=2)
    for i in range(3):
        expected = curve_by_loops(model, x[i], heat[i], steps, kind)
        np.testing.assert_allclose(found[i].numpy(), expected, atol=1e-5)
    whole = model(x).softmax(-1).amax(1).detach()
    torch.testing.assert_close(found[:, -1 if kind == "insertion" else 0], whole, atol=1e-6, rtol=0)


def dense_imputation(image: np.ndarray, missing: np.ndarray) -> np.ndarray:
    """Every missing pixel is the weighted mean of those around it: one dense system, one pixel at a time."""
    C, H, W = image.shape
    holes = list(zip(*np.nonzero(missing), strict=True))
    left, right = np.eye(len(holes)), np.zeros((len(holes), C))
    for i, (r, c) in enumerate(holes):
        around = [(a, b) for a in (r - 1, r, r + 1) for b in (c - 1, c, c + 1) if (a, b) != (r, c)]
        around = [(a, b) for a, b in around if 0 <= a < H and 0 <= b < W]
        weights = np.array([1 / 6 if a == r or b == c else 1 / 12 for a, b in around])
        for (a, b), w in zip(around, weights / weights.sum(), strict=True):
            if missing[a, b]:
                left[i, holes.index((a, b))] -= w
            else:
                right[i] += w * image[:, a, b]
    filled = image.copy()
    for (r, c), value in zip(holes, np.linalg.solve(left, right), strict=True):
        filled[:, r, c] = value
    return filled


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_imputation_equals_a_dense_solve(share):
    rng = np.random.default_rng(3)
    image, missing = rng.normal(size=(3, 9, 13)), rng.random((9, 13)) < share
    found = impute(torch.from_numpy(image), torch.from_numpy(missing)).numpy()
    np.testing.assert_allclose(found, dense_imputation(image, missing), atol=1e-9)


def test_imputation_continues_a_plane_and_leaves_what_is_there():
    """A linear ramp is its own mean inside, so a hole in it is filled exactly; nothing left, nothing to fill from."""
    ramp = (torch.arange(12.0)[:, None] * 2 + torch.arange(15.0) * 3)[None].double()
    hole = torch.zeros(12, 15, dtype=torch.bool)
    hole[3:9, 4:11] = True
    torch.testing.assert_close(impute(ramp, hole), ramp, atol=1e-9, rtol=0)
    assert torch.equal(impute(ramp, torch.zeros_like(hole)), ramp)
    assert not impute(ramp, torch.ones_like(hole)).any()
    single = torch.ones_like(hole)
    single[4, 4] = False  # all takes the one value that is known
    torch.testing.assert_close(impute(ramp, single), torch.full_like(ramp, 20.0), atol=1e-6, rtol=0)


def test_road_is_deletion_with_imputation_and_seeded_noise():
    model, x, heat = small(), images(2), maps(2)
    found = curves(model, x, heat, steps=6, kind="road", seed=5)
    noise = 0.01 * torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(5))
    for i in range(2):
        target = int(model(x[i : i + 1])[0].argmax())
        order = heat[i].flatten().argsort(descending=True)
        for count in range(6):
            missing = torch.zeros(6, dtype=torch.bool)
            missing[order[:count]] = True
            missing = missing.reshape(2, 3).repeat_interleave(8, 0).repeat_interleave(8, 1)
            filled = torch.from_numpy(dense_imputation(x[i].numpy(), missing.numpy())) + noise * missing
            with torch.no_grad():
                expected = model(filled[None])[0].softmax(-1)[target]
            torch.testing.assert_close(found[i, count], expected, atol=1e-4, rtol=0)
    assert torch.equal(found, curves(model, x, heat, steps=6, kind="road", seed=5))
    assert not torch.equal(found, curves(model, x, heat, steps=6, kind="road", seed=6))


@pytest.mark.parametrize("kind", ["deletion", "insertion", "road"])
@pytest.mark.parametrize("method", ["relevance", "grad_cam", "rollout"])
def test_a_batch_equals_one_by_one(kind, method):
    model, x = small(registers=2), images()
    together = curves(model, x, method, steps=3, kind=kind)
    alone = torch.cat([curves(model, image[None], method, steps=3, kind=kind) for image in x])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=0)


def test_area_of_closed_forms():
    t = torch.linspace(0, 1, 101, dtype=torch.float64)
    found = area(torch.stack([torch.ones_like(t), t, 1 - t, t**2]))
    torch.testing.assert_close(found, torch.tensor([1, 0.5, 0.5, 1 / 3], dtype=torch.float64), atol=1e-4, rtol=0)


def test_equal_values_go_in_an_order_by_lot_not_from_the_top_left():
    """Under a flat map the order is drawn, and every image gets the same one."""
    model, x = small(image_size=(32, 32), patch_size=4), torch.randn(2, 3, 32, 32)
    ranks = faithfulness._ranks(torch.zeros(2, 8, 8), seed=0)
    assert torch.equal(ranks[0], ranks[1]) and sorted(ranks[0].tolist()) == list(range(64))
    first = ranks[0] < 16
    assert 1 < first[:32].sum() < 15  # both halves of the picture
    heat = torch.zeros(2, 8, 8)
    heat[:, 5, 3] = 1
    assert (faithfulness._ranks(heat, seed=0)[:, 5 * 8 + 3] == 0).all()
    assert curves(model, x, torch.zeros(2, 8, 8), steps=2).shape == (2, 3)


@pytest.mark.parametrize(
    "options", [{"registers": 2}, {"distill_token": True}, {"pooling": "mean", "class_token": False}], ids=str
)
def test_methods_are_compared_with_random(options):
    model, x = small(**options), images()
    rows = compare_methods(model, x, steps=3)
    assert [(r.kind, r.method) for r in rows] == [(k, m) for k in ("deletion", "insertion", "road") for m in METHODS]
    by_name = {(r.kind, r.method): r for r in rows}
    for kind, sign in (("deletion", -1), ("insertion", 1), ("road", -1)):
        mine, lot = by_name[kind, "relevance"], by_name[kind, "random"]
        expected = area(curves(model, x, relevance(model, x), steps=3, kind=kind)).numpy()
        gain = sign * (expected - area(lot.curves).numpy())
        table = mine.to_dict()
        assert table["area"] == pytest.approx(expected.mean(), abs=1e-5)
        assert table["spread"] == pytest.approx(expected.std(ddof=1), abs=1e-5)
        assert table["gain"] == pytest.approx(gain.mean(), abs=1e-5)
        assert table["wins"] == pytest.approx((gain > 0).mean())
        assert lot.to_dict()["gain"] == 0 and table["images"] == 3


def test_own_maps_and_functions_can_be_compared_and_seeds_matter():
    model, x = small(), images()
    own = {"mine": maps(), "same": lambda model, images, target: maps(), "upside down": -maps().numpy()}
    rows = {r.method: r for r in compare_methods(model, x, own, kinds=["deletion"], steps=6)}
    assert list(rows) == [*own, "random"]
    assert torch.equal(rows["mine"].curves, rows["same"].curves)
    assert not torch.equal(rows["mine"].curves, rows["upside down"].curves)
    again, other = (compare_methods(model, x, [], kinds=["deletion"], steps=6, seed=s)[0] for s in (0, 1))
    assert torch.equal(again.curves, rows["random"].curves) and not torch.equal(other.curves, again.curves)


def test_the_target_is_followed():
    model, x = small(), images()
    found = curves(model, x, maps(), target=[1, 0, 4], steps=2)
    chances = model(x).softmax(-1).detach()
    torch.testing.assert_close(found[:, 0], chances[[0, 1, 2], [1, 0, 4]], atol=1e-6, rtol=0)


def test_half_precision_padding_and_the_models_state():
    model = small(pad=True, dropout=0.5).bfloat16().train()
    x = torch.randn(2, 3, 13, 22)
    for kind in ("deletion", "insertion", "road"):
        found = curves(model, x, "grad_cam", steps=3, kind=kind)
        assert found.dtype == torch.float32 and found.isfinite().all()
        assert torch.equal(found, curves(model, x, "grad_cam", steps=3, kind=kind))
    assert all(m.training for m in model.modules()) and all(p.grad is None for p in model.parameters())


def test_what_cannot_be_is_refused():
    model, x = small(), images()
    with pytest.raises(ValueError, match="Did you mean 'relevance'"):
        curves(model, x, "relevanse")
    with pytest.raises(ValueError, match="deletion, insertion, road"):
        curves(model, x, maps(), kind="removal")
    with pytest.raises(ValueError, match="steps=0"):
        curves(model, x, maps(), steps=0)
    with pytest.raises(ValueError, match=r"\(3, 3, 2\).*\(3, 2, 3\)"):
        curves(model, x, maps().transpose(1, 2))
    with pytest.raises(ValueError, match="NaN"):
        curves(model, x, maps() * float("nan"))
    with pytest.raises(ValueError, match=r"has no classes \(classes=0\)"):
        curves(small(classes=0), x, maps())
    assert find_method("rollout") is METHODS["rollout"]
