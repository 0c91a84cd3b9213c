"""What the page shows of one picture inside one model: the library's own numbers, as plain values or arrays.

Each part is a function (model, look, options) -> a dict for JSON, or an array, which travels as bytes.
"""

from __future__ import annotations

import time
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.explain.attention_maps import query_rows
from vitlab.explain.distance import attention_statistics
from vitlab.explain.features import patch_tokens, pca_rgb
from vitlab.explain.inputs import evaluating, wide
from vitlab.explain.pruned import pruned_patches
from vitlab.explain.reconstruct import reconstruct
from vitlab.explain.relevance import relevance
from vitlab.explain.rollout import rollout
from vitlab.explain.sentences import ask
from vitlab.explain.walk import as_numbers, walk_through
from vitlab.explain.weights import position_similarity
from vitlab.inference import class_labels, class_probabilities, ranked, reads_text
from vitlab.layers.trace import Trace
from vitlab.models.mae import MaskedAutoencoder
from vitlab.models.vit import VisionTransformer
from vitlab.reduce.named import reducer_of
from vitlab.serve.errors import RefusedError

Options = Mapping[str, str]
TOP = 5
TIMED = 3  # passes with and without a reducer; the median counts
KNOWS = 4  # labels that stand for all
SENTENCES, LONGEST = 10, 300  # how many at a time, characters of each


@dataclass(frozen=True)
class Look:
    """A picture as a model sees it."""

    model: str  # its name
    images: Tensor  # (1, C, H, W), normalised


def predict(model: Any, look: Look, options: Options) -> dict[str, Any]:
    began = time.perf_counter()
    chances = class_probabilities(model, [look.images[0]])[0]
    spent = 1e3 * (time.perf_counter() - began)
    return {"scores": _scores(model, chances), "milliseconds": round(spent, 2)}


def walk(model: Any, look: Look, options: Options) -> dict[str, Any]:
    found = as_numbers(walk_through(_encoder(model), look.images))
    labels = class_labels(model) if found["by_depth"] is not None else None
    return {**found, "labels": labels}


def positions(model: Any, look: Look, options: Options) -> Tensor:
    """(grid_h, grid_w, grid_h, grid_w)"""
    encoder = _encoder(model)
    return position_similarity(encoder, encoder.layout(*model.preprocess.size).grid)


@torch.no_grad()
def attention(model: Any, look: Look, options: Options) -> np.ndarray:
    """(h, N, N) of one layer, in half precision: a page holds all layers at once."""
    encoder = _encoder(model)
    trace = Trace("attention", layers=[_whole(options, "layer", 0, len(encoder.blocks) - 1)])
    with evaluating(encoder):
        encoder(look.images, trace=trace)
    return trace.stack("attention")[0, 0].numpy().astype(np.float16)


def roll_out(model: Any, look: Look, options: Options) -> Tensor:
    return rollout(_encoder(model), look.images)[0]


def relevant(model: Any, look: Look, options: Options) -> Tensor:
    """(grid_h, grid_w) for class number `class`."""
    return relevance(model, look.images, _whole(options, "class", 0, model.config.classes - 1))[0]


def distance(model: Any, look: Look, options: Options) -> dict[str, Any]:
    found = attention_statistics(_encoder(model), look.images)
    return {"distance": found.distance.tolist(), "entropy": found.entropy.tolist(), "uniform": found.uniform_distance}


def fewer(model: Any, look: Look, options: Options) -> dict[str, Any]:
    """With `reducer` (tome:r=8, evit:keep=0.7): which patches share a token after each layer, the answer, the time."""
    if len(name := options.get("reducer", "")) > LONGEST:  # long ones nest or overflow
        raise RefusedError(422, f"the reducer is longer than {LONGEST} characters.", "Write it like tome:r=8.")
    try:
        reducer = reducer_of(name)
        found = pruned_patches(model, look.images, reducer)
    except ValueError as error:
        raise RefusedError(422, str(error), "Choose another method, or fewer tokens to remove.") from None
    with torch.no_grad(), evaluating(model):
        chances = wide(model(look.images, reducer=reducer))[0].softmax(-1)
        plain = wide(model(look.images))[0].softmax(-1)
        times: list[list[float]] = [[], []]
        for _ in range(TIMED):
            for kept, how in zip(times, ({}, {"reducer": reducer}), strict=True):
                began = time.perf_counter()
                model(look.images, **how)
                kept.append(1e3 * (time.perf_counter() - began))
    return {
        "groups": found.groups[0].tolist(),
        "tokens": found.tokens[0].tolist(),
        "scores": _scores(model, chances),
        "plain": _scores(model, plain),
        "milliseconds": {"plain": round(median(times[0]), 3), "fewer": round(median(times[1]), 3)},
    }


def similarity(model: Any, look: Look, options: Options) -> np.ndarray:
    """(N, N): the cosine of every patch's token with every other's."""
    tokens = patch_tokens(_encoder(model), look.images)[0].flatten(0, 1)  # (N, D)
    unit = torch.nn.functional.normalize(tokens, dim=-1)
    return (unit @ unit.T).numpy().astype(np.float16)


def colours(model: Any, look: Look, options: Options) -> np.ndarray:
    """(grid_h, grid_w, 3), bytes"""
    return _bytes(pca_rgb(_encoder(model), look.images)[0])


