"""Evaluation: top-1 and top-5, per class, confusion, calibration; each image is counted once.

Scores come from a classifier, from nearest neighbours of the features, or from text (zero-shot).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.images.sources.splits import few_labels
from vitlab.layers.reducer import Reducer
from vitlab.models.base import Network, evaluation_mode, features_of
from vitlab.models.clip import CLIP
from vitlab.text.templates import class_prompts
from vitlab.training.batches import Pictures
from vitlab.training.processes import Processes
from vitlab.training.unreadable import none_readable


@dataclass
class Scores:
    """Logits and labels of a dataset, and the metrics computed from them."""

    logits: Tensor  # (N, K)
    labels: Tensor  # (N,)
    read: Tensor  # (N,), False where an image could not be read
    seconds: float
    skipped: dict[str, str] = field(default_factory=dict)  # images that could not be read: name -> what is wrong

    @property
    def predicted(self) -> Tensor:
        return self.logits.argmax(dim=1)

    def top(self, k: int) -> float:
        hits = self.logits.topk(min(k, self.logits.shape[1]), dim=1).indices == self.labels[:, None]
        return float(hits.any(dim=1)[self.read].float().mean())

    def loss(self) -> float:
        return float(F.cross_entropy(self.logits[self.read], self.labels[self.read]))

    def confusion(self) -> np.ndarray:
        """(K, K) counts: row = truth, column = prediction."""
        K = self.logits.shape[1]
        pairs = (self.labels * K + self.predicted)[self.read]
        return torch.bincount(pairs, minlength=K * K).reshape(K, K).numpy()

    def per_class(self) -> list[float | None]:
        """Accuracy on each class; None where there is no image of it."""
        counts = self.confusion()
        return [float(row[i] / row.sum()) if row.sum() else None for i, row in enumerate(counts)]

    def confused(self) -> list[tuple[int, int, int]]:
        """(truth, prediction, count) of every kind of mistake, the most frequent first."""
        counts = self.confusion()
        np.fill_diagonal(counts, 0)
        pairs = [(int(i), int(j), int(counts[i, j])) for i, j in np.argwhere(counts)]
        return sorted(pairs, key=lambda pair: -pair[2])

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


def evaluate_classifier(
    model: Network,
    pictures: Pictures,
    *,
    processes: Processes | None = None,
    batch_size: int = 256,
    flip: bool = False,
    order: list[int] | None = None,
    reducer: Reducer | None = None,
    progress: Callable[[int], object] | None = None,
) -> Scores:
    """Run the whole set through the model. `flip` averages the scores of each image and its mirror image.

    `order`: for each class of the data the model's output, where their order differs. `reducer`: with fewer tokens.
    `progress` is called with the number of images done, after each batch.
    """
    start = time.perf_counter()
    look = partial(model, **reducer_kwargs(reducer))

    def scores(images: Tensor) -> Tensor:
        out = look(images)
        return (out + look(images.flip(-1))) / 2 if flip else out

    classes = model.config.classes
    logits, read, skipped = forward_all(model, scores, classes, pictures, processes, batch_size, progress)
    logits = logits if order is None else logits[:, order]
    return Scores(logits, pictures.labels, read, time.perf_counter() - start, skipped)


Features = tuple[Tensor, Tensor]  # (N, D) of unit length, labels (N,)


def features(
    model: Network,
    pictures: Pictures,
    batch_size: int = 256,
    *,
    processes: Processes | None = None,
    skipped: dict[str, str] | None = None,
    reducer: Reducer | None = None,
    progress: Callable[[int], object] | None = None,
) -> Features:
    """Unit-length features (N, D) of every readable image, and its labels.

    `skipped` is filled with the images that could not be read.
    """
    look = features_of(model, **reducer_kwargs(reducer))
    vectors, read, bad = forward_all(model, look, model.feature_width, pictures, processes, batch_size, progress)
    if skipped is not None:
        skipped |= bad
    return F.normalize(vectors[read], dim=1), pictures.labels[read]


def knn_scores(train: Features, queries: Tensor, classes: int, k: int = 20) -> Tensor:
    """The k nearest training features vote, weighted by exp(cosine / 0.07), as DINO does (arXiv:2104.14294).

    The shares of the votes, as logarithms: (N, classes).
    """
    (bank, labels), scores = train, []
    for part in queries.split(1024):
        similarity, nearest = (part @ bank.T).topk(min(k, len(bank)), dim=1)
        votes = similarity.new_zeros(len(nearest), classes)
        votes.scatter_add_(1, labels[nearest], (similarity / 0.07).softmax(dim=1))
        scores.append(votes.clamp(min=1e-4).log())  # no vote at all is not quite impossible
    return torch.cat(scores)


def knn_accuracy(train: Features, test: Features, k: int = 20) -> float:
    classes = int(max(train[1].max(), test[1].max())) + 1
    return float((knn_scores(train, test[0], classes, k).argmax(dim=1) == test[1]).float().mean())


def evaluate_knn(
    encoder: Network, bank: Pictures, pictures: Pictures, classes: int, *, processes: Processes | None = None
) -> Scores:
    """Evaluate features by k-NN: the votes of the nearest images of the bank are the scores."""
    start = time.perf_counter()
    train = features(encoder, bank, processes=processes)
    queries, read, skipped = forward_all(encoder, features_of(encoder), encoder.feature_width, pictures, processes)
    votes = knn_scores(train, F.normalize(queries, dim=1), classes)
    return Scores(votes, pictures.labels, read, time.perf_counter() - start, skipped)


def evaluate_zeroshot(
    model: CLIP,
    pictures: Pictures,
    classes: Sequence[str],
    templates: Sequence[str],
    *,
    processes: Processes | None = None,
    batch_size: int = 256,
    flip: bool = False,
    reducer: Reducer | None = None,
    progress: Callable[[int], object] | None = None,
) -> Scores:
    """Evaluate a CLIP without training: each class is the mean embedding of its captions, the nearest class wins."""
    start = time.perf_counter()
    with evaluating(model):
        weights = model.class_embeddings(class_prompts(classes, templates)).cpu()  # (K, E)
    look, width = image_embedding(model, flip, reducer), model.config.embed_dim
    embeddings, read, skipped = forward_all(model, look, width, pictures, processes, batch_size, progress)
    logits = model.scale.item() * embeddings @ weights.T  # (N, K)
    return Scores(logits, pictures.labels, read, time.perf_counter() - start, skipped)


def image_embedding(model: Network, flip: bool, reducer: Reducer | None = None) -> Callable[[Tensor], Tensor]:
    """(B, C, H, W) -> (B, E) of unit length; `flip`: the mean with the mirror image's."""
    look = features_of(model, **reducer_kwargs(reducer))
    return look if not flip else lambda images: F.normalize(look(images) + look(images.flip(-1)), dim=1)


