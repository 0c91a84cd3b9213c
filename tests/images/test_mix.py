"""Mixup and CutMix against a slow loop in float64, and the statistics of what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from vitlab.images.mix import Mix, cut_box, smooth_targets

K = 7


def batch(count: int = 9, height: int = 12, width: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, 3, height, width, generator=generator), torch.arange(count) % K


def slow(mix: Mix, images: torch.Tensor, labels: torch.Tensor, smoothing: float, **where: int):
    """The papers' definitions, pixel by pixel and class by class, from what was drawn."""
    drawn = mix.draw(len(images), (images.shape[2], images.shape[3]), **where)
    assert drawn is not None
    x, targets = images.double().numpy(), np.zeros((len(images), K))
    out = np.empty_like(x)
    for i, j in enumerate(drawn.partner):
        for row in range(x.shape[2]):
            for column in range(x.shape[3]):
                if drawn.box is None:
                    out[i, :, row, column] = drawn.lam * x[i, :, row, column] + (1 - drawn.lam) * x[j, :, row, column]
                else:
                    left, top, right, bottom = drawn.box
                    source = j if left <= column < right and top <= row < bottom else i
                    out[i, :, row, column] = x[source, :, row, column]
        for k in range(K):
            own, other = (smoothing / K + (1 - smoothing) * (labels[s] == k) for s in (i, j))
            targets[i, k] = drawn.lam * own + (1 - drawn.lam) * other
    return torch.from_numpy(out), torch.from_numpy(targets)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("mix", [Mix(mixup_alpha=0.8), Mix(cutmix_alpha=1.0)])
def test_mix_matches_a_loop(mix, smoothing):
    images, labels = batch()
    before = images.clone()
    for step in range(4):
        where = dict(seed=3, step=step, rank=1, micro=2)
        x, targets = mix(images, smooth_targets(labels, K, smoothing), **where)
        expect_x, expect_targets = slow(mix, images, labels, smoothing, **where)
        torch.testing.assert_close(x.double(), expect_x, atol=1e-6, rtol=0)
        torch.testing.assert_close(targets.double(), expect_targets, atol=1e-6, rtol=0)
        torch.testing.assert_close(targets.sum(1), torch.ones(9))
        assert x.dtype == targets.dtype == torch.float32
    assert torch.equal(images, before)


def test_lambda_is_beta():
    """Mean 1/2 and variance 1 / (4 (2 alpha + 1)), within 5 standard errors of 800 draws."""
    for alpha in (0.2, 0.8, 3.0):
        mix = Mix(mixup_alpha=alpha)
        lam = np.array([mix.draw(2, (4, 4), seed=0, step=step).lam for step in range(800)])  # type: ignore[union-attr]
        variance = 1 / (4 * (2 * alpha + 1))
        assert abs(lam.mean() - 0.5) < 5 * np.sqrt(variance / 800)
        assert abs(lam.var() / variance - 1) < 0.15
        assert (lam >= 0).all() and (lam <= 1).all()


def test_cutmix_boxes():
    """lambda is what is left of the image; its middle is cut more often than the corners, as centres are uniform."""
    mix, cut = Mix(cutmix_alpha=1.0), np.zeros((12, 17))
    lams = []
    for step in range(2000):
        drawn = mix.draw(2, (12, 17), seed=0, step=step)
        assert drawn is not None and drawn.how == "cutmix" and drawn.box is not None
        left, top, right, bottom = drawn.box
        mask = np.zeros((12, 17))
        mask[top:bottom, left:right] = 1
        assert abs(1 - mask.mean() - drawn.lam) < 1e-12
        cut += mask
        lams.append(drawn.lam)
    cut /= 2000
    assert cut[6, 8] > 1.5 * cut[0, 0] > 0
    assert np.abs(cut - cut[::-1]).max() < 0.1 and np.abs(cut - cut[:, ::-1]).max() < 0.1
    assert 0.6 < np.mean(lams) < 0.75  # above 1/2: part of many boxes lies outside


@given(
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
    st.floats(0, 1, exclude_max=True),
)
def test_cut_box_lies_inside(size, lam, across, down):
    (left, top, right, bottom), corrected = cut_box(size, lam, across, down)
    assert 0 <= left <= right <= size[1] and 0 <= top <= bottom <= size[0]
    assert corrected == 1 - (right - left) * (bottom - top) / (size[0] * size[1])
    assert corrected >= lam - 1e-9  # never more than was asked for


def test_choice_of_the_two():
    how = [Mix(0.8, 1.0, 0.7, 0.25).draw(2, (4, 4), seed=0, step=step) for step in range(2000)]
    mixed = [h.how for h in how if h is not None]
    assert abs(len(mixed) / 2000 - 0.7) < 4 * np.sqrt(0.21 / 2000)
    assert abs(mixed.count("cutmix") / len(mixed) - 0.25) < 4 * np.sqrt(0.1875 / len(mixed))


def test_partners_are_a_permutation():
    seen = np.zeros((5, 5))
    for step in range(1000):
        drawn = Mix(mixup_alpha=1.0).draw(5, (4, 4), seed=0, step=step)
        assert drawn is not None and sorted(drawn.partner) == [0, 1, 2, 3, 4]
        seen[np.arange(5), drawn.partner] += 1
    assert np.abs(seen / 1000 - 0.2).max() < 5 * np.sqrt(0.16 / 1000)


def test_every_coordinate_counts():
    images, labels = batch()
    mix = Mix(0.8, 1.0)
    here = dict(seed=0, step=5, rank=0, micro=0)
    first = mix(images, smooth_targets(labels, K, 0.1), **here)
    again = mix(images, smooth_targets(labels, K, 0.1), **here)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    for name in here:
        other = mix(images, smooth_targets(labels, K, 0.1), **{**here, name: here[name] + 1})
        assert not torch.equal(other[0], first[0])
        assert not torch.equal(other[1], first[1])


@pytest.mark.parametrize("mix", [Mix(), Mix(0.8, 1.0, probability=0.0)])
def test_off_gives_the_images_and_smoothed_labels(mix):
    images, labels = batch()
    x, targets = mix(images, smooth_targets(labels, K, 0.1), seed=0, step=0)
    assert x is images
    assert torch.equal(targets, smooth_targets(labels, K, 0.1))


def test_smooth_targets_match_torch_cross_entropy():
    """torch smooths inside its own loss: the same number, and the same gradient."""
    labels = torch.arange(11) % K
    logits = torch.randn(11, K, generator=torch.Generator().manual_seed(0))
    for smoothing in (0.0, 0.1, 0.35):
        ours = F.cross_entropy(logits, smooth_targets(labels, K, smoothing))
        theirs = F.cross_entropy(logits, labels, label_smoothing=smoothing)
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(smooth_targets(labels, K), F.one_hot(labels, K).float())


def test_errors():
    images, labels = batch()
    where = dict(seed=0, step=0)
    with pytest.raises(ValueError, match=r"labels run from 0 to 6, but 5 classes are 0 \.\. 4"):
        smooth_targets(labels, 5)
    with pytest.raises(ValueError, match="Mix after normalising"):
        Mix(0.8)(images.to(torch.uint8), smooth_targets(labels, K), **where)
    with pytest.raises(ValueError, match=r"smoothing=1\.0"):
        smooth_targets(labels, K, 1.0)
    for options in (dict(mixup_alpha=-1), dict(cutmix_alpha=float("nan")), dict(probability=1.1), dict(switch=-0.1)):
        with pytest.raises(ValueError, match=next(iter(options))):
            Mix(**options)
