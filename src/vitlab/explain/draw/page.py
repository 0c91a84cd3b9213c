"""One HTML file that needs nothing else: move over a patch and see where it looks, in every layer and head.

The attention is inside it, in 8 bits between each row's lowest and highest value. What would make the file larger than
LIMIT is left out, and the page says so.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitlab.explain.attention_maps import read_by_the_head
from vitlab.explain.draw.maps import with_views
from vitlab.explain.draw.page_parts import (
    LIMIT,
    about,
    as_many_as_fit,
    check_one,
    data_url,
    eight_bits,
    fit,
    head_names,
    item_of,
    layer_names,
    page_of,
    pictures_left_out,
    with_mean,
)
from vitlab.explain.draw.page_stages import page_in_stages
from vitlab.explain.draw.sheet import write_figure
from vitlab.explain.draw.view import View, spread
from vitlab.explain.inputs import Images, as_batch, evaluating, wide
from vitlab.explain.stages import in_stages
from vitlab.layers.trace import Trace, check_offered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FINE = 64  # cells along the longer side, where two models' patches differ


def attention_page(
    model: Any,
    images: Images,
    views: Sequence[View],
    *,
    layers: str | Sequence[int] = "all",
    heads: str | Sequence[int] = "all",
    title: str = "Where patches look",
    limit: int = LIMIT,
    batch_size: int = 4,
) -> tuple[str, str]:
    """The page, and what was left out of it ("" if nothing). One layer's attention is held at a time."""
    check_offered(["attention"], model.traceable)
    batch = as_batch(model, images)
    if in_stages(model):
        return page_in_stages(model, batch, views, layers, heads, title, limit, batch_size)
    layout = model.layout(*batch.images.shape[-2:])
    depth, prefix = len(model.blocks), list(layout.prefix)
    asked = list(range(depth)) if isinstance(layers, str) else [layer % depth for layer in layers]
    numbers: list[int] = (
        [] if heads == "mean" else list(range(model.config.heads)) if isinstance(heads, str) else list(heads)
    )
    patches = layout.grid[0] * layout.grid[1]
    one = (len(prefix) + patches) * (patches + 4 * (2 + len(prefix))) * 4 / 3  # bytes of one layer's head, in base64
    pictures = [data_url(view) for view in views]
    kept, asked, single, note = fit(pictures, asked, numbers, one, limit)
    found: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in asked}

    def keep(weights: Tensor, layer: int | None) -> None:
        A = wide(weights)  # (B, h, N, N)
        A = with_mean(A, single)
        assert layer is not None
        found[layer].append((*eight_bits(A[..., len(prefix) :]), A[..., : len(prefix)].cpu()))

    with evaluating(model), torch.no_grad():
        for part in as_batch(model, batch.images[:kept]).split(batch_size):
            model(part.images, trace=Trace("attention", layers=asked, heads=numbers or "all", reduce=keep))
    values, low, high, before = (
        torch.stack([torch.cat([part[i] for part in found[layer]]) for layer in asked], dim=1) for i in range(4)
    )  # (B, L, h, ...)
    named = layer_names(asked, head_names(numbers, single))
    named |= {"prefix": prefix, "first": 0 if read_by_the_head(model) == "class" else -1}
    items = [
        item_of(view, picture, (values[i], low[i], high[i], before[i])) | named
        for i, (view, picture) in enumerate(zip(views[:kept], pictures, strict=False))
    ]
    return page_of("attention", title, about(views), note, items), note


def likeness_page(views: Sequence[View], likeness: Any, *, title: str, layer: str) -> str:
    """(B, patches, patches) of any kind: for each patch of a picture, how like it the others are."""
    check_one(4 / 3 * np.shape(likeness)[-1] ** 2, LIMIT)
    items = []
    for view, matrix in zip(views, torch.as_tensor(np.asarray(likeness)), strict=True):
        before = torch.zeros(1, 1, len(matrix), 0)
        one = item_of(view, data_url(view), (*eight_bits(matrix[None, None]), before))
        names = {"layers": [layer], "short_layers": [""], "heads": [""], "short_heads": [""]}
        items.append(one | names | {"prefix": [], "signed": [False], "first": len(matrix) // 2 + view.grid[1] // 2})
    kept = as_many_as_fit(items, LIMIT)
    note = pictures_left_out(kept, len(items))
    return page_of("likeness", title, about(views), note, items[:kept])


def maps_page(views: Sequence[View], columns: Mapping[str, Any], *, title: str, signed: Sequence[str] = ()) -> str:
    """Maps with names, as `heat` takes them: choose one, and read its values patch by patch."""
    items = []
    for i, view in enumerate(views):
        laid, place = _side_by_side(view, [(own[i], found[i]) for own, found in with_views(views, columns).values()])
        rows = torch.as_tensor(laid).flatten(1)  # (maps, patches)
        before = torch.zeros(len(rows), 1, 1, 0)
        one = item_of(view, data_url(view), (*eight_bits(rows[:, None, None]), before)) | place
        names = {"layers": list(columns), "short_layers": [str(n + 1) for n in range(len(rows))], "heads": [""]}
        names |= {"short_heads": [""], "signed": [name in signed for name in columns]}
        items.append(one | names | {"prefix": [], "first": -1})
    kept = as_many_as_fit(items, LIMIT)
    return page_of("maps", title, about(views), pictures_left_out(kept, len(items)), items[:kept])


def figure_page(figure: Figure, *, title: str) -> str:
    """A figure on a page of its own, for what has no patches to move over."""
    buffer = io.BytesIO()
    write_figure(figure, buffer, "png")
    picture = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    name = html.escape(title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>{name}</title>\n<style>body {{ margin: 0; background: #fff; }} "
        "img { display: block; max-width: 100%; margin: 0 auto; }</style>\n</head>\n"
        f'<body><img alt="{name}" src="{picture}"></body>\n</html>\n'
    )


def _side_by_side(view: View, maps: Sequence[tuple[View, np.ndarray]]) -> tuple[np.ndarray, dict[str, Any]]:
    """Maps of one picture on one grid, (maps, rows, columns): their own, or a fine one where two models cut the picture
    differently, with what it says of its place."""
    if all((own.geometry, own.size, own.grid) == (view.geometry, view.size, view.grid) for own, _ in maps):
        return np.stack([heat for _, heat in maps]), {}
    H, W = view.geometry.original
    shape = (max(1, round(FINE * H / max(H, W))), max(1, round(FINE * W / max(H, W))))
    laid = [spread(heat, own, shape) for own, heat in maps]
    whole = {"grid": list(shape), "box": [0, 0, 1, 1], "seen": [0, 0, 1, 1]}
    return np.stack([np.where(np.isnan(heat), np.nanmin(heat), heat) for heat in laid]), whole
