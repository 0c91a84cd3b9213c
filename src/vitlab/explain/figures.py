"""The figures of `vitlab explain`, one function for each verb: subject -> Explanation.

subject = open_subject("bundled:cifar10", ["cat.jpg"])
figures.attention(subject, layers=[-1], query=(100, 60)).save("attention.png")
figures.relevance(subject, "grad_cam", target="cat").numbers["maps"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.explain import draw
from vitlab.explain.agreement import agreement
from vitlab.explain.attention_maps import attention_maps, default_query, without_patches
from vitlab.explain.attention_page import attention_page
from vitlab.explain.clip_prompts import PromptClassifier
from vitlab.explain.faithfulness import Kind, compare_methods
from vitlab.explain.features import Foreground, foreground, nearest, patch_similarity, patch_tokens, pca_rgb
from vitlab.explain.figure7 import figure7_numbers
from vitlab.explain.figure_outliers import FigureOutliers
from vitlab.explain.inputs import TokenModel, check_layer
from vitlab.explain.inside_figures import ablate as ablate
from vitlab.explain.inside_figures import attribution as attribution
from vitlab.explain.inside_figures import lens as lens
from vitlab.explain.inside_figures import patch as patch
from vitlab.explain.methods import BY_CLASS, COMPARED, METHODS, find_methods
from vitlab.explain.pruned import pruned_patches
from vitlab.explain.reconstruct import masked_autoencoder
from vitlab.explain.reconstruct import reconstruct as reconstruct_images
from vitlab.explain.relevance import Target, target_classes
from vitlab.explain.rollout import rollout as attention_rollout
from vitlab.explain.stages import head_counts, sights
from vitlab.explain.subject import Explanation, Subject
from vitlab.explain.views import View
from vitlab.images.read import read_image
from vitlab.layers.reducer import Reducer
from vitlab.models.hierarchy import Hierarchy
from vitlab.reduce import reducer_of
from vitlab.tables import Table

WITH_ANOTHER = ("rollout", "grad_cam", "attention", "relevance")  # the first that two models support
COLUMNS = 12  # layers in a figure of several images
NORMALISED = "Mean and contrast of each patch are the true ones: the model paints normalised pixels."


def attention(
    subject: Subject,
    layers: str | Sequence[int] | None = None,
    heads: str | Sequence[int] | None = None,
    query: str | tuple[float, float] | None = None,
) -> Explanation:
    """Where a token looks. One image: a grid of layers and heads. Several: a row for each, mean over heads.

    layers   "all", or layer numbers. None: all, or COLUMNS of them where several images have more
    heads    "all", "mean" or head numbers. None: all, or the mean where the layers have different numbers
    query    as in attention_maps, but a pixel (x, y) is one of the original image
    """
    model, views = subject.model, subject.views
    notes, depth = [], len(model.blocks)
    if layers is None and len(views) > 1 and depth > COLUMNS:
        layers = sorted({round(i) for i in np.linspace(0, depth - 1, COLUMNS)})
        notes.append(f"{COLUMNS} of {depth} layers are drawn: ask for all to see every one.")
    layers = "all" if layers is None else layers
    if heads is None:
        heads = "mean" if len(head_counts(model, layers)) > 1 else "all"
    pixel = None if query is None or isinstance(query, str) else query
    patches = [None if pixel is None else view.patch_under(*pixel) for view in views]
    maps, before = _attention_of(subject, layers, heads, query if isinstance(query, str) else None, patches)
    layer_numbers = list(range(depth)) if isinstance(layers, str) else [n % depth for n in layers]
    if isinstance(heads, str):
        head_numbers = [] if heads == "mean" else list(range(maps.shape[2]))
    else:
        head_numbers = list(heads) if isinstance(model, Hierarchy) else [n % model.config.heads for n in heads]
    who = _query_name(model, query)
    numbers: dict[str, Any] = {"maps": maps, "prefix": before, "layers": layer_numbers, "query": who}
    numbers["heads"] = head_numbers or ["mean"]
    sights_by_image, note = None, ""
    if isinstance(model, Hierarchy):
        numbers |= {"padding": before[..., -1], "prefix": before[..., :-1]}
        numbers["stage"] = [model.config.stage_of(n) for n in layer_numbers]
        if pixel is not None:
            sights_by_image = [
                sights(model, view.size, patch or 0, layer_numbers) for view, patch in zip(views, patches, strict=True)
            ]
            rows, columns = views[0].grid
            numbers["query_box"] = [[sight.who for sight in row] for row in sights_by_image]
            numbers["query_window"] = [[s.window or (0, 0, columns, rows) for s in row] for row in sights_by_image]
            windows = any(sight.window for row in sights_by_image for sight in row)
            note = "Blue: the token that looks, of each layer's own grid." + (" White: its window." if windows else "")
    if pixel is not None:
        numbers["query_patch"] = patches
    one_head = len(head_numbers) == 1 and np.max(model.config.heads) > 1
    title = f"Attention of {who}" + (f", head {head_numbers[0] + 1}" if one_head else "")
    outliers = FigureOutliers.of(subject)
    left_out = None
    if outliers.any:
        rows = torch.cat([before, maps.flatten(3)], dim=-1)  # (B, layers, heads, tokens)
        left_out = without_patches(rows, outliers.mask)[..., before.shape[-1] :].unflatten(-1, maps.shape[3:])
        numbers["maps_left_out"] = left_out
    numbers |= outliers.numbers
    note = "\n".join(filter(None, [note, outliers.note]))
    figure = lambda: draw.attention(
        views,
        maps,
        layers=layer_numbers,
        heads=head_numbers or None,
        title=title,
        patches=patches,
        sights=sights_by_image,
        outliers=outliers.patches if outliers.any else None,
        left_out=left_out,
        note=note,
        scale=subject.scale,
    )

    def page() -> str:
        text, too_large = attention_page(
            model,
            subject.images,
            views,
            layers=layers,
            heads=heads,
            title=f"Attention in {subject.name}",
            scale=subject.scale,
        )
        notes.extend([too_large] if too_large else [])
        return text

    results = {"query": who, "layers": layer_numbers, **outliers.results, "scale": subject.scale}
    return Explanation(subject, title, figure, numbers, results, page, [*notes, *outliers.notes])


def rollout(subject: Subject, discard: float = 0.0) -> Explanation:
    """Attention multiplied through all layers; `discard` as in explain.rollout."""
    maps = attention_rollout(subject.model, subject.images, discard, batch_size=subject.batch_size)
    note = "Attention multiplied through all layers." + (f" Lowest {discard:.0%} discarded." if discard else "")
    columns, results = {METHODS["rollout"].title: maps.numpy()}, {"discard": discard}
    numbers: dict[str, Any] = {"maps": maps, **results}
    if (outliers := FigureOutliers.of(subject)).any:
        options: dict[str, Any] = dict(leave_out=outliers.mask, batch_size=subject.batch_size)
        numbers["maps_left_out"] = attention_rollout(subject.model, subject.images, discard, **options)
        columns["Outliers left out"] = numbers["maps_left_out"].numpy()
    return _maps(subject, "Attention rollout", columns, numbers, results, note=note)


def relevance(subject: Subject, method: str = "relevance", target: Target = None) -> Explanation:
    """Which patches speak for a class, by a method that explains classes; or for each of a CLIP's sentences."""
    (name,) = find_methods([method], BY_CLASS)
    row, model = METHODS[name], subject.model
    if isinstance(model, PromptClassifier):
        if target is not None:
            raise UsageError("target is for a model's classes; a CLIP explains each of its texts.")
        return _sentences(subject, model, name)
    classes = target_classes(model, subject.images, target)
    labels = [model.label_of(number) for number in classes]
    title = f"{row.title} for " + (labels[0] if len(set(labels)) == 1 else "each image's top class")
    maps = row(model, subject.images, classes).numpy()
    results = {"class": classes, "explained": labels}
    signed = [row.title] if row.signed else []
    return _maps(subject, title, {row.title: maps}, {"maps": maps, **results}, results, signed=signed)


