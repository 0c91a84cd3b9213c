"""Image-text retrieval: recall@k both ways, with several captions per image.

    result = evaluate_retrieval(model, ImageSet(data.test, model.preprocess), data.test.captions)
    result.recall(10)               # {"image_to_text": 0.31, "text_to_image": 0.28}
    result.chance(10)               # of guessing

An image counts if one of its captions is among the nearest k; a caption has one image. Ties count as nearer, so a
model that gives everything the same embedding scores 0.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.images.datasets import Captions
from vitlab.models.two_towers import TwoTowers
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import PassOptions, embed_images, evaluating

AT = (1, 5, 10)  # k
WAYS = ("image_to_text", "text_to_image")


@dataclass
class Retrieval:
    """Embeddings of a split, and the metrics computed from them."""

    images: Tensor  # (N, E) of unit length
    texts: Tensor  # (M, E) of unit length
    owner: Tensor  # (M,): the image that each caption is of, rising
    read: Tensor  # (N,), False where an image could not be read: it and its captions count nowhere
    seconds: float
    scale: float = 1.0  # of the logits
    skipped: dict[str, str] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> dict[str, Tensor]:
        """For each image (N',) and each caption (M',) that counts, how many wrong ones are as near or nearer."""
        kept = self.read[self.owner]
        images, texts = self.images[self.read], self.texts[kept]
        number = self.read.long().cumsum(0) - 1  # of an image among those that count
        owner = number[self.owner[kept]]
        to_text, to_image = [], []
        for first in range(0, len(images), 1024):
            near = images[first : first + 1024] @ texts.T  # (n, M')
            own = owner[None] == torch.arange(first, first + len(near))[:, None]
            best = near.masked_fill(~own, -math.inf).max(dim=1).values
            to_text.append((~(near < best[:, None]) & ~own).sum(dim=1))  # so written, NaN finds nothing
        for first in range(0, len(texts), 1024):
            near, mine = texts[first : first + 1024] @ images.T, owner[first : first + 1024, None]  # (m, N')
            to_image.append((~(near < near.gather(1, mine))).sum(dim=1) - 1)  # itself is not a wrong one
        return dict(zip(WAYS, (torch.cat(to_text), torch.cat(to_image)), strict=True))

    def recall(self, k: int) -> dict[str, float]:
        return {way: float((ranks < k).float().mean()) for way, ranks in self.ranks.items()}

    def chance(self, k: int) -> dict[str, float]:
        """Of k captions drawn at random one or more are the image's; of k images one is the caption's."""
        counts = torch.bincount(self.owner, minlength=len(self.read))[self.read].tolist()
        N, M = len(counts), sum(counts)
        missed = {c: math.comb(M - c, k) / math.comb(M, k) if k <= M else 0.0 for c in set(counts)}
        return {WAYS[0]: 1 - sum(missed[c] for c in counts) / N, WAYS[1]: min(1.0, k / N)}

    def top(self, k: int) -> float:
        """Recall@k, the mean of both ways."""
        return sum(self.recall(k).values()) / 2

    def mean_recall(self) -> float:
        """Over both ways and k = 1, 5, 10: what the best model of a run is picked by."""
        return sum(self.top(k) for k in AT) / len(AT)

    def loss(self) -> float:
        """The symmetric contrastive loss over the whole split, each image with the first of its captions."""
        firsts = torch.searchsorted(self.owner, torch.arange(len(self.read)))
        logits = self.scale * self.images[self.read] @ self.texts[firsts][self.read].T
        target = torch.arange(len(logits))
        return float((F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2)

    def nearest(self) -> tuple[Tensor, Tensor]:
        """For each image the nearest caption's share of a softmax over all captions (N,), and which it is (N,)."""
        parts = [(self.scale * part @ self.texts.T).softmax(dim=1).max(dim=1) for part in self.images.split(1024)]
        return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])

    def to_dict(self) -> dict[str, Any]:
        return {
            "images": int(self.read.sum()),
            "captions": int(self.read[self.owner].sum()),
            "unreadable": int((~self.read).sum()),
            "unreadable_pictures": list(self.skipped.values()),
            "recall": {way: {str(k): self.recall(k)[way] for k in AT} for way in WAYS},
            "chance": {way: {str(k): self.chance(k)[way] for k in AT} for way in WAYS},
            "mean_recall": self.mean_recall(),
            "loss": self.loss(),
            "seconds": self.seconds,
            "images_per_second": len(self.read) / self.seconds,
        }


def evaluate_retrieval(
    model: TwoTowers, image_set: ImageSet, captions: Captions, **options: Unpack[PassOptions]
) -> Retrieval:
    """Embed a whole split, its images and all their captions."""
    start = time.perf_counter()
    images, read, skipped = embed_images(model, image_set, **options)
    texts = embed_texts(model, captions.everything(), options.get("batch_size", 256))
    owner = torch.arange(len(captions)).repeat_interleave(torch.from_numpy(captions.counts))
    seconds = time.perf_counter() - start
    return Retrieval(images, texts, owner, read, seconds, model.scale.item(), skipped)


def embed_texts(model: TwoTowers, texts: list[str], batch_size: int = 256) -> Tensor:
    """(M, E) of unit length."""
    tokenizer, device, embeddings = model.require_tokenizer(), next(model.parameters()).device, []
    with evaluating(model):
        for first in range(0, len(texts), batch_size):
            ids = model.text.trim_padding(tokenizer(texts[first : first + batch_size]))
            embeddings.append(model.encode_text(ids.to(device)).float().cpu())
    return torch.cat(embeddings)
