"""Numbers that the page shows about one image in one model, computed by the library.

Each query is a function (served model, image, options) -> a dict, sent as JSON, or an array or several named ones,
sent as bytes.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import RMSNorm

from vitlab.errors import VitlabError
from vitlab.explain.block_view import block_view, query_attention
from vitlab.explain.cell_view import THIRDS, cell_view
from vitlab.explain.clip_prompts import ask
from vitlab.explain.distance import attention_statistics
from vitlab.explain.equations import equations
from vitlab.explain.features import patch_tokens, pca_rgb
from vitlab.explain.inputs import wide
from vitlab.explain.methods import METHODS, SHOWN, ScoringMethod
from vitlab.explain.pruned import pruned_patches
from vitlab.explain.reconstruct import reconstruct
from vitlab.explain.step_meanings import stem_kind
from vitlab.explain.walk import STEPS, ForwardView, as_numbers, forward_view, walk_through
from vitlab.explain.weights import position_similarity
from vitlab.inference import answer, class_probabilities
from vitlab.layers.block import Block, LayerScale, SwiGLU
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, class_labels, evaluating
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.plain import PlainTransformer
from vitlab.parsing import parse_json
from vitlab.reduce.parse import reducer_of
from vitlab.serve.errors import RequestError
from vitlab.serve.model_pool import ServedModel
from vitlab.serve.settings import MAX_TEXT_LENGTH, MAX_TEXTS

Options = Mapping[str, str]
Value = TypeVar("Value")
TOP = 5
MAX_EDIT_LENGTH = 20_000  # a mask of all 1,369 patches of a ViT-S/14 is shorter
REPETITIONS = 3  # timed passes with and without a reducer; the median is shown


@dataclass(frozen=True, eq=False)
class PageImage:
    """An image as the model takes it."""

    model: str  # name
    images: Tensor  # (1, C, H, W), normalised


@dataclass(frozen=True)
class NamedArrays:
    """Several arrays of one answer."""

    arrays: dict[str, Tensor]


def predict(served: ServedModel, image: PageImage, options: Options) -> dict[str, Any]:
    began = time.perf_counter()
    probabilities = class_probabilities(served.model, [image.images[0]])[0]
    milliseconds = 1e3 * (time.perf_counter() - began)
    return {"scores": _scores(served, probabilities), "milliseconds": round(milliseconds, 2)}


def walk(served: ServedModel, image: PageImage, options: Options) -> dict[str, Any]:
    numbers = as_numbers(walk_through(served.encoder, image.images, view=_pass(served, image, None)))
    labels = class_labels(served.model) if numbers["by_depth"] is not None else None
    return {**numbers, "labels": labels}


def forward(served: ServedModel, image: PageImage, options: Options) -> dict[str, Any]:
    """Logits, scores, the scores after each block, and the length of every token after each step."""
    view = _edited(lambda edit: _pass(served, image, edit, options), options)
    numbers = {"logits": view.logits, "probabilities": view.scores, "by_depth": view.by_depth}
    lengths = {name: values.tolist() for name, values in view.lengths.items()}
    return {name: None if value is None else value.tolist() for name, value in numbers.items()} | {"lengths": lengths}


def block(served: ServedModel, image: PageImage, options: Options) -> NamedArrays:
    """One token's way through block `layer` with attention head `head`."""
    encoder, x = _vit(served), image.images
    numbers = {
        "layer": _integer(options, "layer", 0, len(encoder.blocks) - 1),
        "head": _integer(options, "head", 0, encoder.config.heads - 1),
        "token": _token(options, encoder, x),
    }
    view = lambda edit: block_view(encoder, x, **numbers, edit=edit, view=_pass(served, image, edit, options))
    return NamedArrays(_edited(view, options).arrays())


def cell(served: ServedModel, image: PageImage, options: Options) -> NamedArrays:
    """One number of block `layer`, of token `token`, as inputs, weights and bias; of q, k and v in head `head`."""
    encoder, step = _vit(served), options.get("step", "")
    c = encoder.config
    width = {"proj": c.width, "fc2": c.width, "fc1_pre": 2 * c.mlp_hidden}.get(step, c.head_width)
    channel = _integer(options, "channel", 0, width - 1)
    if step in THIRDS:
        channel += c.head_width * _integer(options, "head", 0, c.heads - 1)
    numbers: dict[str, Any] = {
        "layer": _integer(options, "layer", 0, len(encoder.blocks) - 1),
        "token": _token(options, encoder, image.images),
        "step": step[:MAX_TEXT_LENGTH],
        "channel": channel,
    }
    run = lambda edit: cell_view(encoder, image.images, **numbers, edit=edit, view=_pass(served, image, edit, options))
    try:
        view = _edited(run, options)
    except VitlabError as error:
        raise RequestError(422, str(error), "Choose another number.") from None
    return NamedArrays({"inputs": view.inputs, "weights": view.weights, "bias": torch.tensor([view.bias])})


