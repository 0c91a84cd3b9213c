"""Attention distance and entropy per layer and head: Figure 7 (right) of ViT (arXiv:2010.11929).

    distance = attention_distance(model, images)       # (layers, heads), in pixels of the model's input
    entropy = attention_entropy(model, images)         # (layers, heads), in nats; at most ln N

Appendix D.7 measures the distance in image space from a query to everything else, weighted by attention, and averages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.explain.inputs import Images, batches, run_trace, wide
from vitlab.explain.stages import one_grid
from vitlab.layers.trace import check_offered
from vitlab.tables import Table, Tabular


@dataclass
class AttentionStatistics(Tabular):
    """Both measures from one pass, and their values for uniform attention."""

    distance: Tensor  # (layers, heads), pixels
    entropy: Tensor  # (layers, heads), nats
    uniform_distance: float
    max_entropy: float  # ln N
    images: int

    def table(self) -> Table:
        depth, heads = self.distance.shape
        titles = ["layer", *(f"head {head + 1}" for head in range(heads))]
        pair = lambda distance, entropy: f"{distance:.1f} px, {entropy:.2f}"
        both = torch.stack([self.distance, self.entropy], dim=-1).tolist()  # (L, h, 2)
        rows = [[str(layer + 1), *(pair(*values) for values in both[layer])] for layer in range(depth)]
        heading = [f"Attention distance and entropy, mean over {self.images} image{'s' if self.images > 1 else ''}"]
        note = f"Uniform attention: {pair(self.uniform_distance, self.max_entropy)} nats."
        return Table(titles, rows, titles, heading, notes=[note])


def attention_distance(model: ModelOrName, images: Images, *, batch_size: int = 8) -> Tensor:
    """(layers, heads): mean attention distance in pixels of the model's input.

    Queries and keys are the patches only: class, distillation and register tokens have no position. A query's weights
    on patches are normalised, then weigh the Euclidean distances between patch centres; the mean is over all queries
    and images. (A query whose weights on patches are all 0 is left out.)
    """
    return attention_statistics(model, images, batch_size=batch_size).distance


def attention_entropy(model: ModelOrName, images: Images, *, batch_size: int = 8) -> Tensor:
    """(layers, heads): mean of -sum_j A_ij ln A_ij over all tokens i and images, in nats.

    All N tokens count, prefix tokens too, as queries and as keys: 0 is attention to one token, ln N to all equally.
    """
    return attention_statistics(model, images, batch_size=batch_size).entropy


def attention_statistics(model: ModelOrName, images: Images, *, batch_size: int = 8) -> AttentionStatistics:
    """Distance and entropy. Holds one layer's attention at a time."""
    model = one_grid(model, "attention distance")
    check_offered(["attention"], model.traceable)
    total: Tensor | None = None
    count, tokens, uniform = 0, 0, 0.0
    for batch in batches(model, images, batch_size):
        layout = model.layout(*batch.images.shape[-2:])
        prefix = len(layout.prefix)
        between = patch_distances(layout.grid, model.config.patch_size)  # (patches, patches)
        tokens, uniform = prefix + len(between), float(between.mean())
        near = between.to(batch.images.device, wide(batch.images[:0]).dtype)

        def summed(weights: Tensor, _: int | None, prefix: int = prefix, near: Tensor = near) -> Tensor:
            return torch.stack([_sums(wide(A), prefix, near) for A in weights]).cpu()  # (B, 3, h)

        trace = run_trace(model, batch.images, "attention", reduce=summed)
        part = trace.stack("attention").double().sum(1)  # (L, 3, h)
        total, count = part if total is None else total + part, count + len(batch)
    assert total is not None
    distance, queries, entropy = total.unbind(1)  # each (L, h)
    return AttentionStatistics(distance / queries, entropy / (count * tokens), uniform, math.log(tokens), count)


def _sums(A: Tensor, prefix: int, near: Tensor) -> Tensor:
    """One image, (h, N, N) -> (3, h), sums over queries: distance, how many queries have one, entropy."""
    to_patches = A[:, prefix:, prefix:]  # (h, patches, patches)
    share = to_patches.sum(-1)  # (h, patches)
    reach = (to_patches * near).sum(-1) / share
    seen = share > 0
    A = A / A.sum(-1, keepdim=True)  # rows rounded to half precision are a little off 1
    spread = torch.special.entr(A).sum(-1)  # (h, N)
    return torch.stack([torch.where(seen, reach, 0.0).sum(-1), seen.to(A.dtype).sum(-1), spread.sum(-1)])


def patch_distances(grid: tuple[int, int], patch_size: int) -> Tensor:
    """Pixels between the centres of any two patches, numbered row by row: (patches, patches), float64."""
    rows, columns = (torch.arange(n, dtype=torch.float64) * patch_size for n in grid)
    y, x = (axis.flatten() for axis in torch.meshgrid(rows, columns, indexing="ij"))
    return torch.hypot(y[:, None] - y, x[:, None] - x)