def compare(
    subject: Subject, methods: Sequence[str] | None = None, target: Target = None, other: Subject | None = None
) -> Explanation:
    """Methods side by side, or two models with the same images, and the rank correlation of their maps.

    methods   default: all without a sign, or with a second model the first of WITH_ANOTHER that both support. What a
              model does not support is left out, with a note
    """
    subjects = [subject] if other is None else [subject, other]
    names, left_out = _comparable(find_methods(methods or (COMPARED if other is None else WITH_ANOTHER)), subjects)
    if other is not None and not methods:
        names, left_out = names[:1], {}
    if len(names) < (2 if other is None else 1):
        why = "".join(f" {METHODS[name].title} is left out: {reason}." for name, reason in left_out.items())
        raise UsageError(f"compare needs two methods, e.g. rollout,relevance, or a second model to compare with.{why}")
    if other is not None and other.failed:
        raise UsageError(f"{other.name} cannot read {', '.join(other.failed)}. Leave it out.")
    columns, headings, numbers, signed = {}, {}, {}, []
    for letter, each in zip("AB", [subject] if other is None else [subject, other], strict=False):
        by_class = any(METHODS[name].by_class for name in names)
        classes = target_classes(each.model, each.images, target) if by_class else None
        for name in names:
            maps = METHODS[name](each.model, each.images, classes).numpy()
            model, key = ("", name) if other is None else (f"{letter}: ", f"{name}_{letter.lower()}")
            columns[model + name], numbers[key] = (each.views, maps), maps
            headings[model + name] = model + METHODS[name].title
            signed += [model + METHODS[name].title] if METHODS[name].signed else []
    pairs = [(a, b) for i, a in enumerate(columns) for b in list(columns)[i + 1 :]]
    if other is not None:  # each method with itself
        pairs = [(a, b) for a, b in pairs if a[3:] == b[3:]]
    agreements = [agreement(*columns[a], *columns[b]) for a, b in pairs]
    numbers |= {"agreement_of": [f"{a} | {b}" for a, b in pairs], "agreement": np.array(agreements)}
    rows = [
        {"first": a, "second": b, "agreement": [float(v) if np.isfinite(v) else None for v in values]}
        for (a, b), values in zip(pairs, agreements, strict=True)
    ]
    title, note, captions = "Methods compared", "", None
    if other is not None:
        title, note = "Models compared", f"A is {subject.name}, B is {other.name}."
        captions = [[views[i].prediction for views, _ in columns.values()] for i in range(len(subject.views))]
    results = {"agreement": rows, "left_out": left_out}
    shown = {headings[name]: column for name, column in columns.items()}
    explanation = _maps(subject, title, shown, numbers, results, note=note, captions=captions, signed=signed)
    notes = [f"{METHODS[name].title} is left out: {reason}" for name, reason in left_out.items()]
    return replace(explanation, notes=[*notes, *explanation.notes], tables=[_agreement_table(rows)])


