"""The captions of a run's images, and the tokenizer that reads them.

Captions come from the data. A class becomes a caption by a template ("a photo of a {}") that is drawn each time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints import native
from vitlab.errors import TrainingError
from vitlab.images.datasets import Captions
from vitlab.images.randomness import uniform
from vitlab.images.sources.dataset import CAPTION
from vitlab.text.templates import fill
from vitlab.text.tokenizer import FILE, Tokenizer
from vitlab.training.processes import Processes
from vitlab.training.recipe import Recipe, difference, read_recipe


class ClassCaptions:
    """Captions made of class names, where the data have no `Captions`."""

    def __init__(self, labels: np.ndarray, classes: list[str], templates: list[str]):
        self.labels, self.classes, self.templates = labels, classes, templates

    def everything(self) -> list[str]:
        return [fill(template, name) for template in self.templates for name in self.classes]

    def draw(self, indices: np.ndarray, *, seed: int, epoch: int) -> list[str]:
        """One caption for each image, another in another epoch."""
        chance = uniform(seed, CAPTION, epoch, indices, count=1)[:, 0]
        picked = (chance * len(self.templates)).astype(np.int64)
        return [fill(self.templates[i], self.classes[k]) for i, k in zip(picked, self.labels[indices], strict=True)]

    def kinds(self, indices: np.ndarray) -> Tensor:
        """(B, 1): equal where the captions mean the same, even if worded differently."""
        return torch.from_numpy(self.labels[indices])[:, None]


def make_tokenizer(
    recipe: Recipe, captions: Captions | ClassCaptions, run: Path, who: Processes, saved: Path | None = None
) -> Tokenizer:
    """The run's own where it is resumed; otherwise text.tokenizer, or byte pairs trained on the training captions.

    `saved`: the save that the run continues from. The first process reads or trains it and sends it to the others.
    """

    def as_json() -> str:
        return _saved_tokenizer(recipe, run, saved) or _new_tokenizer(recipe, captions).to_json()

    return Tokenizer.from_json(who.from_first(as_json))


def save_tokenizer(tokenizer: Tokenizer, run: Path) -> None:
    """Write it into the run folder, so that a run killed before its first save resumes with the same."""
    run.mkdir(parents=True, exist_ok=True)
    native.write_text(run / FILE, tokenizer.to_json())


def check_same_tokenizer(tokenizer: Tokenizer, saved: Path | None) -> None:
    """Refuse another tokenizer than the one that the save was trained with."""
    if saved is None or not (saved / FILE).is_file():
        return
    if Tokenizer.read(saved / FILE).to_json() != tokenizer.to_json():
        raise TrainingError(
            f"{saved}: was trained with another tokenizer than model.init_from has now. Put that back as it was, or "
            "start a new run: run.dir=..."
        )


def _new_tokenizer(recipe: Recipe, captions: Captions | ClassCaptions) -> Tokenizer:
    t = recipe.text
    if t.tokenizer is not None:
        return Tokenizer.read(t.tokenizer, context=t.context)
    return Tokenizer.train(captions.everything(), vocab=t.vocab, context=t.context)


def _saved_tokenizer(recipe: Recipe, run: Path, saved: Path | None) -> str | None:
    """The tokenizer of a run that is resumed, as JSON; None for a new run, whatever else its folder holds.

    A new run has no recipe.toml yet: a tokenizer.json there is left from a run that was killed before it began.
    """
    if not (run / "recipe.toml").is_file():
        return None
    place = (run if saved is None else saved) / FILE  # that of a save was compared with its digest
    if not place.is_file():
        if saved is not None:
            raise TrainingError(f"{place}: is missing, and without it the run cannot go on. Put it back.")
        return None
    kept, text = Tokenizer.read(place), recipe.text
    changed = [line for line in difference(read_recipe(run / "recipe.toml"), recipe) if line.startswith("text.")]
    changed += [f"text.context: {kept.context} -> {text.context}"] if kept.context != text.context else []
    if changed:
        raise TrainingError(
            f"{run} was started with another tokenizer ({', '.join(changed)}), and its model fits no other. "
            "Leave [text] as it was, or start a new run: run.dir=..."
        )
    return kept.to_json()
