"""vitlab explain attention, rollout, relevance, compare: heat maps on pictures."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vitlab.cli.console import out as console
from vitlab.cli.console import say
from vitlab.cli.explain.job import Job, Options, finish, lay, open_model, parse_list, parse_numbers, parse_point, start
from vitlab.explain import draw
from vitlab.explain.agreement import agreement
from vitlab.explain.attention_maps import attention_maps, read_by_the_head
from vitlab.explain.inputs import evaluating
from vitlab.explain.methods import METHODS, find_method
from vitlab.explain.relevance import check_classes, class_numbers
from vitlab.explain.rollout import rollout as attention_rollout
from vitlab.explain.stages import heads_of, in_stages, sights

TOKENS = {"cls": "class", "class": "class", "distillation": "distillation", "mean": "mean"}
GRADIENTS = ("relevance", "grad_cam", "gradient_x_input")
SIGNED = "gradient_x_input"  # speaks for a class, and against it
COMPARED = "attention,rollout,relevance,grad_cam"
COLUMNS = 12  # layers of a sheet with several pictures
TOKEN = "Blue: the token that looks, of each layer's own grid."


def attention(options: Options, layers: str | None, heads: str | None, query: str | None) -> None:
    asked_layers = None if layers is None else parse_numbers(layers, "--layers", "all")
    asked_heads = parse_numbers(heads or "all", "--heads", "all", "mean")
    point = None if query is None or query in TOKENS else parse_point(query, "--query")
    job = start(options)
    depth = len(job.model.blocks)
    if asked_layers is None:
        asked_layers = "all" if len(job.views) == 1 or depth <= COLUMNS else _evenly(depth)
        if asked_layers != "all":
            say(f"note: {COLUMNS} of {depth} layers are drawn; --layers all draws every one.")
    _check_token(job, query)
    patches = [None if point is None else view.patch_under(*point) for view in job.views]
    staged = in_stages(job.model)
    if staged and heads is None and not _equal_heads(job.model, asked_layers):
        asked_heads = "mean"  # they have unlike numbers of them
    maps, before = _attention(job, asked_layers, asked_heads, TOKENS.get(query or ""), patches)
    numbers = list(range(depth)) if isinstance(asked_layers, str) else [n % depth for n in asked_layers]
    if isinstance(asked_heads, str):
        which = [] if asked_heads == "mean" else list(range(maps.shape[2]))
    else:
        which = asked_heads if staged else [n % job.model.config.heads for n in asked_heads]
    who = _who(job, query, point)
    found = {"maps": maps, "prefix": before, "layers": numbers, "query": who}
    found["heads"] = which or ["mean"]
    seen = None
    if staged:
        found |= {"padding": before[..., -1], "prefix": before[..., :-1]}
        found["stage"] = [job.model.config.stage_of(n) for n in numbers]
        if point is not None:
            seen = [sights(job.model, view.size, p or 0, numbers) for view, p in zip(job.views, patches, strict=True)]
            rows, columns = job.views[0].grid
            found["query_box"] = [[one.who for one in row] for row in seen]
            found["query_window"] = [[one.window or (0, 0, columns, rows) for one in row] for row in seen]
    if point is not None:
        found["query_patch"] = patches

    def page(_: Any) -> str:
        text, note = draw.attention_page(
            job.model, job.images, job.views, layers=asked_layers, heads=asked_heads, title=f"Attention in {job.name}"
        )
        if note:
            say(f"note: {note}")
        return text

    single = len(which) == 1 and np.max(job.model.config.heads) > 1
    title = f"Attention of {who}" + (f", head {which[0]}" if single else "")
    windows = any(one.window for row in seen or [] for one in row)
    told = "" if seen is None else TOKEN + (" White: its window." if windows else "")
    drawn: dict[str, Any] = dict(layers=numbers, heads=which or None, patches=patches, sights=seen, note=told)
    figure = lambda: draw.attention(job.views, maps, title=title, **drawn)
    finish(job, figure, found, page, {"query": who, "layers": numbers})


def rollout(options: Options, discard: float) -> None:
    if not 0 <= discard < 1:
        raise ValueError(f"--discard {discard:g} is a share: at least 0 and below 1, e.g. 0.9.")
    job = start(options)
    maps = attention_rollout(job.model, job.images, discard, batch_size=job.many)
    note = "Attention multiplied through all layers." + (f" Lowest {discard:.0%} discarded." if discard else "")
    _one_map(job, "rollout", maps, "Attention rollout", note, {"discard": discard})


def relevance(options: Options, method: str, target: str | None) -> None:
    if method not in GRADIENTS:
        raise ValueError(f"--method: there is no {method!r}. There are: {', '.join(GRADIENTS)}.")
    if options.texts and target is not None:
        raise ValueError("--target names one of a model's classes; with --text the sentences are what is asked for.")
    job = start(options)
    if options.texts:
        _sentences(job, method)
        return
    classes = _classes(job, target)
    maps = METHODS[method](job.model, job.images, classes)
    names = [_label(job.model, n) for n in classes]
    speaks = f"for {names[0]}" if len(set(names)) == 1 else "for each picture's top class"
    _one_map(job, method, maps, f"{_title(method)} {speaks}", "", {"class": classes, "explained": names})


def compare(options: Options, other: str | None, methods: str | None, target: str | None) -> None:
    named = parse_list(methods or ("rollout" if other else COMPARED), "--methods", list(METHODS))
    if other is None and len(named) < 2:
        raise ValueError(
            f"compare needs two methods, --methods {named[0]},relevance, or a second model: --with CHECKPOINT."
        )
    job = start(options, keep=other is not None)
    pairs = [(job.model, job.images, job.views)]
    if other is not None:
        model = open_model(other, options.size, texts=options.texts)
        before = set(job.failed)
        batch, views = lay(model, job.pictures, job.failed, job.many)
        if set(job.failed) - before or batch is None:
            raise ValueError(f"{other} cannot read {', '.join(set(job.failed) - before)}. Leave it out.")
        pairs.append((model, batch.images, views))
    columns, numbers = {}, {}
    for number, (model, images, views) in enumerate(pairs):
        explained = _targets(model, images, target, named)
        for name in named:
            maps = find_method(name)(model, images, explained).numpy()
            key = name if other is None else f"{'AB'[number]}: {name}"
            columns[key] = (views, maps)
            numbers[name if other is None else f"{name}_{'ab'[number]}"] = maps
    agree = _agreements(columns)
    captions = None
    if other is not None:
        captions = [[views[i].said for views, _ in columns.values()] for i in range(len(job.views))]
    title = "Methods compared" if other is None else "Models compared"
    note = "" if other is None else f"A is {job.name}, B is {other}."
    signed = [key for key in columns if key.endswith(SIGNED)]
    figure = lambda: draw.heat(job.views, columns, title=title, note=note, captions=captions, signed=signed)
    page = lambda _: draw.maps_page(job.views, columns, title=title, signed=signed)
    rows: list[dict[str, Any]] = [
        {"first": a, "second": b, "agreement": [float(v) if np.isfinite(v) else None for v in values]}
        for (a, b), values in agree.items()
    ]
    numbers |= {"agreement_of": [f"{a} | {b}" for a, b in agree], "agreement": np.array(list(agree.values()))}
    finish(job, figure, numbers, page, {"agreement": rows}, show=lambda: _show(rows))


def _attention(
    job: Job, layers: Any, heads: Any, token: str | None, patches: list[int | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps and prefix shares; where a pixel is asked for, pictures with the same patch under it go together."""
    ask: dict[str, Any] = dict(layers=layers, heads=heads, batch_size=job.many)
    if patches[0] is None:
        return attention_maps(job.model, job.images, query=token, prefix=True, **ask)
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for patch in dict.fromkeys(patches):
        indices = [i for i, p in enumerate(patches) if p == patch]
        found = attention_maps(job.model, job.images[indices], query=patch, prefix=True, **ask)
        parts |= {i: (maps, before) for i, maps, before in zip(indices, *found, strict=True)}
    maps, before = zip(*(parts[i] for i in range(len(patches))), strict=True)
    return torch.stack(maps), torch.stack(before)