def _comparable(names: Sequence[str], subjects: Sequence[Subject]) -> tuple[list[str], dict[str, str]]:
    """The methods that all models support, and why the others are left out."""
    left_out: dict[str, str] = {}
    for name in names:
        for subject in subjects:
            if not METHODS[name].supports(subject.model):
                left_out[name] = f"{subject.name} has {METHODS[name].missing_in(subject.model)}"
    return [name for name in names if name not in left_out], left_out


def figure7(subject: Subject) -> Explanation:
    """Figure 7 of ViT: filters, positions, distances; without images, only what the weights show."""
    images = subject.images if subject.views else None
    numbers = figure7_numbers(subject.model, images, batch_size=subject.batch_size)
    missing = numbers["missing"]
    notes = [
        f"{', '.join(name for name, why in missing.items() if why == reason)}: {reason}"
        for reason in dict.fromkeys(missing.values())
    ]
    title = f"Inside {subject.name}"
    outliers = FigureOutliers.of(subject)
    numbers |= outliers.numbers
    view = subject.views[0] if subject.views else None
    figure = lambda: draw.figure7(numbers, view=view, title=title, scale=subject.scale)
    results: dict[str, Any] = {"missing": missing, **outliers.results, "scale": subject.scale}
    if "distance" in numbers:
        results |= {"distance": numbers["distance"].tolist(), "entropy": numbers["entropy"].tolist()}
    if "high_norm_found" in numbers:
        results["high_norm_tokens"] = numbers["high_norm_found"]
    arrays = {name: value for name, value in numbers.items() if name != "missing"}
    return Explanation(subject, title, figure, arrays, results, notes=[*notes, *outliers.notes])


