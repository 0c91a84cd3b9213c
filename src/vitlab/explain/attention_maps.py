"""Where a token looks: one row of the attention matrix, laid out as the grid of patches.

    maps = attention_maps(model, "cat.jpg", layers=[-1])              # (B, 1, h, grid_h, grid_w), from the class token
    maps = attention_maps(model, images, heads="mean", query=(100, 60))   # from the patch under pixel x=100, y=60

Values are the softmax weights the network used. Class, distillation and register tokens are not in the map, so a map
sums to 1 minus their share. Networks in stages (Swin, PVT, Twins) have windows, several grids and fewer keys; their
maps lie on the grid of the first stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, TokenModel, as_batch, batches, run_trace, token_model, wide
from vitlab.explain.outliers import resolve_mask
from vitlab.explain.stages import Stages, heads_of, row_of
from vitlab.layers.trace import check_offered
from vitlab.models.hierarchy import Hierarchy

Query = str | int | Sequence[float] | None
LeaveOut = Literal["outliers"] | Tensor | None  # patches: those of outlier_tokens, or a mask (B, grid_h, grid_w)


@overload
def attention_maps(
    model: ModelOrName,
    images: Images,
    layers: str | Sequence[int] = "all",
    heads: str | Sequence[int] = "all",
    query: Query = None,
    *,
    prefix: Literal[False] = False,
    leave_out: LeaveOut = None,
    batch_size: int = 8,
) -> Tensor: ...


@overload
def attention_maps(
    model: ModelOrName,
    images: Images,
    layers: str | Sequence[int] = "all",
    heads: str | Sequence[int] = "all",
    query: Query = None,
    *,
    prefix: Literal[True],
    leave_out: LeaveOut = None,
    batch_size: int = 8,
) -> tuple[Tensor, Tensor]: ...


def attention_maps(
    model: ModelOrName,
    images: Images,
    layers: str | Sequence[int] = "all",
    heads: str | Sequence[int] = "all",
    query: Query = None,
    *,
    prefix: bool = False,
    leave_out: LeaveOut = None,
    batch_size: int = 8,
) -> Tensor | tuple[Tensor, Tensor]:
    """(B, layers, heads, grid_h, grid_w), on the CPU in float32 (float64 for a float64 model).

    layers   "all", or layer numbers; -1 is the last
    heads    "all", head numbers, or "mean": their average, as one head
    query    the token that looks: "class", "distillation", "mean" (the average over all patches), the number of a patch
             (row by row), or a pixel (x, y) of the model's input. None: what the head reads, "class" or "mean"
    prefix   also return the weights on the tokens before the patches: (maps, (B, layers, heads, prefix tokens))
    leave_out   "outliers" (see outlier_tokens), or a mask (B, grid_h, grid_w): the weights of these patches are set to
             0 and the rest of the row is divided by its sum. For models with one grid

    For the class token only its row is computed; for others each layer's matrix is held briefly.

    In stages, the query is the token of each layer's own grid that holds the patch or pixel. The weight of a token or a
    reduced key is spread evenly over its patches, so that a map still sums to 1. Padding is left out and the rest
    normalised; its weight is the last number of `prefix`. heads="all" needs layers with equally many heads. None is
    "class" in layers that have that token, "mean" in others.
    """
    model = token_model(model)
    check_offered(["attention"], model.traceable)
    _check_numbers(layers, heads)
    images = images if leave_out is None else as_batch(model, images)
    mask = resolve_mask(model, images, leave_out, batch_size)
    grid, parts = (0, 0), []
    for batch in batches(model, images, batch_size):
        grid = model.layout(*batch.images.shape[-2:]).grid
        if isinstance(model, Hierarchy):
            parts.append(_rows_in_stages(model, batch.images, query, layers, heads))
        else:
            parts.append(_rows(model, batch.images, query, layers, heads))
    rows = torch.cat(parts)  # (B, L, h, before + patches)
    if mask is not None:
        rows = without_patches(rows, mask)
    before = rows.shape[-1] - grid[0] * grid[1]
    maps = rows[..., before:].unflatten(-1, grid)
    return (maps, rows[..., :before]) if prefix else maps


def without_patches(rows: Tensor, mask: Tensor) -> Tensor:
    """(B, L, h, N) with 0 at the patches of the mask (B, grid_h, grid_w), the rest of each row divided by its sum."""
    patches = mask[0].numel()
    if len(mask) != len(rows) or patches > rows.shape[-1]:
        raise UsageError(f"leave_out is {tuple(mask.shape)}, which does not fit the patches of {len(rows)} images.")
    kept = F.pad(~mask.flatten(1), (rows.shape[-1] - patches, 0), value=True)[:, None, None]  # (B, 1, 1, N)
    rows = rows * kept
    return rows / rows.sum(-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)


def last_attention(model: ModelOrName, images: Images) -> Tensor:
    """(B, grid_h, grid_w): the last layer's attention from what the head reads, mean over heads."""
    return attention_maps(model, images, layers=[-1], heads="mean")[:, 0, 0]


