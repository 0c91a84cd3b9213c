"""Is a heat map faithful? Remove the patches it scores highest, and see how fast the class probability falls.

    curve = curves(model, images, "relevance", kind="deletion")    # (B, steps + 1), the class's probability
    area(curve)                                                    # (B,), lower is better
    scores = compare_methods(model, images)                        # each method against random

deletion    most important first, replaced by the mean colour (0 after normalising): lower is better (arXiv:1806.07421)
insertion   most important first, put into a blurred image: higher is better (the same paper)
road        like deletion, but removed patches are filled in from around them, so that the shape of the hole gives
            little away: noisy linear imputation, lower is better (arXiv:2202.00449)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, TokenModel, as_batch, grid_of, logits_of, token_model, wide
from vitlab.explain.methods import METHODS, find_method
from vitlab.explain.relevance import Target, classifier, target_classes
from vitlab.tables import Table, Tabular

Kind = Literal["deletion", "insertion", "road"]
Maps = str | Callable[[Any, Images, Target], Tensor] | Tensor | np.ndarray
NOISE = 0.01  # road: standard deviation, in normalised pixels, as in the authors' code
ONE_IMAGE = "One image is not a study: no verdict on the methods. Give ten images or more."
NEIGHBOURS = {  # road: weights of a pixel's neighbours by (rows, columns) away; the other half mirrors these
    (0, 1): 1 / 6,
    (1, 0): 1 / 6,
    (1, 1): 1 / 12,
    (1, -1): 1 / 12,
}


def curves(
    model: ModelOrName,
    images: Images,
    maps: Maps,
    target: Target = None,
    steps: int = 16,
    kind: Kind = "deletion",
    *,
    seed: int = 0,
    batch_size: int = 32,
) -> Tensor:
    """(B, steps + 1): the probability of each image's class with 0, 1/steps, ... 1 of its patches removed or inserted.

    maps    a method's name, a function of (model, images, target), or any (B, grid_h, grid_w); highest first
    target  as in relevance; None is the top class of the full image
    seed    for the order of equal values and for road's noise; both are the same for every image

    road solves a linear system per image and step.
    """
    if kind not in get_args(Kind):
        raise UsageError(f"kind={kind!r} must be one of {', '.join(get_args(Kind))}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"steps={steps!r} must be a whole number, at least 1.")
    model = classifier(model)
    if model.task.kind == "number":
        raise UsageError("this model predicts a number and no class, whose probability could be followed.")
    x = as_batch(model, images).images
    classes = torch.tensor(target_classes(model, x, target, batch_size=batch_size), device=x.device)
    rank = _ranks(_as_maps(model, x, maps, classes.tolist()), seed)  # (B, N), 0 = first
    fill = _fill(kind, wide(x).cpu(), model.config.patch_size, seed)
    grid, patches = grid_of(model, x), rank.shape[1]
    columns = []
    for step in range(steps + 1):
        count = round(step * patches / steps)
        gone = rank >= count if kind == "insertion" else rank < count  # (B, N)
        gone = _as_pixels(gone.unflatten(1, grid), model.config.patch_size, x.shape[-2:])  # (B, H, W)
        changed = fill(gone).to(x.device, x.dtype)  # (B, C, H, W)
        chances = model.task.scores(logits_of(model, changed, batch_size))
        columns.append(chances.gather(1, classes[:, None]))
    return torch.cat(columns, dim=1).cpu()


def area(curve: Tensor) -> Tensor:
    """(..., steps + 1) -> (...): the area under each curve over 0 to 1, by the trapezoidal rule."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[-1] - 1))