def features(
    subject: Subject,
    *,
    joint: bool = True,
    at: tuple[float, float] | None = None,
    mask: bool = False,
    layer: int = -1,
) -> Explanation:
    """Patch tokens as colours; the foreground by `mask`; similarity to the patch `at` pixel (x, y) of image 0."""
    model, views, images = subject.model, subject.views, subject.images
    layer = check_layer(model, layer)
    options: dict[str, Any] = dict(layer=layer, batch_size=subject.batch_size)
    guess = foreground(model, images, **options) if mask else None
    shown = None if guess is None else guess.mask
    columns = {"components": pca_rgb(model, images, joint, foreground=shown, **options).numpy()}
    results, notes, captions = {}, [], None
    if guess is not None:
        columns["foreground"] = guess.mask.numpy()
        results["foreground"] = _trust(guess)
        captions = [["", text] for text in guess.doubts()]
        notes = [
            f"{view.name}: the foreground is {text}." for view, (_, text) in zip(views, captions, strict=True) if text
        ]
    note = "Like parts have like colours" + (", in all images alike." if joint and len(views) > 1 else ".")
    marks = None
    if at is not None:
        patch = views[0].patch_under(*at)
        columns["likeness"] = patch_similarity(model, images, patch, of=0, **options).numpy()
        captions = None if captions is None else [[*row, ""] for row in captions]
        marks = [[draw.mark_of(views[0], patch)], *[()] * (len(views) - 1)]
        note += " Likeness is to the framed patch" + (" of the first image." if len(views) > 1 else ".")
    title = f"Features of layer {layer + 1}"
    outliers = FigureOutliers.of(subject)
    drawing: dict[str, Any] = dict(note=note, marks=marks, captions=captions, scale=subject.scale)
    figure = lambda: draw.heat(views, columns, title=title, **drawing)

    def page() -> str:
        tokens = F.normalize(patch_tokens(model, images, **options).flatten(1, 2), dim=-1)  # (B, N, D)
        scale = subject.scale
        return draw.likeness_page(views, tokens @ tokens.mT, title=title, layer=f"layer {layer + 1}", scale=scale)

    numbers = {**columns, "layer": layer, **outliers.numbers}
    if guess is not None:
        numbers |= {"separation": guess.separation.numpy(), "margin": guess.margin.numpy()}
    results |= {**outliers.results, "scale": subject.scale}
    return Explanation(subject, title, figure, numbers, results, page, [*notes, *outliers.notes])