def painted(model: Any, look: Look, options: Options) -> dict[str, Any]:
    """What is there, what is left to see, and what the model makes of it: (3, H, W, 3), bytes. Hidden are the patches
    that `mask` names by 1, row by row, or `percent` of them, by `seed`.
    """
    rows, columns = model.encoder.layout(*look.images.shape[-2:]).grid
    chosen = options.get("mask")
    if chosen is not None:
        if len(chosen) != rows * columns or set(chosen) - {"0", "1"}:
            raise RefusedError(422, f"mask must be {rows * columns} times 0 or 1.", "Send one for each patch.")
        mask = torch.tensor([one == "1" for one in chosen]).unflatten(0, (rows, columns))
        how: dict[str, Any] = {"mask": mask}
    else:
        ratio = _whole(options, "percent", 1, 99) / 100
        how = {"mask_ratio": ratio, "seed": _whole(options, "seed", 0, 10**6)}
    try:
        found = reconstruct(model, look.images, **how)
    except ValueError as error:
        raise RefusedError(422, str(error), "Hide at least one patch, and leave at least one.") from None
    grey = torch.where(found.hidden, torch.zeros_like(found.images), found.images)
    pictures = torch.cat([found.images, grey, found.pasted])  # (3, C, H, W)
    pixels = np.stack([_pixels(model, one) for one in pictures])
    return {
        "shape": list(pixels.shape),
        "pixels": b64encode(pixels.tobytes()).decode(),
        "mask": "".join("01"[int(hidden)] for hidden in found.mask[0].flatten()),
        "error": float(found.error[0]),
    }


def sentences(model: Any, look: Look, options: Options) -> dict[str, Any]:
    """Of `texts`, one in each line: cosine and probability among them, and which patches speak for each."""
    texts = [text.strip() for text in options.get("texts", "").splitlines() if text.strip()]
    texts = list(dict.fromkeys(texts))
    if not 1 <= len(texts) <= SENTENCES or any(len(text) > LONGEST for text in texts):
        raise RefusedError(
            422, f"{len(texts)} sentences were given.", f"Send 1 to {SENTENCES}, {LONGEST} letters at most."
        )
    asked = ask(model, texts)
    with torch.no_grad(), evaluating(asked):
        logits = wide(asked(look.images))[0]
    maps = [relevance(asked, look.images, number)[0].tolist() for number in range(len(texts))]
    cosines = asked.cosines(look.images)[0].tolist()
    return {"texts": texts, "cosine": cosines, "probability": logits.softmax(-1).tolist(), "maps": maps}


PARTS: dict[str, Callable[[Any, Look, Options], Any]] = {
    "predict": predict,
    "walk": walk,
    "positions": positions,
    "attention": attention,
    "rollout": roll_out,
    "relevance": relevant,
    "distance": distance,
    "fewer": fewer,
    "similarity": similarity,
    "colours": colours,
    "painted": painted,
    "sentences": sentences,
}


def offers(model: Any) -> list[str]:
    """The parts that this model has."""
    encoder = _encoder(model)
    plain = isinstance(encoder, VisionTransformer)
    classes = model.encoder is model and bool(model.config.classes)
    has = {
        "predict": classes,
        **dict.fromkeys(("walk", "attention", "rollout", "distance", "similarity", "colours"), plain),
        "positions": plain and encoder.positions is not None,
        "relevance": classes and hasattr(model, "layout"),
        "fewer": classes and plain and encoder.config.positions.kind not in ("rotary", "relative"),
        "painted": isinstance(model, MaskedAutoencoder),
        "sentences": reads_text(model) and model.tokenizer is not None,
    }
    return [part for part in PARTS if has[part]]


def about(model: Any) -> dict[str, Any]:
    """What the page must know before it asks."""
    encoder = _encoder(model)
    found: dict[str, Any] = {"offers": offers(model), "size": list(model.preprocess.size)}
    if "predict" in found["offers"]:
        found["knows"] = class_labels(model)[:KNOWS]
    if isinstance(encoder, VisionTransformer):
        c = encoder.config
        grid = encoder.layout(*model.preprocess.size).grid
        shapes = {"patch": c.patch_size, "depth": c.depth, "heads": c.heads, "grid": list(grid)}
        zeros = torch.zeros(1, c.channels, *model.preprocess.size)
        reads = query_rows(encoder, zeros, None).start  # the token that the head reads
        found |= {**shapes, "prefix": list(c.prefix), "reads": reads}
    return found


def view(model: Any, look: Look) -> np.ndarray:
    """(H, W, 3), bytes: the picture as the model sees it."""
    return _pixels(model, look.images[0])


def _encoder(model: Any) -> Any:
    return getattr(model, "encoder", model)


def _scores(model: Any, chances: Tensor) -> list[dict[str, Any]]:
    return [{"label": label, "probability": p} for label, p in ranked(chances, class_labels(model), TOP)]


def _pixels(model: Any, normalised: Tensor) -> np.ndarray:
    return np.asarray(model.preprocess.picture(normalised).convert("RGB"))


def _bytes(values: Tensor) -> np.ndarray:
    return (wide(values).clamp(0, 1) * 255).round().byte().cpu().numpy()


def _whole(options: Options, name: str, least: int, most: int) -> int:
    text = options.get(name, "")
    if not text.isdecimal() or len(text) > 9 or not least <= int(text) <= most:
        raise RefusedError(422, f"{name}={text[:20]!r} must be a whole number.", f"Send {name}={least} to {most}.")
    return int(text)
