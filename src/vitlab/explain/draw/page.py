"""One HTML file that needs nothing else: move over a patch and see where it looks, in every layer and head.

The attention is inside it, in 8 bits between each row's lowest and highest value. What would make the file larger than
LIMIT is left out, and the page says so.
"""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitlab.explain.draw.maps import with_views
from vitlab.explain.draw.sheet import write_figure
from vitlab.explain.draw.view import DIM, FAINT, STRONG, View, colours_at, drawn, spread
from vitlab.explain.inputs import Images, as_batch, evaluating, wide
from vitlab.layers.trace import Trace, check_offered
from vitlab.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMIT = 5_000_000  # bytes
SIDE = 560  # of a picture in the page
FINE = 64  # cells along the longer side, where two models' patches differ
WORDS: dict[str, dict[str, Any]] = {
    "attention": {
        "percent": True,
        "verb": "looks",
        "at": "at",
        "layer_label": "layer",
        "hint": "Move over the picture, touch it, or use the arrow keys: the heat is where that patch looks. "
        "Click to hold it.",
        "grid_hint": "Every layer and head (M is their mean). Click one to enlarge it.",
    },
    "likeness": {
        "percent": False,
        "verb": "is like",
        "at": "",
        "layer_label": "layer",
        "hint": "Move over the picture, touch it, or use the arrow keys: the heat is what is like that patch. "
        "Click to hold it.",
        "grid_hint": "",
    },
    "maps": {
        "percent": False,
        "verb": "",
        "at": "",
        "layer_label": "map",
        "hint": "Move over the picture, touch it, or use the arrow keys to read a patch's value. Click to hold it.",
        "grid_hint": "All maps. Click one to enlarge it.",
    },
}


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
    layout = model.layout(*batch.images.shape[-2:])
    depth, prefix = len(model.blocks), list(layout.prefix)
    asked = list(range(depth)) if isinstance(layers, str) else [layer % depth for layer in layers]
    numbers: list[int] = (
        [] if heads == "mean" else list(range(model.config.heads)) if isinstance(heads, str) else list(heads)
    )
    patches = layout.grid[0] * layout.grid[1]
    one = (len(prefix) + patches) * (patches + 4 * (2 + len(prefix))) * 4 / 3  # bytes of one layer's head, in base64
    pictures = [_data_url(view) for view in views]
    kept, asked, single, note = _fit(pictures, asked, numbers, one, limit)
    found: dict[int, list[tuple[Tensor, ...]]] = {layer: [] for layer in asked}

    def keep(weights: Tensor, layer: int | None) -> None:
        A = wide(weights)  # (B, h, N, N)
        mean = A.mean(1, keepdim=True)
        A = torch.cat([mean, A], dim=1) if single and A.shape[1] > 1 else A if single else mean
        assert layer is not None
        found[layer].append((*_eight_bits(A[..., len(prefix) :]), A[..., : len(prefix)].cpu()))

    with evaluating(model), torch.no_grad():
        for part in as_batch(model, batch.images[:kept]).split(batch_size):
            model(part.images, trace=Trace("attention", layers=asked, heads=numbers or "all", reduce=keep))
    values, low, high, before = (
        torch.stack([torch.cat([part[i] for part in found[layer]]) for layer in asked], dim=1) for i in range(4)
    )  # (B, L, h, ...)
    names = ["mean of heads"] if not single or len(numbers) > 1 else []
    names += [f"head {n}" for n in numbers] if single else []
    items = [
        _item(view, picture, (values[i], low[i], high[i], before[i]))
        | {
            "prefix": prefix,
            "signed": [False] * len(asked),
            "layers": [f"layer {layer}" for layer in asked],
            "short_layers": [str(layer) for layer in asked],
            "heads": names,
            "short_heads": ["M" if name[0] == "m" else name.split()[1] for name in names],
            "first": 0 if model.config.head.pooling in ("class", "class_mean") else -1,
        }
        for i, (view, picture) in enumerate(zip(views[:kept], pictures, strict=False))
    ]
    return _page("attention", title, _about(views), note, items), note


