"""How good is a model? Top-1 and top-5, per class, confusion, calibration; each image is counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.training.batches import Pictures
from vitlab.training.processes import Processes
from vitlab.training.unreadable import none_readable


@dataclass
class Scores:
    """Logits of a whole data set beside its labels, and what follows from them."""

    logits: Tensor  # (N, K)
    labels: Tensor  # (N,)
    read: Tensor  # (N,), False where a picture could not be read
    seconds: float
    skipped: dict[str, str] = field(default_factory=dict)  # pictures that could not be read: name -> what is wrong

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

    def per_class(self) -> list[float | None]:
        """Accuracy on each class; None where there is no picture of it."""
        counts = self.confusion()
        return [float(row[i] / row.sum()) if row.sum() else None for i, row in enumerate(counts)]

    def confused(self) -> list[tuple[int, int, int]]:
        """(truth, answer, how often) of every mistake that was made, the most frequent first."""
        counts = self.confusion()
        np.fill_diagonal(counts, 0)
        found = [(int(i), int(j), int(counts[i, j])) for i, j in np.argwhere(counts)]
        return sorted(found, key=lambda pair: -pair[2])

    def calibration_error(self, bins: int = 15) -> float:
        """ECE, eq. 3 of arXiv:1706.04599: |accuracy - confidence| of each bin ((m-1)/M, m/M], weighed by its size."""
        confidence, answer = self.logits[self.read].double().softmax(dim=1).max(dim=1)
        right = (answer == self.labels[self.read]).double()
        m = torch.bucketize(confidence, torch.arange(1, bins, dtype=torch.float64) / bins)  # (N,), from 0
        gaps = torch.zeros(bins, dtype=torch.float64).scatter_add_(0, m, right - confidence)  # |B_m| (acc - conf)
        return float(gaps.abs().sum() / len(m))

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": int(self.read.sum()),
            "unreadable": int((~self.read).sum()),
            "unreadable_pictures": list(self.skipped.values()),
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
    order: list[int] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Scores:
    """Run the whole set through the model. `flip` averages the scores of each picture and its mirror image.

    `order`: for each class of the data the model's output, where the two count them differently. `progress` is called
    with the number of pictures done, after each batch.
    """
    who = processes or Processes(device=next(model.parameters()).device)
    n = len(pictures)
    places = -(-n // who.world) * who.world  # a model that is shared out must run equally often in every process
    mine = np.arange(who.rank, places, who.world)
    logits, read = torch.zeros(places, model.config.classes), torch.zeros(places)
    skipped: dict[str, str] = {}
    start = time.perf_counter()
    with _evaluating(model):
        for first in range(0, len(mine), batch_size):
            part = mine[first : first + batch_size]
            pixels, kept, bad = pictures.take(part % n)  # beyond the end: again the first
            skipped |= bad
            blank = torch.zeros(1, *pixels.shape[1:])  # where no picture of the batch can be read, for the same reason
            images = pictures.normalise(pixels if len(kept) else blank).to(who.device)
            out = model(images)
            out = (out + model(images.flip(-1))) / 2 if flip else out
            logits[part[kept]], read[part[kept]] = out[: len(kept)].float().cpu(), 1.0
            if progress is not None:
                progress(len(part))
    seconds = time.perf_counter() - start
    logits, read, skipped = who.sum(logits)[:n], who.sum(read)[:n] > 0, who.join(skipped)
    if not read.any():
        raise none_readable(skipped)
    return Scores(logits if order is None else logits[:, order], pictures.labels, read, seconds, skipped)


def features(
    model: Any,
    pictures: Pictures,
    batch_size: int = 256,
    *,
    skipped: dict[str, str] | None = None,
    progress: Callable[[int], object] | None = None,
) -> tuple[Tensor, Tensor]:
    """What the classifier reads of every readable picture, (N, D) of unit length, and its labels.

    `skipped` is filled with the pictures that could not be read.
    """
    found, labels = [], []
    skipped = {} if skipped is None else skipped
    with _evaluating(model):
        for first in range(0, len(pictures), batch_size):
            indices = np.arange(first, min(first + batch_size, len(pictures)))
            pixels, kept, bad = pictures.take(indices)
            skipped |= bad
            if len(kept):
                images = pictures.normalise(pixels).to(next(model.parameters()).device)
                found.append(model.forward_head(model.forward_features(images), pre_logits=True).float().cpu())
                labels.append(pictures.labels[torch.from_numpy(indices[kept])])
            if progress is not None:
                progress(len(indices))
    if not found:
        raise none_readable(skipped)
    return F.normalize(torch.cat(found), dim=1), torch.cat(labels)


def knn_accuracy(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], k: int = 20) -> float:
    """The k nearest training features vote, weighted by exp(cosine / 0.07), as DINO does (arXiv:2104.14294)."""
    (bank, labels), (queries, truth) = train, test
    k, classes = min(k, len(bank)), int(max(labels.max(), truth.max())) + 1
    right = 0
    for first in range(0, len(queries), 1024):
        similarity, nearest = (queries[first : first + 1024] @ bank.T).topk(k, dim=1)
        votes = similarity.new_zeros(len(nearest), classes)
        votes.scatter_add_(1, labels[nearest], (similarity / 0.07).exp())
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
        with torch.no_grad():  # inference mode would not let shares of a model come together
            yield
    finally:
        for module, training in modes.items():
            module.training = training