def neighbours(subject: Subject, folder: str | Path, k: int = 5) -> Explanation:
    """The k most similar images of a folder, for each image."""
    folder, notes = Path(folder).expanduser(), []
    if not folder.is_dir():
        raise UsageError(f"{folder}: is no folder. Name one with images in it.")
    rows = nearest(subject.model, subject.images, folder, k, batch_size=subject.batch_size, skip=notes.append)
    images = {one.name: read_image(one.name) for row in rows for one in row}
    with_images = [[(one, images[one.name]) for one in row] for row in rows]
    title = f"Most alike in {folder.resolve().name}"
    figure = lambda: draw.neighbours(subject.views, with_images, title=title)
    numbers = {
        "neighbours": [[one.name for one in row] for row in rows],
        "similarity": [[one.similarity for one in row] for row in rows],
    }
    results = [[{"image": one.name, "similarity": one.similarity} for one in row] for row in rows]
    pairs = [(view, one) for view, row in zip(subject.views, rows, strict=True) for one in row]
    cells = [[view.name, f"{one.similarity:.3f}", one.name] for view, one in pairs]
    table = Table(["image", "similarity", "neighbour"], cells, ("similarity",))
    return Explanation(subject, title, figure, numbers, {"neighbours": results}, notes=notes, tables=[table])


def faithfulness(
    subject: Subject,
    methods: Sequence[str] | None = None,
    kinds: Sequence[Kind] = ("deletion", "insertion", "road"),
    steps: int = 16,
    target: Target = None,
) -> Explanation:
    """Curves of `compare_methods`, and their areas."""
    model = subject.model
    if isinstance(model, PromptClassifier) and model.config.classes == 1:
        raise UsageError("one text alone always has the probability 1. Give a second one to tell it from.")
    names = None if methods is None else find_methods(methods)
    scores = compare_methods(model, subject.images, names, kinds, target, steps, batch_size=subject.batch_size)
    title = f"Faithfulness, {subject.name}"
    numbers = {f"{score.kind}_{score.method}": score.curves.numpy() for score in scores}
    results = {"scores": [score.to_dict() for score in scores]}
    figure = lambda: draw.faithfulness(scores, title=title)
    return Explanation(subject, title, figure, numbers, results, tables=[scores.table()])


def reconstruct(subject: Subject, mask_ratio: float | None = None, seed: int = 0) -> Explanation:
    """Hidden patches painted by a masked autoencoder; open the subject with encoder=False."""
    model, views = masked_autoencoder(subject.network), subject.views
    preprocess, share = model.preprocess, model.config.mask_ratio if mask_ratio is None else mask_ratio
    assert preprocess is not None
    result = reconstruct_images(model, subject.images, mask_ratio=share, seed=seed, batch_size=subject.batch_size)
    title = f"Painted by {subject.name}"
    note = NORMALISED if model.config.norm_pix else ""
    figure = lambda: draw.reconstruction(views, result, preprocess, title=title, note=note)

    def colours(images: Tensor) -> np.ndarray:
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
    hidden = int(result.mask[0].sum())
    results = {"error": result.error.tolist(), "hidden_patches": hidden, "mask_ratio": share, "seed": seed}
    rows = [[view.name, f"{error:.4f}", str(hidden)] for view, error in zip(views, results["error"], strict=True)]
    table = Table(["image", "error", "hidden patches"], rows, ("error", "hidden patches"))
    return Explanation(subject, title, figure, numbers, results, tables=[table])


def pruned(subject: Subject, reducer: str | Reducer = "tome:r=8") -> Explanation:
    """Which patches a reducer kept, merged or dropped, by layer."""
    reducer, name = (reducer_of(reducer), reducer) if isinstance(reducer, str) else (reducer, type(reducer).__name__)
    result = pruned_patches(subject.model, subject.images, reducer, batch_size=subject.batch_size)
    title = f"Tokens left by {name}"
    numbers = {"groups": result.groups, "tokens": result.tokens, "changed": np.array(result.changed, dtype=int)}
    figure = lambda: draw.pruned(subject.views, result, title=title)
    return Explanation(subject, title, figure, numbers, {"tokens": result.tokens.tolist()})


def _agreement_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    cells = []
    for row in rows:
        values = [value for value in row["agreement"] if value is not None]
        spread = f" ± {stdev(values):.2f}" if len(values) > 1 else ""
        cells.append([row["first"], row["second"], f"{mean(values):.2f}{spread}" if values else "a map is flat"])
    return Table(["map", "and map", "rank correlation"], cells, ("rank correlation",))


