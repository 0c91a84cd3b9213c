"""The gradient norm of every parameter in one backward pass: finds dead and exploding ones."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.resolve import check_batch, image_size_pair, input_size_of, resolve
from vitlab.models import registry
from vitlab.models.base import evaluation_mode
from vitlab.models.two_towers import TwoTowers, TwoTowersConfig
from vitlab.tables import Table, Tabular


@dataclass
class Gradient:
    name: str
    norm: float
    verdict: str = ""  # "dead", "exploding", or "frozen" (requires_grad=False)


class Gradients(Tabular, list[Gradient]):
    """The gradient of every parameter, shown as a table."""

    def table(self) -> Table:
        rows = [[gradient.name, f"{gradient.norm:.3e}", gradient.verdict] for gradient in self]
        trained = [gradient for gradient in self if gradient.verdict != "frozen"]
        wrong = [f"{gradient.name} ({gradient.verdict})" for gradient in trained if gradient.verdict]
        note = f"all {len(trained)} parameters have a finite gradient that is not zero."
        if wrong:
            note = f"{len(wrong)} of {len(trained)} look wrong: {', '.join(wrong[:8])}"
        return Table(["parameter", "norm", ""], rows, ("norm",), ["gradient norms, one batch of noise"], notes=[note])


def gradients(
    what: ModelOrName, *, image_size: int | tuple[int, int] | None = None, batch: int = 2, seed: int = 0, **options: Any
) -> Gradients:
    """One backward pass on random images and labels: the gradient norm of every parameter, in order.

    Dropout and stochastic depth are off, as a dropped branch would look dead. The model's gradients and modes stay
    unchanged.
    """
    check_batch(batch)
    size = image_size_pair(image_size)
    family, c, _, model = resolve(what, size, options)
    if not isinstance(what, str | PathLike) and options:
        raise UsageError(f"a model that is built cannot take {', '.join(options)}: give its name, or a checkpoint.")
    model = registry.build(family, c) if model is None else model
    like = next(model.parameters())
    if like.is_meta:
        raise UsageError("the model is on the meta device, where nothing is computed: build it on the CPU or a GPU.")
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(batch, c.channels, *(size or input_size_of(model, c, options)), generator=generator).to(
        like.device, like.dtype
    )
    labels = torch.randint(c.classes, (batch,), generator=generator).to(like.device) if c.classes else None
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    slopes: dict[str, Tensor | None] = {}
    if trained:
        with evaluation_mode(model), torch.enable_grad():
            out: Any = model(images) if not isinstance(model, TwoTowers) else None
            if family == "mae":
                loss = out.loss
            elif isinstance(model, TwoTowers):
                loss = model.loss(model.encode_image(images), model.encode_text(_texts(c, batch, generator, like)))
            else:
                loss = out.float().square().mean() if labels is None else F.cross_entropy(out.float(), labels)
            grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        slopes = dict(zip(trained, grads, strict=True))
    return Gradients(_gradient(name, name in trained, slopes.get(name)) for name, _ in model.named_parameters())


def _texts(c: TwoTowersConfig, batch: int, generator: torch.Generator, like: Tensor) -> Tensor:
    """Random texts of the full context length."""
    ids = torch.randint(c.text.vocab, (batch, c.text.context), generator=generator)
    ids[ids == c.text.end_id] = 0
    ids[:, -1] = c.text.end_id
    return ids.to(like.device)


def _gradient(name: str, trained: bool, slope: Tensor | None) -> Gradient:
    norm = 0.0 if slope is None else float(slope.float().norm())
    verdict = "dead" if norm == 0.0 else "exploding" if not norm < 1e3 else ""
    return Gradient(name, norm, verdict if trained else "frozen")
