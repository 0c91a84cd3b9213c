"""vitlab explain figure7, features, faithfulness, reconstruct, pruned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F

from vitlab.cli.console import out as console
from vitlab.cli.console import say
from vitlab.cli.explain.job import finish, parse_list, parse_point, start
from vitlab.cli.explain.options import Options
from vitlab.errors import UsageError
from vitlab.explain import draw
from vitlab.explain.faithfulness import Kind, MethodScore, compare_methods
from vitlab.explain.features import foreground_mask, nearest, patch_similarity, patch_tokens, pca_rgb
from vitlab.explain.figure7 import figure7_numbers
from vitlab.explain.methods import METHODS
from vitlab.explain.pruned import pruned_patches
from vitlab.explain.reconstruct import check_decoder
from vitlab.explain.reconstruct import reconstruct as reconstruct_images
from vitlab.images.read import read_image
from vitlab.printable import one_line
from vitlab.reduce import reducer_of


def figure7(options: Options) -> None:
    job = start(options)
    numbers = figure7_numbers(job.model, job.images if job.views else None, batch_size=job.batch_size)
    missing = numbers["missing"]
    for reason in dict.fromkeys(missing.values()):
        say(f"note: {', '.join(name for name, why in missing.items() if why == reason)}: {reason}")
    title = f"Inside {job.name}"
    figure = lambda: draw.figure7(numbers, view=job.views[0] if job.views else None, title=title)
    results: dict[str, Any] = {"missing": missing}
    if "distance" in numbers:
        results |= {"distance": numbers["distance"].tolist(), "entropy": numbers["entropy"].tolist()}
    if "high_norm_found" in numbers:
        results["high_norm_tokens"] = numbers["high_norm_found"]
    finish(job, figure, {k: v for k, v in numbers.items() if k != "missing"}, title, results)


def features(options: Options, joint: bool, at: str | None, mask: bool, layer: int) -> None:
    point = None if at is None else parse_point(at, "--at")
    job = start(options)
    depth = len(job.model.blocks)
    if not -depth <= layer < depth:
        raise UsageError(f"--layer {layer} does not exist: this model has layers 0 to {depth - 1} (or -1, ...).")
    settings: dict[str, Any] = dict(layer=layer, batch_size=job.batch_size)
    foreground = foreground_mask(job.model, job.images, **settings) if mask else None
    columns = {"components": pca_rgb(job.model, job.images, joint, foreground=foreground, **settings).numpy()}
    if foreground is not None:
        columns["foreground"] = foreground.numpy()
    marks = None
    if point is not None:
        patch = job.views[0].patch_under(*point)
        columns["likeness"] = patch_similarity(job.model, job.images, patch, of=0, **settings).numpy()
        marks = [[draw.mark_of(job.views[0], patch)], *[()] * (len(job.views) - 1)]
    title = f"Features of layer {layer % depth}"
    note = "Like parts have like colours" + (", in all pictures alike." if joint and len(job.views) > 1 else ".")
    if point is not None:
        note += " Likeness is to the framed patch" + (" of the first picture." if len(job.views) > 1 else ".")
    figure = lambda: draw.heat(job.views, columns, title=title, note=note, marks=marks)

    def page() -> str:
        tokens = F.normalize(patch_tokens(job.model, job.images, **settings).flatten(1, 2), dim=-1)  # (B, N, D)
        return draw.likeness_page(job.views, tokens @ tokens.mT, title=title, layer=f"layer {layer % depth}")

    finish(job, figure, {**columns, "layer": layer % depth}, page)


def neighbours(options: Options, folder: Path, k: int) -> None:
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UsageError(f"--neighbours {folder}: is no folder. Name one with pictures in it.")
    job = start(options)
    skip = lambda message: say(f"note: {one_line(message)}")
    rows = nearest(job.model, job.images, folder, k, batch_size=job.batch_size, skip=skip)
    pictures = {one.name: read_image(one.name) for row in rows for one in row}
    title = f"Most alike in {folder.resolve().name}"
    figure = lambda: draw.neighbours(
        job.views, [[(one, pictures[one.name]) for one in row] for row in rows], title=title
    )
    numbers = {
        "neighbours": [[one.name for one in row] for row in rows],
        "similarity": [[one.similarity for one in row] for row in rows],
    }
    results = [[{"image": one.name, "similarity": one.similarity} for one in row] for row in rows]

    def show() -> None:
        for view, row in zip(job.views, rows, strict=True):
            for one in row:
                console(markup=False).print(one_line(f"{view.name}  {one.similarity:.3f}  {one.name}"), soft_wrap=True)

    finish(job, figure, numbers, title, {"neighbours": results}, show)


def faithfulness(
    options: Options, methods: str | None, kinds: str, steps: int, target: str | None, texts: Sequence[str]
) -> None:
    names = parse_list(methods, "--methods", list(METHODS)) if methods else None
    tests = cast("list[Kind]", parse_list(kinds, "--kinds", get_args(Kind)))
    if len(set(texts)) == 1:
        raise UsageError(
            "--text: one sentence alone always has the probability 1. Give a second one to tell it from: "
            f'--text "{texts[0]}" --text "something else".'
        )
    job = start(options, texts=texts)
    scores = compare_methods(job.model, job.images, names, tests, target, steps, batch_size=job.batch_size)
    title = f"Faithfulness, {job.name}"
    figure = lambda: draw.faithfulness(scores, title=title)
    numbers = {f"{score.kind}_{score.method}": score.curves.numpy() for score in scores}
    finish(job, figure, numbers, title, {"scores": [s.to_dict() for s in scores]}, lambda: _print_scores(scores))


def reconstruct(options: Options, mask_ratio: float | None, seed: int) -> None:
    if mask_ratio is not None and not 0 < mask_ratio < 1:
        raise UsageError(f"--mask-ratio {mask_ratio:g} is a share: above 0 and below 1, e.g. 0.75.")
    job = start(options, encoder=False)
    check_decoder(job.model)
    config, preprocess = job.model.config, job.model.preprocess
    share = config.mask_ratio if mask_ratio is None else mask_ratio
    result = reconstruct_images(job.model, job.images, mask_ratio=share, seed=seed, batch_size=job.batch_size)
    hidden = int(result.mask[0].sum())
    title = f"Painted by {job.name}"
    normalised = "Mean and contrast of each patch are the true ones: the model paints normalised pixels."
    note = normalised if config.norm_pix else ""
    figure = lambda: draw.reconstruction(job.views, result, preprocess, title=title, note=note)

    def colours(images: torch.Tensor) -> np.ndarray:
        """(B, C, H, W) -> (B, H, W, C), 0 to 1 as in the file."""
        mean, std = (torch.tensor(v)[:, None, None] for v in (preprocess.mean, preprocess.std))
        return (images * std + mean).permute(0, 2, 3, 1).numpy()

    numbers = {
        "picture": colours(result.images),
        "reconstruction": colours(result.painted),
        "mask": result.mask.numpy(),
        "prediction": result.prediction.numpy(),
        "error": result.error.numpy(),
        "mask_ratio": share,
        "seed": seed,
    }
    results = {"error": result.error.tolist(), "hidden_patches": hidden, "mask_ratio": share, "seed": seed}

    def show() -> None:
        for view, error in zip(job.views, result.error.tolist(), strict=True):
            line = f"{view.name}: error {error:.4f} over {hidden} hidden patches"
            console(markup=False).print(one_line(line), soft_wrap=True)

    finish(job, figure, numbers, title, results, show)


def pruned(options: Options, name: str) -> None:
    reducer = reducer_of(name)
    job = start(options)
    result = pruned_patches(job.model, job.images, reducer, batch_size=job.batch_size)
    title = f"Tokens left by {name}"
    figure = lambda: draw.pruned(job.views, result, title=title)
    numbers = {"groups": result.groups, "tokens": result.tokens, "changed": np.array(result.changed, dtype=int)}
    finish(job, figure, numbers, title, {"tokens": result.tokens.tolist()})


def _print_scores(scores: list[MethodScore]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("test", "method", "area", "better than random by", "better in"):
        table.add_column(column, justify="left" if column in ("test", "method") else "right", no_wrap=True)
    for score in scores:
        d = score.to_dict()
        many = d["images"] > 1
        cells = [f"{d['area']:.3f}" + (f" ± {d['spread']:.3f}" if many else "")]
        if not METHODS[score.method].baseline:
            cells += [f"{d['gain']:+.3f}" + (f" ± {d['gain_spread']:.3f}" if many else ""), f"{d['wins']:.0%}"]
        table.add_row(score.kind, score.method, *cells)
    console(markup=False).print(table)
    console(markup=False).print("Area: deletion and road lower is better, insertion higher.")
