"""The fastest backend that gives a classifier's own scores on this machine, to float32 rounding: `--engine exact`.

The scores of a batch are compared with the model's before a backend may answer for it; a model for which none passes
runs as it is. Explanations and embeddings always come from the model itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.export.bench import fastest, make_runners, measure
from vitlab.export.loader import InferenceNetwork
from vitlab.export.optimize import Optimized
from vitlab.export.runners import RunnerFactory
from vitlab.images.photos import PHOTOS
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Capability, Network

BACKENDS = ("eager", "folded", "onnx")  # not compiled, which would compile again for every size of a batch
ROUNDS = 9


def exact_engine(model: Network, batch: int) -> Optimized | None:
    """For batches of up to so many images; None where the model runs as it is."""
    if isinstance(model, InferenceNetwork) or Capability.CLASSIFY not in model.capabilities:
        return None
    preprocess = model.require_preprocess()
    if preprocess.how == "aspect" or next(model.parameters()).device.type != "cpu":
        return None
    images, factory = _examples(preprocess, batch), RunnerFactory(model)
    runners, notes = make_runners(factory, BACKENDS, [None], images)
    rows = measure(runners, images, factory.gives, batch=batch, rounds=ROUNDS, task=model.task)
    chosen = fastest(rows, 1.0)
    if chosen is None or chosen is rows[0]:
        return None
    return Optimized(factory, runners[rows.index(chosen)], chosen, rows, notes).eval()


def _examples(preprocess: Preprocess, batch: int) -> Tensor:
    """The photos of the package, or noise of the kind that the model reads: (B, C, H, W)."""
    if preprocess.stored is None:
        sources: list[Any] = [photo.path for photo in PHOTOS.values()]
    else:
        shape = (*preprocess.size, preprocess.stored.channels)
        sources = [np.random.default_rng(0).integers(0, 100, shape).astype(preprocess.stored.kind)]
    return torch.stack([preprocess(sources[i % len(sources)]) for i in range(batch)])
