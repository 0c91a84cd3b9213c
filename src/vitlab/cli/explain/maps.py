"""vitlab explain attention, rollout, relevance, compare: heat maps on pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from vitlab.cli.console import out as console
from vitlab.cli.console import say
from vitlab.cli.explain.job import (
    ExplainJob,
    finish,
    open_model,
    parse_list,
    parse_numbers,
    parse_point,
    preprocess,
    start,
)
from vitlab.cli.explain.options import Options
from vitlab.errors import UsageError
from vitlab.explain import draw
from vitlab.explain.agreement import agreement
from vitlab.explain.attention_maps import attention_maps, default_query
from vitlab.explain.inputs import evaluating
from vitlab.explain.methods import BY_CLASS, COMPARED, METHODS, ScoringMethod
from vitlab.explain.relevance import check_classes, class_numbers
from vitlab.explain.rollout import rollout as attention_rollout
from vitlab.explain.stages import heads_of, in_stages, sights

TOKENS = {"cls": "class", "class": "class", "distillation": "distillation", "mean": "mean"}
COLUMNS = 12  # layers of a sheet with several images
TOKEN = "Blue: the token that looks, of each layer's own grid."


def attention(options: Options, layers: str | None, heads: str | None, query: str | None) -> None:
    layer_choice = None if layers is None else parse_numbers(layers, "--layers", "all")
    head_choice = parse_numbers(heads or "all", "--heads", "all", "mean")
    point = None if query is None or query in TOKENS else parse_point(query, "--query")
    job = start(options)
    depth = len(job.model.blocks)
    if layer_choice is None:
        layer_choice = "all" if len(job.views) == 1 or depth <= COLUMNS else _evenly(depth)
        if layer_choice != "all":
            say(f"note: {COLUMNS} of {depth} layers are drawn; --layers all draws every one.")
    _check_token(job, query)
    patches = [None if point is None else view.patch_under(*point) for view in job.views]
    staged = in_stages(job.model)
    if staged and heads is None and not _equal_heads(job.model, layer_choice):
        head_choice = "mean"  # layers have different numbers of heads
    maps, before = _attention(job, layer_choice, head_choice, TOKENS.get(query or ""), patches)
    layer_numbers = list(range(depth)) if isinstance(layer_choice, str) else [n % depth for n in layer_choice]
    if isinstance(head_choice, str):
        head_numbers = [] if head_choice == "mean" else list(range(maps.shape[2]))
    else:
        head_numbers = head_choice if staged else [n % job.model.config.heads for n in head_choice]
    who = _query_name(job, query, point)
    numbers: dict[str, Any] = {"maps": maps, "prefix": before, "layers": layer_numbers, "query": who}
    numbers["heads"] = head_numbers or ["mean"]
    sights_by_image = None
    if staged:
        numbers |= {"padding": before[..., -1], "prefix": before[..., :-1]}
        numbers["stage"] = [job.model.config.stage_of(n) for n in layer_numbers]
        if point is not None:
            sights_by_image = [
                sights(job.model, view.size, p or 0, layer_numbers) for view, p in zip(job.views, patches, strict=True)
            ]
            rows, columns = job.views[0].grid
            numbers["query_box"] = [[one.who for one in row] for row in sights_by_image]
            numbers["query_window"] = [[one.window or (0, 0, columns, rows) for one in row] for row in sights_by_image]
    if point is not None:
        numbers["query_patch"] = patches

    def page() -> str:
        text, note = draw.attention_page(
            job.model, job.images, job.views, layers=layer_choice, heads=head_choice, title=f"Attention in {job.name}"
        )
        if note:
            say(f"note: {note}")
        return text

    single = len(head_numbers) == 1 and np.max(job.model.config.heads) > 1
    title = f"Attention of {who}" + (f", head {head_numbers[0]}" if single else "")
    windows = any(one.window for row in sights_by_image or [] for one in row)
    note = "" if sights_by_image is None else TOKEN + (" White: its window." if windows else "")
    shown: dict[str, Any] = dict(layers=layer_numbers, heads=head_numbers or None, patches=patches)
    figure = lambda: draw.attention(job.views, maps, title=title, sights=sights_by_image, note=note, **shown)
    finish(job, figure, numbers, page, {"query": who, "layers": layer_numbers})


def rollout(options: Options, discard: float) -> None:
    if not 0 <= discard < 1:
        raise UsageError(f"--discard {discard:g} is a share: at least 0 and below 1, e.g. 0.9.")
    job = start(options)
    maps = attention_rollout(job.model, job.images, discard, batch_size=job.batch_size)
    note = "Attention multiplied through all layers." + (f" Lowest {discard:.0%} discarded." if discard else "")
    _draw_one_map(job, METHODS["rollout"], maps, "Attention rollout", note, {"discard": discard})


def relevance(options: Options, method: str, target: str | None, texts: Sequence[str]) -> None:
    if method not in BY_CLASS:
        raise UsageError(f"--method: there is no {method!r}. There are: {', '.join(BY_CLASS)}.")
    if texts and target is not None:
        raise UsageError("--target names one of a model's classes; with --text the sentences are what is asked for.")
    job = start(options, texts=texts)
    if texts:
        _draw_sentences(job, METHODS[method])
        return
    classes = _target_classes(job.model, job.images, target)
    maps = METHODS[method](job.model, job.images, classes)
    names = [_label(job.model, n) for n in classes]
    speaks = f"for {names[0]}" if len(set(names)) == 1 else "for each picture's top class"
    title = f"{METHODS[method].title} {speaks}"
    _draw_one_map(job, METHODS[method], maps, title, "", {"class": classes, "explained": names})


def compare(options: Options, other: str | None, methods: str | None, target: str | None, texts: Sequence[str]) -> None:
    names = parse_list(methods or ("rollout" if other else ",".join(COMPARED)), "--methods", list(METHODS))
    if other is None and len(names) < 2:
        raise UsageError(
            f"compare needs two methods, --methods {names[0]},relevance, or a second model: --with CHECKPOINT."
        )
    job = start(options, texts=texts, keep_pictures=other is not None)
    models = [(job.model, job.images, job.views)]
    if other is not None:
        model = open_model(other, options.image_size, texts=texts)
        before = set(job.failed)
        batch, views = preprocess(model, job.pictures, job.failed, job.batch_size)
        if set(job.failed) - before or batch is None:
            raise UsageError(f"{other} cannot read {', '.join(set(job.failed) - before)}. Leave it out.")
        models.append((model, batch.images, views))
    columns, numbers, signed = {}, {}, []
    for number, (model, images, views) in enumerate(models):
        classes = _target_classes(model, images, target) if set(names) & set(BY_CLASS) else None
        for name in names:
            maps = METHODS[name](model, images, classes).numpy()
            key = name if other is None else f"{'AB'[number]}: {name}"
            columns[key] = (views, maps)
            numbers[name if other is None else f"{name}_{'ab'[number]}"] = maps
            signed += [key] if METHODS[name].signed else []
    agree = _agreements(columns)
    captions = None
    if other is not None:
        captions = [[views[i].prediction for views, _ in columns.values()] for i in range(len(job.views))]
    title = "Methods compared" if other is None else "Models compared"
    note = "" if other is None else f"A is {job.name}, B is {other}."
    figure = lambda: draw.heat(job.views, columns, title=title, note=note, captions=captions, signed=signed)
    page = lambda: draw.maps_page(job.views, columns, title=title, signed=signed)
    rows: list[dict[str, Any]] = [
        {"first": a, "second": b, "agreement": [float(v) if np.isfinite(v) else None for v in values]}
        for (a, b), values in agree.items()
    ]
    numbers |= {"agreement_of": [f"{a} | {b}" for a, b in agree], "agreement": np.array(list(agree.values()))}
    finish(job, figure, numbers, page, {"agreement": rows}, show=lambda: _print_agreements(rows))


def _attention(
    job: ExplainJob,
    layers: str | Sequence[int],
    heads: str | Sequence[int],
    token: str | None,
    patches: list[int | None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps and prefix shares. Where the query is a pixel, images with the same patch under it share a batch."""
    settings: dict[str, Any] = dict(layers=layers, heads=heads, batch_size=job.batch_size)
    if patches[0] is None:
        return attention_maps(job.model, job.images, query=token, prefix=True, **settings)
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for patch in dict.fromkeys(patches):
        indices = [i for i, p in enumerate(patches) if p == patch]
        result = attention_maps(job.model, job.images[indices], query=patch, prefix=True, **settings)
        parts |= {i: (maps, before) for i, maps, before in zip(indices, *result, strict=True)}
    maps, before = zip(*(parts[i] for i in range(len(patches))), strict=True)
    return torch.stack(maps), torch.stack(before)