def likeness_page(views: Sequence[View], likeness: Any, *, title: str, layer: str) -> str:
    """(B, patches, patches) of any kind: for each patch of a picture, how like it the others are."""
    _check_one(4 / 3 * np.shape(likeness)[-1] ** 2, LIMIT)
    items = []
    for view, matrix in zip(views, torch.as_tensor(np.asarray(likeness)), strict=True):
        before = torch.zeros(1, 1, len(matrix), 0)
        one = _item(view, _data_url(view), (*_eight_bits(matrix[None, None]), before))
        names = {"layers": [layer], "short_layers": [""], "heads": [""], "short_heads": [""]}
        items.append(one | names | {"prefix": [], "signed": [False], "first": len(matrix) // 2 + view.grid[1] // 2})
    kept = _as_many_as_fit(items, LIMIT)
    note = _pictures_left_out(kept, len(items))
    return _page("likeness", title, _about(views), note, items[:kept])


def maps_page(views: Sequence[View], columns: Mapping[str, Any], *, title: str, signed: Sequence[str] = ()) -> str:
    """Maps with names, as `heat` takes them: choose one, and read its values patch by patch."""
    items = []
    for i, view in enumerate(views):
        laid, place = _side_by_side(view, [(own[i], found[i]) for own, found in with_views(views, columns).values()])
        rows = torch.as_tensor(laid).flatten(1)  # (maps, patches)
        before = torch.zeros(len(rows), 1, 1, 0)
        one = _item(view, _data_url(view), (*_eight_bits(rows[:, None, None]), before)) | place
        names = {"layers": list(columns), "short_layers": [str(n + 1) for n in range(len(rows))], "heads": [""]}
        names |= {"short_heads": [""], "signed": [name in signed for name in columns]}
        items.append(one | names | {"prefix": [], "first": -1})
    kept = _as_many_as_fit(items, LIMIT)
    return _page("maps", title, _about(views), _pictures_left_out(kept, len(items)), items[:kept])


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


# ------------------------------------------------------------------------------------------------------------- parts


def _fit(
    pictures: Sequence[str], layers: list[int], heads: list[int], one: float, limit: int
) -> tuple[int, list[int], bool, str]:
    """How many pictures, which layers, and whether single heads: as much as goes into the page, and what does not."""
    left_out = []
    room = limit - 60_000  # the page itself
    columns = len(heads) + (len(heads) > 1) or 1

    def fits(count: int, depth: int, wide: int) -> bool:
        return sum(map(len, pictures[:count])) + count * depth * wide * one <= room

    B, single = len(pictures), bool(heads)
    if single and not fits(B, len(layers), columns):
        single, columns = False, 1
        left_out.append("single heads (their mean is shown)")
    if not fits(B, len(layers), columns):
        most = max((n for n in range(1, len(layers) + 1) if fits(B, n, columns)), default=1)
        chosen = sorted({len(layers) - 1 - round(i) for i in np.linspace(0, len(layers) - 1, most)})
        left_out.append(f"layers {', '.join(str(n) for i, n in enumerate(layers) if i not in chosen)}")
        layers = [layers[i] for i in chosen]
    while B > 1 and not fits(B, len(layers), columns):
        B -= 1
    if len(pictures) > B:
        left_out.append(f"{len(pictures) - B} of {len(pictures)} pictures")
    _check_one(len(pictures[0]) + one, room)
    if not left_out:
        return B, layers, single, ""
    note = f"Left out to keep this page below {limit / 1e6:.0f} MB: {'; '.join(left_out)}. "
    return B, layers, single, note + "Ask for fewer layers or heads to see them: --layers -1 --heads 0,1."


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


def _check_one(size: float, limit: float) -> None:
    if size > limit:
        raise ValueError(
            f"one layer of one picture has {size / 1e6:.1f} MB, more than the {limit / 1e6:.1f} MB that a page may "
            "hold: use a smaller input, --image-size."
        )


def _as_many_as_fit(items: Sequence[Mapping[str, Any]], limit: int) -> int:
    total, kept = 60_000, 0
    for item in items:
        total += sum(len(value) for value in item.values() if isinstance(value, str))
        if total > limit and kept:
            break
        kept += 1
    return kept


def _pictures_left_out(kept: int, total: int) -> str:
    return "" if kept == total else f"Left out to keep this page small: {total - kept} of {total} pictures."


def _eight_bits(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., n) -> uint8 (..., n), and what 0 and 255 of each row stand for, (...)."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    step = torch.where(high > low, high - low, 1.0)
    return ((rows - low) / step * 255).round().to(torch.uint8).cpu(), low[..., 0].cpu(), high[..., 0].cpu()


def _item(view: View, picture: str, rows: tuple[Tensor, ...]) -> dict[str, Any]:
    values, low, high, before = rows
    (H, W), (h, w) = view.geometry.original, view.read
    tall, wide = view.grid[0] * view.patch_size, view.grid[1] * view.patch_size
    shares = np.array([W, H, W, H])
    return {
        "name": view.name,
        "said": view.said,
        "picture": picture,
        "grid": list(view.grid),
        "box": (np.array(view.geometry.to_original((0, 0, wide, tall))) / shares).tolist(),
        "seen": (np.array(view.geometry.to_original((0, 0, w, h))) / shares).tolist(),
        "queries": values.shape[-2],
        "values": _base64(values.numpy().astype(np.uint8)),
        "low": _base64(low.numpy().astype("<f4")),
        "high": _base64(high.numpy().astype("<f4")),
        "before": _base64(before.numpy().astype("<f4")),
    }


def _page(kind: str, title: str, about: str, note: str, items: Sequence[Mapping[str, Any]]) -> str:
    data = {**WORDS[kind], "title": title, "about": about, "note": note, "items": items}
    data |= {"colours": _colours(), "signed_colours": _colours(signed=True)}
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # so that no name ends the script
    page = _template()
    fields = {
        "title": html.escape(title),
        "version": html.escape(__version__),
        "faint": FAINT,
        "strong": STRONG,
        "dim": DIM,
    }
    for name, value in fields.items():
        page = page.replace("{{" + name + "}}", str(value))
    return page.replace("{{data}}", text).encode("utf-8", "replace").decode()


def _about(views: Sequence[View]) -> str:
    rows, columns = views[0].grid
    many = f"{len(views)} pictures" if len(views) > 1 else "1 picture"
    return f"{many}, seen as {rows} x {columns} patches of {views[0].patch_size} x {views[0].patch_size} pixels"


@cache
def _template() -> str:
    return files("vitlab.explain.draw").joinpath("hover.html").read_text(encoding="utf-8")


@cache
def _colours(signed: bool = False) -> str:
    return _base64((colours_at(np.arange(256) / 255, signed) * 255).round().astype(np.uint8))


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def _data_url(view: View) -> str:
    """Small pictures exactly, photographs as JPEG."""
    small = max(view.picture.size) <= 160
    picture = view.picture.convert("RGB") if small else drawn(view, SIDE)
    buffer = io.BytesIO()
    picture.save(buffer, "PNG" if small else "JPEG", **({} if small else {"quality": 88}))
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"
