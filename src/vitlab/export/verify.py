"""Compare an exported file with its model on the same real images, each with its own preprocess.

A file that fails is not kept (pipeline.py). The limits:
    float32   no value differs by more than 1e-4 of the model's largest output
    int8      99 % of the images get the same class, the same labels, or a number within 0.05 standard deviations;
              features: each image's nearest neighbour is itself, cosine > 0.5
    reducer   as float32, but 2 % of the images may differ, because rounding can change which tokens are reduced
NaN or infinity on either side always fails.
The export runs in batches of 1, 3 and 8; with dynamic size it is also compared at other image sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import ExportError
from vitlab.export.loader import Exported
from vitlab.export.metadata import ExportMetadata
from vitlab.export.program import first_line
from vitlab.export.samples import preprocess_batch, sample_images, sample_texts
from vitlab.export.timing import alternate, summary
from vitlab.export.wrapper import ExportWrapper, in_a_row, run_where_it_is
from vitlab.images.read import Source
from vitlab.models.base import Network, evaluating
from vitlab.models.dense import DenseOutput
from vitlab.models.task import CLASSES, ModelTask
from vitlab.parsing import spell_not_finite
from vitlab.tables import Table, Tabular

TOLERANCE = 1e-4
AGREEMENT = 0.99
MIN_COSINE = 0.5  # of an image's features with the expected ones; all zeros have cosine 0 with everything
BATCHES = (1, 3, 8)
REDUCER_MARGIN = 0.02  # share of images that may differ under a reducer
ROUNDS = 5


@dataclass(frozen=True)
class Comparison:
    """Images that an export is compared on, and how much it may differ."""

    source: str | None = None  # a data source; None: crops of photographs
    path: str | None = None
    images: int = 128
    tolerance: float = TOLERANCE
    agreement: float = AGREEMENT

    def sample(self, channels: int, *, calibrate: bool = False) -> list[Source]:
        return sample_images(self.images, channels=channels, source=self.source, path=self.path, calibrate=calibrate)


@dataclass
class Verification(Tabular):
    images: int
    max_difference: float
    largest: float  # output of the model
    agreement: float  # share of images with the same answer
    answers: int | None  # different classes that the model predicts here; None for features
    within: float  # share of images with no difference above the tolerance
    tolerance: float
    milliseconds: dict[str, float]  # median per batch: model, export
    batch: int
    bytes: dict[str, int]  # model: its weights; export: the file
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # caveats
    not_finite: dict[str, int] = field(default_factory=dict)  # images with NaN or infinity: model, export
    inputs: str = "images"  # or texts

    @property
    def passed(self) -> bool:
        return not self.problems

    def table(self) -> Table:
        ms, size = self.milliseconds, self.bytes
        classes = "" if self.answers is None else f", to which the model gives {self.answers} different classes"
        rows = [
            ["same answer", f"{self.agreement:.2%} of {self.images} {self.inputs}{classes}"],
            ["largest difference", f"{self.max_difference:.1e}, of values up to {self.largest:.3g}"],
            [f"a batch of {self.batch}", f"{ms['export']:.1f} ms, the model {ms['model']:.1f} ms"],
            ["size", f"{size['export'] / 1e6:.2f} MB, the model {size['model'] / 1e6:.2f} MB"],
        ]
        return Table(["", ""], rows, prose=("",))

    def to_dict(self) -> dict[str, Any]:
        """For JSON; NaN and infinity become strings."""
        return {**spell_not_finite(vars(self)), "passed": self.passed}


def verify(
    model: Network,
    exported: Exported,
    images: Sequence[Source],
    *,
    tolerance: float = TOLERANCE,
    agreement: float = AGREEMENT,
    rounds: int = ROUNDS,
) -> Verification:
    """Compare with the exported `model`, which runs with the file's reducer."""
    metadata = exported.metadata
    wrapper = ExportWrapper(model, metadata.gives, metadata.reducer)
    run = partial(run_where_it_is, wrapper)
    with evaluating(wrapper):
        ours, theirs = _inputs(model, exported, images)
        expected = _run_batches(run, ours, (8,))
        actual = _run_batches(lambda x: in_a_row(exported(x)), theirs, BATCHES)
        result = _compare(expected, actual, tolerance, exported)
        result.problems += _find_problems(result, metadata, agreement)
        if metadata.gives == "dense":
            result.problems += _field_problems(exported(theirs[:1]), expected, actual, tolerance)
        if result.answers == 1:
            result.notes.append(
                f"the model predicts one class for all {result.images} images, so their agreement says little: "
                "compare on images of several classes, --data SOURCE"
            )
        if result.problems and ours.shape == theirs.shape and not torch.equal(ours, theirs):
            result.problems.append(_preprocess_difference(model, exported))
        if metadata.gives in ("logits", "dense") and list(exported.labels or []) != list(model.labels or []):
            result.problems.append("the class names differ")
        if metadata.gives == "logits" and exported.task != model.task:
            result.problems.append("what the outputs mean differs")
        if metadata.dynamic_size and metadata.gives != "text":
            result.problems += _other_sizes(run, exported, images, tolerance, agreement)
        few, same = ours[: BATCHES[-1]], theirs[: BATCHES[-1]]
        result.batch = len(few)
        times = alternate({"model": lambda: run(few), "export": lambda: in_a_row(exported(same))}, rounds)
        result.milliseconds = {name: 1000 * summary(seconds)["median"] for name, seconds in times.items()}
    result.bytes = {"model": sum(p.nbytes for p in wrapper.state_dict().values()), "export": exported.bytes}
    return result