def _check_token(job: ExplainJob, query: str | None) -> None:
    layout = job.model.layout(*job.views[0].size)
    prefix = job.model.prefix if in_stages(job.model) else layout.prefix
    if TOKENS.get(query or "") in {"class", "distillation"} - set(prefix):
        have = [word for word, token in (("cls", "class"), ("distillation",) * 2) if token in prefix]
        raise UsageError(
            f"--query {query}: this model has {layout}. Ask for {', '.join([*have, 'mean'])} (the average over all "
            "patches), or the patch under a pixel: X,Y."
        )


def _query_name(job: ExplainJob, query: str | None, point: tuple[float, float] | None) -> str:
    if point is not None:
        return f"the patch at {point[0]:g}, {point[1]:g}"
    token = TOKENS.get(query or "") or default_query(job.model)
    if token == "mean":
        return "all patches (mean)"
    return f"the {token} token" + (
        ", before its stage all patches (mean)" if query is None and in_stages(job.model) else ""
    )


def _equal_heads(model: Any, layers: str | Sequence[int]) -> bool:
    try:
        return heads_of(model, layers) > 0
    except ValueError:
        return False


def _draw_one_map(
    job: ExplainJob, method: ScoringMethod, maps: torch.Tensor, title: str, note: str, results: dict[str, Any]
) -> None:
    heat = maps.numpy()
    columns, signed = {method.title: heat}, [method.title] if method.signed else []
    figure = lambda: draw.heat(job.views, columns, title=title, note=note, signed=signed)
    page = lambda: draw.maps_page(job.views, columns, title=title, signed=signed)
    finish(job, figure, {"maps": heat, **results}, page, results)