def probe_accuracy(train: Features, test: Features) -> float:
    """Accuracy of a logistic regression on the frozen features (scikit-learn's)."""
    from sklearn.linear_model import LogisticRegression

    fitted = LogisticRegression(C=10.0, max_iter=1000).fit(train[0].numpy(), train[1].numpy())
    return float(fitted.score(test[0].numpy(), test[1].numpy()))


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
        y = 2.0 * F.one_hot(labels[few], len(classes)).double() - 1  # (n, K)
        centre, level = x.mean(dim=0), y.mean(dim=0)
        x = x - centre
        penalty = ridge * x.square().sum() / len(x) * torch.eye(len(x), dtype=x.dtype)
        weights = x.mT @ torch.linalg.solve(x @ x.mT + penalty, y - level)  # (D, K)
        answers = ((queries.double() - centre) @ weights + level).argmax(dim=1)
        accuracies.append(float((answers == truth).float().mean()))
    return accuracies


def forward_all(
    model: Network,
    function: Callable[[Tensor], Tensor],
    width: int,
    pictures: Pictures,
    processes: Processes | None = None,
    batch_size: int = 256,
    progress: Callable[[int], object] | None = None,
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Apply `function` to every image once, over all processes: outputs (N, width), which were read, and the errors."""
    here = next(model.parameters(), torch.zeros(0)).device  # an exported model has no parameters
    who = processes or Processes(device=here)
    n = len(pictures)
    places = -(-n // who.world) * who.world  # a model that is shared out must run equally often in every process
    mine = np.arange(who.rank, places, who.world)
    outputs, read = torch.zeros(places, width), torch.zeros(places)
    skipped: dict[str, str] = {}
    with evaluating(model):
        for first in range(0, len(mine), batch_size):
            part = mine[first : first + batch_size]
            pixels, kept, bad = pictures.take(part % n)  # beyond the end: again the first
            skipped |= bad
            blank = torch.zeros(1, *pixels.shape[1:])  # where no image of the batch can be read, for the same reason
            images = pictures.normalise(pixels if len(kept) else blank).to(who.device)
            outputs[part[kept]], read[part[kept]] = function(images)[: len(kept)].float().cpu(), 1.0
            if progress is not None:
                progress(len(part))
    outputs, read, skipped = who.sum(outputs)[:n], who.sum(read)[:n] > 0, who.join(skipped)
    if not read.any():
        raise none_readable(skipped)
    return outputs, read, skipped


def reducer_kwargs(reducer: Reducer | None) -> dict[str, Any]:
    """Arguments of a forward pass; empty without a reducer, because not every model takes one."""
    return {} if reducer is None else {"reducer": reducer}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Inference mode, which base.evaluating adds, fails with sharded models."""
    with evaluation_mode(model), torch.no_grad():
        yield