def rows(served: ServedModel, image: PageImage, options: Options) -> Tensor:
    """(L, h, N): where token `token` looks in every layer and head."""
    encoder, x = _vit(served), image.images
    token = _token(options, encoder, x)
    view = lambda edit: query_attention(encoder, x, token, edit, view=_pass(served, image, edit, options))
    return _edited(view, options)


def positions(served: ServedModel, image: PageImage, options: Options) -> Tensor:
    """(grid_h, grid_w, grid_h, grid_w)"""
    encoder = _vit(served)
    return position_similarity(encoder, encoder.layout(*served.preprocess.size).grid)


def attention(served: ServedModel, image: PageImage, options: Options) -> np.ndarray:
    """(h, N, N) of one layer, in half precision: the page keeps all layers."""
    encoder = _vit(served)
    trace = Trace("attention", layers=[_integer(options, "layer", 0, len(encoder.blocks) - 1)])
    with evaluating(encoder):
        _edited(lambda edit: encoder(image.images, trace=trace, edit=edit), options)
    return trace.stack("attention")[0, 0].numpy().astype(np.float16)


def method_map(method: ScoringMethod, served: ServedModel, image: PageImage, options: Options) -> Tensor:
    """(grid_h, grid_w), where the method needs one for class number `class`."""
    if not method.by_class:
        return method(served.encoder, image.images)[0]
    number = _integer(options, "class", 0, served.model.config.classes - 1)
    return _edited(lambda edit: method(served.model, image.images, number, edit)[0], options)


def distance(served: ServedModel, image: PageImage, options: Options) -> dict[str, Any]:
    statistics = attention_statistics(served.encoder, image.images)
    return {
        "distance": statistics.distance.tolist(),
        "entropy": statistics.entropy.tolist(),
        "uniform": statistics.uniform_distance,
    }


def fewer_tokens(served: ServedModel, image: PageImage, options: Options) -> dict[str, Any]:
    """With `reducer` (tome:r=8, evit:keep=0.7): the patches of each token after each layer, the scores, the time."""
    model, images = served.model, image.images
    if len(name := options.get("reducer", "")) > MAX_TEXT_LENGTH:  # long ones nest or overflow
        error = f"the reducer is longer than {MAX_TEXT_LENGTH} characters."
        raise RequestError(422, error, "Write it like tome:r=8.")
    try:
        reducer = reducer_of(name)
        pruned = pruned_patches(model, images, reducer)
    except VitlabError as error:
        raise RequestError(422, str(error), "Choose another method, or remove fewer tokens.") from None
    with evaluating(model):
        probabilities = model.task.scores(wide(model(images, reducer=reducer)))[0]
        full_probabilities = model.task.scores(wide(model(images)))[0]
        times: list[list[float]] = [[], []]
        for _ in range(REPETITIONS):
            for measured, arguments in zip(times, ({}, {"reducer": reducer}), strict=True):
                began = time.perf_counter()
                model(images, **arguments)
                measured.append(1e3 * (time.perf_counter() - began))
    return {
        "groups": pruned.groups[0].tolist(),
        "tokens": pruned.tokens[0].tolist(),
        "scores": _scores(served, probabilities),
        "plain": _scores(served, full_probabilities),
        "milliseconds": {"plain": round(median(times[0]), 3), "fewer": round(median(times[1]), 3)},
    }


def similarity(served: ServedModel, image: PageImage, options: Options) -> np.ndarray:
    """(N, N): cosine similarity of the patch tokens."""
    tokens = patch_tokens(served.encoder, image.images)[0].flatten(0, 1)  # (N, D)
    unit = torch.nn.functional.normalize(tokens, dim=-1)
    return (unit @ unit.T).numpy().astype(np.float16)


def colours(served: ServedModel, image: PageImage, options: Options) -> np.ndarray:
    """(grid_h, grid_w, 3), uint8"""
    return (wide(pca_rgb(served.encoder, image.images)[0]).clamp(0, 1) * 255).round().byte().cpu().numpy()