def _draw_sentences(job: ExplainJob, method: ScoringMethod) -> None:
    """A map for every image and sentence, with their cosine below it."""
    names = job.model.labels
    columns = {name: method(job.model, job.images, number).numpy() for number, name in enumerate(names)}
    cosines = job.model.cosines(job.images, batch_size=job.batch_size).cpu()  # (B, T)
    captions = [[f"cosine {value:.3f}" for value in row] for row in cosines.tolist()]
    title = f"{method.title} for a sentence" if len(names) == 1 else f"{method.title} for {len(names)} sentences"
    signed = names if method.signed else []
    figure = lambda: draw.heat(job.views, columns, title=title, captions=captions, signed=signed)
    page = lambda: draw.maps_page(job.views, columns, title=title, signed=signed)
    numbers = {"maps": np.stack(list(columns.values()), axis=1), "sentences": names, "cosine": cosines.numpy()}
    finish(job, figure, numbers, page, {"sentences": names, "cosine": cosines.tolist()})


def _target_classes(model: Any, images: torch.Tensor, target: str | None) -> list[int]:
    """The class to explain for each image."""
    check_classes(model)
    with torch.no_grad(), evaluating(model):
        logits = torch.cat([model(part) for part in images.split(8)])
    return class_numbers(model, logits, target).tolist()


def _label(model: Any, number: int) -> str:
    return model.labels[number] if model.labels and number < len(model.labels) else f"class {number}"


def _agreements(columns: dict[str, Any]) -> dict[tuple[str, str], np.ndarray]:
    """Every pair of columns; for two models, each method with itself."""
    names = list(columns)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    if any(name.startswith("A: ") for name in names):
        pairs = [(a, b) for a, b in pairs if a[3:] == b[3:]]
    return {(a, b): agreement(*columns[a], *columns[b]) for a, b in pairs}


def _print_agreements(rows: list[dict[str, Any]]) -> None:
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
