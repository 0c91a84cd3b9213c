"""The figures of lens, attribution, ablate and patch: subject -> Explanation. `figures` has them too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.explain import draw
from vitlab.explain.ablate import How
from vitlab.explain.ablate import ablate as ablate_parts
from vitlab.explain.attribution import attribution as attribute
from vitlab.explain.inputs import TokenModel
from vitlab.explain.lens import lens as read_layers
from vitlab.explain.patch import patch as patch_parts
from vitlab.explain.relevance import Target
from vitlab.explain.stages import Stages
from vitlab.explain.subject import Explanation, Subject
from vitlab.models.hierarchy import Hierarchy
from vitlab.tables import Table

CLOSE = 0.5  # between two logits
LISTED = 12  # the strongest parts, in a table
HALVES = {"attention": "attention", "MLP": "mlps"}  # title -> field of Ablation
STAGE = "Only the last stage has tokens that the head can read: its layers, and its own grid."


def lens(subject: Subject, target: Target = None) -> Explanation:
    """Which class each patch would be read as after every layer, and what the head would say there."""
    model = subject.model
    result = read_layers(model, subject.images, target, batch_size=subject.batch_size)
    best = result.probabilities.max(-1)  # (B, layers)
    labels = [[model.label_of(number) for number in row] for row in best.indices.tolist()]
    captions = [
        [f"{label} {value:.0%}" for label, value in zip(*row, strict=True)]
        for row in zip(labels, best.values.tolist(), strict=True)
    ]
    names = {number: model.label_of(number) for number in range(result.logits.shape[-1])}
    title = f"Logit lens of {subject.name}"
    maps, probability = result.patch_class.numpy(), result.patch_probability.numpy()
    shown = (_painted(subject, maps).round().astype(int), _painted(subject, probability))
    figure = lambda: draw.lens(subject.views, *shown, names, captions, layers=result.layers, title=title)
    numbers = {
        "class": result.target,
        "layers": result.layers,
        "logits": result.logits,
        "probabilities": result.probabilities,
        "patch_class": maps,
        "patch_probability": probability,
        "target_probability": result.target_probability,
    }
    of_target = [row[:, number].tolist() for row, number in zip(result.probabilities, result.target, strict=True)]
    results = {
        "layers": result.layers,
        "top": labels,
        "probability": best.values.tolist(),
        "explained": _labels(model, result.target),
        "explained_probability": of_target,
    }
    tables = []
    for i, view in enumerate(subject.views):
        followed = results["explained"][i]
        titles, right = ["layer", "top class", "probability", "", followed], ("probability", followed)
        tables.append(Table(titles, result.image_rows(i), right, heading=[view.name]))
    return Explanation(subject, title, figure, numbers, results, notes=_stage_note(model), tables=tables)


def attribution(subject: Subject, target: Target = None) -> Explanation:
    """Shares of heads, MLPs, embedding and patches in the logit. One image: all of them; several: the patches."""
    model, views = subject.model, subject.views
    result = attribute(model, subject.images, target, batch_size=subject.batch_size)
    labels = _labels(model, result.target)
    patches = result.patches
    if isinstance(model, Hierarchy):
        patches = Stages(model, *views[0].size).lay(patches.flatten(1), len(model.stages) - 1)
    title = f"Shares in the logit of {labels[0]}" if len(set(labels)) == 1 else "Shares in the logit of each top class"
    shares = [result.parts(i) for i in range(len(views))]
    if len(views) == 1:
        lines = [
            f"{subject.name}, {views[0].name}: logit {float(result.logit[0]):.3f}, sum of the shares "
            f"{float(result.total[0]):.3f}.",
            "A share is direct: what later layers made of it counts as theirs. The last norm's statistics are fixed.",
        ]
        heads, image_map = result.heads[0].numpy(), patches[0].numpy()
        options: dict[str, Any] = dict(layers=result.layers, title=title, lines=lines, scale=subject.scale)
        figure = lambda: draw.attribution(views[0], heads, shares[0], image_map, **options)
    else:
        columns = {"by patch": patches.numpy()}
        captions = [[f"logit {value:.2f}"] for value in result.logit.tolist()]
        note = "What the heads of all layers took from each patch."
        options = dict(title=title, note=note, captions=captions, signed=list(columns), scale=subject.scale)
        figure = lambda: draw.heat(views, columns, **options)
    names = ("logit", "total", "heads", "attention_bias", "mlps", "embedding", "positions", "constant", "sources")
    numbers = {name: getattr(result, name).numpy() for name in names} | {
        "layers": result.layers,
        "class": result.target,
    }
    results = {"explained": labels, "logit": result.logit.tolist(), "sum": result.total.tolist(), "shares": shares}
    tables = []
    for view, label, logit, total, parts in zip(views, labels, results["logit"], results["sum"], shares, strict=True):
        heading = f"{view.name}: logit of {label} {logit:.4f}, sum {total:.4f}"
        tables.append(Table(["part", "share"], _strongest(parts), ("share",), heading=[heading], prose=["part"]))
    numbers["patches"] = patches
    return Explanation(subject, title, figure, numbers, results, notes=_stage_note(model), tables=tables)


def ablate(subject: Subject, how: How = "zero", target: Target = None) -> Explanation:
    """How the class's logit changes without each head, attention layer and MLP; the mean over several images."""
    result = ablate_parts(subject.model, subject.images, target, how, batch_size=subject.batch_size)
    labels = _labels(subject.model, result.target)
    parts = {name: getattr(result, name).numpy() for name in ("heads", "attention", "mlps")}
    title = f"Ablation in {subject.name}"
    what = {"zero": "zeros", "mean": "the mean over its patches"}[how]
    about = labels[0] if len(set(labels)) == 1 else "each image's top class"
    images = f", mean of {len(labels)} images" if len(labels) > 1 else ""
    lines = [
        f"Change of the logit of {about} with {what} in place of one head{images}.",
        "Blue: the logit falls, so the part spoke for the class.",
    ]
    mean = {name: part.mean(0) for name, part in parts.items()}
    halves = {title: mean[name] for title, name in HALVES.items()}
    figure = lambda: draw.ablation(mean["heads"], halves, title=title, lines=lines)
    more = ("heads_probability", "attention_probability", "mlps_probability", "logit", "probability")
    numbers = {**parts, **{name: getattr(result, name).numpy() for name in more}, "class": result.target, "how": how}
    results: dict[str, Any] = {"how": how, "explained": labels, "logit": result.logit.tolist()}
    results |= {name: _json_list(getattr(result, name)) for name in (*parts, *more[:3])}
    tables = []
    for i, view in enumerate(subject.views):
        heading = f"{view.name}: logit of {labels[i]} {results['logit'][i]:.4f}; strongest changes:"
        changes = _strongest(_ablated_parts({name: part[i] for name, part in parts.items()}))
        tables.append(Table(["without", "change"], changes, ("change",), heading=[heading], prose=["without"]))
    return Explanation(subject, title, figure, numbers, results, tables=tables)


