"""IoU, average precision and panoptic quality against torchmetrics, a slow loop and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchmetrics.classification import MulticlassJaccardIndex
from torchmetrics.detection import PanopticQuality

from vitlab.images.regions import VOID, IdRegion, Regions, RunLengths, mask_box
from vitlab.training.dense_answers import DenseAnswer, FoundObject, windows
from vitlab.training.dense_scores import (
    PanopticCounts,
    RegionComparison,
    average_precision,
    box_iou,
    boxes_found,
    class_ious,
    confusion_of,
    mean_of,
    panoptic_counts,
)

K, H, W = 3, 20, 26


def blocks(rng, size=(H, W), values=K):
    """A map of random blocks, so that maps overlap in parts."""
    coarse = rng.integers(0, values, (size[0] // 2, size[1] // 2))
    return np.kron(coarse, np.ones((2, 2), dtype=np.int64))


def test_iou_equals_torchmetrics():
    rng = np.random.default_rng(0)
    theirs = MulticlassJaccardIndex(K, average="none", ignore_index=VOID)
    confusion = np.zeros((K, K), dtype=np.int64)
    for _ in range(4):
        truth, said = blocks(rng), blocks(rng)
        said[:12] = truth[:12]
        truth[rng.random(truth.shape) < 0.1] = VOID
        theirs.update(torch.from_numpy(said)[None], torch.from_numpy(truth)[None])
        confusion += confusion_of(truth, said, K)
    np.testing.assert_allclose(class_ious(confusion), theirs.compute().numpy(), atol=1e-6)


def test_iou_of_a_class_that_is_nowhere_counts_in_no_mean():
    confusion = confusion_of(np.array([[0, 0, VOID]]), np.array([[0, 2, 1]]), 4)
    assert class_ious(confusion) == [0.5, None, 0.0, None]
    assert mean_of(class_ious(confusion)) == 0.25


def objects_of(rng, count, labels=K):
    """Boxes as masks, with the numbers of a map: (map, labels). Later ones lie on top."""
    ids = np.zeros((H, W), dtype=np.int64)
    for number in range(1, count + 1):
        top, left = rng.integers(0, H - 6), rng.integers(0, W - 6)
        ids[top : top + rng.integers(3, 9), left : left + rng.integers(3, 9)] = number
    return ids, rng.integers(0, labels, count)


def moved(rng, ids):
    return np.roll(ids, rng.integers(-1, 2, 2), axis=(0, 1))


def test_panoptic_quality_equals_torchmetrics():
    rng = np.random.default_rng(1)
    theirs = PanopticQuality(things=set(range(K)), stuffs={K}, return_per_class=True, allow_unknown_preds_category=True)
    counts = PanopticCounts.none(K + 1)
    for _ in range(8):
        ids, labels = objects_of(rng, 5)
        said = moved(rng, ids)
        said_labels = np.where(rng.random(5) < 0.8, labels, rng.integers(0, K, 5))

        def with_background(numbers, of):  # torchmetrics takes every pixel for a part of some segment
            return np.where(numbers == 0, len(of) + 1, numbers), np.append(of, K)

        truth, answer = with_background(ids, labels), with_background(said, said_labels)
        counts = counts.plus(panoptic_counts(truth, answer, np.zeros((H, W), dtype=bool), K + 1))
        theirs.update(*(_pairs(*maps) for maps in (answer, truth)))
    np.testing.assert_allclose(counts.quality(), theirs.compute()[0].numpy(), atol=1e-6)


def _pairs(ids, labels):
    categories = labels[ids - 1]
    return torch.from_numpy(np.stack([categories, np.where(categories == K, 0, ids)], axis=-1))[None]


def test_answers_in_a_crowd_are_not_wrong():
    none = np.zeros(0, dtype=np.int64)
    said = np.zeros((H, W), dtype=np.int32)
    said[:5, :5], said[10:15, 10:15] = 1, 2
    void = np.zeros((H, W), dtype=bool)
    void[:4, :5] = True  # four fifths of the first answer
    counts = panoptic_counts((np.zeros_like(said), none), (said, np.array([0, 0])), void, 1)
    assert counts.wrong.tolist() == [1.0] and counts.quality() == [0.0]


def slow_average_precision(truths, answers, threshold, label):
    """Eleven lines of a textbook: match the surest first, then interpolate precision at 101 recalls."""
    marks = []
    for image, answer in enumerate(answers):
        free = [i for i, (k, _) in enumerate(truths[image]) if k == label]
        for score, k, box in sorted(answer, key=lambda row: -row[0]):
            if k != label:
                continue
            overlaps = [(box_iou(box, truths[image][i][1]), i) for i in free]
            best = max(overlaps, default=(0.0, -1))
            hit = best[0] >= threshold
            free = [i for i in free if not (hit and i == best[1])]
            marks.append((score, hit))
    count = sum(k == label for truth in truths for k, _ in truth)
    marks.sort(key=lambda mark: -mark[0])
    hits = np.cumsum([hit for _, hit in marks])
    recall, precision = hits / count, hits / np.arange(1, len(hits) + 1)
    return np.mean([precision[recall >= r].max(initial=0.0) for r in np.linspace(0, 1, 101)])


@pytest.mark.parametrize("what", ["bbox", "segm"])
def test_average_precision_equals_a_slow_loop(what):
    rng = np.random.default_rng(2)
    comparison = RegionComparison("instance" if what == "segm" else "detect", 2)
    truths, answers = [], []
    for image in range(6):
        corners = [np.array([x, y, x + w, y + h], dtype=float) for x, y, w, h in rng.integers(2, 10, (4, 4))]
        labels = rng.integers(0, 2, 4)
        shapes = tuple(RunLengths.of_mask(_filled(box)) for box in corners)
        truth = Regions((H, W), labels, np.array(corners), np.zeros(4, dtype=bool), shapes)
        said = [
            (float(rng.random()), int(label), (box + rng.integers(-2, 3, 4)).clip(0, 20))
            for box, label in [*zip(corners, labels, strict=True), (corners[0], 1 - labels[0])]
        ]
        said = [(score, label, box) for score, label, box in said if box[2] > box[0] and box[3] > box[1]]
        found = [FoundObject(k, s, tuple(box.tolist()), RunLengths.of_mask(_filled(box))) for s, k, box in said]
        comparison.add(image, DenseAnswer((H, W), objects=sorted(found, key=lambda f: -f.score)), truth)
        truths.append(list(zip(labels, corners, strict=True)))
        answers.append(said)
    ours = average_precision(comparison, what)
    for threshold, value in ((0.5, ours.per_class50), (np.linspace(0.5, 0.95, 10), ours.per_class)):
        for label in range(2):
            slow = np.mean([slow_average_precision(truths, answers, t, label) for t in np.atleast_1d(threshold)])
            assert value[label] == pytest.approx(slow, abs=1e-6)
    assert ours.ap == pytest.approx(np.mean(ours.per_class)) and 0.02 < ours.ap < ours.ap50 < 1


def _filled(box):
    left, top, right, bottom = box.astype(int)
    mask = np.zeros((H, W), dtype=bool)
    mask[top:bottom, left:right] = True
    return mask


def test_a_perfect_answer_scores_one_and_a_mirrored_one_does_not():
    rng = np.random.default_rng(4)
    for flip, expected in ((False, 1.0), (True, 0.0)):
        comparison = RegionComparison("instance", 1)
        ids, _ = objects_of(rng, 3)
        ids[:, W // 2 :] = 0  # all on the left
        numbers = np.unique(ids[ids > 0])
        truth = Regions.of_ids(ids, numbers, np.zeros(len(numbers), dtype=int), np.zeros(len(numbers), dtype=bool))
        said = ids[:, ::-1] if flip else ids
        masks = [IdRegion(said, int(number)).mask((H, W)) for number in numbers]
        found = [FoundObject(0, 0.9, tuple(mask_box(m).tolist()), RunLengths.of_mask(m)) for m in masks]
        quality = comparison.add(0, DenseAnswer((H, W), objects=found), truth)
        assert (quality, average_precision(comparison, "segm").ap) == (pytest.approx(expected), pytest.approx(expected))


def test_no_answer_and_no_object():
    comparison = RegionComparison("detect", 2)
    empty = Regions.of_ids(np.zeros((H, W), dtype=int), *np.zeros((3, 0), dtype=int))
    assert comparison.add(0, DenseAnswer((H, W)), empty) == 1.0
    assert average_precision(comparison, "bbox").ap == 0.0
    truth = Regions((H, W), np.array([1]), np.array([[2.0, 2, 8, 8]]), np.array([False]))
    assert boxes_found(DenseAnswer((H, W)), truth) == 0.0


@pytest.mark.parametrize(("size", "window"), [((50, 90), (32, 32)), ((20, 100), (32, 32)), ((32, 32), (32, 32))])
def test_windows_cover_an_image_and_overlap(size, window):
    seen = np.zeros(np.maximum(size, window), dtype=int)
    for top, left in windows(size, window):
        assert top + window[0] <= seen.shape[0] and left + window[1] <= seen.shape[1]
        seen[top : top + window[0], left : left + window[1]] += 1
    assert (seen >= 1).all() and (seen.max() >= 2) == (size != window)
