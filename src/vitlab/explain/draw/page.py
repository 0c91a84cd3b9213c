"""HTML pages that need no other file: move over a patch and read its values, in every layer and head or map.

The numbers are stored in 8 bits between each row's lowest and highest value, in steps that grow with the value, so that
small ones stay apart where one patch has far more than the rest. What would make the file larger than LIMIT is left
out, and the page says so.
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
from numpy.typing import ArrayLike
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.explain.draw.heatmap import DIM, FAINT, STRONG, colours_at, drawn, spread
from vitlab.explain.draw.maps import Columns, with_views
from vitlab.explain.draw.sheet import write_figure
from vitlab.explain.scale import DECADES, DEFAULT, HIGHEST, LOWEST, check_scale
from vitlab.explain.views import View
from vitlab.language import language, translate
from vitlab.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FINE = 64  # cells along the longer side, where two models' patches differ
LIMIT = 5_000_000  # bytes
SIDE = 560  # pixels along the longer side of an image in the page
TEXTS: dict[str, dict[str, Any]] = {
    "attention": {
        "percent": True,
        "lead": "{who} looks",
        "most": "most at {place}",
        "then": "then at {place}",
        "layer_label": "layer",
        "hint": "Move over the image, touch it, or use the arrow keys: the heat is where that patch looks. "
        "Click to hold it.",
        "grid_hint": "Every layer and head (M is their mean). Click one to enlarge it.",
    },
    "likeness": {
        "percent": False,
        "lead": "{who} is like",
        "most": "most like {place}",
        "then": "then like {place}",
        "layer_label": "layer",
        "hint": "Move over the image, touch it, or use the arrow keys: the heat is what is like that patch. "
        "Click to hold it.",
        "grid_hint": "",
    },
    "maps": {
        "percent": False,
        "lead": "{who}",
        "most": "highest at {place}",
        "then": "then at {place}",
        "layer_label": "map",
        "hint": "Move over the image, touch it, or use the arrow keys to read a patch's value. Click to hold it.",
        "grid_hint": "All maps. Click one to enlarge it.",
    },
}
WORDS = {  # of every kind of page
    "who": "who looks",
    "head": "head",
    "heat": "heat",
    "smooth": "smooth",
    "colours": "colours",
    "images": "the images",
    "all": "all layers and heads, small; the selects above choose the same",
    "place": "row {row}, column {column}",
    "patch": "the patch at {place}",
    "mean": "the mean of all patches",
    "itself": "at itself",
    "this": "this patch",
    "held": "Held. Click again or press Enter to let go.",
    "percentile": f"{LOWEST}st to {HIGHEST}th percentile",
    "log": "log scale",
    "minmax": "lowest to highest",
}


def likeness_page(views: Sequence[View], likeness: ArrayLike, *, title: str, layer: str, scale: str = DEFAULT) -> str:
    """(B, patches, patches): for each patch, how similar the others are."""
    check_size(4 / 3 * np.shape(likeness)[-1] ** 2, LIMIT)
    items = []
    for view, matrix in zip(views, torch.as_tensor(np.asarray(likeness)), strict=True):
        before = torch.zeros(1, 1, len(matrix), 0)
        one = item_of(view, data_url(view), (*eight_bits(matrix[None, None]), before))
        names = {"layers": [translate(layer)], "short_layers": [""], "heads": [""], "short_heads": [""]}
        items.append(one | names | {"prefix": [], "signed": [False], "first": len(matrix) // 2 + view.grid[1] // 2})
    kept = count_that_fit(items, LIMIT)
    note = left_out_note(kept, len(items))
    return page_of("likeness", title, about(views), note, items[:kept], scale=scale)


def maps_page(
    views: Sequence[View],
    columns: Columns,
    *,
    title: str,
    signed: Sequence[str] = (),
    scale: str = DEFAULT,
    note: str = "",
) -> str:
    """Named maps, as `heat` takes them: choose one, and read its values patch by patch."""
    items = []
    for i, view in enumerate(views):
        laid, place = _side_by_side(view, [(own[i], maps[i]) for own, maps in with_views(views, columns).values()])
        rows = torch.as_tensor(laid).flatten(1)  # (maps, patches)
        before = torch.zeros(len(rows), 1, 1, 0)
        one = item_of(view, data_url(view), (*eight_bits(rows[:, None, None]), before)) | place
        names = {
            "layers": list(map(translate, columns)),
            "short_layers": [str(n + 1) for n in range(len(rows))],
            "heads": [""],
        }
        names |= {"short_heads": [""], "signed": [name in signed for name in columns]}
        items.append(one | names | {"prefix": [], "first": -1})
    kept = count_that_fit(items, LIMIT)
    note = " ".join(filter(None, [note, left_out_note(kept, len(items))]))
    return page_of("maps", title, about(views), note, items[:kept], scale=scale)


def figure_page(figure: Figure, *, title: str) -> str:
    """A figure as an image on a page."""
    url, name = figure_url(figure), html.escape(translate(title))
    return (
        f'<!DOCTYPE html>\n<html lang="{html_language()}">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
        f"<title>{name}</title>\n<style>body {{ margin: 0; background: #fff; }} "
        "img { display: block; max-width: 100%; margin: 0 auto; }</style>\n</head>\n"
        f'<body><img alt="{name}" src="{url}"></body>\n</html>\n'
    )


def figure_url(figure: Figure) -> str:
    """A figure as a PNG, as a data URL."""
    buffer = io.BytesIO()
    write_figure(figure, buffer, "png")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _side_by_side(view: View, maps: Sequence[tuple[View, np.ndarray]]) -> tuple[np.ndarray, dict[str, Any]]:
    """Maps of one image on one grid, (maps, rows, columns): their own, or a fine one where two models have different
    patches; then also the place of that grid."""
    if all((own.geometry, own.size, own.grid) == (view.geometry, view.size, view.grid) for own, _ in maps):
        return np.stack([heat for _, heat in maps]), {}
    H, W = view.geometry.original
    shape = (max(1, round(FINE * H / max(H, W))), max(1, round(FINE * W / max(H, W))))
    laid = [spread(heat, own, shape) for own, heat in maps]
    place = {"grid": list(shape), "box": [0, 0, 1, 1], "seen": [0, 0, 1, 1]}
    return np.stack([np.where(np.isnan(heat), np.nanmin(heat), heat) for heat in laid]), place


def fit(
    urls: Sequence[str], layers: list[int], heads: list[int], one: float, limit: int
) -> tuple[int, list[int], bool, str]:
    """How many images, which layers, whether single heads fit below the limit, and a note on what was left out."""
    left_out = []
    room = limit - 60_000  # the page itself
    columns = len(heads) + (len(heads) > 1) or 1

    def fits(count: int, depth: int, wide: int) -> bool:
        return sum(map(len, urls[:count])) + count * depth * wide * one <= room

    B, single = len(urls), bool(heads)
    if single and not fits(B, len(layers), columns):
        single, columns = False, 1
        left_out.append("single heads (their mean is shown)")
    if not fits(B, len(layers), columns):
        most = max((n for n in range(1, len(layers) + 1) if fits(B, n, columns)), default=1)
        chosen = sorted({len(layers) - 1 - round(i) for i in np.linspace(0, len(layers) - 1, most)})
        left_out.append(f"layers {', '.join(str(n + 1) for i, n in enumerate(layers) if i not in chosen)}")
        layers = [layers[i] for i in chosen]
    while B > 1 and not fits(B, len(layers), columns):
        B -= 1
    if len(urls) > B:
        left_out.append(f"{len(urls) - B} of {len(urls)} images")
    check_size(len(urls[0]) + one, room)
    if not left_out:
        return B, layers, single, ""
    note = f"Left out to keep this page below {limit / 1e6:.0f} MB: {'; '.join(left_out)}. "
    return (
        B,
        layers,
        single,
        note + "Ask for fewer layers or heads to see them: --layers -1 --heads 0,1 (counted from 0).",
    )


def check_size(size: float, limit: float) -> None:
    if size > limit:
        raise UsageError(
            f"one layer of one image has {size / 1e6:.1f} MB, more than the {limit / 1e6:.1f} MB that a page may "
            "hold: use a smaller input, --image-size."
        )


def count_that_fit(items: Sequence[Mapping[str, Any]], limit: int) -> int:
    """How many items stay below the limit, at least one."""
    total, kept = 60_000, 0
    for item in items:
        total += sum(len(value) for value in item.values() if isinstance(value, str))
        if total > limit and kept:
            break
        kept += 1
    return kept


def left_out_note(kept: int, total: int) -> str:
    return "" if kept == total else f"Left out to keep this page small: {total - kept} of {total} images."


def with_mean(A: Tensor, single: bool) -> Tensor:
    """(B, h, ...) -> the mean over heads, followed by the heads if `single`."""
    mean = A.mean(1, keepdim=True)
    return torch.cat([mean, A], dim=1) if single and A.shape[1] > 1 else A if single else mean


def eight_bits(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(..., n) -> uint8 (..., n), and each row's values of 0 and 255, (...). b means low + (high - low) (b / 255)^2."""
    low, high = rows.amin(-1, keepdim=True), rows.amax(-1, keepdim=True)
    share = (rows - low) / torch.where(high > low, high - low, 1.0)
    return (share.sqrt() * 255).round().to(torch.uint8).cpu(), low[..., 0].cpu(), high[..., 0].cpu()


