"""vitlab explain figure7, features, faithfulness, pruned."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch.nn.functional as F

from vitlab.cli.console import out as console
from vitlab.cli.console import say
from vitlab.cli.explain.job import Options, finish, parse_list, parse_point, start
from vitlab.explain import draw
from vitlab.explain.faithfulness import Kind, Row, compare_methods
from vitlab.explain.features import foreground_mask, nearest, patch_similarity, patch_tokens, pca_rgb
from vitlab.explain.methods import METHODS
from vitlab.explain.pruned import pruned_patches
from vitlab.images.read import read_image
from vitlab.printable import one_line
from vitlab.reduce import reducer_of


def figure7(options: Options) -> None:
    job = start(options)
    found = draw.figure7_numbers(job.model, job.images if job.views else None, batch_size=job.many)
    for words in dict.fromkeys(found["missing"].values()):
        names = [name for name, why in found["missing"].items() if why == words]
        say(f"note: {', '.join(names)}: {words}")
    title = f"Inside {job.name}"
    figure = lambda: draw.figure7(found, view=job.views[0] if job.views else None, title=title)
    page = lambda drawn: draw.figure_page(drawn if drawn is not None else figure(), title=title)
    numbers = {key: value for key, value in found.items() if key != "missing"}
    told: dict[str, Any] = {"missing": found["missing"]}
    if "distance" in found:
        told |= {"distance": found["distance"].tolist(), "entropy": found["entropy"].tolist()}
    if "high_norm_found" in found:
        told["high_norm_tokens"] = found["high_norm_found"]
    finish(job, figure, numbers, page, told)


def features(options: Options, joint: bool, at: str | None, mask: bool, layer: int) -> None:
    point = None if at is None else parse_point(at, "--at")
    job = start(options)
    depth = len(job.model.blocks)
    if not -depth <= layer < depth:
        raise ValueError(f"--layer {layer} does not exist: this model has layers 0 to {depth - 1} (or -1, ...).")
    ask: dict[str, Any] = dict(layer=layer, batch_size=job.many)
    foreground = foreground_mask(job.model, job.images, **ask) if mask else None
    columns = {"components": pca_rgb(job.model, job.images, joint, foreground=foreground, **ask).numpy()}
    if foreground is not None:
        columns["foreground"] = foreground.numpy()
    marks = None
    if point is not None:
        patch = job.views[0].patch_under(*point)
        columns["likeness"] = patch_similarity(job.model, job.images, patch, of=0, **ask).numpy()
        marks = [[draw.mark_of(job.views[0], patch)], *[()] * (len(job.views) - 1)]
    title = f"Features of layer {layer % depth}"
    note = "Like parts have like colours" + (", in all pictures alike." if joint and len(job.views) > 1 else ".")
    if point is not None:
        note += " Likeness is to the framed patch" + (" of the first picture." if len(job.views) > 1 else ".")
    figure = lambda: draw.heat(job.views, columns, title=title, note=note, marks=marks)

    def page(_: Any) -> str:
        tokens = F.normalize(patch_tokens(job.model, job.images, **ask).flatten(1, 2), dim=-1)  # (B, N, D)
        return draw.likeness_page(job.views, tokens @ tokens.mT, title=title, layer=f"layer {layer % depth}")

    finish(job, figure, {**columns, "layer": layer % depth}, page)


def neighbours(options: Options, folder: Path, k: int) -> None:
    folder = folder.expanduser()
    if not folder.is_dir():
        raise ValueError(f"--neighbours {folder}: is no folder. Name one with pictures in it.")
    job = start(options)
    found = nearest(
        job.model, job.images, folder, k, batch_size=job.many, skip=lambda words: say(f"note: {one_line(words)}")
    )
    pictures = {one.name: read_image(one.name) for row in found for one in row}
    paired = [[(one, pictures[one.name]) for one in row] for row in found]
    title = f"Most alike in {folder.resolve().name}"
    figure = lambda: draw.neighbours(job.views, paired, title=title)
    page = lambda drawn: draw.figure_page(drawn if drawn is not None else figure(), title=title)
    names = [[one.name for one in row] for row in found]
    values = [[one.similarity for one in row] for row in found]
    told = [[{"image": one.name, "similarity": one.similarity} for one in row] for row in found]

    def show() -> None:
        for view, row in zip(job.views, found, strict=True):
            for one in row:
                console(markup=False).print(one_line(f"{view.name}  {one.similarity:.3f}  {one.name}"), soft_wrap=True)

    finish(job, figure, {"neighbours": names, "similarity": values}, page, {"neighbours": told}, show)


def faithfulness(options: Options, methods: str | None, kinds: str, steps: int, target: str | None) -> None:
    named = parse_list(methods, "--methods", list(METHODS)) if methods else None
    asked: Any = parse_list(kinds, "--kinds", get_args(Kind))
    if len(set(options.texts)) == 1:
        raise ValueError(
            "--text: one sentence alone always has the probability 1. Give a second one to tell it from: "
            f'--text "{options.texts[0]}" --text "something else".'
        )
    job = start(options)
    rows = compare_methods(job.model, job.images, named, asked, target, steps, batch_size=job.many)
    title = f"Faithfulness, {job.name}"
    figure = lambda: draw.faithfulness(rows, title=title)
    page = lambda drawn: draw.figure_page(drawn if drawn is not None else figure(), title=title)
    numbers = {f"{row.kind}_{row.method}": row.curves.numpy() for row in rows}
    finish(job, figure, numbers, page, {"scores": [row.to_dict() for row in rows]}, lambda: _table(rows))


def pruned(options: Options, name: str) -> None:
    reducer = reducer_of(name)
    job = start(options)
    found = pruned_patches(job.model, job.images, reducer, batch_size=job.many)
    title = f"Tokens left by {name}"
    figure = lambda: draw.pruned(job.views, found, title=title)
    page = lambda drawn: draw.figure_page(drawn if drawn is not None else figure(), title=title)
    numbers = {"groups": found.groups, "tokens": found.tokens, "changed": np.array(found.changed, dtype=int)}
    finish(job, figure, numbers, page, {"tokens": found.tokens.tolist()})


def _table(rows: list[Row]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("test", "method", "area", "better than random by", "better in"):
        table.add_column(column, justify="left" if column in ("test", "method") else "right", no_wrap=True)
    for row in rows:
        d = row.to_dict()
        many = d["images"] > 1
        cells = [f"{d['area']:.3f}" + (f" ± {d['spread']:.3f}" if many else "")]
        if row.method != "random":
            cells += [f"{d['gain']:+.3f}" + (f" ± {d['gain_spread']:.3f}" if many else ""), f"{d['wins']:.0%}"]
        table.add_row(row.kind, row.method, *cells)
    console(markup=False).print(table)
    console(markup=False).print("Area: deletion and road lower is better, insertion higher.")
