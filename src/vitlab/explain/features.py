"""What patch tokens have in common: colours by principal components, likeness to one patch, foreground, nearest images.

    rgb = pca_rgb(model, ["a.jpg", "b.jpg"])           # (B, grid_h, grid_w, 3): like parts get like colours
    like = patch_similarity(model, images, at=(100, 60))
    found = nearest(model, "cat.jpg", "photos/", k=5)  # found[0][0].name

No classes are needed. The DINOv2 paper (arXiv:2304.07193) shows such pictures, of whose tokens they say most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.explain.attention_maps import resolve_query
from vitlab.explain.inputs import Images, as_batch, batches, check_model, evaluating, wide
from vitlab.explain.stages import Stages, in_stages
from vitlab.images.read import EXTENSIONS, ImageError


@torch.no_grad()
def patch_tokens(model: Any, images: Images, layer: int = -1, *, batch_size: int = 8) -> Tensor:
    """(B, grid_h, grid_w, D): the patches' tokens after block `layer` and the final norm, on the CPU.

    In stages a token stands on several patches of the first one: each of them has it.
    """
    check_model(model)
    parts = []
    for batch in batches(model, images, batch_size):
        with evaluating(model):
            (found,) = model.intermediate_features(batch.images, [layer], maps=True)  # (B, D, grid_h, grid_w)
        if in_stages(model):
            stages = Stages(model, *batch.images.shape[-2:])
            found = stages.paint(wide(found).flatten(2), stages.layers[layer].stage)
        parts.append(wide(found).permute(0, 2, 3, 1).cpu())
    return torch.cat(parts)


def pca_rgb(
    model: Any,
    images: Images,
    joint: bool = True,
    layer: int = -1,
    foreground: bool | Tensor | np.ndarray | None = None,
    *,
    batch_size: int = 8,
) -> Tensor:
    """(B, grid_h, grid_w, 3), 0 to 1: the first three principal components of patch tokens as red, green and blue.

    joint       one set of components for all images, so that colours can be compared; or each image by itself
    foreground  True: components of the foreground only (`foreground_mask`), the rest black; or a mask of your own,
                (B, grid_h, grid_w)

    Each component is stretched from its lowest value to its highest. Its sign means nothing: its largest entry is made
    positive.
    """
    tokens = patch_tokens(model, images, layer, batch_size=batch_size)
    mask = torch.ones(tokens.shape[:3], dtype=torch.bool)
    if foreground is True:
        mask = _foreground(tokens, joint)
    elif foreground is not None and foreground is not False:
        mask = torch.as_tensor(foreground).cpu().bool()
        if mask.shape != tokens.shape[:3]:
            raise ValueError(f"foreground is {tuple(mask.shape)} but the patches are {tuple(tokens.shape[:3])}.")
    rgb = torch.zeros(*tokens.shape[:3], 3, dtype=tokens.dtype)
    for part in _together(len(tokens), joint):
        values, seen = tokens[part], mask[part]
        found = principal_components(values[seen], 3)  # (n, 3)
        if len(found):
            low, high = found.amin(0), found.amax(0)
            rgb[part][seen] = torch.where(high > low, (found - low) / (high - low), 0.0)
    return rgb


def patch_similarity(
    model: Any,
    images: Images,
    at: tuple[float, float] | int,
    layer: int = -1,
    *,
    of: int | None = None,
    batch_size: int = 8,
) -> Tensor:
    """(B, grid_h, grid_w): the cosine of every patch's token with the one at pixel (x, y) of the model's input.

    `at` may also be a patch's number, row by row. of=0 takes the patch from image 0 for all images, to find the same
    part elsewhere; None takes each image's own.
    """
    batch = as_batch(model, images)
    place = resolve_query(model, batch.images, at)
    if not isinstance(place, int):
        raise ValueError(f"at={at!r} must be a pixel (x, y) of the model's input, or a patch's number.")
    if of is not None and not -len(batch) <= of < len(batch):
        raise ValueError(f"of={of} does not exist: there are images 0 to {len(batch) - 1}.")
    tokens = F.normalize(patch_tokens(model, batch, layer, batch_size=batch_size), dim=-1)
    chosen = tokens.flatten(1, 2)[:, place]  # (B, D)
    chosen = chosen if of is None else chosen[of].expand_as(chosen)
    return (tokens * chosen[:, None, None]).sum(-1)


def foreground_mask(model: Any, images: Images, joint: bool = False, layer: int = -1, *, batch_size: int = 8) -> Tensor:
    """(B, grid_h, grid_w), True on what stands out: the first principal component, cut in two where the halves differ
    most (Otsu's threshold).

    A component has no sign of its own; it is turned so that patches at the picture's border lie lower than the mean, so
    the border is background. An object that fills the border is taken for it.
    """
    return _foreground(patch_tokens(model, images, layer, batch_size=batch_size), joint)


@dataclass(frozen=True)
class Neighbour:
    name: str  # its path, or "image 3"
    number: int  # its place among the pictures searched
    similarity: float  # cosine, at most 1


def nearest(
    model: Any,
    query_images: Images,
    among: Images,
    k: int = 5,
    *,
    batch_size: int = 16,
    skip: Callable[[str], object] | None = None,
) -> list[list[Neighbour]]:
    """For each query the k most alike, best first, by the cosine of pooled features.

    among   a folder, searched with all folders in it, or images. A picture that is in both finds itself
    skip    called with what is wrong with a picture that cannot be read, which is then left out; without it, that is an
            error
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise ValueError(f"k={k!r} must be a whole number, at least 1.")
    queries = pooled_features(model, query_images, batch_size=batch_size)  # (Q, D)
    named, vectors = _searched(model, among, batch_size, skip)  # (M, D)
    likeness = (queries @ vectors.T).clamp(-1, 1)  # (Q, M)
    best = likeness.topk(min(k, len(named)), dim=1)
    return [
        [Neighbour(named[place][0], named[place][1], value) for place, value in zip(places, values, strict=True)]
        for places, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
    ]


@torch.no_grad()
def pooled_features(model: Any, images: Images, *, batch_size: int = 16) -> Tensor:
    """(B, D): what the classifier reads of each image, made to length 1, on the CPU."""
    check_model(model)
    parts = []
    for batch in batches(model, images, batch_size):
        with evaluating(model):
            found = model.forward_head(model.forward_features(batch.images), pre_logits=True)
        parts.append(F.normalize(wide(found), dim=-1).cpu())
    return torch.cat(parts)


def _searched(
    model: Any, among: Any, batch_size: int, skip: Callable[[str], object] | None
) -> tuple[list[tuple[str, int]], Tensor]:
    """Name and number of every picture that was read, and their features."""
    if isinstance(among, str | PathLike):
        among = _pictures(Path(among)) if Path(among).is_dir() else [among]
    if not isinstance(among, list | tuple):  # a tensor, a batch, or one picture
        batch = as_batch(model, among)
        named = [(f"image {number}", number) for number in range(len(batch))]
        return named, pooled_features(model, batch, batch_size=batch_size)
    named, vectors = [], []
    for start in range(0, len(among), batch_size):
        read = []
        for number, picture in enumerate(among[start : start + batch_size], start):
            try:
                read.append(as_batch(model, picture).images)
            except ImageError as error:
                if skip is None:
                    raise
                skip(str(error))
                continue
            named.append((fspath(picture) if isinstance(picture, str | PathLike) else f"image {number}", number))
        if read:
            vectors.append(pooled_features(model, torch.cat(read), batch_size=batch_size))
    if not named:
        raise ValueError("there is no picture to search among: none was given, or none could be read.")
    return named, torch.cat(vectors)


def _pictures(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.rglob("*") if path.name.lower().endswith(EXTENSIONS) and path.is_file())
    if not found:
        raise ValueError(f"{folder}: no pictures in this folder. Read are {', '.join(EXTENSIONS)}.")
    return found


def principal_components(values: Tensor, count: int) -> Tensor:
    """(n, D) -> (n, count): each row's place along the directions in which rows differ most, the strongest first.

    A direction's largest entry is positive. Where there are fewer directions than asked for, the rest is 0.
    """
    if not len(values):
        return values.new_zeros(0, count)
    centred = values.double() - values.double().mean(0)
    square = torch.linalg.qr(centred, mode="r").R if len(centred) > centred.shape[1] else centred  # the same directions
    directions = torch.linalg.svd(square, full_matrices=False).Vh[:count]  # (count, D)
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    found = centred @ (directions * largest.sign()).T
    return F.pad(found, (0, count - found.shape[1])).to(values.dtype)


def otsu(values: Tensor) -> float:
    """The threshold that cuts values in two so that the halves' means lie farthest apart, weighed by their sizes."""
    ordered = values.flatten().double().sort().values
    n = len(ordered)
    below = torch.arange(1, n, dtype=torch.float64)  # how many lie below each cut
    low = ordered.cumsum(0)[:-1] / below
    high = (ordered.sum() - ordered.cumsum(0)[:-1]) / (n - below)
    between = below * (n - below) * (high - low) ** 2
    cut = int(between.argmax()) if n > 1 else 0
    return float(ordered[cut : cut + 2].mean())


def _foreground(tokens: Tensor, joint: bool) -> Tensor:
    mask = torch.zeros(tokens.shape[:3], dtype=torch.bool)
    border = torch.ones(tokens.shape[1:3], dtype=torch.bool)
    border[1:-1, 1:-1] = False
    for part in _together(len(tokens), joint):
        values = tokens[part]  # (b, grid_h, grid_w, D)
        first = principal_components(values.flatten(0, 2), 1).reshape(values.shape[:3])
        if first[:, border].mean() > first.mean():
            first = -first
        mask[part] = first > otsu(first)
    return mask


def _together(images: int, joint: bool) -> list[slice]:
    """Which images share their components."""
    return [slice(0, images)] if joint else [slice(i, i + 1) for i in range(images)]