def patch(subject: Subject, target: Target = None, by_patch: bool = False) -> Explanation:
    """How far the first image's logit moves to the second one's with parts of its pass."""
    if subject.failed:
        raise UsageError(next(iter(subject.failed.values())))
    if len(subject.views) != 2:
        raise UsageError(
            f"patch takes two images, the one to run and the one to take parts of; found {len(subject.views)}."
        )
    model, (image, other) = subject.model, subject.images.split(1)
    result = patch_parts(model, image, other, target, by_patch=by_patch, batch_size=subject.batch_size)
    groups = {_group_name(model, name): result.moved(values).numpy() for name, values in result.groups.items()}
    heads = result.moved(result.heads).numpy()
    patches = None if result.patches is None else result.moved(result.patches).numpy()
    label = model.label_of(result.target)
    title = f"Activation patching in {subject.name}"
    lines = [
        f"Logit of {label}: {result.logit:.3f} of the image, {result.other_logit:.3f} of the other.",
        "0: as if nothing had been patched. 1: as the other image.",
    ]
    notes: list[str] = []
    if abs(result.other_logit - result.logit) < CLOSE:
        notes.append(
            f"Both logits of {label} are nearly the same, so how far one moves says little: choose another target."
        )
    options: dict[str, Any] = dict(title=title, lines=lines, scale=subject.scale)
    figure = lambda: draw.patching(subject.views, groups, heads, patches, **options)
    numbers: dict[str, Any] = {"class": result.target, "logits": [result.logit, result.other_logit], "heads": heads}
    numbers |= {f"group_{name}": result.moved(values) for name, values in result.groups.items()}
    numbers |= {} if patches is None else {"patches": patches}
    results: dict[str, Any] = {"explained": label, "logit": result.logit, "other_logit": result.other_logit}
    results |= {"moved": {name: _json_list(result.moved(values)) for name, values in result.groups.items()}}
    results |= {"heads": _json_list(result.moved(result.heads))}
    return Explanation(subject, title, figure, numbers, results, notes=notes, tables=[result.table()])


def _labels(model: TokenModel, numbers: list[int]) -> list[str]:
    return [model.label_of(number) for number in numbers]


def _ablated_parts(changes: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Changes of one image's logit, by the name of the part that is left out; those of `Ablation`."""
    parts = {f"layer {n + 1}, {title}": float(v) for title, key in HALVES.items() for n, v in enumerate(changes[key])}
    for (layer, head), change in np.ndenumerate(changes["heads"]):
        if np.isfinite(change):  # this layer has so many heads
            parts[f"layer {layer + 1}, head {head + 1}"] = float(change)
    return parts


def _strongest(parts: Mapping[str, float]) -> list[list[str]]:
    strongest = sorted(parts.items(), key=lambda part: -abs(part[1]))[:LISTED]
    return [[name, f"{value:+.4f}"] for name, value in strongest]


def _group_name(model: TokenModel, name: str) -> str:
    if name == "prefix":
        tokens = model.prefix if isinstance(model, Hierarchy) else model.config.prefix
        return f"{' and '.join(dict.fromkeys(tokens))} token{'s' if len(tokens) > 1 else ''}"
    return {"patches": "all patches", "attention": "what attention adds", "MLP": "what the MLP adds"}[name]


def _painted(subject: Subject, maps: np.ndarray) -> np.ndarray:
    """(..., grid_h, grid_w) of the last stage, on the first stage's grid, which the views have."""
    model = subject.model
    if not isinstance(model, Hierarchy):
        return maps
    stages = Stages(model, *subject.views[0].size)
    return stages.paint(torch.from_numpy(maps).double().flatten(-2), len(model.stages) - 1).numpy()


def _stage_note(model: TokenModel) -> list[str]:
    return [STAGE] if isinstance(model, Hierarchy) else []


def _json_list(values: Tensor) -> Any:
    """Nested lists, with None for what does not exist."""
    array = values.numpy().astype(object)
    array[~np.isfinite(values.numpy())] = None
    return array.tolist()
