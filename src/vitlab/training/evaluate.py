"""How good is a model? Top-1 and top-5, per class, confusion, calibration; each image is counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.training.batches import Pictures
from vitlab.training.processes import Processes


@dataclass
class Scores:
    """Logits of a whole data set beside its labels, and what follows from them."""

    logits: Tensor  # (N, K)
    labels: Tensor  # (N,)
    read: Tensor  # (N,), False where a picture could not be read
    seconds: float

    @property
    def predicted(self) -> Tensor:
        return self.logits.argmax(dim=1)

    def top(self, k: int) -> float:
        hits = self.logits.topk(min(k, self.logits.shape[1]), dim=1).indices == self.labels[:, None]
        return float(hits.any(dim=1)[self.read].float().mean())

    def loss(self) -> float:
        return float(F.cross_entropy(self.logits[self.read], self.labels[self.read]))

    def confusion(self) -> np.ndarray:
        """(K, K) counts: row = truth, column = answer."""
        K = self.logits.shape[1]
        pairs = (self.labels * K + self.predicted)[self.read]
        return torch.bincount(pairs, minlength=K * K).reshape(K, K).numpy()

    def per_class(self) -> list[float]:
        counts = self.confusion()
        return [float(row[i] / row.sum()) if row.sum() else float("nan") for i, row in enumerate(counts)]

    def calibration_error(self, bins: int = 15) -> float:
        """ECE (arXiv:1706.04599): |accuracy - confidence| averaged over equal bins of confidence, by their size."""
        confidence, answer = self.logits[self.read].softmax(dim=1).max(dim=1)
        right = (answer == self.labels[self.read]).float()
        place = (confidence * bins).long().clamp(max=bins - 1)
        total = 0.0
        for b in range(bins):
            inside = place == b
            if inside.any():
                total += float(inside.float().mean() * (right[inside].mean() - confidence[inside].mean()).abs())
        return total

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": int(self.read.sum()),
            "unreadable": int((~self.read).sum()),
            "top1": self.top(1),
            "top5": self.top(5),
            "loss": self.loss(),
            "ece": self.calibration_error(),
            "seconds": self.seconds,
            "images_per_second": len(self.labels) / self.seconds,
            "per_class": self.per_class(),
            "confusion": self.confusion().tolist(),
        }


def evaluate(
    model: Any,
    pictures: Pictures,
    *,
    processes: Processes | None = None,
    batch_size: int = 256,
    flip: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Scores:
    """Run the whole set through the model. `flip` averages the scores of each picture and its mirror image."""
    who = processes or Processes(device=next(model.parameters()).device)
    mine = np.arange(len(pictures))[who.rank :: who.world]
    logits = torch.zeros(len(pictures), model.config.classes)
    read = torch.zeros(len(pictures))
    start = time.perf_counter()
    with _evaluating(model):
        for first in range(0, len(mine), batch_size):
            indices = mine[first : first + batch_size]
            images, kept = pictures.normalised(indices)
            images = images.to(who.device)
            out = model(images)
            out = (out + model(images.flip(-1))) / 2 if flip else out
            logits[indices[kept]], read[indices[kept]] = out.float().cpu(), 1.0
            if progress is not None:
                progress(len(indices))
    seconds = time.perf_counter() - start
    return Scores(who.sum(logits), pictures.labels, who.sum(read) > 0, seconds)


def features(model: Any, pictures: Pictures, batch_size: int = 256) -> tuple[Tensor, Tensor]:
    """What the classifier reads of every readable picture, (N, D) of unit length, and its labels."""
    found, labels = [], []
    with _evaluating(model):
        for first in range(0, len(pictures), batch_size):
            indices = np.arange(first, min(first + batch_size, len(pictures)))
            images, kept = pictures.normalised(indices)
            images = images.to(next(model.parameters()).device)
            found.append(model.forward_head(model.forward_features(images), pre_logits=True).float().cpu())
            labels.append(pictures.labels[torch.from_numpy(indices[kept])])
    return F.normalize(torch.cat(found), dim=1), torch.cat(labels)


def knn_accuracy(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], k: int = 20) -> float:
    """The k nearest training features vote, weighted by exp(cosine / 0.07), as DINO does (arXiv:2104.14294)."""
    (bank, labels), (queries, truth) = train, test
    k, classes = min(k, len(bank)), int(max(labels.max(), truth.max())) + 1
    right = 0
    for first in range(0, len(queries), 1024):
        similarity, nearest = (queries[first : first + 1024] @ bank.T).topk(k, dim=1)
        votes = torch.zeros(len(nearest), classes).scatter_add_(1, labels[nearest], (similarity / 0.07).exp())
        right += int((votes.argmax(dim=1) == truth[first : first + 1024]).sum())
    return right / len(queries)


def probe_accuracy(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> float:
    """Accuracy of a logistic regression on the frozen features (scikit-learn's)."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=10.0, max_iter=1000).fit(train[0].numpy(), train[1].numpy())
    return float(fitted.score(test[0].numpy(), test[1].numpy()))


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """No gradients, evaluation mode; afterwards every module is as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