def _trust(guess: Foreground) -> list[dict[str, Any]]:
    """How far to trust each image's foreground, for JSON."""
    measures = zip(guess.separation.tolist(), guess.margin.tolist(), guess.unsure.tolist(), strict=True)
    return [{"separation": s, "margin": m, "unsure": unsure} for s, m, unsure in measures]


def _attention_of(
    subject: Subject,
    layers: str | Sequence[int],
    heads: str | Sequence[int],
    token: str | None,
    patches: list[int | None],
) -> tuple[Tensor, Tensor]:
    """Maps and prefix shares. Where the query is a pixel, images with the same patch under it share a batch."""
    options: dict[str, Any] = dict(layers=layers, heads=heads, prefix=True, batch_size=subject.batch_size)
    if patches[0] is None:
        return attention_maps(subject.model, subject.images, query=token, **options)
    parts: dict[int, tuple[Tensor, Tensor]] = {}
    for number in dict.fromkeys(patches):
        indices = [i for i, p in enumerate(patches) if p == number]
        result = attention_maps(subject.model, subject.images[indices], query=number, **options)
        parts |= {i: (maps, before) for i, maps, before in zip(indices, *result, strict=True)}
    maps, before = zip(*(parts[i] for i in range(len(patches))), strict=True)
    return torch.stack(maps), torch.stack(before)


def _query_name(model: TokenModel, query: str | tuple[float, float] | None) -> str:
    if query is not None and not isinstance(query, str):
        return f"the patch at {query[0]:g}, {query[1]:g}"
    token = query or default_query(model)
    if token == "mean":
        return "all patches (mean)"
    earlier = ", before its stage all patches (mean)" if query is None and isinstance(model, Hierarchy) else ""
    return f"the {token} token{earlier}"


def _sentences(subject: Subject, model: PromptClassifier, name: str) -> Explanation:
    """A map for every image and sentence, with their cosine below it."""
    method, texts = METHODS[name], model.labels or []
    columns = {text: method(model, subject.images, number).numpy() for number, text in enumerate(texts)}
    cosines = model.cosines(subject.images, batch_size=subject.batch_size).cpu()  # (B, T)
    captions = [[f"cosine {value:.3f}" for value in row] for row in cosines.tolist()]
    title = f"{method.title} for {'a sentence' if len(texts) == 1 else f'{len(texts)} sentences'}"
    numbers = {"maps": np.stack(list(columns.values()), axis=1), "sentences": texts, "cosine": cosines.numpy()}
    results = {"sentences": texts, "cosine": cosines.tolist()}
    signed = texts if method.signed else []
    return _maps(subject, title, columns, numbers, results, captions=captions, signed=signed)


def _maps(
    subject: Subject,
    title: str,
    columns: Mapping[str, np.ndarray | tuple[Sequence[View], np.ndarray]],
    numbers: dict[str, Any],
    results: dict[str, Any],
    *,
    note: str = "",
    captions: Sequence[Sequence[str]] | None = None,
    signed: Sequence[str] = (),
) -> Explanation:
    """Named maps of every image, as `draw.heat` takes them; outlier tokens are framed in those of this subject."""
    outliers, views = FigureOutliers.of(subject), subject.views
    own = [not isinstance(column, tuple) or column[0] is views for column in columns.values()]
    options: dict[str, Any] = dict(title=title, signed=signed, scale=subject.scale)
    note = "\n".join(filter(None, [note, outliers.note]))
    marks = outliers.marks(own)
    figure = lambda: draw.heat(views, columns, note=note, captions=captions, marks=marks, **options)
    page = lambda: draw.maps_page(views, columns, note=outliers.note, **options)
    numbers, results = numbers | outliers.numbers, results | outliers.results | {"scale": subject.scale}
    return Explanation(subject, title, figure, numbers, results, page, outliers.notes)
