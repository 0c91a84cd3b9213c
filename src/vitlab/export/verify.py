"""The gate: model and exported file look at the same real pictures, each with the preprocess it brings itself.

A file that answers otherwise is not kept (ship.py). What is asked of it:
    float32   no value differs by more than 1e-4 of the largest value that the model gives
    int8      99 of 100 pictures get the same class; features: each picture's are nearest to its own
    fewer tokens   as float32, but of 50 pictures one may differ: where two tokens are as similar, rounding may choose
NaN or infinity, on either side, fails every one of them: such values have no difference and no order.
The export is asked in batches of 1, 3 and 8, and where it promises other image sizes, the same is asked of it in those.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitlab.export.about import About
from vitlab.export.opened import Exported
from vitlab.export.pictures import prepared, texts
from vitlab.export.timing import alternate, summary
from vitlab.export.tower import Tower
from vitlab.models.base import evaluating

TOLERANCE = 1e-4
AGREEMENT = 0.99
BATCHES = (1, 3, 8)
ODD = 0.02  # of the pictures, where tokens are chosen
ROUNDS = 5


@dataclass
class Verdict:
    images: int
    max_difference: float
    largest: float  # value that the model gives
    agreement: float  # share of pictures with the same answer
    answers: int | None  # different classes that the model gives to these pictures; None: it gives features
    within: float  # share of pictures with no difference above the tolerance
    tolerance: float
    milliseconds: dict[str, float]  # of a batch, medians: model, export
    batch: int
    bytes: dict[str, int]  # of the weights: model; of the file: export
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what makes this say less than it seems to
    not_finite: dict[str, int] = field(default_factory=dict)  # pictures with NaN or infinity: model, export

    @property
    def passed(self) -> bool:
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: those are texts."""
        plain = {key: str(v) if isinstance(v, float) and not math.isfinite(v) else v for key, v in vars(self).items()}
        return {**plain, "passed": self.passed}


def verify(
    model: Any,
    exported: Exported,
    images: list[Image.Image],
    *,
    tolerance: float = TOLERANCE,
    agreement: float = AGREEMENT,
    rounds: int = ROUNDS,
) -> Verdict:
    """`model` is the one that was exported: it says what is right, without the file's reducer or int8 being undone."""
    about = exported.about
    tower = Tower(model, about.gives, about.reducer)
    with evaluating(tower):
        ours, theirs = _inputs(model, exported, images)
        right = _in_batches(tower, ours, (8,))
        found = _in_batches(exported, theirs, BATCHES)
        verdict = _compare(right, found, tolerance, about.gives)
        verdict.problems += _judge(verdict, about, agreement)
        if verdict.answers == 1:
            verdict.notes.append(
                f"the model gives all {verdict.images} pictures the same class, so that both agree says little: "
                "compare on pictures of several classes, --data SOURCE"
            )
        if verdict.problems and ours.shape == theirs.shape and not torch.equal(ours, theirs):
            verdict.problems.append(_prepared_otherwise(model, exported))
        if about.gives == "logits" and list(exported.labels or []) != list(model.labels or []):
            verdict.problems.append("the names of the classes differ")
        if about.dynamic_size and about.gives != "text":
            verdict.problems += _other_sizes(tower, exported, images, tolerance, agreement)
        few, same = ours[: BATCHES[-1]], theirs[: BATCHES[-1]]
        verdict.batch = len(few)
        times = alternate({"model": lambda: tower(few), "export": lambda: exported(same)}, rounds)
        verdict.milliseconds = {name: 1000 * summary(seconds)["median"] for name, seconds in times.items()}
    verdict.bytes = {"model": sum(p.nbytes for p in tower.state_dict().values()), "export": exported.bytes}
    return verdict


def _inputs(model: Any, exported: Exported, images: list[Image.Image]) -> tuple[Tensor, Tensor]:
    if exported.about.gives == "text":
        if model.tokenizer is None:
            raise ValueError("the CLIP came without its tokenizer, so its text tower cannot be compared.")
        asked = texts(len(images))
        return model.tokenizer(asked), exported.tokenizer(asked)  # type: ignore[operator]
    if model.preprocess is None or exported.preprocess is None:
        raise ValueError("the model has no preprocess, so it cannot look at pictures: set model.preprocess first.")
    size = exported.config.image_size
    return prepared(model.preprocess.with_size(size), images), prepared(exported.preprocess, images)


def _in_batches(look: Callable[[Tensor], Tensor], inputs: Tensor, sizes: tuple[int, ...]) -> Tensor:
    found, start, number = [], 0, 0
    while start < len(inputs):
        size = sizes[min(number, len(sizes) - 1)]
        found.append(look(inputs[start : start + size]).float())
        start, number = start + size, number + 1
    return torch.cat(found)


