"""Evaluation: top-1 and top-5, per class, confusion, calibration; each image is counted once.

Scores come from a classifier, from nearest neighbours of the features, or from text (zero-shot).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.images.sources.splits import few_labels
from vitlab.layers.reducer import Reducer
from vitlab.models.base import Network, evaluation_mode, features_of
from vitlab.models.two_towers import TwoTowers
from vitlab.text.templates import class_prompts
from vitlab.training.batches import ImageSet
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


class PassOptions(TypedDict, total=False):
    """How a dataset is run through a model."""

    processes: Processes | None  # that share the work; default: this one
    batch_size: int  # default: 256
    flip: bool  # average the outputs for each image and its mirror image
    shift: int  # pixels: of the image moved so far up left and down right as well, at half the weight
    reducer: Reducer | None  # run a ViT with fewer tokens
    progress: Callable[[int], object] | None  # called with the number of images done, after each batch


def evaluate_classifier(
    model: Network, image_set: ImageSet, *, order: list[int] | None = None, **options: Unpack[PassOptions]
) -> Scores:
    """Scores of a classifier. `order`: for each class of the data the model's output, where their order differs."""
    start = time.perf_counter()
    look = partial(model, **_reducer(options))
    flip, shift = options.get("flip", False), options.get("shift", 0)

    def scores(images: Tensor) -> Tensor:
        out = torch.zeros(())
        for weight, view in shifted_views(images, shift):
            out = out + weight * ((look(view) + look(view.flip(-1))) / 2 if flip else look(view))
        return out

    logits, read, skipped = forward_all(model, scores, model.classes, image_set, **options)
    logits = logits if order is None else logits[:, order]
    return Scores(logits, image_set.labels, read, time.perf_counter() - start, skipped)


def shifted_views(images: Tensor, shift: int) -> list[tuple[float, Tensor]]:
    """Views of images (B, C, H, W) with their weights, which sum to 1: as they are, and moved by `shift` pixels."""
    if not shift:
        return [(1.0, images)]
    H, W = images.shape[-2:]
    wider = F.pad(images, (shift,) * 4, mode="reflect")
    return [(0.5, images), (0.25, wider[..., :H, :W]), (0.25, wider[..., 2 * shift :, 2 * shift :])]


Features = tuple[Tensor, Tensor]  # (N, D) of unit length, labels (N,)


def features(
    model: Network, image_set: ImageSet, *, skipped: dict[str, str] | None = None, **options: Unpack[PassOptions]
) -> Features:
    """Unit-length features (N, D) of every readable image, and its labels.

    `skipped` is filled with the images that could not be read.
    """
    look = features_of(model, **_reducer(options))
    vectors, read, bad = forward_all(model, look, model.feature_width, image_set, **options)
    if skipped is not None:
        skipped |= bad
    return F.normalize(vectors[read], dim=1), image_set.labels[read]


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
    encoder: Network, bank: ImageSet, image_set: ImageSet, classes: int, **options: Unpack[PassOptions]
) -> Scores:
    """Evaluate features by k-NN: the votes of the nearest images of the bank are the scores."""
    start = time.perf_counter()
    train = features(encoder, bank, **options)
    look = features_of(encoder, **_reducer(options))
    queries, read, skipped = forward_all(encoder, look, encoder.feature_width, image_set, **options)
    votes = knn_scores(train, F.normalize(queries, dim=1), classes)
    return Scores(votes, image_set.labels, read, time.perf_counter() - start, skipped)


def evaluate_zeroshot(
    model: TwoTowers,
    image_set: ImageSet,
    classes: Sequence[str],
    templates: Sequence[str],
    **options: Unpack[PassOptions],
) -> Scores:
    """Evaluate without training: each class is the mean embedding of its captions, the nearest class wins."""
    start = time.perf_counter()
    with evaluating(model):
        weights = model.class_embeddings(class_prompts(classes, templates)).cpu()  # (K, E)
    embeddings, read, skipped = embed_images(model, image_set, **options)
    logits = model.scale.item() * embeddings @ weights.T  # (N, K)
    return Scores(logits, image_set.labels, read, time.perf_counter() - start, skipped)


def embed_images(
    model: TwoTowers, image_set: ImageSet, **options: Unpack[PassOptions]
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """(N, E) of unit length; the rest as `forward_all`."""
    look = features_of(model, **_reducer(options))

    def embedding(images: Tensor) -> Tensor:
        return F.normalize(look(images) + look(images.flip(-1)), dim=1) if options.get("flip") else look(images)

    return forward_all(model, embedding, model.config.embed_dim, image_set, **options)


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
    image_set: ImageSet,
    **options: Unpack[PassOptions],
) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Apply `function` to every image once, over all processes: outputs (N, width), which were read, and the errors.

    Of the options, `flip`, `shift` and `reducer` are the function's own concern.
    """
    here = next(model.parameters(), torch.zeros(0)).device  # an exported model has no parameters
    who = options.get("processes") or Processes(device=here)
    batch_size, progress = options.get("batch_size", 256), options.get("progress")
    n = len(image_set)
    places = -(-n // who.world) * who.world  # a model that is shared out must run equally often in every process
    mine = np.arange(who.rank, places, who.world)
    outputs, read = torch.zeros(places, width), torch.zeros(places)
    skipped: dict[str, str] = {}
    with evaluating(model):
        for first in range(0, len(mine), batch_size):
            part = mine[first : first + batch_size]
            pixels, kept, bad = image_set.take(part % n)  # beyond the end: again the first
            skipped |= bad
            blank = torch.zeros(1, *pixels.shape[1:])  # where no image of the batch can be read, for the same reason
            images = image_set.normalise(pixels if len(kept) else blank).to(who.device)
            outputs[part[kept]], read[part[kept]] = function(images)[: len(kept)].float().cpu(), 1.0
            if progress is not None:
                progress(len(part))
    outputs, read, skipped = who.sum(outputs)[:n], who.sum(read)[:n] > 0, who.join(skipped)
    if not read.any():
        raise none_readable(skipped)
    return outputs, read, skipped


def _reducer(options: PassOptions) -> dict[str, Any]:
    """Arguments of a forward pass; empty without a reducer, because not every model takes one."""
    reducer = options.get("reducer")
    return {} if reducer is None else {"reducer": reducer}


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients. Inference mode, which base.evaluating adds, fails with sharded models."""
    with evaluation_mode(model), torch.no_grad():
        yield
