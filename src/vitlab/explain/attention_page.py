"""The page of all attention: move over a patch and see where it looks, in every layer and head.

Networks in stages (Swin, PVT, Twins) store one row per window or per reduced key, and for each layer where its queries
and keys lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.explain.attention_maps import default_query
from vitlab.explain.draw import page
from vitlab.explain.inputs import ImageBatch, Images, TokenModel, as_batch, run_trace, token_model, wide
from vitlab.explain.scale import DEFAULT
from vitlab.explain.stages import Layer, Stages, heads_of
from vitlab.explain.views import View
from vitlab.layers.trace import check_offered
from vitlab.models.hierarchy import Hierarchy

STAGED_TEXTS = {
    "hint": "Move over the image, touch it, or use the arrow keys: the heat is where the token that holds that patch "
    "looks. Blue is the token, of the layer's own grid, white its window. Click to hold it.",
}


def attention_page(
    model: ModelOrName,
    images: Images,
    views: Sequence[View],
    *,
    layers: str | Sequence[int] = "all",
    heads: str | Sequence[int] = "all",
    title: str = "Where patches look",
    limit: int = page.LIMIT,
    batch_size: int = 4,
    scale: str = DEFAULT,
) -> tuple[str, str]:
    """The page, and a note on what was left out of it ("" if nothing). Holds one layer's attention at a time."""
    model = token_model(model)
    check_offered(["attention"], model.traceable)
    batch, depth = as_batch(model, images), len(model.blocks)
    chosen = list(range(depth)) if isinstance(layers, str) else [layer % depth for layer in layers]
    head_numbers = list(heads) if not isinstance(heads, str) else []
    if heads == "all":
        head_numbers = list(range(heads_of(model, layers)))
    contents = Contents(batch, views, chosen, head_numbers, limit, batch_size)
    items, texts, note = _staged_items(model, contents) if isinstance(model, Hierarchy) else _items(model, contents)
    return page.page_of("attention", title, page.about(views), note, items, texts, scale=scale), note


@dataclass(frozen=True)
class Contents:
    """What a page shows."""

    batch: ImageBatch
    views: Sequence[View]
    layers: list[int]
    heads: list[int]  # none: the mean of all
    limit: int  # bytes
    batch_size: int


Items = tuple[list[dict[str, Any]], dict[str, Any], str]  # for page_of: items, texts, and a note on what was left out


def _items(model: TokenModel, contents: Contents) -> Items:
    views, heads, images = contents.views, contents.heads, contents.batch.images
    layout = model.layout(*images.shape[-2:])
    prefix, patches = list(layout.prefix), layout.grid[0] * layout.grid[1]
    one = (len(prefix) + patches) * (patches + 4 * (2 + len(prefix))) * 4 / 3  # bytes of one layer's head, in base64
    urls = [page.data_url(view) for view in views]
    kept, layers, single, note = page.fit(urls, contents.layers, heads, one, contents.limit)
    rows: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in layers}

    def keep(weights: Tensor, layer: int | None) -> None:
        assert layer is not None
        A = page.with_mean(wide(weights), single)  # (B, h, N, N)
        rows[layer].append((*page.eight_bits(A[..., len(prefix) :]), A[..., : len(prefix)].cpu()))

    for part in images[:kept].split(contents.batch_size):
        run_trace(model, part, "attention", layers=layers, heads=heads or "all", reduce=keep)
    values, low, high, before = (
        torch.stack([torch.cat([part[i] for part in rows[layer]]) for layer in layers], dim=1) for i in range(4)
    )  # (B, L, h, ...)
    names = _names(model, prefix, layers, page.head_names(heads, single))
    items = [
        page.item_of(view, url, (values[i], low[i], high[i], before[i])) | names
        for i, (view, url) in enumerate(zip(views[:kept], urls, strict=False))
    ]
    return items, {}, note


def _staged_items(model: Hierarchy, contents: Contents) -> Items:
    """Items of a network in stages, with the weights inside windows and on reduced keys only."""
    views, layers, heads, images = contents.views, contents.layers, contents.heads, contents.batch.images
    stages = Stages(model, *images.shape[-2:])
    urls, sizes = [page.data_url(view) for view in views], [_bytes(stages.layers[layer]) for layer in layers]
    kept, fitting, single, note = page.fit(urls, layers, heads, sum(sizes) / len(sizes), contents.limit)
    if fitting != layers:  # those that stay may be larger than the mean
        kept, fitting, single, note = page.fit(urls, layers, heads, max(sizes), contents.limit)
    places = [_place_of(stages, stages.layers[layer]) for layer in fitting]
    distinct = [place for i, place in enumerate(places) if place not in places[:i]]  # layers of a stage share them
    rows: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in fitting}

    def keep(weights: Tensor, number: int | None) -> None:
        """For each image: values (h, windows, n, m), and the values of 0 and 255, (h, windows, n)."""
        assert number is not None
        layer = stages.layers[number]
        A, _ = layer.real(layer.windowed(weights))
        rows[number] += zip(*page.eight_bits(page.with_mean(A, single)), strict=True)

    for part in images[:kept].split(contents.batch_size):
        run_trace(model, part, "attention", layers=fitting, heads=heads or "all", reduce=keep)
    names = _names(model, list(model.prefix), fitting, page.head_names(heads, single))
    items = []
    for i, (view, url) in enumerate(zip(views[:kept], urls, strict=False)):
        packed = [
            {
                "place": distinct.index(place),
                "values": page.packed(values.numpy()),
                "low": page.packed(low.numpy().astype("<f4")),
                "high": page.packed(high.numpy().astype("<f4")),
            }
            for place, (values, low, high) in zip(places, (rows[layer][i] for layer in fitting), strict=True)
        ]
        queries = len(model.prefix) + view.grid[0] * view.grid[1]
        items.append({**page.place_of(view, url), **names, "stages": packed, "queries": queries})
    return items, {**STAGED_TEXTS, "places": distinct}, note


def _names(model: TokenModel, prefix: list[str], layers: list[int], heads: list[str]) -> dict[str, Any]:
    first = 0 if default_query(model) == "class" else -1
    return page.layer_names(layers, heads) | {"prefix": prefix, "first": first}


def _bytes(layer: Layer) -> float:
    """Size of one head of a layer in base64."""
    return layer.queries.numel() * (layer.keys.shape[1] + 8) * 4 / 3


def _place_of(stages: Stages, layer: Layer) -> dict[str, Any]:
    """Where the queries and keys of a layer lie on the patches."""
    held = stages.stands[layer.stage]
    if layer.holds is not None:
        held = (layer.holds[0] @ held[0], layer.holds[1] @ held[1])
    region = torch.zeros_like(layer.queries) if layer.apart is None else (~layer.apart).int().argmax(-1)
    tokens = [stages.token(patch, layer.stage) for patch in range(stages.grids[0][0] * stages.grids[0][1])]
    indices = {
        "queries": layer.queries,
        "keys": layer.keys,
        "region": region,  # in a window, only those of one region see each other
        "tokens": torch.tensor(tokens),  # of each patch
    }
    return {
        "prefix": layer.prefix,
        "windows": layer.in_windows,
        "n": layer.queries.shape[1],
        "m": layer.keys.shape[1],
        **{name: page.packed(values.cpu().numpy().astype("<i4")) for name, values in indices.items()},
        "held": [[[[i, v] for i, v in enumerate(row) if v] for row in axis.tolist()] for axis in held],  # by each key
    }
