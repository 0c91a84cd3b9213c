"""Compares two checkpoints step by step on the same input: the first step that differs, and its cause.

A step differs where its largest difference is more than `tolerance` of its largest value. Each side preprocesses the
images, and the results are compared; both networks then get the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.diff.causes import Cause, Search
from vitlab.explain.diff.guesses import options
from vitlab.explain.diff.remedies import saved_anew
from vitlab.explain.diff.sides import Side, open_side
from vitlab.explain.diff.steps import Key, StepDifference, Tally, first_difference, json_values, run_steps, step_name
from vitlab.explain.diff.table import difference_table
from vitlab.explain.inputs import as_list
from vitlab.images.read import Source, read_image
from vitlab.images.samples import replace_sample
from vitlab.layers.patches import check_images
from vitlab.tables import Table, Tabular

SAME = (  # options that two copies of a network share
    *("patch_size", "channels", "width", "depth", "mlp_hidden", "mlp.kind", "stem.kind", "stem.patch_norms"),
    *("norm.kind", "norm.norm_pre", "final_norm", "attention.qk_norm"),
)
SETTINGS = (  # name, and the fields that belong together
    ("mean and std", ("mean", "std")),
    ("crop", ("how", "resize")),
    ("interpolation", ("interpolation",)),
    ("scale of the pixels", ("scale",)),
    ("input size", ("size", "resize")),
)


@dataclass
class Difference(Tabular):
    """The result of `diff`; `rows` in the order of the pass, preprocess first."""

    a: str
    b: str
    tolerance: float
    image_size: tuple[int, int]
    images: int  # number of images; 0: noise
    rows: list[StepDifference]
    causes: list[Cause] = field(default_factory=list)
    unexplained: str = ""  # describes what has no known cause
    own: StepDifference | None = None  # the output with each side's own preprocess
    same_class: int | None = None  # how many images then get the same class
    notes: list[str] = field(default_factory=list)

    def table(self, all_blocks: bool = False) -> Table:
        return difference_table(self, all_blocks)

    @property
    def equal(self) -> bool:
        return not self.causes and all(not row.differs for row in self.rows)

    @property
    def first(self) -> str | None:
        """The first step that differs."""
        step = next((row.step for row in self.rows if row.differs), None)
        return step or (self.causes[0].step if self.causes else None)

    @property
    def cause(self) -> Cause | None:
        return self.causes[0] if self.causes else None

    @property
    def remedy(self) -> str:
        return self.causes[0].remedy if self.causes else ""

    @property
    def verdict(self) -> str:
        """A summary in text, a line for each finding."""
        if self.equal:
            most = max((row.relative for row in self.rows), default=0.0)
            return (
                f"A and B agree in all {len(self.rows)} steps: no difference is above {most:.1e} of the largest value."
            )
        lines = []
        row = next((row for row in self.rows if row.differs), None)
        if row is not None and row.shape != row.other_shape:
            shapes = (" x ".join(map(str, shape)) for shape in (row.shape, row.other_shape))
            lines.append(f"first difference: {row.step} ({' in A, '.join(shapes)} in B).")
        elif row is not None and math.isnan(row.relative):
            lines.append(f"first difference: {row.step} (not a number in one of them).")
        elif row is not None:
            lines.append(f"first difference: {row.step} ({row.relative:.1e} of the largest value).")
        for number, cause in enumerate(self.causes):
            start = "Likely cause" if number == 0 else f"Then {cause.step}"
            repaired = ""
            if cause.after is not None:
                other = "A" if cause.changed == "B" else "B"
                how = f"to {cause.after:.1e}" if cause.after else "exactly"
                repaired = f" With {cause.changed} made as {other} in this, {cause.step} agrees {how}."
            lines.append(f"{start}: {cause.words}.{repaired}")
            lines.append(f"  {cause.remedy}")
        if self.unexplained:
            lines.append(self.unexplained)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self).items() if name not in ("rows", "causes", "own")},
            "equal": self.equal,
            "first": self.first,
            "verdict": self.verdict,
            "causes": [json_values({**vars(cause), "explained": cause.explained}) for cause in self.causes],
            "rows": [row.to_dict() for row in self.rows],
            "own": self.own.to_dict() if self.own is not None else None,
        }


def diff(
    a: ModelOrName,
    b: ModelOrName,
    images: Tensor | Source | Iterable[Source] | None = None,
    tolerance: float = 1e-5,
    *,
    image_size: tuple[int, int] | None = None,
    heads: int | None = None,
    device: str | None = None,
) -> Difference:
    """Compare two copies of one network: anything `vitlab.load` reads, transformers:FOLDER, or models.

    images      paths, PIL images, arrays or bytes, or a normalised tensor (B, C, H, W); None: fixed noise
    tolerance   the share of a step's largest value that counts as a difference
    image_size  the input's (height, width); B's own unless given
    heads       for bare files that do not tell it
    device      where both run: "cpu", "cuda", "auto"; None: where they are
    """
    if not isinstance(tolerance, int | float) or not 0 < tolerance < math.inf:
        raise UsageError(f"tolerance={tolerance!r} must be a number above 0, e.g. 1e-5.")
    A, B = (open_side(letter, what, heads, image_size, device) for letter, what in (("A", a), ("B", b)))
    _check_one_network(A, B)
    size = image_size or B.input_size
    fitted = size if image_size is not None or A.config.image_size != B.config.image_size else None
    result = Difference(A.name, B.name, tolerance, size, 0, [], notes=[*A.notes, *B.notes])
    originals: list[Image.Image] = []
    stored = next((s.preprocess.stored for s in (A, B) if s.preprocess is not None and s.preprocess.stored), None)
    if stored is not None and images is not None and not isinstance(images, Tensor):
        raise UsageError(f"the networks read {stored}, not photos: pass a tensor (B, C, H, W), or no images.")
    if images is not None and not isinstance(images, Tensor):
        originals = [read_image(replace_sample(source)) for source in as_list(images)]
        result.images = len(originals)
    views = (
        _compare_preprocessing(A, B, originals or [_fixed_image(size)], fitted, result)
        if (images is None and stored is None) or originals
        else {}
    )
    batch = _inputs(A, images, views if originals else {}, size)
    result.image_size = (batch.shape[-2], batch.shape[-1])
    worst = _compare_networks(A, B, batch, result)
    if originals and len(views) == 2:
        _compare_outputs(A, B, views, result)
    made: set[str] = set()
    if any(row.differs for row in result.rows if row.step != "preprocess"):
        made = _find_causes(A, B, batch[worst : worst + 1], result)
    _compare_labels(A, B, result)
    harmless = "" if result.unexplained else ", without effect here"
    rest = [guess for guess in options(A, B, {}) if not made.issuperset(guess.options)]
    result.notes += [f"also different{harmless}: {guess.description}." for guess in rest]
    return result


def _check_one_network(a: Side, b: Side) -> None:
    """Raises unless both sides are copies of one network."""
    values = [(path, *(attrgetter(path)(side.config) for side in (a, b))) for path in SAME]
    inner = ((c.head_dim or c.width // c.heads) * c.heads for c in (a.config, b.config))
    values.append(("width of attention", *inner))
    values.append(("layer_scale", *(bool(side.config.residual.layer_scale) for side in (a, b))))
    kinds = [side.config.positions.kind for side in (a, b)]
    if {"rotary", "relative"}.intersection(kinds):
        values.append(("positions", *kinds))
    other = [f"{path} {x} in A, {y} in B" for path, x, y in values if x != y]
    if a.family != b.family:
        other.insert(0, f"family {a.family} in A, {b.family} in B")
    if other:
        raise UsageError(
            f"{a.name} and {b.name} are different networks: {'; '.join(other)}. diff compares two copies of one "
            "network; `vitlab inspect` shows what each is."
        )


def _compare_preprocessing(
    a: Side, b: Side, images: list[Image.Image], size: tuple[int, int] | None, result: Difference
) -> dict[str, Tensor]:
    """Each side's input for the images, at `size` or its own; adds a row and a cause where they differ."""
    views = {side.letter: side.view(images, size) for side in (a, b)}
    there = {letter: view for letter, view in views.items() if view is not None}
    for side in (a, b):
        if side.letter not in there:
            result.notes.append(f"{side.letter} says nothing of how images are preprocessed, so that was not compared.")
    if len(there) == 2:
        row = _compare_views(there["A"], there["B"], result.tolerance)
        result.rows.append(row)
        if row.differs:
            result.causes.append(_why_views_differ(a, b, images, size, row))
    return there


