"""A model's answer for one photo, and why: what `vitlab try` shows.

look = first_look("bundled:cifar10", "cat.jpg")
look.prediction.label                      # "cat"
look.save("cat.png")                       # cat.png, the evidence on the photo; cat.html, attention to explore
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain import figures
from vitlab.explain.draw.sheet import save
from vitlab.explain.methods import METHODS
from vitlab.explain.subject import Explanation, check_output, open_subject
from vitlab.export.loader import is_export
from vitlab.images.read import Source
from vitlab.inference import Prediction, predict
from vitlab.models.base import Capability


@dataclass(frozen=True)
class FirstLook:
    """The answer, and two explanations of it."""

    prediction: Prediction | None  # None: the model has no classes
    heat: Explanation  # which patches speak for the answer
    attention: Explanation  # where every patch looks

    def save(self, path: str | Path) -> list[Path]:
        """Write the heat map by its suffix, and the page of all attention as .html beside it."""
        path = check_output(path)
        if path.suffix.lower() == ".html":
            raise UsageError(f"{path}: name the picture, {path.with_suffix('.png')}; the page is written beside it.")
        return save(self.heat.figure(), path, page=self.attention.page())

    def _repr_html_(self) -> str:
        answer = "" if self.prediction is None else self.prediction._repr_html_()
        return answer + self.heat._repr_html_()


def first_look(model: ModelOrName, photo: Source, *, top: int = 3, **options: Any) -> FirstLook:
    """The `top` classes of a photo, the heat map of the first, and the attention.

    `options`: `device`, and those of vitlab.load.
    """
    if isinstance(model, str | Path) and is_export(model):
        raise UsageError(f"{model} is an exported network, which cannot be looked into: name the checkpoint it is of.")
    subject = open_subject(model, photo, **options)
    network = subject.network
    classifies = Capability.CLASSIFY in network.capabilities and network.encoder is network
    prediction = predict(network, photo, top=top)[0] if classifies else None
    draw: Callable[..., Explanation] = figures.rollout
    if classifies and network.classes > 1 and METHODS["relevance"].supports(subject.model):
        draw = figures.relevance
    return FirstLook(prediction, draw(subject), figures.attention(subject))
