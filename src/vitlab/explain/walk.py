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
from vitlab.explain.inputs import Images, TokenModel, as_batch, token_model, wide
from vitlab.explain.inspect import Step, inspect
from vitlab.explain.step_words import equations
from vitlab.layers.patches import patchify
from vitlab.layers.trace import Trace
from vitlab.models.base import evaluation_mode
from vitlab.models.hierarchy import Hierarchy

STEPS = ("picture", "patches", "patch_embed", "prefix", "positions", "norm_pre", "blocks", "norm", "pool", "pre_logits")
STEPS = (*STEPS, "head", "softmax")


@dataclass(frozen=True)
class WalkStep:
    name: str  # picture, patches, patch_embed, prefix, positions, blocks.0, ..., norm, pool, head, softmax
    shape: tuple[int, ...]  # of one image
    equation: str
    parameters: int = 0
    macs: int = 0
    lengths: Tensor | None = None  # (N,), length of each token after this step


@dataclass(frozen=True)
class Walk:
    steps: list[WalkStep]
    prefix: tuple[str, ...]  # tokens before the patches
    grid: tuple[int, int]
    by_depth: Tensor | None  # (depth, classes), probabilities; None without classes


@torch.no_grad()
def walk_through(model: ModelOrName, image: Images) -> Walk:
    """One image, or a normalised tensor (1, C, H, W), through a plain ViT."""
    model = token_model(model)
    if isinstance(model, Hierarchy):
        raise UsageError(
            f"the walk is through a plain ViT, and this is a {model.family}: vitlab inspect shows its steps."
        )
    if model.classes and model.task.kind != "class":
        raise UsageError(f"the walk ends in probabilities of classes, and this model gives {model.task.description}.")
    batch = as_batch(model, image)
    if len(batch) != 1:
        raise UsageError(f"a walk is through one image, found {len(batch)}.")
    x = batch.images
    kinds = [kind for kind in (*STEPS, "tokens") if kind in model.traceable]
    trace = Trace(*kinds)
    with evaluation_mode(model):
        logits = model(x, trace=trace)
        read = [_read_out(model, trace["tokens", layer]) for layer in trace.layers] if model.config.classes else []
    layout = model.layout(*x.shape[-2:])
    costs = {s.name: s for s in inspect(model, image_size=(x.shape[-2], x.shape[-1])).at_depth(2)}
    patches = patchify(x, model.config.patch_size)  # (1, N, P*P*C)
    values = {"picture": x, "patches": patches}
    values |= {kind if layer is None else f"blocks.{layer}": value for (kind, layer), value in trace.items()}
    values |= {"softmax": logits} if model.config.classes else {}
    written = equations(model)
    steps = [_step(name, v[0], written[name.partition(".")[0]], costs.get(name)) for name, v in values.items()]
    return Walk(steps, layout.prefix, layout.grid, torch.stack(read) if read else None)


def _read_out(model: TokenModel, tokens: Tensor) -> Tensor:
    """Tokens (1, N, D) after a block -> probabilities (classes,)."""
    tokens = tokens if model.norm is None else model.norm(tokens)
    return wide(model.forward_head(tokens))[0].softmax(-1).cpu()


def _step(name: str, value: Tensor, equation: str, cost: Step | None) -> WalkStep:
    spent = {} if cost is None else {"parameters": cost.parameters, "macs": cost.macs}
    lengths = wide(value).norm(dim=-1).cpu() if value.ndim == 2 and name != "patches" else None
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
