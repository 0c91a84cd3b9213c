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
from vitlab.layers.patches import patchify
from vitlab.layers.trace import TokenLayout, Trace
from vitlab.models.base import evaluation_mode
from vitlab.models.hierarchy import Hierarchy
from vitlab.tables import Table, Tabular, by, count, short

EQUATIONS = {  # in the letters of ViT (arXiv:2010.11929), where it has them
    "picture": "x ∈ R^(H×W×C)",
    "patches": "x_p ∈ R^(N×(P²·C))",
    "patch_embed": "x_p E",
    "prefix": "[x_class; x_p¹E; …; x_pᴺE]",
    "positions": "z₀ = [x_class; x_p E] + E_pos",
    "norm_pre": "z₀ ← LN(z₀)",
    "blocks": "z'ₗ = MSA(LN(zₗ₋₁)) + zₗ₋₁;  zₗ = MLP(LN(z'ₗ)) + z'ₗ",
    "norm": "LN(z_L)",
    "pool": "y = LN(z_L⁰)",
    "pre_logits": "tanh(y W)",
    "head": "y W + b",
    "softmax": "exp(sᵢ) / Σⱼ exp(sⱼ)",
}
MEAN = "y = mean of LN(z_L) over the patches"
POST_NORM = "z'ₗ = LN(MSA(zₗ₋₁) + zₗ₋₁);  zₗ = LN(MLP(z'ₗ) + z'ₗ)"


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
    kinds = [kind for kind in (*EQUATIONS, "tokens") if kind in model.traceable]
    trace = Trace(*kinds)
    with evaluation_mode(model):
        logits = model(x, trace=trace)
        read = [_read_out(model, trace["tokens", layer]) for layer in trace.layers] if model.config.classes else []
    layout = model.layout(*x.shape[-2:])
    costs = {s.name: s for s in inspect(model, image_size=(x.shape[-2], x.shape[-1])).at_depth(2)}
    patches = patchify(x, model.config.patch_size)  # (1, N, P*P*C)
    steps = [_step("picture", x[0], model), _step("patches", patches[0], model)]
    for (kind, layer), value in trace.items():
        name = kind if layer is None else f"blocks.{layer}"
        steps.append(_step(name, value[0], model, costs.get(name)))
    if model.config.classes:
        steps.append(_step("softmax", logits[0], model))
    return Walk(steps, layout.prefix, layout.grid, torch.stack(read) if read else None)


def _read_out(model: TokenModel, tokens: Tensor) -> Tensor:
    """Tokens (1, N, D) after a block -> probabilities (classes,)."""
    tokens = tokens if model.norm is None else model.norm(tokens)
    return wide(model.forward_head(tokens))[0].softmax(-1).cpu()


def _step(name: str, value: Tensor, model: TokenModel, cost: Step | None = None) -> WalkStep:
    kind = name.partition(".")[0]
    equation = EQUATIONS[kind]
    if kind == "pool" and model.config.pool_kind != "class":
        equation = MEAN if model.config.pool_kind == "mean" else f"y = {model.config.pool_kind} pooling of LN(z_L)"
    if kind == "blocks" and model.config.post_norm:
        equation = POST_NORM
    spent = {} if cost is None else {"parameters": cost.parameters, "macs": cost.macs}
    lengths = wide(value).norm(dim=-1).cpu() if value.ndim == 2 and kind != "patches" else None
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
