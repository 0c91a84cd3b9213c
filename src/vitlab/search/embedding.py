"""Embeddings of image files for an index, read from the feature cache where training or evaluation computed them."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from vitlab.export.loader import Exported
from vitlab.images.digest import file_digest
from vitlab.inference import Embedding, embed, feature_rows
from vitlab.models.base import Network
from vitlab.training.feature_cache import FeatureCache
from vitlab.training.features import open_cache


class FileEmbedder:
    """vitlab.embed for image files, through the feature cache."""

    def __init__(self, encoder: Network, batch_size: int):
        self.encoder, self.batch_size = encoder, batch_size
        exported = isinstance(encoder, Exported)  # it has no weights that identify it
        self.cache = None if exported else open_cache(encoder, encoder.require_preprocess())

    def __call__(self, paths: Sequence[Path]) -> list[Embedding]:
        if self.cache is None:
            return embed(self.encoder, list(paths), batch_size=self.batch_size)
        digests = {path: digest for path in paths if (digest := _digest(path)) is not None}
        try:
            cached = self._read_cache(self.cache, digests)
        except (OSError, sqlite3.Error):
            cached = {}
        new = [path for path in paths if path not in cached]
        computed = dict(zip(new, self._compute(new, digests), strict=True))
        return [cached[path] if path in cached else computed[path] for path in paths]

    def _read_cache(self, cache: FeatureCache, digests: dict[Path, bytes]) -> dict[Path, Embedding]:
        rows = cache.find(list(digests.values()))
        paths = [path for path, row in zip(digests, rows, strict=True) if row >= 0]
        vectors = _unit(cache.take([digests[path] for path in paths]))
        return {path: Embedding(str(path), vector, cached=True) for path, vector in zip(paths, vectors, strict=True)}

    def _compute(self, paths: list[Path], digests: dict[Path, bytes]) -> list[Embedding]:
        features = list(feature_rows(self.encoder, paths, batch_size=self.batch_size))
        pairs = [(path, row[1]) for path, row in zip(paths, features, strict=True) if path in digests]
        new = {digests[path]: vector.numpy() for path, vector in pairs if vector is not None}
        if self.cache is not None and new:
            with suppress(OSError, sqlite3.Error):  # nothing is lost but time
                self.cache.add(list(new), np.stack(list(new.values())))
        return [
            Embedding(name, None if vector is None else _unit(vector.numpy()[None])[0], error)
            for name, vector, error in features
        ]


def _digest(path: Path) -> bytes | None:
    try:
        return file_digest(path)
    except OSError:
        return None


def _unit(vectors: np.ndarray) -> np.ndarray:
    return F.normalize(torch.from_numpy(vectors), dim=1).numpy()
