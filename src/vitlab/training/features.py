"""Features of a dataset: each image goes through the encoder once, and is remembered by its content.

train = dataset_features(encoder, ImageSet(data.train, encoder.preprocess))
train.vectors, train.labels                              # (N, E), (N,) of the images that could be read

The same images always go through the encoder together, so that a run which was killed and resumed gets the same bits.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.digests import feature_fingerprint
from vitlab.errors import ImageError
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Network, features_of
from vitlab.training.batches import Decode, ImageSet, Skipped
from vitlab.training.evaluate import evaluating
from vitlab.training.feature_cache import EncoderDescription, FeatureCache
from vitlab.training.processes import Processes
from vitlab.training.unreadable import none_readable

VERSION = 1  # raise it where a correction changes the features of the same weights: stored ones are then not used
BATCH = 32  # images of one forward pass
AHEAD = 2  # batches that are read while one is computed
SAMPLE = 256  # images that tell how many have stored features
Progress = Callable[[int], object]  # called with the number of images done, after each batch
Count = Callable[[str, int, int], object]  # what is run through the model, images done, images in all


@dataclass
class FeatureSet:
    """Features of a dataset, in its order, of those images that could be read."""

    vectors: Tensor  # (n, E)
    labels: Tensor  # (n,)
    indices: np.ndarray  # (n,): their numbers in the dataset
    skipped: Skipped = field(default_factory=dict)  # the others: name -> what is wrong
    computed: int = 0  # images that went through the encoder now; the others were known
    seconds: float = 0.0  # that this took


def joined_features(parts: Sequence[FeatureSet]) -> FeatureSet:
    """Those of several parts of one dataset as one, in their order."""
    return FeatureSet(
        torch.cat([part.vectors for part in parts]),
        torch.cat([part.labels for part in parts]),
        np.concatenate([part.indices for part in parts]),
        {name: error for part in parts for name, error in part.skipped.items()},
        sum(part.computed for part in parts),
        sum(part.seconds for part in parts),
    )


def feature_key(
    model: Network, preprocess: Preprocess, device: torch.device, mirrored: bool = False, decode: Decode = "exact"
) -> str:
    """Equal where equal images give equal features: the encoder's weights, how images are read, the kind of device."""
    about = [VERSION, feature_fingerprint(model), sorted(preprocess.to_dict().items()), device.type, mirrored]
    about += [decode] if decode != "exact" else []
    return blake2b(repr(about).encode(), digest_size=16).hexdigest()


def open_cache(
    model: Network, preprocess: Preprocess, *, mirrored: bool = False, decode: Decode = "exact"
) -> FeatureCache | None:
    """The cache for this encoder; None where there can be none."""
    name = (model.card.name if model.card is not None else None) or model.family
    about: EncoderDescription = {"model": name, "size": list(preprocess.size), "mirrored": mirrored}
    device = next(model.parameters()).device
    return FeatureCache.open(feature_key(model, preprocess, device, mirrored, decode), model.feature_width, about)


def dataset_features(
    model: Network,
    image_set: ImageSet,
    *,
    mirrored: bool = False,
    processes: Processes | None = None,
    progress: Progress | None = None,
    stored: bool = True,
) -> FeatureSet:
    """What the classifier reads, (N, E), of every readable image; `mirrored`: of its mirror image.

    `stored=False`: computed now, and not stored.
    """
    began, who = time.perf_counter(), processes or Processes(device=next(model.parameters()).device)
    work = _Work(model, image_set.without_copies(), mirrored, who, progress)
    cache = open_cache(model, image_set.preprocess, mirrored=mirrored, decode=image_set.decode) if stored else None
    if cache is None:
        features = work.run(None)
    else:
        with cache:
            try:
                features = work.run(cache)
            except (OSError, sqlite3.Error):  # the disk is full, or the cache was taken away: go on without it
                features = work.run(None)
    if not len(features.indices):
        raise none_readable(features.skipped)
    features.seconds = time.perf_counter() - began
    return features


def missing_share(model: Network, image_set: ImageSet, *, mirrored: bool = False) -> float:
    """Share of the images whose features are not stored, by a sample."""
    chosen = np.unique(np.linspace(0, len(image_set) - 1, min(len(image_set), SAMPLE)).astype(np.int64))
    cache = open_cache(model, image_set.preprocess, mirrored=mirrored, decode=image_set.decode)
    if cache is None:
        return 1.0
    digests = []
    with cache:
        for index in chosen:
            with suppress(ImageError):  # it will be reported when it is read
                digests.append(image_set.data.digest(int(index)))
        return float((cache.find(digests) < 0).mean()) if digests else 0.0


