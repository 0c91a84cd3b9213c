"""Few-shot accuracy of frozen features, over several draws of the labelled images."""

from __future__ import annotations

import torch

from vitlab.images.sources.splits import few_labels
from vitlab.training.evaluate import Features


def few_shot_accuracies(
    train: Features, test: Features, classes: list[str], shots: int, *, draws: int = 10, ridge: float = 0.1
) -> list[float]:
    """Accuracies from `shots` labelled images of each class, one for each draw of them.

    As the ViT paper evaluates features (arXiv:2010.11929, sec. 4.1): ridge regression to targets of -1 and 1, one per
    class, in closed form. `ridge` is a share of the features' own mean squared length: methods differ much in that.
    """
    (bank, labels), (queries, truth) = train, test
    accuracies = []
    for draw in range(draws):
        few = torch.from_numpy(few_labels(labels.numpy(), classes, draw, per_class=shots))
        x = bank[few].double()  # (n, D), n = shots * K
        y = 2.0 * torch.nn.functional.one_hot(labels[few], len(classes)).double() - 1  # (n, K)
        centre, level = x.mean(dim=0), y.mean(dim=0)
        x = x - centre
        penalty = ridge * x.square().sum() / len(x) * torch.eye(len(x), dtype=x.dtype)
        weights = x.mT @ torch.linalg.solve(x @ x.mT + penalty, y - level)  # (D, K)
        answers = ((queries.double() - centre) @ weights + level).argmax(dim=1)
        accuracies.append(float((answers == truth).float().mean()))
    return accuracies