def _compare(right: Tensor, found: Tensor, tolerance: float, gives: str) -> Verdict:
    if right.shape != found.shape:
        raise ValueError(f"the export gives {tuple(found.shape)} where the model gives {tuple(right.shape)}.")
    differences = (right - found).abs().amax(dim=1)  # (B,), nan stays nan
    largest = float(right.abs().max())
    allowed = tolerance * largest
    bad = {"model": count_not_finite(right), "export": count_not_finite(found)}
    return Verdict(
        images=len(right),
        max_difference=float(differences.max()),
        largest=largest,
        agreement=agreement_of(right, found, gives),
        answers=len(right.argmax(dim=1).unique()) if gives == "logits" else None,
        within=float((differences <= allowed).float().mean()),
        tolerance=allowed,
        milliseconds={},
        batch=0,
        bytes={},
        not_finite={side: count for side, count in bad.items() if count},
    )


def count_not_finite(values: Tensor) -> int:
    """How many rows hold NaN or infinity."""
    return int((~torch.isfinite(values)).any(dim=1).sum())


def agreement_of(right: Tensor, found: Tensor, gives: str) -> float:
    """Same class; of features: looked up among the right ones, a picture finds itself. NaN and infinity never agree."""
    finite = torch.isfinite(right).all(dim=1) & torch.isfinite(found).all(dim=1)
    if gives == "logits":
        same = right.argmax(dim=1) == found.argmax(dim=1)
        return float((same & finite).float().mean())
    cosines = _unit(found) @ _unit(right).T  # (B, B)
    own = cosines.diagonal()
    same = own >= cosines.nan_to_num(-1.0).amax(dim=1) - 1e-6  # of two equal pictures either will do
    return float((same & finite).float().mean())


def _unit(features: Tensor) -> Tensor:
    """Of length 1, however short they are: F.normalize alone leaves those below 1e-12 short."""
    return F.normalize(features / features.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo().tiny), dim=1)


def _judge(verdict: Verdict, about: About, agreement: float) -> list[str]:
    problems, odd = [], ODD if about.reducer is not None else 0.0
    problems += [
        f"the {side} gives NaN or infinity for {count} of {verdict.images} pictures"
        for side, count in verdict.not_finite.items()
    ]
    if about.int8 is None and verdict.within < 1 - odd:
        problems.append(
            f"values differ by up to {verdict.max_difference:.1e}, where {verdict.tolerance:.1e} is allowed "
            f"({1 - verdict.within:.1%} of the pictures)"
        )
    if verdict.agreement < agreement:
        problems.append(
            f"only {verdict.agreement:.1%} of {verdict.images} pictures get the same answer, not {agreement:.0%}"
        )
    return problems


def _prepared_otherwise(model: Any, exported: Exported) -> str:
    ours, theirs = model.preprocess.to_dict(), exported.preprocess.to_dict()  # type: ignore[union-attr]
    names = [name for name in ours if name != "size" and ours[name] != theirs[name]]
    told = ", ".join(f"{name} {theirs[name]} and not {ours[name]}" for name in names)
    return f"the file prepares pictures otherwise than the model: {told or 'the resized pictures differ'}"


def _other_sizes(
    tower: Tower, exported: Exported, images: list[Image.Image], tolerance: float, agreement: float
) -> list[str]:
    """Larger and smaller, and not square, with an odd and with an even number of patches, because some reducers halve
    them. Rounding shows on a few pictures; a share that agrees needs all of them.
    """
    assert exported.preprocess is not None
    about, (h, w) = exported.about, exported.config.image_size
    step = about.stride if about.stride > 1 else 8
    few = images if about.int8 is not None or about.reducer is not None else images[: BATCHES[-1]]
    problems = []
    rows, columns = h // step, w // step
    odd = (rows + 1 + rows % 2, columns + 3 - columns % 2)
    even = (max(2, rows - 1), columns + 1 + (columns + 1) % 2)
    for size in ((step * r, step * c) for r, c in (odd, even)):
        inputs = prepared(exported.preprocess.with_size(size), few)
        right = _in_batches(tower, inputs, BATCHES[-1:])
        try:
            found = _in_batches(exported, inputs, BATCHES[-1:])
        except Exception as error:  # torch and ONNX Runtime raise many kinds
            first = str(error).strip().partition("\n")[0][:200]
            problems.append(f"at {size[0]} x {size[1]} pixels it does not run: {first}")
            continue
        verdict = _compare(right, found, tolerance, about.gives)
        problems += [f"at {size[0]} x {size[1]} pixels {told}" for told in _judge(verdict, about, agreement)]
    return problems