@dataclass
class _Work:
    """One pass over a dataset, in parts: the images of a part always go through the encoder together."""

    model: Network
    image_set: ImageSet
    mirrored: bool
    who: Processes
    progress: Progress | None

    def run(self, cache: FeatureCache | None) -> FeatureSet:
        n, skipped, computed = len(self.image_set), {}, 0
        numbers = range(self.who.rank, -(-n // BATCH), self.who.world)
        parts = [np.arange(number * BATCH, min((number + 1) * BATCH, n)) for number in numbers]
        digests = self._digests(parts, skipped) if cache is not None else {}
        cached = np.zeros(n, dtype=bool)
        if cache is not None and digests:
            cached[list(digests)] = cache.find(list(digests.values())) >= 0
        missing = [part for part in parts if not cached[part].all()]
        self._count(sum(map(len, parts)) - sum(map(len, missing)))
        new: dict[int, Tensor] = {}  # where nothing can be kept on disk
        with evaluating(self.model):
            for part, (pixels, kept, bad) in self._ahead(missing, cached):
                skipped |= bad
                if len(kept):
                    images = self.image_set.normalise(pixels).to(self.who.device)
                    vectors = features_of(self.model)(images.flip(-1) if self.mirrored else images).float().cpu()
                    computed += len(kept)
                    if cache is None:
                        new |= dict(zip(part[kept].tolist(), vectors, strict=True))
                    else:
                        cache.add([digests[int(i)] for i in part[kept]], vectors.numpy())
                    cached[part] = False
                    cached[part[kept]] = True
                self._count(len(part))
        if cache is not None:
            indices = np.flatnonzero(cached)
            vectors = torch.from_numpy(cache.take([digests[int(i)] for i in indices]))
        else:
            indices = np.array(sorted(new), dtype=np.int64)
            vectors = torch.stack([new[i] for i in indices]) if new else torch.zeros(0, self.model.feature_width)
        return self._together(FeatureSet(vectors, self.image_set.labels[indices], indices, skipped, computed))

    def _together(self, mine: FeatureSet) -> FeatureSet:
        """The features of all processes, in each of them."""
        if self.who.world == 1:
            return mine
        n = len(self.image_set)
        vectors, read = torch.zeros(n, self.model.feature_width), torch.zeros(n)
        vectors[mine.indices], read[mine.indices] = mine.vectors, 1.0
        read = (self.who.sum(read) > 0).nonzero()[:, 0]
        computed = int(self.who.sum(torch.tensor(float(mine.computed))))
        vectors, skipped = self.who.sum(vectors)[read], self.who.join(mine.skipped)
        return FeatureSet(vectors, self.image_set.labels[read], read.numpy(), skipped, computed)

    def _digests(self, parts: list[np.ndarray], skipped: Skipped) -> dict[int, bytes]:
        """By number in the dataset, of the files that can be opened."""
        data, digests = self.image_set.data, {}
        for index in (int(index) for part in parts for index in part):
            try:
                digests[index] = data.digest(index)
            except ImageError as error:
                skipped[data.name_of(index)] = str(error)
        return digests

    def _ahead(
        self, parts: list[np.ndarray], cached: np.ndarray
    ) -> Iterator[tuple[np.ndarray, tuple[Tensor, np.ndarray, Skipped]]]:
        """Each part with its pixels, as ImageSet.take gives them; the next ones are read meanwhile."""

        def read(part: np.ndarray) -> tuple[Tensor, np.ndarray, Skipped]:
            missing = part[~cached[part]]
            pixels = self.image_set.take(missing)
            if len(missing) == len(part) or not len(pixels[1]):  # what is missing may be what cannot be read
                return pixels
            return self.image_set.take(part)

        with ThreadPoolExecutor(AHEAD) as readers:
            waiting: deque[tuple[np.ndarray, Future[tuple[Tensor, np.ndarray, Skipped]]]] = deque()
            for part in parts:
                waiting.append((part, readers.submit(read, part)))
                if len(waiting) > AHEAD:
                    first, pixels = waiting.popleft()
                    yield first, pixels.result()
            for part, pixels in waiting:
                yield part, pixels.result()

    def _count(self, images: int) -> None:
        if self.progress is not None and images:
            self.progress(images)


def adding(count: Count | None, what: str, total: int) -> Progress | None:
    """Adds up the images of each batch for `count`."""
    if count is None:
        return None
    done = 0
    count(what, done, total)  # shown before the first batch is done, which may take long

    def add(images: int) -> None:
        nonlocal done
        done += images
        count(what, done, total)

    return add