def _check_token(job: Job, query: str | None) -> None:
    layout = job.model.layout(*job.views[0].size)
    prefix = job.model.prefix if in_stages(job.model) else layout.prefix
    if TOKENS.get(query or "") in {"class", "distillation"} - set(prefix):
        have = [word for word, token in (("cls", "class"), ("distillation",) * 2) if token in prefix]
        raise ValueError(
            f"--query {query}: this model has {layout}. Ask for {', '.join([*have, 'mean'])} (the average over all "
            "patches), or the patch under a pixel: X,Y."
        )


def _who(job: Job, query: str | None, point: tuple[float, float] | None) -> str:
    if point is not None:
        return f"the patch at {point[0]:g}, {point[1]:g}"
    token = TOKENS.get(query or "") or read_by_the_head(job.model)
    if token == "mean":
        return "all patches (mean)"
    return f"the {token} token" + (
        ", before its stage all patches (mean)" if query is None and in_stages(job.model) else ""
    )


def _equal_heads(model: Any, layers: Any) -> bool:
    try:
        return heads_of(model, layers) > 0
    except ValueError:
        return False


def _one_map(job: Job, name: str, maps: torch.Tensor, title: str, note: str, more: dict[str, Any]) -> None:
    heat = maps.numpy()
    columns, signed = {_title(name): heat}, [_title(name)] if name == SIGNED else []
    figure = lambda: draw.heat(job.views, columns, title=title, note=note, signed=signed)
    page = lambda _: draw.maps_page(job.views, columns, title=title, signed=signed)
    finish(job, figure, {"maps": heat, **more}, page, more)


