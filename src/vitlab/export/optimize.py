"""vitlab.optimize: the same model, run in the way that is best here, found by measuring.

    fast = vitlab.optimize(model, pictures, goal="fast")
    vitlab.predict(fast, "cat.jpg");  fast(images);  fast.chosen.title

exact   float32, no value differs by more than rounding; the fastest of eager, folded, compiled and ONNX Runtime
fast    also int8 and fewer tokens: the fastest that agrees with the model on `agreement` of the pictures
small   the smallest that agrees so
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from vitlab.export.bench import Row, default_reducers, fastest, make_all, measure
from vitlab.export.runners import EXACT, Runner, Workshop
from vitlab.export.verify import AGREEMENT
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, Network

Goal = Literal["exact", "fast", "small"]
WAYS: dict[str, tuple[str, ...]] = {"exact": EXACT, "fast": (*EXACT, "int8"), "small": ("eager", "int8")}


class Optimized(Network):
    """Takes the model's place for inference on the CPU, in vitlab.predict and vitlab.embed too."""

    def __init__(self, model: Any, runner: Runner, chosen: Row, rows: list[Row], notes: list[str], keep: Any):
        super().__init__()
        self.family, self.config = model.family, model.config
        self.preprocess, self.labels, self.card = model.preprocess, model.labels, model.card
        self.chosen, self.rows, self.notes = chosen, rows, notes
        self._keep = [runner, keep]  # in a list: torch is not to find modules here

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.CLASSIFY})

    def forward(self, images: Tensor) -> Tensor:
        return self._keep[0].run(images)

    def __repr__(self) -> str:
        return f"Optimized({self.family}, {self.chosen.title}, {self.chosen.speedup:.2f} x eager here)"


class OptimizedFeatures(Optimized):
    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.EMBED})

    def features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        return self(images)


def optimize(
    model: Any,
    example: Tensor | Sequence[Any],
    goal: Goal = "exact",
    *,
    agreement: float = AGREEMENT,
    batch: int | None = None,
    reducers: Sequence[str] | None = None,
    rounds: int = 9,
    progress: Callable[[str], object] | None = None,
) -> Optimized:
    """`example`: a batch (B, C, H, W) as the model gets it, or pictures. It is what is timed, B at once (or `batch`),
    and what agreement is measured on, so give real pictures, a hundred or more, for "fast" and "small". The model is
    put into evaluation mode.
    """
    if goal not in WAYS:
        raise ValueError(f"goal={goal!r} is not known: use {', '.join(WAYS)}.")
    seen = _prepared(model, example)
    batch = batch or min(len(seen), 8)
    workshop = Workshop(model)
    tried: list[str | None] = [None]
    if goal == "fast":
        tried += default_reducers(model) if reducers is None else list(reducers)
    runners, notes = make_all(workshop, WAYS[goal], tried, seen[:batch], progress)
    rows = measure(runners, seen, workshop.gives, batch=batch, rounds=rounds)
    if not rows[0].within:
        raise ValueError(
            "the model itself gives NaN or infinity for these pictures, so nothing can be compared with it. Take a "
            "checkpoint from before its training diverged."
        )
    if goal == "small":
        chosen = min((r for r in rows if r.within or r.agreement >= agreement), key=lambda r: r.bytes)
    else:
        chosen = fastest(rows, 1.0 if goal == "exact" else agreement) or rows[0]
    kind = Optimized if workshop.gives == "logits" else OptimizedFeatures
    return kind(model, runners[rows.index(chosen)], chosen, rows, notes, workshop).eval()


def _prepared(model: Any, example: Tensor | Sequence[Any]) -> Tensor:
    if isinstance(example, Tensor):
        if example.ndim != 4 or not len(example):
            raise ValueError(f"example must be (batch, C, height, width) but is {tuple(example.shape)}.")
        return example.detach().float().cpu()
    if model.preprocess is None:
        raise ValueError("the model has no preprocess, so example must be a tensor (batch, C, height, width).")
    pictures = [example] if isinstance(example, str | bytes | Image.Image) else list(example)
    return torch.stack([model.preprocess(picture) for picture in pictures])
