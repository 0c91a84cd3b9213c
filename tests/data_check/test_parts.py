"""Confident learning against the paper's definition, correlation against numpy, neighbours against all pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.model_selection import LeaveOneGroupOut

from vitlab.data_check import matching, neighbours
from vitlab.data_check.duplicates import Copies, Copy
from vitlab.data_check.outliers import find_outliers
from vitlab.training.label_issues import find_label_issues
from vitlab.training.probe import deal


def joint_by_definition(p: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Eqs. 1 and 2 of arXiv:1911.00068, image by image."""
    n, K = p.shape
    t = [sum(p[x][j] for x in range(n) if labels[x] == j) / sum(labels == j) for j in range(K)]
    joint = np.zeros((K, K), dtype=int)
    for x in range(n):
        above = [j for j in range(K) if p[x][j] >= t[j]]
        if above:
            joint[labels[x], max(above, key=lambda j: p[x][j])] += 1
    return joint


def test_confident_joint_is_the_papers():
    random = np.random.default_rng(0)
    labels = random.permutation(np.repeat(np.arange(5), [40, 7, 23, 61, 12]))
    p = torch.from_numpy(random.normal(0, 2, (143, 5)) + 2 * np.eye(5)[labels]).softmax(dim=1).numpy()
    found = find_label_issues(p, labels)
    joint = joint_by_definition(p, labels)
    np.testing.assert_array_equal(found.joint, joint)
    assert len(found.suspects) == joint.sum() - np.trace(joint) > 10
    counts = np.bincount(labels)
    Q = joint / joint.sum(axis=1, keepdims=True) * counts[:, None]  # eq. 3
    assert found.estimated == pytest.approx(1 - np.trace(Q) / Q.sum())
    margins = [p[s.image, s.given] - max(np.delete(p[s.image], s.given)) for s in found.suspects]
    assert margins == sorted(margins) and margins == pytest.approx([s.margin for s in found.suspects])


def test_confident_learning_by_hand():
    """t_0 = (.9 + .8 + .1) / 3 = .6, t_1 = (.9 + .7 + .4) / 3 = 2/3: image 2 counts as 1, image 5 as neither."""
    p = np.array([[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.1, 0.9], [0.3, 0.7], [0.599, 0.401]])
    found = find_label_issues(p, np.array([0, 0, 0, 1, 1, 1]), np.array([True, True]))
    assert found.joint.tolist() == [[2, 1], [0, 2]]
    (suspect,) = found.suspects
    assert (suspect.image, suspect.given, suspect.suggested) == (2, 0, 1) and suspect.margin == pytest.approx(-0.8)
    assert found.estimated == pytest.approx(1 / 6)  # rows scaled to 3 images each: [[2, 1], [0, 3]]


def test_small_classes_are_neither_judged_nor_suggested():
    p = np.tile([0.2, 0.2, 0.6], (14, 1))
    found = find_label_issues(p, np.array([0] * 6 + [1] * 6 + [2] * 2))
    assert found.joint[2].sum() == found.joint[:, 2].sum() == 0


def test_copies_are_held_out_together():
    labels, groups = np.arange(60) % 3, np.arange(60) // 4
    folds = deal(labels, 0, groups)
    splitter = LeaveOneGroupOut()
    for seen, held in splitter.split(labels, groups=folds):
        assert not set(groups[seen]) & set(groups[held])
    assert splitter.get_n_splits(groups=folds) == 5


def test_neighbours_in_blocks_are_those_of_all_pairs(monkeypatch):
    unit = F.normalize(torch.randn(53, 7), dim=1)
    monkeypatch.setattr(neighbours, "BLOCK", 53 * 5)  # five rows at a time
    cosines, rows = neighbours.nearest(unit, unit, 4)
    every = unit @ unit.T
    every.fill_diagonal_(-2)
    torch.testing.assert_close(cosines, every.topk(4, dim=1).values)
    torch.testing.assert_close(every.gather(1, rows), cosines)


def test_correlation_at_full_size_is_numpys():
    """One place only, no crop: Pearson's correlation of the details but for their mean."""
    random = np.random.default_rng(0)
    base = random.integers(0, 256, (64, 64)).astype(np.float32)
    a, b = (torch.from_numpy(base + random.normal(0, s, (64, 64)).astype(np.float32))[None] for s in (10, 60))
    at = matching.Resolution((1.0,), 0.8, 3.0)
    x, y = (matching._details(image, at).numpy().ravel() for image in (a, b))
    expected = (x * y).sum() / np.sqrt((x * x).sum() * (y * y).sum())
    assert float(matching._as_part(a, b, at)) == pytest.approx(expected, abs=1e-5)


def test_outliers_are_far_from_their_class():
    random = torch.Generator().manual_seed(0)
    centre = torch.randn(1, 16, generator=random) * 5
    around = torch.randn(70, 16, generator=random)
    features = torch.cat([centre.expand(40, -1), -centre.expand(30, -1)]) + around
    features[4] = -centre[0]  # among the others' images
    found = find_outliers(features, np.repeat([0, 1], [40, 30]))
    assert found[0].image == 4 and found[0].deviation > 10 * found[1].deviation
    assert found[0].distance == pytest.approx(
        float((1 - F.cosine_similarity(features[4], features[:40])).sort().values[1:6].mean()), abs=1e-5
    )


def test_leaks_follow_chains_of_copies():
    """0 (train) ~ 1 (train) ~ 2 (val): image 2 leaks, although it was never compared with 0."""
    near = [Copy(1, 0, "near", 0.9), Copy(2, 1, "near", 0.8, True)]
    copies = Copies([], near, np.array([0, 0, 0, 3]), 0.7)
    splits = ["train", "train", "val", "test"]
    assert copies.leaks(splits) == [Copy(2, 1, "near", 0.8, True)]
    assert copies.within(splits) == [Copy(1, 0, "near", 0.9)]
    assert copies.leaks(["train", "val", "test", "test"]) == [
        Copy(1, 0, "near", 0.9),
        Copy(2, 0, "near", 0.0),
        Copy(2, 1, "near", 0.8, True),
    ]