def attention_masks(
    model: ModelOrName, images: Images, keep: float = 0.6, layer: int = -1, *, batch_size: int = 8
) -> Tensor:
    """(B, h, grid_h, grid_w), True on the fewest patches that hold the share `keep` of a head's attention to patches.

    The segmentation of DINO (arXiv:2104.14294, section 4.2.2 and figure 4). The query is the class token, so the model
    needs one; its attention to itself does not count.
    """
    if not 0 < keep <= 1:
        raise UsageError(f"keep={keep:g} is a share of the attention: above 0 and at most 1, e.g. 0.6.")
    maps = attention_maps(model, images, [layer], query="class", batch_size=batch_size)[:, 0]  # (B, h, grid_h, grid_w)
    share = maps.flatten(2).double()
    share = share / share.sum(dim=-1, keepdim=True)
    most, order = share.sort(dim=-1, descending=True, stable=True)
    before = most.cumsum(dim=-1) - most  # the share of the patches before each one
    kept = before < keep - 1e-12  # the patch that completes the share is still kept
    return torch.zeros_like(kept).scatter(-1, order, kept).unflatten(-1, maps.shape[2:])


def _rows(
    model: TokenModel, images: Tensor, query: Query, layers: str | Sequence[int], heads: str | Sequence[int]
) -> Tensor:
    """The query's rows, averaged: (B, L, h, N)."""
    tokens = query_rows(model, images, query)
    of_class = tokens == slice(0, 1) and "class_attention" in model.traceable
    kind = "class_attention" if of_class else "attention"

    def reduce(weights: Tensor, _: int | None) -> Tensor:
        row = wide(weights) if of_class else wide(weights[:, :, tokens]).mean(2)  # (B, h, N)
        return (row.mean(1, keepdim=True) if heads == "mean" else row).cpu()

    chosen = "all" if heads == "mean" else heads
    return run_trace(model, images, kind, layers=layers, heads=chosen, reduce=reduce).stack(kind).transpose(0, 1)


def _rows_in_stages(
    model: Hierarchy, images: Tensor, query: Query, layers: str | Sequence[int], heads: str | Sequence[int]
) -> Tensor:
    """(B, L, h, prefix tokens + padding + patches)."""
    stages, who = Stages(model, *images.shape[-2:]), resolve_query(model, images, query)
    if heads == "all":
        heads_of(model, layers)  # raises where the layers have different numbers

    def reduce(weights: Tensor, number: int | None) -> Tensor:
        assert number is not None
        layer = stages.layers[number]
        A, lost = layer.real(layer.windowed(weights))  # (B, h, windows, n, m)
        row = row_of(stages, layer, who).to(A)  # (tokens,)
        weights = layer.look(row.expand(*A.shape[:2], -1), A)  # (B, h, tokens)
        padding = (layer.at_queries(row) * lost).sum((-2, -1))[..., None]  # (B, h, 1)
        before = weights.new_zeros(*weights.shape[:2], stages.prefix)
        before[..., : layer.prefix] = weights[..., : layer.prefix]
        laid = stages.lay(weights[..., layer.prefix :], layer.stage).flatten(-2)
        row = torch.cat([before, padding, laid], dim=-1)
        return (row.mean(1, keepdim=True) if heads == "mean" else row).cpu()

    chosen = "all" if heads == "mean" else heads
    trace = run_trace(model, images, "attention", layers=layers, heads=chosen, reduce=reduce)
    return trace.stack("attention").transpose(0, 1)


