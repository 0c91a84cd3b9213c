"""Which words go with which pictures of a run, and the tokenizer that reads them.

Captions are those of the data. Classes are put into sentences ("a photo of a {}"), one of which is drawn each time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlab.images.datasets import Captioned, Captions, Data
from vitlab.images.randomness import uniform
from vitlab.images.sources.dataset import CAPTION
from vitlab.text.templates import fill, read_templates
from vitlab.text.tokenizer import FILE, Tokenizer
from vitlab.training.recipe import Recipe


class Sentences:
    """Classes in sentences: what `Captions` are where the data have none."""

    def __init__(self, labels: np.ndarray, classes: list[str], templates: list[str]):
        self.labels, self.classes, self.templates = labels, classes, templates

    def everything(self) -> list[str]:
        return [fill(template, name) for template in self.templates for name in self.classes]

    def draw(self, indices: np.ndarray, *, seed: int, epoch: int) -> list[str]:
        """One sentence for each picture, another in another epoch."""
        chance = uniform(seed, CAPTION, epoch, indices, count=1)[:, 0]
        picked = (chance * len(self.templates)).astype(np.int64)
        return [fill(self.templates[i], self.classes[k]) for i, k in zip(picked, self.labels[indices], strict=True)]

    def kinds(self, indices: np.ndarray) -> Tensor:
        """(B, 1): rows that are equal say the same of their pictures, be it in other words."""
        return torch.from_numpy(self.labels[indices])[:, None]


def trimmed(ids: Tensor, end_id: int) -> Tensor:
    """(B, N) without the columns that are padding in every row: no token sees what comes after it."""
    last = int((ids == end_id).int().argmax(dim=1).max())  # the first end of a row counts
    return ids[:, : last + 1]


def words_of(recipe: Recipe, data: Data) -> Captions | Sentences:
    if isinstance(data.train, Captioned):
        return data.train.captions
    return Sentences(data.train.labels, data.classes, read_templates(recipe.objective.templates))


def tokenizer_of(recipe: Recipe, data: Data, run: Path) -> Tokenizer:
    """The run's own, if it was saved already; the one that is named; or byte pairs of the captions of train."""
    t = recipe.text
    if (run / "last" / FILE).is_file():
        return Tokenizer.read(run / "last")
    if t.tokenizer is not None:
        return Tokenizer.read(t.tokenizer, context=t.context)
    return Tokenizer.train(words_of(recipe, data).everything(), vocab=t.vocab, context=t.context)
