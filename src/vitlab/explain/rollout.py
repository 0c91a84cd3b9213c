"""Attention rollout: how much of each patch reaches a token through all layers (Abnar and Zuidema, arXiv:2005.00928).

Figure 6 of ViT (arXiv:2010.11929) is made of it: average the heads, add the identity for the residual path, make rows
sum to 1 again, and multiply through the layers. It knows nothing of classes or values.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from vitlab.explain.attention_maps import Query, asked, query_rows
from vitlab.explain.inputs import Images, batches, check_model, evaluating, wide
from vitlab.explain.stages import Layer, Stages, in_stages, row_of
from vitlab.layers.trace import Trace, check_offered

FUSE = {  # (B, h, N, N) -> (B, N, N)
    "mean": lambda A: A.mean(1, dtype=torch.promote_types(A.dtype, torch.float32)),
    "max": lambda A: wide(A.amax(1)),
    "min": lambda A: wide(A.amin(1)),
}


def rollout(
    model: Any,
    images: Images,
    discard: float = 0.0,
    start_layer: int = 0,
    query: Query = None,
    heads: Literal["mean", "max", "min"] = "mean",
    *,
    batch_size: int = 8,
) -> Tensor:
    """(B, grid_h, grid_w): the query's row of A_L ... A_1 over the patches, with A_l = (W_l + I) / its row sums.

    W_l is layer l's attention, its heads put together by `heads`. Class, distillation and register tokens take part in
    the product and are left out of the map, so a map sums to 1 minus their share.

    discard      in every W_l, for each image alone, this share of the N x patches weights that point at patches is set
                 to 0, the lowest first (rounded down), before the identity is added. Weights that point at prefix
                 tokens (the class token's column) are never touched
    start_layer  the first layer of the product
    query        as in attention_maps. None: what the head reads, the class token or the mean over the patches' rows

    Layers are multiplied in as they come: one layer's attention and one (B, N, N) product are all that is ever held.

    In stages (Swin, PVT, Twins) W_l is laid out over the tokens of its stage: windows put back where they were cut,
    what a reduced key gets spread evenly over the tokens that it holds, padding left out. Between two stages stands the
    matrix of the merging, whose rows are equal shares of what each token was merged from; it has no residual path. A
    token that a query names is that of the last stage. `discard` counts the weights that there are, n in a window.
    """
    check_model(model)
    check_offered(["attention"], model.traceable)
    if heads not in FUSE:
        raise ValueError(f'heads={heads!r} must be "mean", "max" or "min".')
    if not 0 <= discard < 1:
        raise ValueError(f"discard={discard!r} is a share: at least 0 and below 1, e.g. discard=0.9.")
    depth = len(model.blocks)
    if not -depth <= start_layer < depth:
        raise ValueError(f"start_layer={start_layer} does not exist: this model has layers 0 to {depth - 1}.")
    layers = range(start_layer % depth, depth)
    follow = _in_stages if in_stages(model) else _in_one_grid
    parts = (follow(model, b.images, layers, query, discard, heads) for b in batches(model, images, batch_size))
    return torch.cat([part.cpu() for part in parts])


def _in_one_grid(model: Any, images: Tensor, layers: range, query: Query, discard: float, heads: str) -> Tensor:
    layout = model.layout(*images.shape[-2:])
    product = _product(model, images, layers, len(layout.prefix), discard, heads)  # (B, N, N)
    row = product[:, query_rows(model, images, query), len(layout.prefix) :].mean(1)  # (B, patches)
    return row.unflatten(1, layout.grid)


@torch.no_grad()
def _in_stages(model: Any, images: Tensor, layers: range, query: Query, discard: float, heads: str) -> Tensor:
    """One row, walked back from the last layer: each layer's weights are few where windows or keys are."""
    stages, who = Stages(model, *images.shape[-2:]), asked(model, images, query)

    def fuse(weights: Tensor, number: int | None) -> Tensor:
        assert number is not None
        layer = stages.layers[number]
        A, _ = layer.real(layer.windowed(weights))
        A = FUSE[heads](A)  # (B, windows, n, m)
        return _discard_in_windows(A, discard, layer) if discard else A

    trace = Trace("attention", layers=layers, reduce=fuse)
    with evaluating(model):
        model(images, trace=trace)
    layer = stages.layers[layers[-1]]
    row = row_of(stages, layer, who).to(wide(images)).expand(len(images), -1)  # (B, tokens)
    for number in reversed(layers):
        if stages.layers[number].stage < layer.stage:  # the prefix tokens began there
            row = stages.descend(row[:, layer.prefix :], layer.stage)
        layer, W = stages.layers[number], trace["attention", number]
        sums = 1 + layer.of_tokens(W.sum(-1))  # (B, tokens)
        row = row / sums + layer.look(row / sums, W)
    return stages.lay(row[:, layer.prefix :], layer.stage)


@torch.no_grad()
def _product(model: Any, images: Tensor, layers: range, prefix: int, discard: float, heads: str) -> Tensor:
    product: Tensor | None = None

    def multiply(weights: Tensor, _: int | None) -> None:
        nonlocal product
        A = FUSE[heads](weights)  # (B, N, N)
        if discard:
            A = discard_lowest(A, discard, prefix)
        A = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        A = A / A.sum(-1, keepdim=True)
        product = A if product is None else A @ product

    with evaluating(model):
        model(images, trace=Trace("attention", layers=layers, reduce=multiply))
    assert product is not None
    return product


def discard_lowest(A: Tensor, share: float, prefix: int) -> Tensor:
    """(B, N, N) with the lowest `share` of each image's weights on patches at 0; prefix tokens' columns stay."""
    patches = A[:, :, prefix:].flatten(1)  # (B, N * patches)
    lowest = patches.topk(int(share * patches.shape[1]), dim=1, largest=False, sorted=False).indices
    kept = patches.scatter(1, lowest, 0.0).unflatten(1, (A.shape[1], -1))
    return torch.cat([A[:, :, :prefix], kept], dim=2)


def _discard_in_windows(A: Tensor, share: float, layer: Layer) -> Tensor:
    """The same of (B, windows, n, m), where places of padding do not count."""
    free = (layer.queries >= 0)[:, :, None] & (layer.keys >= layer.prefix)[:, None, :]  # (windows, n, m)
    values = A[:, free]  # (B, weights)
    lowest = values.topk(int(share * values.shape[1]), dim=1, largest=False, sorted=False).indices
    kept = A.clone()
    kept[:, free] = values.scatter(1, lowest, 0.0)
    return kept