def default_query(model: TokenModel) -> str:
    """What the head reads: "class" or "mean"."""
    if isinstance(model, Hierarchy):
        return "class" if "class" in model.prefix else "mean"
    return "class" if model.config.pool_kind in ("class", "class_norm", "class_mean") else "mean"


def query_rows(model: TokenModel, images: Tensor, query: Query) -> slice:
    """The tokens of a query; the rows of several are averaged."""
    prefix, (rows, columns) = (layout := model.layout(*images.shape[-2:])).prefix, layout.grid
    who = resolve_query(model, images, query)
    who = default_query(model) if who is None else who
    if who == "mean":
        return slice(len(prefix), len(prefix) + rows * columns)
    place = prefix.index(who) if isinstance(who, str) else len(prefix) + who
    return slice(place, place + 1)


def resolve_query(model: TokenModel, images: Tensor, query: Query) -> str | int | None:
    """The name of a token, "mean", or a patch's number; None for None."""
    height, width = images.shape[-2:]
    layout = model.layout(height, width)
    if query is None:
        return None
    if isinstance(query, str):
        if query == "mean":
            return query
        prefix = model.prefix if isinstance(model, Hierarchy) else layout.prefix
        tokens = [name for name in ("class", "distillation") if name in prefix]
        if query not in tokens:
            choices = ", ".join(repr(name) for name in [*tokens, "mean"])
            raise UsageError(
                f"query={query!r}: this model has no such token: it has {layout}. Ask for {choices} (the average over "
                "all patches), a patch's number, or a pixel (x, y)."
            )
        return query
    rows, columns = layout.grid
    if isinstance(query, Sequence):
        return _patch_under(query, height, width, layout.grid, model.config.patch_size)
    return _patch_number(query, rows, columns)


def _patch_under(pixel: Sequence[float], height: int, width: int, grid: tuple[int, int], patch_size: int) -> int:
    if len(pixel) != 2 or not all(isinstance(n, int | float) for n in pixel):
        raise UsageError(f"query={pixel!r} must be one pixel (x, y) of the model's input.")
    x, y = pixel
    if not (0 <= x < width and 0 <= y < height):
        raise UsageError(
            f"query=({x}, {y}) lies outside the model's input, which is {width} x {height} pixels: "
            f"x is 0 to {width - 1}, y is 0 to {height - 1}."
        )
    row, column = (min(int(v // patch_size), side - 1) for v, side in zip((y, x), grid, strict=True))
    return row * grid[1] + column


def _patch_number(query: int, rows: int, columns: int) -> int:
    try:
        patch = index(query)
    except TypeError:
        raise UsageError(
            f'query={query!r} must be "class", "distillation", "mean", a patch\'s number, or a pixel (x, y).'
        ) from None
    if isinstance(query, bool) or not 0 <= patch < rows * columns:
        raise UsageError(
            f"query={query!r}: {rows} x {columns} patches are numbered 0 to {rows * columns - 1}, row by row."
        )
    return patch


def _check_numbers(layers: str | Sequence[int], heads: str | Sequence[int]) -> None:
    if isinstance(heads, str) and heads not in ("all", "mean"):
        raise UsageError(f'heads={heads!r} must be "all", "mean" or a list of head numbers, e.g. heads=[0, -1].')
    for what, given in (("layers", layers), ("heads", heads)):
        if isinstance(given, Sequence) and not len(given):
            raise UsageError(f'{what}={given!r} asks for nothing: use {what}="all", or {what}=[-1].')