@dataclass
class MethodScore:
    """The curves of one method in one kind of test."""

    method: str
    kind: Kind
    curves: Tensor  # (B, steps + 1)
    random: Tensor  # (B,), the areas of the random baseline

    @property
    def areas(self) -> Tensor:
        return area(self.curves)  # (B,)

    @property
    def better(self) -> Tensor:
        """(B,): how much better each image's area is than that of the random baseline."""
        return self.areas - self.random if self.kind == "insertion" else self.random - self.areas

    def to_dict(self) -> dict[str, Any]:
        """Mean and standard deviation over images of the area and of the gain over random. `wins` is the share of
        images where it beats random; None of one image, which is no study."""
        mean, spread = _mean_and_spread(self.areas)
        gain, gain_spread = _mean_and_spread(self.better)
        return {
            "method": self.method,
            "kind": self.kind,
            "images": len(self.areas),
            "area": mean,
            "spread": spread,
            "gain": gain,
            "gain_spread": gain_spread,
            "wins": float((self.better > 0).double().mean()) if len(self.areas) > 1 else None,
        }


class MethodScores(Tabular, list[MethodScore]):
    """A list of scores, shown as a table."""

    def table(self) -> Table:
        scores = [score.to_dict() for score in self]
        numbers = ("area", "better than random by", "better in")
        note = "Area: deletion and road lower is better, insertion higher."
        if any(score["images"] == 1 for score in scores):  # what one image says of a method is chance
            rows = [[score["kind"], score["method"], f"{score['area']:.3f}"] for score in scores]
            return Table(["test", "method", "area"], rows, ("area",), notes=[note, ONE_IMAGE])
        rows = []
        for score in scores:
            cells = [f"{score['area']:.3f} ± {score['spread']:.3f}", "", ""]
            if score["method"] != "random":
                cells[1:] = [f"{score['gain']:+.3f} ± {score['gain_spread']:.3f}", f"{score['wins']:.0%}"]
            rows.append([score["kind"], score["method"], *cells])
        return Table(["test", "method", *numbers], rows, numbers, notes=[note])


def compare_methods(
    model: ModelOrName,
    images: Images,
    methods: Sequence[str] | Mapping[str, Maps] | None = None,
    kinds: Sequence[Kind] = ("deletion", "insertion", "road"),
    target: Target = None,
    steps: int = 16,
    *,
    seed: int = 0,
    batch_size: int = 32,
) -> MethodScores:
    """Scores in the order of kinds, then methods; `random` is last in each kind, as the baseline.

    methods   names, or a table of names and maps (or functions) of your own; None: all that the model supports
    """
    model = classifier(model)
    if methods is None or isinstance(methods, str):
        methods = [name for name, m in METHODS.items() if m.supports(model)] if methods is None else [methods]
    chosen: dict[str, Maps] = dict(methods) if isinstance(methods, Mapping) else {name: name for name in methods}
    chosen.pop("random", None)
    batch = as_batch(model, images)
    classes = target_classes(model, batch.images, target, batch_size=batch_size)
    maps = {name: _as_maps(model, batch.images, given, classes) for name, given in chosen.items()}
    maps["random"] = random_map(model, batch, seed=seed)
    scores = []
    for kind in kinds:
        by_name = {
            name: curves(model, batch, heat, classes, steps, kind, seed=seed, batch_size=batch_size)
            for name, heat in maps.items()
        }
        scores += [MethodScore(name, kind, curve, area(by_name["random"])) for name, curve in by_name.items()]
    return MethodScores(scores)


def random_map(model: ModelOrName, images: Images, *, seed: int = 0) -> Tensor:
    """(B, grid_h, grid_w): random scores, different for each image. The baseline of the other methods."""
    model = token_model(model)
    batch = as_batch(model, images)
    return torch.rand(len(batch), *grid_of(model, batch), generator=torch.Generator().manual_seed(seed))