def _fixed_image(size: tuple[int, int]) -> Image.Image:
    """Fixed noise, larger than the input and of another shape, so that every setting matters."""
    rows, columns = (3 * size[0] // 2 + 3, 2 * size[1] + 5)
    pixels = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _compare_views(a: Tensor, b: Tensor, tolerance: float) -> StepDifference:
    tally = Tally()
    tally.add(a, b)
    return tally.row("preprocess", tolerance)


def _why_views_differ(
    p: Side, r: Side, images: list[Image.Image], size: tuple[int, int] | None, row: StepDifference
) -> Cause:
    """The setting of r that brings p's input nearest to r's: each one alone, and all so far."""
    wanted = r.view(images, size)
    mine, theirs = (side.preprocess_at(size) for side in (p, r))
    assert wanted is not None and mine is not None
    best: tuple[float, str, dict[str, Any]] = (row.relative, "", {})
    so_far: dict[str, Any] = {}
    names: list[str] = []
    for name, fields in SETTINGS:
        other = {f: getattr(theirs, f) for f in fields if getattr(theirs, f) != getattr(mine, f)}
        if not other:
            continue
        so_far |= other
        names.append(name)
        for called, change in ((name, other), (", ".join(names), so_far)):
            after = _compare_views(replace(mine, **change).batch(images), wanted, 0.0).relative
            if after < best[0]:
                best = (after, called, dict(change))
    after, name, change = best
    if not change:
        text = f"{p.letter} and {r.letter} preprocess images by equal settings, yet their pixels differ"
        remedy = (
            "Two libraries resize: their rounding differs by a grey level or two. Preprocess images with one of them."
        )
        return Cause("preprocess", row.step, text, remedy, row.relative)
    text = "; ".join(
        f"{field} {_short(getattr(mine, field))} in {p.letter}, {_short(value)} in {r.letter}"
        for field, value in change.items()
    )
    values = ", ".join(f"{field}={value!r}" for field, value in change.items())
    remedy = saved_anew(p, r, f"preprocess=dict({values})")
    return Cause("preprocess", row.step, f"{name}: {text}", remedy, row.relative, after, p.letter)


def _short(value: object) -> str:
    return f"({', '.join(f'{n:g}' for n in value)})" if isinstance(value, tuple) else str(value)


def _inputs(
    a: Side, images: Tensor | Source | Iterable[Source] | None, views: dict[str, Tensor], size: tuple[int, int]
) -> Tensor:
    """The input of both networks: the given tensor, A's (or B's) preprocessed images, or noise."""
    if isinstance(images, Tensor):
        check_images(images, a.config.channels)
        if not len(images):
            raise UsageError("there is no image to look at: give at least one.")
        return images
    if views:
        return next(iter(views.values()))
    if images is not None:
        raise UsageError("neither A nor B says how images are preprocessed: leave the images out, or pass a tensor.")
    return torch.randn(2, a.config.channels, *size, generator=torch.Generator().manual_seed(0))


def _compare_networks(a: Side, b: Side, batch: Tensor, result: Difference) -> int:
    """Adds a row for every common step, over all images; returns the image with the largest first difference.

    One image at a time, as every step of two networks is held.
    """
    tallies: dict[Key, Tally] = {}
    alone: list[dict[Key, Tally]] = []
    absent: set[str] = set()
    for n in range(len(batch)):
        image = batch[n : n + 1]
        steps_a, steps_b = a.steps(image), b.steps(image)
        absent |= {key[0] for key in steps_a.keys() ^ steps_b.keys()}
        alone.append({})
        for key, value in steps_b.items():
            if key in steps_a:
                for tally in (tallies.setdefault(key, Tally()), alone[-1].setdefault(key, Tally())):
                    tally.add(steps_a[key], value)
    steps = {key: tally.row(step_name(*key), result.tolerance) for key, tally in tallies.items()}
    result.rows += steps.values()
    if absent:
        result.notes.append(f"not compared, because only one side shows it: {', '.join(sorted(absent))}.")
    first = next((key for key, row in steps.items() if row.differs), None)
    if first is None:
        return 0
    return max(range(len(alone)), key=lambda n: alone[n][first].row("", result.tolerance).relative)


def _compare_outputs(a: Side, b: Side, views: dict[str, Tensor], result: Difference) -> None:
    """Compares the outputs with each side's own preprocess."""
    tally = Tally()
    same = 0
    key: Key | None = None
    for n in range(result.images):
        steps_a, steps_b = (side.steps(views[side.letter][n : n + 1]) for side in (a, b))
        key = [k for k in steps_b if k in steps_a][-1]
        tally.add(steps_a[key], steps_b[key])
        same += int(steps_a[key].argmax()) == int(steps_b[key].argmax())
    if key is not None:
        result.own = tally.row(step_name(*key), result.tolerance)
        result.same_class = same if key == ("head", None) else None


def _find_causes(a: Side, b: Side, image: Tensor, result: Difference) -> set[str]:
    """Searches on a side that its config and weights reproduce when rebuilt; returns the options that are causes."""
    for p, r in ((a, b), (b, a)):
        again = run_steps(p.rebuilt({}, {}, {}), image)
        if first_difference(again, p.steps(image), result.tolerance) is None:
            search = Search(p, r, image, result.tolerance)
            result.causes += search.run()
            result.unexplained = search.unexplained
            return set(search.state.options)
        result.notes.append(f"{p.letter} is not what its config and weights make: it was changed after it was built.")
    result.unexplained = "No cause was looked for: neither side is what its config and weights make."
    return set()


def _compare_labels(a: Side, b: Side, result: Difference) -> None:
    """Compares label names: equal scores under reordered names are different predictions."""
    if not a.labels or not b.labels or a.labels == b.labels:
        return
    if len(a.labels) != len(b.labels):
        result.notes.append(f"A names {len(a.labels)} classes, B {len(b.labels)}.")
        return
    at = next(i for i, (x, y) in enumerate(zip(a.labels, b.labels, strict=True)) if x != y)
    example = f"class {at} is {a.labels[at]!r} in A, {b.labels[at]!r} in B"
    if sorted(a.labels) == sorted(b.labels) and not any(row.differs for row in result.rows if row.step == "head"):
        text = f"label order: the same names in another order; {example}"
        remedy = "Take the names from the side whose predictions are right: model.labels = [...], then vitlab.save."
        result.causes.append(Cause("labels", "labels", text, remedy, 1.0))
    else:
        result.notes.append(f"label names differ: {example}.")