def _sentences(job: Job, method: str) -> None:
    """A map for every picture and sentence, with their cosine below it."""
    names = job.model.labels
    columns = {name: METHODS[method](job.model, job.images, number).numpy() for number, name in enumerate(names)}
    cosines = job.model.cosines(job.images, batch_size=job.many).cpu()  # (B, T)
    captions = [[f"cosine {value:.3f}" for value in row] for row in cosines.tolist()]
    title = f"{_title(method)} for a sentence" if len(names) == 1 else f"{_title(method)} for {len(names)} sentences"
    signed = names if method == SIGNED else []
    figure = lambda: draw.heat(job.views, columns, title=title, captions=captions, signed=signed)
    page = lambda _: draw.maps_page(job.views, columns, title=title, signed=signed)
    numbers = {"maps": np.stack(list(columns.values()), axis=1), "sentences": names, "cosine": cosines.numpy()}
    finish(job, figure, numbers, page, {"sentences": names, "cosine": cosines.tolist()})


def _classes(job: Job, target: str | None) -> list[int]:
    return _targets(job.model, job.images, target, GRADIENTS) or []


def _targets(model: Any, images: torch.Tensor, target: str | None, methods: Any) -> list[int] | None:
    """The class meant for each picture; None where no method asks for one."""
    if not set(methods) & set(GRADIENTS):
        return None
    check_classes(model)
    with torch.no_grad(), evaluating(model):
        logits = torch.cat([model(part) for part in images.split(8)])
    return class_numbers(model, logits, target).tolist()


def _label(model: Any, number: int) -> str:
    return model.labels[number] if model.labels and number < len(model.labels) else f"class {number}"


def _title(method: str) -> str:
    return {"grad_cam": "Grad-CAM", "gradient_x_input": "Gradient x input"}.get(method, method.capitalize())


def _agreements(columns: dict[str, Any]) -> dict[tuple[str, str], np.ndarray]:
    """Every pair of columns; for two models, each method with itself."""
    names = list(columns)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    if any(name.startswith("A: ") for name in names):
        pairs = [(a, b) for a, b in pairs if a[3:] == b[3:]]
    return {(a, b): agreement(*columns[a], *columns[b]) for a, b in pairs}


def _show(rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("map", "and map", "rank correlation"):
        table.add_column(column, justify="right" if column[0] == "r" else "left")
    for row in rows:
        values = np.array([v for v in row["agreement"] if v is not None])
        spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
        table.add_row(row["first"], row["second"], f"{values.mean():.2f}{spread}" if len(values) else "a map is flat")
    console(markup=False).print(table)


def _evenly(depth: int) -> list[int]:
    return sorted({round(i) for i in np.linspace(0, depth - 1, COLUMNS)})
