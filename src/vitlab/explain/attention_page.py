"""The page of all attention: move over a patch and see where it looks, in every layer and head.

Networks in stages (Swin, PVT, Twins) store one row per window or per reduced key, and for each layer where its queries
and keys lie.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.explain.attention_maps import default_query
from vitlab.explain.draw import page
from vitlab.explain.inputs import Batch, Images, as_batch, evaluating, wide
from vitlab.explain.stages import Layer, Stages, heads_of, in_stages
from vitlab.explain.views import View
from vitlab.layers.trace import Trace, check_offered
from vitlab.models.hierarchy import Hierarchy

STAGED_TEXTS = {
    "hint": "Move over the picture, touch it, or use the arrow keys: the heat is where the token that holds that patch "
    "looks. Blue is the token, of the layer's own grid, white its window. Click to hold it.",
}


def attention_page(
    model: Any,
    images: Images,
    views: Sequence[View],
    *,
    layers: str | Sequence[int] = "all",
    heads: str | Sequence[int] = "all",
    title: str = "Where patches look",
    limit: int = page.LIMIT,
    batch_size: int = 4,
) -> tuple[str, str]:
    """The page, and a note on what was left out of it ("" if nothing). Holds one layer's attention at a time."""
    check_offered(["attention"], model.traceable)
    batch = as_batch(model, images)
    if in_stages(model):
        return _staged_page(model, batch, views, layers, heads, title, limit, batch_size)
    layout = model.layout(*batch.images.shape[-2:])
    depth, prefix = len(model.blocks), list(layout.prefix)
    chosen = list(range(depth)) if isinstance(layers, str) else [layer % depth for layer in layers]
    head_numbers: list[int] = (
        [] if heads == "mean" else list(range(model.config.heads)) if isinstance(heads, str) else list(heads)
    )
    patches = layout.grid[0] * layout.grid[1]
    one = (len(prefix) + patches) * (patches + 4 * (2 + len(prefix))) * 4 / 3  # bytes of one layer's head, in base64
    pictures = [page.data_url(view) for view in views]
    kept, chosen, single, note = page.fit(pictures, chosen, head_numbers, one, limit)
    rows: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in chosen}

    def keep(weights: Tensor, layer: int | None) -> None:
        A = wide(weights)  # (B, h, N, N)
        A = page.with_mean(A, single)
        assert layer is not None
        rows[layer].append((*page.eight_bits(A[..., len(prefix) :]), A[..., : len(prefix)].cpu()))

    with evaluating(model), torch.no_grad():
        for part in as_batch(model, batch.images[:kept]).split(batch_size):
            model(part.images, trace=Trace("attention", layers=chosen, heads=head_numbers or "all", reduce=keep))
    values, low, high, before = (
        torch.stack([torch.cat([part[i] for part in rows[layer]]) for layer in chosen], dim=1) for i in range(4)
    )  # (B, L, h, ...)
    names = page.layer_names(chosen, page.head_names(head_numbers, single))
    names |= {"prefix": prefix, "first": 0 if default_query(model) == "class" else -1}
    items = [
        page.item_of(view, picture, (values[i], low[i], high[i], before[i])) | names
        for i, (view, picture) in enumerate(zip(views[:kept], pictures, strict=False))
    ]
    return page.page_of("attention", title, page.about(views), note, items), note


def _staged_page(
    model: Hierarchy,
    batch: Batch,
    views: Sequence[View],
    layers: str | Sequence[int],
    heads: str | Sequence[int],
    title: str,
    limit: int,
    batch_size: int,
) -> tuple[str, str]:
    """`attention_page` of a network in stages, with the weights inside windows and on reduced keys only."""
    stages, depth = Stages(model, *batch.images.shape[-2:]), len(model.blocks)
    chosen = list(range(depth)) if isinstance(layers, str) else [layer % depth for layer in layers]
    head_numbers = list(heads) if not isinstance(heads, str) else []
    if heads == "all":
        head_numbers = list(range(heads_of(model, layers)))
    pictures, sizes = [page.data_url(view) for view in views], [_bytes(stages.layers[layer]) for layer in chosen]
    kept, fitting, single, note = page.fit(pictures, chosen, head_numbers, sum(sizes) / len(sizes), limit)
    if fitting != chosen:  # those that stay may be larger than the mean
        kept, fitting, single, note = page.fit(pictures, chosen, head_numbers, max(sizes), limit)
    places = [_place_of(stages, stages.layers[layer]) for layer in fitting]
    distinct = [place for i, place in enumerate(places) if place not in places[:i]]  # layers of a stage share them
    by_image = _rows(model, batch.images[:kept].split(batch_size), stages, fitting, head_numbers or "all", single)
    names = page.layer_names(fitting, page.head_names(head_numbers, single))
    names |= {"prefix": list(model.prefix), "first": 0 if default_query(model) == "class" else -1}
    items = []
    for view, picture, of_layers in zip(views[:kept], pictures, by_image, strict=False):
        rows = [
            {
                "place": distinct.index(place),
                "values": page.packed(values.numpy()),
                "low": page.packed(low.numpy().astype("<f4")),
                "high": page.packed(high.numpy().astype("<f4")),
            }
            for place, (values, low, high) in zip(places, of_layers, strict=True)
        ]
        queries = len(model.prefix) + view.grid[0] * view.grid[1]
        items.append({**page.place_of(view, picture), **names, "stages": rows, "queries": queries})
    return page.page_of("attention", title, page.about(views), note, items, {**STAGED_TEXTS, "places": distinct}), note


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


@torch.no_grad()
def _rows(
    model: Hierarchy,
    parts: Sequence[Tensor],
    stages: Stages,
    layers: Sequence[int],
    heads: str | Sequence[int],
    single: bool,
) -> list[tuple[tuple[Tensor, ...], ...]]:
    """For each image and layer: values (h, windows, n, m), and the values of 0 and 255, (h, windows, n)."""
    by_layer: dict[int, list[tuple[Tensor, ...]]] = {number: [] for number in layers}

    def keep(weights: Tensor, number: int | None) -> None:
        assert number is not None
        layer = stages.layers[number]
        A, _ = layer.real(layer.windowed(weights))
        by_layer[number] += zip(*page.eight_bits(page.with_mean(A, single)), strict=True)

    with evaluating(model):
        for images in parts:
            model(images, trace=Trace("attention", layers=layers, heads=heads, reduce=keep))
    return list(zip(*(by_layer[number] for number in layers), strict=True))