def place_of(view: View, url: str) -> dict[str, Any]:
    """An image, and where its patches lie."""
    (H, W), (h, w) = view.geometry.original, view.read
    tall, wide = view.grid[0] * view.patch_size, view.grid[1] * view.patch_size
    shares = np.array([W, H, W, H])
    return {
        "name": view.name,
        "said": view.prediction,
        "image": url,
        "grid": list(view.grid),
        "box": (np.array(view.geometry.to_original((0, 0, wide, tall))) / shares).tolist(),
        "seen": (np.array(view.geometry.to_original((0, 0, w, h))) / shares).tolist(),
    }


def item_of(view: View, url: str, rows: tuple[Tensor, ...]) -> dict[str, Any]:
    values, low, high, before = rows
    return {
        **place_of(view, url),
        "queries": values.shape[-2],
        "values": packed(values.numpy().astype(np.uint8)),
        "low": packed(low.numpy().astype("<f4")),
        "high": packed(high.numpy().astype("<f4")),
        "before": packed(before.numpy().astype("<f4")),
    }


def page_of(
    kind: str,
    title: str,
    about: str,
    note: str,
    items: Sequence[Mapping[str, Any]],
    more: Mapping[str, Any] | None = None,
    *,
    scale: str = DEFAULT,
) -> str:
    texts = {**TEXTS[kind], **(more or {}), "title": title, "about": about, "note": note}
    data = {
        "scale": check_scale(scale),
        "words": {name: translate(text) for name, text in WORDS.items()},
        "tokens": _token_names(items[0]["prefix"]),
        "percentiles": [LOWEST, HIGHEST],
        "decades": DECADES,
        **{name: translate(text) if isinstance(text, str) else text for name, text in texts.items()},
        "items": items,
    }
    data |= {"colours": _colours(), "signed_colours": _colours(signed=True)}
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # so that no name ends the script
    page = _template()
    fields = {
        "lang": html_language(),
        "title": html.escape(translate(title)),
        "version": html.escape(__version__),
        "faint": FAINT,
        "strong": STRONG,
        "dim": DIM,
    }
    for name, value in fields.items():
        page = page.replace("{{" + name + "}}", str(value))
    return page.replace("{{data}}", text).encode("utf-8", "replace").decode()


