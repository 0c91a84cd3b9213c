"""Whether one classifier beats another: the expected gain against scikit-learn, resampling and a known truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from vitlab.training.evaluate import Scores
from vitlab.training.expected_gain import expected_gain
from vitlab.training.rungs import Rung
from vitlab.training.uncertainty import Z, beats


def classifiers(n: int, seed: int, noise: tuple[float, float], classes: int = 4):
    """Two classifiers that see the truth through the same noise and some of their own: logits (n, K), labels (n,)."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=random)
    seen = torch.nn.functional.one_hot(labels, classes) + 0.7 * torch.randn(n, classes, generator=random)
    return [seen + own * torch.randn(n, classes, generator=random) for own in noise], labels


def counted_gain(new: torch.Tensor, old: torch.Tensor, labels: torch.Tensor) -> float:
    return float((new.argmax(1) == labels).float().mean() - (old.argmax(1) == labels).float().mean())


def test_two_classes_weigh_as_scikit_learns_regression_does():
    (new, old), labels = classifiers(400, 0, (0.2, 0.5), classes=2)
    margins = torch.stack([new[:, 1] - new[:, 0], old[:, 1] - old[:, 0]], dim=1).numpy()
    fitted = LogisticRegression(C=1e4, fit_intercept=False, tol=1e-10).fit(margins, labels)
    chance = fitted.predict_proba(margins)
    rows = np.arange(len(labels))
    expected = chance[rows, new.argmax(1)] - chance[rows, old.argmax(1)]
    assert expected_gain(new, old, labels)[0] == pytest.approx(expected.mean(), abs=1e-3)


def test_the_error_is_that_of_drawing_the_images_again_and_half_that_of_counting():
    gains, errors, counted = [], [], []
    for seed in range(60):
        (new, old), labels = classifiers(300, seed, (0.1, 0.4))
        gain, error = expected_gain(new, old, labels)
        gains.append(gain)
        errors.append(error)
        counted.append(counted_gain(new, old, labels))
    assert np.mean(errors) == pytest.approx(np.std(gains), rel=0.25)
    assert np.std(gains) < 0.6 * np.std(counted)
    (new, old), labels = classifiers(200_000, 99, (0.1, 0.4))
    assert np.mean(gains) == pytest.approx(counted_gain(new, old, labels), abs=0.005)


def test_copies_of_images_in_one_group_tell_nothing_new():
    (new, old), labels = classifiers(150, 5, (0.2, 0.5))
    gain, error = expected_gain(new, old, labels)
    thrice = new.repeat(3, 1), old.repeat(3, 1), labels.repeat(3)
    again = expected_gain(*thrice, groups=np.tile(np.arange(150), 3))
    assert again == pytest.approx((gain, error), rel=1e-6)
    assert expected_gain(*thrice)[1] == pytest.approx(error / 3**0.5, rel=1e-6)


def rung(logits: torch.Tensor, labels: torch.Tensor) -> Rung:
    return Rung("x", "x", Scores(logits, labels, torch.ones(len(labels), dtype=torch.bool), 0.0), 0.0)


def test_a_tie_of_the_counts_is_decided_by_what_is_expected():
    ties, kept = 0, 0
    for seed in range(60):
        (new, old), labels = classifiers(300, seed, (0.1, 0.4))
        better, worse = rung(new, labels), rung(old, labels)
        assert not worse.beats(better) and not better.beats(better)
        if not beats(better.right, worse.right):
            ties, kept = ties + 1, kept + better.beats(worse)
    assert ties >= 5 and kept >= 0.6 * ties


def test_equally_good_ones_stay_a_tie():
    called = 0
    for seed in range(60):
        (new, old), labels = classifiers(300, seed, (0.3, 0.3))
        gain, error = expected_gain(new, old, labels)
        called += gain > Z * error
    assert called <= 5  # 2.5 % of 60, and chance


def test_labels_without_an_error_are_no_problem():
    labels = torch.tensor([0, 1, 2] * 10)
    sure = 30 * torch.nn.functional.one_hot(labels, 3).float()
    gain, error = expected_gain(sure, sure.roll(1, dims=1), labels)
    assert gain == pytest.approx(1, abs=0.01) and error < 0.05
    assert expected_gain(sure, sure, labels)[0] == 0
