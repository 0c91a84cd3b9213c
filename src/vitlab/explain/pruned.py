"""Which patches a Reducer keeps, merges or drops, layer by layer.

result = pruned_patches(model, images, reducer)
result.groups[0, -1]                       # (grid_h, grid_w): the token that holds each patch, -1 where dropped
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.explain.inputs import Images, batches, token_model
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.base import evaluation_mode
from vitlab.tables import Table, Tabular


@dataclass
class Pruned(Tabular):
    """The token that holds each patch, after every layer."""

    groups: Tensor  # (B, layers, grid_h, grid_w): equal numbers are one token, -1 was dropped
    tokens: Tensor  # (B, layers): their number, with prefix tokens
    changed: tuple[int, ...]  # the layers that removed tokens

    def table(self) -> Table:
        counts = self.tokens.double().mean(0).tolist()  # over images
        rows = [[str(i + 1), f"{n:g}", "removes" if i in self.changed else ""] for i, n in enumerate(counts)]
        return Table(["layer", "tokens", ""], rows, ("layer", "tokens"), ["Tokens after each layer, mean over images"])

    @property
    def depth(self) -> int:
        return self.groups.shape[1]


@torch.no_grad()
def pruned_patches(model: ModelOrName, images: Images, reducer: Reducer, *, batch_size: int = 8) -> Pruned:
    """Run the model with the reducer; a layer that removes nothing repeats the layer before it."""
    model = token_model(model)
    groups, counts, changed = [], [], set()
    for batch in batches(model, images, batch_size):
        trace = Trace("assignment", "sizes")
        with evaluation_mode(model):
            model(batch.images, trace=trace, reducer=reducer)
        assert trace.layout is not None
        prefix, (rows, columns) = len(trace.layout.prefix), trace.layout.grid
        now = torch.arange(prefix + rows * columns).expand(len(batch), -1)  # (B, N)
        left = torch.full((len(batch),), prefix + rows * columns)
        for layer in range(len(model.blocks)):
            if ("assignment", layer) in trace:
                now, sizes = trace["assignment", layer].cpu(), trace["sizes", layer]
                left = torch.full((len(batch),), sizes.shape[1])
                changed.add(layer)
            groups.append(now[:, prefix:].unflatten(1, (rows, columns)))
            counts.append(left)
    depth = len(model.blocks)
    return Pruned(_by_image(groups, depth), _by_image(counts, depth), tuple(sorted(changed)))


def _by_image(values: list[Tensor], depth: int) -> Tensor:
    """Batches of layers, (b, ...) each -> (B, layers, ...)."""
    return torch.cat([torch.stack(values[i : i + depth], dim=1) for i in range(0, len(values), depth)])