def _token_names(prefix: Sequence[str]) -> dict[str, dict[str, str]]:
    """How one token before the patches is called, and all of its kind."""
    return {
        name: {"one": translate(f"the {name} token"), "all": translate(f"the {prefix.count(name)} {name} tokens")}
        for name in dict.fromkeys(prefix)
    }


def html_language() -> str:
    return "zh-CN" if language() == "zh" else "en"


def about(views: Sequence[View]) -> str:
    rows, columns = views[0].grid
    many = f"{len(views)} images" if len(views) > 1 else "1 image"
    return f"{many}, seen as {rows} x {columns} patches of {views[0].patch_size} x {views[0].patch_size} pixels"


@cache
def _template() -> str:
    return files("vitlab.explain.draw").joinpath("hover.html").read_text(encoding="utf-8")


@cache
def _colours(signed: bool = False) -> str:
    return packed((colours_at(np.arange(256) / 255, signed) * 255).round().astype(np.uint8))


def packed(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def data_url(view: View) -> str:
    """Small images as PNG, larger ones as JPEG."""
    small = max(view.image.size) <= 160
    image = view.image.convert("RGB") if small else drawn(view, SIDE)
    buffer = io.BytesIO()
    image.save(buffer, "PNG" if small else "JPEG", **({} if small else {"quality": 88}))
    return f"data:image/{'png' if small else 'jpeg'};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def head_names(numbers: Sequence[int], single: bool) -> list[str]:
    names = ["mean of heads"] if not single or len(numbers) > 1 else []
    return names + ([f"head {n + 1}" for n in numbers] if single else [])


def layer_names(layers: Sequence[int], heads: Sequence[str]) -> dict[str, Any]:
    return {
        "signed": [False] * len(layers),
        "layer_numbers": list(layers),  # from 0, as in the API; words count from 1
        "layers": [translate(f"layer {layer + 1}") for layer in layers],
        "short_layers": [str(layer + 1) for layer in layers],
        "head_numbers": [None if name[0] == "m" else int(name.split()[1]) - 1 for name in heads],  # None: their mean
        "heads": list(map(translate, heads)),
        "short_heads": ["M" if name[0] == "m" else name.split()[1] for name in heads],
    }
