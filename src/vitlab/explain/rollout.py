"""Attention rollout: how much of each patch reaches a token through all layers (Abnar and Zuidema, arXiv:2005.00928).

As in figure 6 of ViT (arXiv:2010.11929): average the heads, add the identity for the residual path, normalise the rows,
and multiply through the layers. It ignores classes and values.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.attention_maps import LeaveOut, Query, query_rows, resolve_query
from vitlab.explain.inputs import Images, TokenModel, as_batch, batches, check_layer, run_trace, token_model, wide
from vitlab.explain.outliers import resolve_mask
from vitlab.explain.stages import Layer, Stages, row_of
from vitlab.layers.trace import check_offered
from vitlab.models.hierarchy import Hierarchy

FUSE = {  # (B, h, N, N) -> (B, N, N)
    "mean": lambda A: A.mean(1, dtype=torch.promote_types(A.dtype, torch.float32)),
    "max": lambda A: wide(A.amax(1)),
    "min": lambda A: wide(A.amin(1)),
}


def rollout(
    model: ModelOrName,
    images: Images,
    discard: float = 0.0,
    start_layer: int = 0,
    query: Query = None,
    heads: Literal["mean", "max", "min"] = "mean",
    *,
    leave_out: LeaveOut = None,
    batch_size: int = 8,
) -> Tensor:
    """(B, grid_h, grid_w): the query's row of A_L ... A_1 over the patches, with A_l = (W_l + I) / its row sums.

    W_l is layer l's attention, its heads fused by `heads`. Class, distillation and register tokens take part in the
    product but are not in the map, so a map sums to 1 minus their share.

    discard      in every W_l, for each image alone, this share of the N x patches weights that point at patches is set
                 to 0, the lowest first (rounded down), before the identity is added. Weights that point at prefix
                 tokens (the class token's column) are never touched
    start_layer  the first layer of the product
    query        as in attention_maps. None: what the head reads, the class token or the mean over the patches' rows
    leave_out    patches that are treated as if they were not there: "outliers" (see outlier_tokens), or a mask (B,
                 grid_h, grid_w). In every W_l their rows and columns are removed and the other rows divided by their
                 sums, before anything else; in the map they are 0. For models with one grid

    Holds one layer's attention and one (B, N, N) product at a time.

    In stages (Swin, PVT, Twins) W_l is over the tokens of its stage: windows put back in place, a reduced key's weight
    spread evenly over its tokens, padding left out. Merging between stages is a matrix whose rows are equal shares of
    the merged tokens; it has no residual path. A query token is that of the last stage. `discard` counts existing
    weights only, n in a window.
    """
    model = token_model(model)
    check_offered(["attention"], model.traceable)
    if heads not in FUSE:
        raise UsageError(f'heads={heads!r} must be "mean", "max" or "min".')
    if not 0 <= discard < 1:
        raise UsageError(f"discard={discard!r} is a share: at least 0 and below 1, e.g. discard=0.9.")
    layers = range(check_layer(model, start_layer), len(model.blocks))
    images = images if leave_out is None else as_batch(model, images)
    mask = resolve_mask(model, images, leave_out, batch_size)
    parts, start = [], 0
    for batch in batches(model, images, batch_size):
        left_out = None if mask is None else mask[start : start + len(batch)]
        start += len(batch)
        if isinstance(model, Hierarchy):
            parts.append(_in_stages(model, batch.images, layers, query, discard, heads).cpu())
        else:
            parts.append(_in_one_grid(model, batch.images, layers, query, discard, heads, left_out).cpu())
    return torch.cat(parts)


def _in_one_grid(
    model: TokenModel,
    images: Tensor,
    layers: range,
    query: Query,
    discard: float,
    heads: str,
    left_out: Tensor | None,
) -> Tensor:
    layout = model.layout(*images.shape[-2:])
    prefix, rows = len(layout.prefix), query_rows(model, images, query)
    if left_out is None:
        product = _product(model, images, layers, prefix, discard, heads)  # (B, N, N)
        return product[:, rows, prefix:].mean(1).unflatten(1, layout.grid)
    if left_out.shape != (len(images), *layout.grid):
        raise UsageError(f"leave_out is {tuple(left_out.shape)} but the patches are {(len(images), *layout.grid)}.")
    kept = F.pad(~left_out.flatten(1).to(images.device), (prefix, 0), value=True)  # (B, N)
    if not kept[:, rows].any(dim=1).all():
        raise UsageError("the query is a patch that is left out: choose another, or leave out others.")
    product = _product(model, images, layers, prefix, discard, heads, kept)
    looking = kept[:, rows].to(product)  # (B, queries)
    row = (looking[..., None] * product[:, rows, prefix:]).sum(1) / looking.sum(1, keepdim=True)  # (B, patches)
    return (row * kept[:, prefix:]).unflatten(1, layout.grid)


def _in_stages(model: Hierarchy, images: Tensor, layers: range, query: Query, discard: float, heads: str) -> Tensor:
    """One row, multiplied from the last layer back: windows and reduced keys keep each layer's matrix small."""
    stages, who = Stages(model, *images.shape[-2:]), resolve_query(model, images, query)

    def fuse(weights: Tensor, number: int | None) -> Tensor:
        assert number is not None
        layer = stages.layers[number]
        A, _ = layer.real(layer.windowed(weights))
        A = FUSE[heads](A)  # (B, windows, n, m)
        return _discard_in_windows(A, discard, layer) if discard else A

    trace = run_trace(model, images, "attention", layers=layers, reduce=fuse)
    layer = stages.layers[layers[-1]]
    row = row_of(stages, layer, who).to(wide(images)).expand(len(images), -1)  # (B, tokens)
    for number in reversed(layers):
        if stages.layers[number].stage < layer.stage:  # the prefix tokens start at that stage
            row = stages.descend(row[:, layer.prefix :], layer.stage)
        layer, W = stages.layers[number], trace["attention", number]
        sums = 1 + layer.of_tokens(W.sum(-1))  # (B, tokens)
        row = row / sums + layer.look(row / sums, W)
    return stages.lay(row[:, layer.prefix :], layer.stage)


def _product(
    model: TokenModel,
    images: Tensor,
    layers: range,
    prefix: int,
    discard: float,
    heads: str,
    kept: Tensor | None = None,
) -> Tensor:
    product: Tensor | None = None

    def multiply(weights: Tensor, _: int | None) -> None:
        nonlocal product
        A = FUSE[heads](weights)  # (B, N, N)
        if kept is not None:  # no token reaches those left out, so their own rows do not matter
            A = A * kept[:, None]
            A = A / A.sum(-1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
        if discard:
            A = discard_lowest(A, discard, prefix)
        A = A + torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        A = A / A.sum(-1, keepdim=True)
        product = A if product is None else A @ product

    run_trace(model, images, "attention", layers=layers, reduce=multiply)
    assert product is not None
    return product


def discard_lowest(A: Tensor, share: float, prefix: int) -> Tensor:
    """(B, N, N) with the lowest `share` of each image's weights on patches at 0; prefix tokens' columns stay."""
    patches = A[:, :, prefix:].flatten(1)  # (B, N * patches)
    lowest = patches.topk(int(share * patches.shape[1]), dim=1, largest=False, sorted=False).indices
    kept = patches.scatter(1, lowest, 0.0).unflatten(1, (A.shape[1], -1))
    return torch.cat([A[:, :, :prefix], kept], dim=2)


def _discard_in_windows(A: Tensor, share: float, layer: Layer) -> Tensor:
    """`discard_lowest` for (B, windows, n, m), without padding."""
    free = (layer.queries >= 0)[:, :, None] & (layer.keys >= layer.prefix)[:, None, :]  # (windows, n, m)
    values = A[:, free]  # (B, weights)
    lowest = values.topk(int(share * values.shape[1]), dim=1, largest=False, sorted=False).indices
    kept = A.clone()
    kept[:, free] = values.scatter(1, lowest, 0.0)
    return kept
