"""A forward pass step by step: shape, equation, cost and token lengths for one image, and the class probabilities after
every block.

    walk = walk_through(model, "cat.jpg")
    walk.steps[2].name, walk.steps[2].shape, walk.steps[2].lengths     # 'patch_embed', (196, 768), (196,)
    walk.by_depth                              # (depth, classes): probabilities after each block

An early block's tokens go through the last norm and the head, which were trained on those of the last block: this shows
how far the prediction has formed, not what that block was trained for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.explain.equations import equations
from vitlab.explain.inputs import Images, TokenModel, as_batch, token_model, wide
from vitlab.explain.inspect import Step, inspect
from vitlab.layers.edit import Edit
from vitlab.layers.patches import patchify
from vitlab.layers.trace import TokenLayout, Trace
from vitlab.models.base import evaluation_mode
from vitlab.models.hierarchy import Hierarchy
from vitlab.models.plain import PlainTransformer
from vitlab.tables import Table, Tabular, by, count, short

BEFORE_BLOCKS = ("patch_embed", "prefix", "positions", "norm_pre")
STEPS = ("picture", "patches", *BEFORE_BLOCKS, "blocks", "norm", "pool", "pre_logits", "head", "softmax")


@dataclass(frozen=True)
class ForwardView(Tabular):
    """One image's pass in numbers: how long the tokens are after each step, and what the head says after each block."""

    trace: Trace  # the steps, and of each block its tokens, queries and keys
    logits: Tensor | None  # (K,); None without a classifier
    scores: Tensor | None  # (K,), what a user reads: of classes their probabilities
    by_depth: Tensor | None  # (L, K), the scores if the network ended after each block

    def table(self) -> Table:
        rows = [
            [
                name,
                str(len(lengths)),
                *(f"{float(one):.3g}" for one in (lengths.min(), lengths.median(), lengths.max())),
            ]
            for name, lengths in self.lengths.items()
        ]
        titles = ["step", "tokens", "shortest", "median", "longest"]
        return Table(titles, rows, titles[1:], ["Lengths of the tokens after each step"])

    @property
    def lengths(self) -> dict[str, Tensor]:
        """By step, (N,): patch_embed, prefix, positions, norm_pre, blocks.0, ..., norm; those that the model has."""
        return {
            name: _lengths(value[0])
            for name, value in steps_of(self.trace)
            if name not in ("pool", "pre_logits", "head")
        }

    def tokens_before(self, layer: int) -> Tensor:
        """(1, N, D): what the block of this layer reads."""
        first = [kind for kind in BEFORE_BLOCKS if (kind, None) in self.trace]
        return self.trace["tokens", layer - 1] if layer else self.trace[first[-1]]


@torch.no_grad()
def forward_view(model: ModelOrName, image: Images, edit: Edit | None = None) -> ForwardView:
    """One image, or a normalised tensor (1, C, H, W), through a plain ViT; `edit`: changes to the pass."""
    model, x = _plain_model(model, image)
    trace = Trace(*(kind for kind in (*STEPS, "tokens", "queries", "keys") if kind in model.traceable))
    with evaluation_mode(model):
        output = wide(model(x, trace=trace, edit=edit))
        if not model.config.classes:
            return ForwardView(trace, None, None, None)
        by_depth = [_read_out(model, trace["tokens", layer]) for layer in trace.layers]
    return ForwardView(trace, output[0].cpu(), model.task.scores(output)[0].cpu(), torch.stack(by_depth))


def steps_of(trace: Trace) -> list[tuple[str, Tensor]]:
    """Step names, as in a Walk, and their values (1, ...), in the order of the pass."""
    return [
        (kind if layer is None else f"blocks.{layer}", value)
        for (kind, layer), value in trace.items()
        if kind in STEPS or kind == "tokens"
    ]


@dataclass(frozen=True)
class WalkStep:
    name: str  # picture, patches, patch_embed, prefix, positions, blocks.0, ..., norm, pool, head, softmax
    shape: tuple[int, ...]  # of one image
    equation: str
    parameters: int = 0
    macs: int = 0
    lengths: Tensor | None = None  # (N,), length of each token after this step


@dataclass(frozen=True)
class Walk(Tabular):
    steps: list[WalkStep]
    prefix: tuple[str, ...]  # tokens before the patches
    grid: tuple[int, int]
    by_depth: Tensor | None  # (depth, classes), probabilities; None without classes

    def table(self) -> Table:
        rows = [[s.name, by(s.shape), s.equation, count(s.parameters), short(s.macs)] for s in self.steps]
        tokens = TokenLayout(self.prefix, self.grid)
        right = ("parameters", "MACs")
        return Table(
            ["step", "shape", "equation", *right], rows, right, ["One image, step by step", f"tokens: {tokens}"]
        )


@torch.no_grad()
def walk_through(model: ModelOrName, image: Images, *, view: ForwardView | None = None) -> Walk:
    """A forward pass step by step: one image, or a normalised tensor (1, C, H, W), through a plain ViT. `view`:
    `forward_view` of the same image, where there is one already.
    """
    model, x = _plain_model(model, image)
    if model.classes and model.task.kind != "class":
        raise UsageError(f"the walk ends in probabilities of classes, and this model gives {model.task.description}.")
    view = view or forward_view(model, x)
    layout, written = model.layout(*x.shape[-2:]), equations(model)
    costs = {s.name: s for s in inspect(model, image_size=(x.shape[-2], x.shape[-1])).at_depth(2)}
    patches = patchify(x, model.config.patch_size)  # (1, N, P*P*C)
    values = [("picture", x), ("patches", patches), *steps_of(view.trace)]
    if view.scores is not None:
        values.append(("softmax", view.scores[None]))
    steps = [_step(name, value[0], written[name.partition(".")[0]], costs.get(name)) for name, value in values]
    return Walk(steps, layout.prefix, layout.grid, view.by_depth)


def _plain_model(model: ModelOrName, image: Images) -> tuple[PlainTransformer | PromptClassifier, Tensor]:
    model = token_model(model)
    if isinstance(model, Hierarchy):
        raise UsageError(
            f"the walk is through a plain ViT, and this is a {model.family}: vitlab inspect shows its steps."
        )
    batch = as_batch(model, image)
    if len(batch) != 1:
        raise UsageError(f"a walk is through one image, found {len(batch)}.")
    return model, batch.images


def _read_out(model: TokenModel, tokens: Tensor) -> Tensor:
    """Tokens (1, N, D) after a block -> scores (classes,)."""
    tokens = tokens if model.norm is None else model.norm(tokens)
    return model.task.scores(wide(model.forward_head(tokens)))[0].cpu()


def _lengths(tokens: Tensor) -> Tensor:
    return wide(tokens).norm(dim=-1).cpu()


def _step(name: str, value: Tensor, equation: str, cost: Step | None) -> WalkStep:
    spent = {} if cost is None else {"parameters": cost.parameters, "macs": cost.macs}
    lengths = _lengths(value) if value.ndim == 2 and name != "patches" else None
    return WalkStep(name, tuple(value.shape), equation, **spent, lengths=lengths)


def as_numbers(walk: Walk) -> dict[str, Any]:
    """Plain values, for JSON."""
    steps = [
        {
            **vars(s),
            "shape": list(s.shape),
            "lengths": None if s.lengths is None else np.round(s.lengths.double().numpy(), 4).tolist(),
        }
        for s in walk.steps
    ]
    by_depth = None if walk.by_depth is None else walk.by_depth.tolist()
    return {"prefix": list(walk.prefix), "grid": list(walk.grid), "steps": steps, "by_depth": by_depth}