def reconstruction(served: ServedModel, image: PageImage, options: Options) -> dict[str, Any]:
    """The image, its visible patches, and its reconstruction: (3, H, W, 3), uint8. Hides the patches that are 1 in
    `mask`, row by row, or a random `percent` of them by `seed`.
    """
    rows, columns = _vit(served).layout(*image.images.shape[-2:]).grid
    bits = options.get("mask")
    if bits is not None:
        if len(bits) != rows * columns or set(bits) - {"0", "1"}:
            raise RequestError(422, f"mask must be {rows * columns} times 0 or 1.", "Send one for each patch.")
        mask = torch.tensor([bit == "1" for bit in bits]).unflatten(0, (rows, columns))
        arguments: dict[str, Any] = {"mask": mask}
    else:
        ratio = _integer(options, "percent", 1, 99) / 100
        arguments = {"mask_ratio": ratio, "seed": _integer(options, "seed", 0, 10**6)}
    assert isinstance(served.model, MaskedAutoencoder)
    try:
        result = reconstruct(served.model, image.images, **arguments)
    except VitlabError as error:
        raise RequestError(422, str(error), "Hide at least one patch, and leave at least one.") from None
    visible = torch.where(result.hidden, torch.zeros_like(result.images), result.images)
    images = torch.cat([result.images, visible, result.pasted])  # (3, C, H, W)
    pixels = np.stack([_pixels(served, one) for one in images])
    return {
        "shape": list(pixels.shape),
        "pixels": b64encode(pixels.tobytes()).decode(),
        "mask": "".join("01"[int(hidden)] for hidden in result.mask[0].flatten()),
        "error": float(result.error[0]),
    }


def sentences(served: ServedModel, image: PageImage, options: Options) -> dict[str, Any]:
    """For each line of `texts`: its cosine, its probability among them, and its relevance map."""
    texts = [text.strip() for text in options.get("texts", "").splitlines() if text.strip()]
    texts = list(dict.fromkeys(texts))
    if not 1 <= len(texts) <= MAX_TEXTS or any(len(text) > MAX_TEXT_LENGTH for text in texts):
        remedy = f"Send 1 to {MAX_TEXTS}, {MAX_TEXT_LENGTH} letters at most."
        raise RequestError(422, f"{len(texts)} sentences were given.", remedy)
    classifier = ask(served.model, texts)
    with evaluating(classifier):
        logits = wide(classifier(image.images))[0]
    maps = [METHODS["relevance"](classifier, image.images, number)[0].tolist() for number in range(len(texts))]
    cosines = classifier.cosines(image.images)[0].tolist()
    return {"texts": texts, "cosine": cosines, "probability": logits.softmax(-1).tolist(), "maps": maps}


METHOD_MAPS = tuple(name for name in SHOWN if name != "attention")  # the page draws attention from all its rows
Content = dict[str, Any] | Tensor | np.ndarray | NamedArrays
Query = Callable[[ServedModel, PageImage, Options], Content]
QUERIES: dict[str, Query] = {
    "predict": predict,
    "walk": walk,
    "forward": forward,
    "block": block,
    "cell": cell,
    "rows": rows,
    "positions": positions,
    "attention": attention,
    **{name: partial(method_map, METHODS[name]) for name in METHOD_MAPS},
    "distance": distance,
    "fewer": fewer_tokens,
    "similarity": similarity,
    "colours": colours,
    "painted": reconstruction,
    "sentences": sentences,
}


def supported_queries(served: ServedModel) -> list[str]:
    encoder, task = served.encoder, served.model.task
    classifies = "predict" in served.verbs and task.kind != "number"  # the page shows probabilities
    is_vit = isinstance(encoder, PlainTransformer)
    supported = {
        "predict": classifies,
        "walk": is_vit and task.kind == "class",
        **dict.fromkeys(("forward", "block", "cell", "rows", "attention", "distance", "similarity", "colours"), is_vit),
        "positions": is_vit and encoder.positions is not None,
        **{name: "explain" in served.verbs and METHODS[name].supports(encoder) for name in METHOD_MAPS},
        "fewer": classifies and is_vit and Capability.REDUCE in encoder.capabilities,
        "painted": isinstance(served.model, MaskedAutoencoder),
        "sentences": "zeroshot" in served.verbs,
    }
    return [name for name in QUERIES if supported[name]]