def impute(image: Tensor, missing: Tensor) -> Tensor:
    """(C, H, W) with every missing pixel (H, W) the weighted mean of its up to eight neighbours, missing ones too.

    Weights are 1/6 for direct and 1/12 for diagonal neighbours (arXiv:2202.00449), normalised at the border: one sparse
    linear system for all missing pixels. If all pixels are missing, they become 0.
    """
    from scipy.sparse import diags
    from scipy.sparse.linalg import splu

    gone = missing.flatten().numpy()
    if gone.all() or not gone.any():
        return image * (~missing)
    pixels = image.flatten(1).double().numpy().T  # (HW, C)
    W = _weights(*missing.shape)  # (HW, HW)
    rows = W[gone]
    total = np.asarray(rows.sum(axis=1)).ravel()  # 1, less at the border
    left = (diags(total) - rows[:, gone]).tocsc()
    solver = splu(left, permc_spec="MMD_AT_PLUS_A", diag_pivot_thresh=0.0, options={"SymmetricMode": True})
    filled = pixels.copy()
    filled[gone] = solver.solve(rows[:, ~gone] @ pixels[~gone])
    return torch.from_numpy(filled.T).reshape(image.shape).to(image.dtype)


@lru_cache(maxsize=2)
def _weights(height: int, width: int) -> Any:
    """(HW, HW) sparse: each pixel's weights on its neighbours."""
    from scipy.sparse import coo_matrix

    number = np.arange(height * width).reshape(height, width)
    here, there, weights = [], [], []
    for (down, right), weight in NEIGHBOURS.items():
        a = number[: height - down, max(-right, 0) : width - max(right, 0)].ravel()
        b = a + down * width + right
        here, there = [*here, a, b], [*there, b, a]
        weights += [np.full(2 * len(a), weight)]
    size = (height * width, height * width)
    return coo_matrix((np.concatenate(weights), (np.concatenate(here), np.concatenate(there))), shape=size).tocsr()


def _fill(kind: Kind, images: Tensor, patch_size: int, seed: int) -> Callable[[Tensor], Tensor]:
    """A function that fills in missing pixels, given (B, H, W), True = missing."""
    if kind == "deletion":
        return lambda gone: images.masked_fill(gone[:, None], 0.0)
    if kind == "insertion":
        from scipy.ndimage import gaussian_filter

        sigma = (0, 0, patch_size, patch_size)  # wide enough to remove a patch's own content
        blurred = torch.from_numpy(gaussian_filter(images.numpy(), sigma=sigma, mode="nearest"))
        return lambda gone: torch.where(gone[:, None], blurred, images)
    noise = NOISE * torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(seed))  # (C, H, W)

    def filled_in(gone: Tensor) -> Tensor:
        filled = torch.stack([impute(image, holes) for image, holes in zip(images, gone, strict=True)])
        return filled + noise * gone[:, None]

    return filled_in


def _as_maps(model: TokenModel, images: Tensor, maps: Maps, classes: list[int]) -> Tensor:
    """(B, grid_h, grid_w) on the CPU: the result of a method, or the given maps."""
    if not isinstance(maps, Tensor | np.ndarray):
        maps = find_method(maps)(model, images, classes)
    heat = torch.as_tensor(maps).detach().cpu()
    expected = (len(images), *grid_of(model, images))
    if tuple(heat.shape) != expected:
        raise UsageError(
            f"maps are {tuple(heat.shape)} but these images have {expected}: one value for each image's patches."
        )
    if not heat.isfinite().all():
        raise UsageError("maps hold NaN or infinity: patches cannot be put in order by them.")
    return heat


def _ranks(maps: Tensor, seed: int) -> Tensor:
    """(B, grid_h, grid_w) -> (B, N): the rank of each patch, highest first; ties in random order."""
    values = maps.flatten(1)
    shuffled = torch.randperm(values.shape[1], generator=torch.Generator().manual_seed(seed))
    order = shuffled[values[:, shuffled].argsort(dim=1, descending=True, stable=True)]  # (B, N), patches in order
    return order.argsort(dim=1)


def _as_pixels(patches: Tensor, patch_size: int, size: Sequence[int]) -> Tensor:
    """(B, grid_h, grid_w) -> (B, H, W), without padding."""
    pixels = patches.repeat_interleave(patch_size, dim=1).repeat_interleave(patch_size, dim=2)
    return pixels[:, : size[0], : size[1]]


def _mean_and_spread(values: Tensor) -> tuple[float, float]:
    return float(values.mean()), float(values.std()) if len(values) > 1 else 0.0
