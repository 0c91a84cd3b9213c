"""The page of a network in stages (Swin, PVT, Twins): its rows are as short as windows or reduced keys make them, and
once for all pictures it says where each of a layer's queries and keys lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vitlab.explain.attention_maps import read_by_the_head
from vitlab.explain.draw.page_parts import (
    about,
    data_url,
    eight_bits,
    fit,
    head_names,
    layer_names,
    page_of,
    place_of,
    with_mean,
)
from vitlab.explain.draw.page_parts import packed as pack
from vitlab.explain.draw.view import View
from vitlab.explain.inputs import Batch, evaluating
from vitlab.explain.stages import Layer, Stages, heads_of
from vitlab.layers.trace import Trace

WORDS = {
    "hint": "Move over the picture, touch it, or use the arrow keys: the heat is where the token that holds that patch "
    "looks. Blue is the token, of the layer's own grid, white its window. Click to hold it.",
}


def page_in_stages(
    model: Any, batch: Batch, views: Sequence[View], layers: Any, heads: Any, title: str, limit: int, batch_size: int
) -> tuple[str, str]:
    """As `attention_page`; of the attention only windows and reduced keys are kept."""
    stages, depth = Stages(model, *batch.images.shape[-2:]), len(model.blocks)
    asked = list(range(depth)) if isinstance(layers, str) else [layer % depth for layer in layers]
    numbers = [] if heads == "mean" else list(range(heads_of(model, layers))) if heads == "all" else list(heads)
    pictures, sizes = [data_url(view) for view in views], [_bytes(stages.layers[layer]) for layer in asked]
    kept, fitting, single, note = fit(pictures, asked, numbers, sum(sizes) / len(sizes), limit)
    if fitting != asked:  # those that stay may be larger than the mean
        kept, fitting, single, note = fit(pictures, asked, numbers, max(sizes), limit)
    lies = [_lies(stages, stages.layers[layer]) for layer in fitting]
    ways = [way for i, way in enumerate(lies) if way not in lies[:i]]  # layers of a stage have few
    found = _rows(model, batch.images[:kept].split(batch_size), stages, fitting, numbers or "all", single)
    named = layer_names(fitting, head_names(numbers, single))
    named |= {"prefix": list(model.prefix), "first": 0 if read_by_the_head(model) == "class" else -1}
    items = []
    for view, picture, of_layers in zip(views[:kept], pictures, found, strict=False):
        rows = [
            {"place": ways.index(way), "values": pack(values.numpy()), "low": pack(low.numpy().astype("<f4"))}
            | {"high": pack(high.numpy().astype("<f4"))}
            for way, (values, low, high) in zip(lies, of_layers, strict=True)
        ]
        queries = len(model.prefix) + view.grid[0] * view.grid[1]
        items.append({**place_of(view, picture), **named, "stages": rows, "queries": queries})
    return page_of("attention", title, about(views), note, items, {**WORDS, "places": ways}), note


def _bytes(layer: Layer) -> float:
    """What one head of a layer takes in base64."""
    return layer.queries.numel() * (layer.keys.shape[1] + 8) * 4 / 3


def _lies(stages: Stages, layer: Layer) -> dict[str, Any]:
    """How the queries and keys of a layer lie on the patches."""
    held = stages.stands[layer.stage]
    if layer.holds is not None:
        held = (layer.holds[0] @ held[0], layer.holds[1] @ held[1])
    region = torch.zeros_like(layer.queries) if layer.apart is None else (~layer.apart).int().argmax(-1)
    tokens = [stages.token(patch, layer.stage) for patch in range(stages.grids[0][0] * stages.grids[0][1])]
    numbers = {
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
        **{name: pack(values.cpu().numpy().astype("<i4")) for name, values in numbers.items()},
        "held": [[[[i, v] for i, v in enumerate(row) if v] for row in axis.tolist()] for axis in held],  # by each key
    }


@torch.no_grad()
def _rows(
    model: Any, parts: Sequence[Tensor], stages: Stages, layers: Sequence[int], heads: Any, single: bool
) -> list[tuple[tuple[Tensor, ...], ...]]:
    """For each picture and layer: values (h, windows, n, m), and what their 0 and 255 stand for, (h, windows, n)."""
    found: dict[int, list[tuple[Tensor, ...]]] = {number: [] for number in layers}

    def keep(weights: Tensor, number: int | None) -> None:
        assert number is not None
        layer = stages.layers[number]
        A, _ = layer.real(layer.windowed(weights))
        found[number] += zip(*eight_bits(with_mean(A, single)), strict=True)

    with evaluating(model):
        for images in parts:
            model(images, trace=Trace("attention", layers=layers, heads=heads, reduce=keep))
    return list(zip(*(found[number] for number in layers), strict=True))