def _inputs(model: Network, exported: Exported, images: Sequence[Source]) -> tuple[Tensor, Tensor]:
    if exported.metadata.gives == "text":
        if model.tokenizer is None:
            raise ExportError("the CLIP has no tokenizer, so its text tower cannot be compared.")
        texts = sample_texts(len(images))
        return model.tokenizer(texts), exported.tokenizer(texts)  # type: ignore[operator]
    return preprocess_batch(model, images, exported.config.image_size), preprocess_batch(exported, images)


def _run_batches(run: Callable[[Tensor], Tensor], inputs: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Outputs of all inputs; the last of `sizes` is repeated."""
    outputs, start = [], 0
    while start < len(inputs):
        size = sizes[min(len(outputs), len(sizes) - 1)]
        outputs.append(run(inputs[start : start + size]).float())
        start += size
    return torch.cat(outputs)


def _compare(expected: Tensor, actual: Tensor, tolerance: float, exported: Exported) -> Verification:
    gives, task = exported.metadata.gives, exported.task
    if expected.shape != actual.shape:
        raise ExportError(f"the export returns {tuple(actual.shape)} where the model returns {tuple(expected.shape)}.")
    differences = (expected - actual).abs().amax(dim=1)  # (B,), nan stays nan
    largest = float(expected.abs().max())
    allowed = tolerance * largest
    within = float((differences <= allowed).float().mean())
    bad = {"model": count_not_finite(expected), "export": count_not_finite(actual)}
    return Verification(
        images=len(expected),
        max_difference=float(differences.max()),
        largest=largest,
        agreement=within if gives == "dense" else agreement_rate(expected, actual, gives, task),
        answers=len(expected.argmax(dim=1).unique()) if gives == "logits" and task == CLASSES else None,
        within=within,
        tolerance=allowed,
        milliseconds={},
        batch=0,
        bytes={},
        not_finite={side: count for side, count in bad.items() if count},
        inputs="texts" if gives == "text" else "images",
    )


def count_not_finite(values: Tensor) -> int:
    """How many rows hold NaN or infinity."""
    return int((~torch.isfinite(values)).any(dim=1).sum())


def agreement_rate(expected: Tensor, actual: Tensor, gives: str, task: ModelTask = CLASSES) -> float:
    """Share with the same answer; for features, with itself as nearest neighbour. NaN, infinity and features that are
    all zero never agree.
    """
    finite = torch.isfinite(expected).all(dim=1) & torch.isfinite(actual).all(dim=1)
    if gives == "logits":
        same = task.same_answers(expected, actual)
        return float((same & finite).float().mean())
    cosines = _unit(actual) @ _unit(expected).T  # (B, B)
    own = cosines.diagonal()
    same = own >= cosines.nan_to_num(-1.0).amax(dim=1) - 1e-6  # either of two equal images will do
    similar = own > MIN_COSINE
    return float((same & similar & finite).float().mean())


def _unit(features: Tensor) -> Tensor:
    """Unit-length features, also where F.normalize alone would fail (norms below 1e-12)."""
    return F.normalize(features / features.abs().amax(dim=1, keepdim=True).clamp_min(torch.finfo().tiny), dim=1)


def _find_problems(result: Verification, metadata: ExportMetadata, agreement: float) -> list[str]:
    problems, margin = [], REDUCER_MARGIN if metadata.reducer is not None else 0.0
    problems += [
        f"the {side} gives NaN or infinity for {count} of {result.images} images"
        for side, count in result.not_finite.items()
    ]
    if metadata.int8 is None and result.within < 1 - margin:
        problems.append(
            f"values differ by up to {result.max_difference:.1e}, where {result.tolerance:.1e} is allowed "
            f"({1 - result.within:.1%} of the images)"
        )
    if result.agreement < agreement:
        problems.append(
            f"only {result.agreement:.1%} of {result.images} images get the same answer, not {agreement:.0%}"
        )
    return problems


def _field_problems(one: DenseOutput, expected: Tensor, actual: Tensor, tolerance: float) -> list[str]:
    """Boxes are small numbers beside logits: each field is compared with its own largest value."""
    widths = [value.numel() for value in one.tensors().values()]
    problems: list[str] = []
    for name, a, b in zip(one.tensors(), torch.split(expected, widths, 1), torch.split(actual, widths, 1), strict=True):
        difference, allowed = float((a - b).abs().max()), tolerance * float(a.abs().max())
        if not difference <= allowed:
            problems.append(f"{name} differ by up to {difference:.1e}, where {allowed:.1e} is allowed")
    return problems


def _preprocess_difference(model: Network, exported: Exported) -> str:
    ours, theirs = model.preprocess.to_dict(), exported.preprocess.to_dict()  # type: ignore[union-attr]
    names = [name for name in ours if name != "size" and ours[name] != theirs[name]]
    differences = ", ".join(f"{name} {theirs[name]} and not {ours[name]}" for name in names)
    return f"the file preprocesses images differently from the model: {differences or 'the resized images differ'}"


def _other_sizes(
    run: Callable[[Tensor], Tensor], exported: Exported, images: Sequence[Source], tolerance: float, agreement: float
) -> list[str]:
    """Compare at a larger and a smaller size, not square, with an odd and an even number of patches, because some
    reducers halve them. A few images show rounding; the agreement rate needs all of them.
    """
    metadata, (h, w) = exported.metadata, exported.config.image_size
    step = metadata.stride if metadata.stride > 1 else 8
    few = images if metadata.int8 is not None or metadata.reducer is not None else images[: BATCHES[-1]]
    problems = []
    rows, columns = h // step, w // step
    odd = (rows + 1 + rows % 2, columns + 3 - columns % 2)
    even = (max(2, rows - 1), columns + 1 + (columns + 1) % 2)
    for size in ((step * r, step * c) for r, c in (odd, even)):
        inputs = preprocess_batch(exported, few, size)
        expected = _run_batches(run, inputs, BATCHES[-1:])
        try:
            actual = _run_batches(exported, inputs, BATCHES[-1:])
        except Exception as error:  # torch and ONNX Runtime raise many kinds
            problems.append(f"at {size[0]} x {size[1]} pixels it does not run: {first_line(error)[:200]}")
            continue
        result = _compare(expected, actual, tolerance, exported)
        problems += [
            f"at {size[0]} x {size[1]} pixels {problem}" for problem in _find_problems(result, metadata, agreement)
        ]
    return problems
