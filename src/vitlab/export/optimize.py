"""vitlab.optimize: measure the backends on this machine and run the model with the best one.

    fast = vitlab.optimize(model, images, goal="fast")
    vitlab.predict(fast, "cat.jpg");  fast(batch);  fast.chosen.title

exact   float32, equal to rounding: the fastest of eager, folded, compiled and ONNX Runtime
fast    also int8 and fewer tokens: the fastest that agrees with the model on `agreement` of the images
small   the smallest with that agreement
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Literal

from PIL import Image
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName, as_network
from vitlab.errors import ExportError, UsageError
from vitlab.export.bench import BackendResult, default_reducers, fastest, make_runners, measure
from vitlab.export.loader import InferenceNetwork
from vitlab.export.runners import EXACT, Runner, RunnerFactory
from vitlab.export.samples import preprocess_batch
from vitlab.export.verify import AGREEMENT
from vitlab.images.read import Source
from vitlab.models.base import Network

Goal = Literal["exact", "fast", "small"]
BACKENDS: dict[str, tuple[str, ...]] = {"exact": EXACT, "fast": (*EXACT, "int8"), "small": ("eager", "int8")}


class Optimized(InferenceNetwork):
    """Replaces the model for inference on the CPU, also in vitlab.predict and vitlab.embed."""

    def __init__(
        self, factory: RunnerFactory, runner: Runner, chosen: BackendResult, rows: list[BackendResult], notes: list[str]
    ):
        super().__init__()
        model = factory.model
        self.gives, self.family, self.config = factory.gives, model.family, model.config
        self.preprocess, self.labels, self.card = model.preprocess, model.labels, model.card
        self.task = model.task
        self.chosen, self.rows, self.notes = chosen, rows, notes
        self._hidden = runner, factory  # a tuple hides them from nn.Module; the factory owns the runner's files

    def forward(self, images: Tensor) -> Tensor:
        return self._hidden[0].run(images)

    def __repr__(self) -> str:
        return f"Optimized({self.family}, {self.chosen.title}, {self.chosen.speedup:.2f} x eager here)"


def optimize(
    model: ModelOrName,
    example: Tensor | Source | Sequence[Source],
    goal: Goal = "exact",
    *,
    agreement: float = AGREEMENT,
    batch: int | None = None,
    reducers: Sequence[str] | None = None,
    rounds: int = 9,
    progress: Callable[[str], object] | None = None,
) -> Optimized:
    """`model` may be the name of a checkpoint; it is put into evaluation mode. `example`: a batch (B, C, H, W) of model
    inputs, or images. It is timed, B (or `batch`) at once, and agreement is measured on it, so give a hundred or more
    real images for "fast" and "small".
    """
    model = as_network(model)
    if goal not in BACKENDS:
        raise UsageError(f"goal={goal!r} is not known: use {', '.join(BACKENDS)}.")
    images = _to_batch(model, example)
    batch = batch or min(len(images), 8)
    factory = RunnerFactory(model)
    tried: list[str | None] = [None]  # reducers
    if goal == "fast":
        tried += default_reducers(model) if reducers is None else list(reducers)
    runners, notes = make_runners(factory, BACKENDS[goal], tried, images[:batch], progress)
    rows = measure(runners, images, factory.gives, batch=batch, rounds=rounds, task=model.task)
    if not rows[0].within:
        raise ExportError(
            "the model itself gives NaN or infinity for these images, so nothing can be compared with it. Use a "
            "checkpoint from before its training diverged."
        )
    if goal == "small":
        chosen = min((r for r in rows if r.within or r.agreement >= agreement), key=lambda r: r.bytes)
    else:
        chosen = fastest(rows, 1.0 if goal == "exact" else agreement) or rows[0]
    return Optimized(factory, runners[rows.index(chosen)], chosen, rows, notes).eval()


def _to_batch(model: Network, example: Tensor | Source | Sequence[Source]) -> Tensor:
    if isinstance(example, Tensor):
        if example.ndim != 4 or not len(example):
            raise UsageError(f"example must be (batch, C, height, width) but is {tuple(example.shape)}.")
        return example.detach().float().cpu()
    single = isinstance(example, str | bytes | PathLike | Image.Image)
    return preprocess_batch(model, [example] if single else list(example))  # type: ignore[arg-type]
