"""Likely wrong labels by confident learning (Northcutt, Jiang, Chuang: arXiv:1911.00068).

A probe that has not seen an image gives it probabilities. A class's threshold t_j is the mean probability of j over
the images labelled j (eq. 2). An image counts as a j if p_j >= t_j, and p_j is the largest such probability (eq. 1).
Images labelled i that count as j, i != j, are suspects: the off-diagonal of the confident joint. They are ranked by the
normalised margin p_given - max of the others, the worst first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SURE = 4.0  # how many times likelier the other class must be: 80 to 20 % between two
FEWEST = 5  # images of a class whose labels can be judged: with fewer, some fold has never seen it


@dataclass(frozen=True)
class LabelSuspect:
    """An image whose label is likely wrong."""

    image: int
    given: int
    suggested: int
    confidence: float  # probability of the suggested label
    given_confidence: float
    margin: float  # p_given - p of the best other; from -1


@dataclass(frozen=True)
class LabelIssues:
    suspects: list[LabelSuspect]  # the worst first
    joint: np.ndarray  # (K, K): confident joint, counts of (given, true)
    estimated: float  # share of wrong labels that the joint implies, of the images judged


def find_label_issues(probabilities: np.ndarray, labels: np.ndarray, judged: np.ndarray | None = None) -> LabelIssues:
    """probabilities (n, K) by models that have not seen the image, labels (n,). `judged` (K,): classes to judge.

    Without `judged`: those with FEWEST images or more.
    """
    K = probabilities.shape[1]
    if judged is None:
        judged = np.bincount(labels, minlength=K) >= FEWEST
    rows = np.flatnonzero(judged[labels])
    p, given = probabilities[rows], labels[rows]  # (m, K), (m,)
    thresholds = class_thresholds(p, given, judged)
    confident = np.where(p >= thresholds, p, -1.0)  # (m, K)
    true = confident.argmax(axis=1)
    counted = confident.max(axis=1) >= 0
    joint = np.zeros((K, K), dtype=np.int64)
    np.add.at(joint, (given[counted], true[counted]), 1)
    others = p.copy()
    others[np.arange(len(p)), given] = -1.0
    margins = p[np.arange(len(p)), given] - others.max(axis=1)
    wrong = np.flatnonzero(counted & (true != given))
    suspects = [
        LabelSuspect(
            int(rows[i]), int(given[i]), int(true[i]), float(p[i, true[i]]), float(p[i, given[i]]), float(margins[i])
        )
        for i in wrong[np.argsort(margins[wrong], kind="stable")]
    ]
    return LabelIssues(suspects, joint, noise_share(joint, np.bincount(given, minlength=K)))


def sure_suspects(probabilities: np.ndarray, labels: np.ndarray) -> list[LabelSuspect]:
    """Those of any class that are far likelier something else: a weak model has low thresholds, and accuses many."""
    present = np.bincount(labels, minlength=probabilities.shape[1]) > 0
    suspects = find_label_issues(probabilities, labels, present).suspects
    return [suspect for suspect in suspects if suspect.confidence >= SURE * suspect.given_confidence]


def class_thresholds(p: np.ndarray, given: np.ndarray, judged: np.ndarray) -> np.ndarray:
    """(K,): t_j, the mean self-confidence of each class; infinite for a class that is not judged."""
    counts = np.bincount(given, minlength=p.shape[1])
    sums = np.bincount(given, weights=p[np.arange(len(p)), given], minlength=p.shape[1])
    return np.where(judged & (counts > 0), sums / np.maximum(counts, 1), np.inf)


def noise_share(joint: np.ndarray, counts: np.ndarray) -> float:
    """Eq. 3: the joint's rows are scaled to the number of images of each label; the share off the diagonal."""
    rows = joint.sum(axis=1)
    scaled = joint * (counts / np.maximum(rows, 1))[:, None]
    total = scaled.sum()
    return float(1 - np.trace(scaled) / total) if total else 0.0