def model_info(served: ServedModel) -> dict[str, Any]:
    """What the page needs before its first query."""
    encoder, size = served.encoder, served.preprocess.size
    task = served.model.task.kind if served.model.classes else None
    info: dict[str, Any] = {"offers": supported_queries(served), "size": list(size), "task": task}
    if isinstance(encoder, PlainTransformer):
        info["offers"].append("edit")  # of forward, block, rows and attention
    info["methods"] = [
        {"name": m.name, "title": m.title, "by_class": m.by_class, "signed": m.signed, "edits": m.edits}
        for m in map(METHODS.__getitem__, METHOD_MAPS)
        if m.name in info["offers"]
    ]
    if "predict" in info["offers"]:
        info["labels"] = class_labels(served.model)
    if isinstance(served.model, MaskedAutoencoder):
        info["norm_pix"] = served.model.config.norm_pix
    return info | (_architecture(encoder, size) if isinstance(encoder, PlainTransformer) else {})


def _architecture(encoder: PlainTransformer, size: tuple[int, int]) -> dict[str, Any]:
    """What the picture of the network is drawn from; its words follow what the model is made of."""
    c, first = encoder.config, cast("list[Block]", encoder.blocks)[0]
    by_class_token = c.pool_kind in ("class", "class_norm")
    return {
        "patch": c.patch_size,
        "grid": list(encoder.layout(*size).grid),
        "depth": c.depth,
        "heads": c.heads,
        "width": c.width,
        "head_dim": first.attention.head_dim,
        "hidden": c.mlp_hidden,
        "prefix": list(c.prefix),
        "reads": 0 if by_class_token else None,
        "pooling": c.pool_kind,
        "stem": stem_kind(encoder),
        "positions": c.position_kind,
        "norm": "post" if c.post_norm else "pre",
        "norm_kind": "RMSNorm" if isinstance(first.norm1, RMSNorm) else "LayerNorm",
        "qk_norm": first.attention.q_norm is not None,
        "layer_scale": isinstance(first.scale1, LayerScale),
        "gated": isinstance(first.mlp, SwiGLU),
        "mlp": c.mlp_name,
        "steps": [kind for kind in STEPS if kind in encoder.traceable],
        "equations": equations(encoder),
    }


def model_view(served: ServedModel, image: PageImage) -> np.ndarray:
    """(H, W, 3), uint8: the image as the model sees it."""
    return _pixels(served, image.images[0])


def _vit(served: ServedModel) -> PlainTransformer:
    """The encoder, for queries that `supported_queries` offers of a Vision Transformer only."""
    assert isinstance(served.encoder, PlainTransformer)
    return served.encoder


def _pass(
    served: ServedModel, image: PageImage, edit: Edit | None, options: Options = MappingProxyType({})
) -> ForwardView:
    """The pass of an image under an edit, kept: of a large network it takes seconds, and every query needs it."""
    key = (image, options.get("edit"))
    view = served.pass_cache.get(key)
    if view is None:
        view = forward_view(served.encoder, image.images, edit)
        served.pass_cache.put(key, view)
    return view


def _edited(run: Callable[[Edit | None], Value], options: Options) -> Value:
    """run(edit) with the changes that are asked for in `edit`, as JSON."""
    text = options.get("edit")
    if text is None:
        return run(None)
    if len(text) > MAX_EDIT_LENGTH:
        raise RequestError(422, f"the edit is longer than {MAX_EDIT_LENGTH:,} characters.", "Change less at once.")
    try:
        values = parse_json(text.encode())
    except ValueError:
        raise RequestError(422, "the edit is not JSON.", 'Write it like {"temperature": 2}.') from None
    if isinstance(values, dict) and "changes" in values:  # tensors by JSON are for files
        raise RequestError(422, "the page's edits have no changes of single steps.", "Use vitlab.Edit in Python.")
    try:
        return run(Edit.from_json(values))
    except VitlabError as error:
        raise RequestError(422, str(error), "Undo this change.") from None


def _token(options: Options, encoder: PlainTransformer, x: Tensor) -> int:
    rows, columns = encoder.layout(*x.shape[-2:]).grid
    return _integer(options, "token", 0, len(encoder.config.prefix) + rows * columns - 1)


def _scores(served: ServedModel, probabilities: Tensor) -> list[dict[str, Any]]:
    best = answer(served.model, "", probabilities, TOP).scores
    return [{"label": label, "probability": p} for label, p in best]


def _pixels(served: ServedModel, normalised: Tensor) -> np.ndarray:
    return np.asarray(served.preprocess.to_image(normalised).convert("RGB"))


def _integer(options: Options, name: str, minimum: int, maximum: int) -> int:
    text = options.get(name, "")
    if not text.isdecimal() or len(text) > 9 or not minimum <= int(text) <= maximum:
        error = f"{name}={text[:20]!r} must be a whole number."
        raise RequestError(422, error, f"Send {name}={minimum} to {maximum}.")
    return int(text)
