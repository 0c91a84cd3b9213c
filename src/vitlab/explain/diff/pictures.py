"""Compares the preprocessing of the two sides, and finds the setting that differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from vitlab.explain.diff.causes import Cause
from vitlab.explain.diff.remedies import saved_anew
from vitlab.explain.diff.sides import Side
from vitlab.explain.diff.steps import StepDifference, Tally

SETTINGS = (  # name, and the fields that belong together
    ("mean and std", ("mean", "std")),
    ("crop", ("how", "resize")),
    ("interpolation", ("interpolation",)),
    ("scale of the pixels", ("scale",)),
    ("input size", ("size", "resize")),
)


def fixed_picture(size: tuple[int, int]) -> Image.Image:
    """Fixed noise, larger than the input and of another shape, so that every setting matters."""
    rows, columns = (3 * size[0] // 2 + 3, 2 * size[1] + 5)
    pixels = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def compare_views(a: Tensor, b: Tensor, tolerance: float) -> StepDifference:
    tally = Tally()
    tally.add(a, b)
    return tally.row("preprocess", tolerance)


def why_views_differ(
    p: Side, r: Side, pictures: list[Image.Image], size: tuple[int, int] | None, row: StepDifference
) -> Cause:
    """The setting of r that brings p's input nearest to r's: each one alone, and all so far."""
    wanted = r.view(pictures, size)
    mine, theirs = (_settings(side, size) for side in (p, r))
    assert wanted is not None
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
            after = compare_views(replace(mine, **change).batch(pictures), wanted, 0.0).relative
            if after < best[0]:
                best = (after, called, dict(change))
    after, name, change = best
    if not change:
        text = f"{p.letter} and {r.letter} prepare pictures by equal settings, yet their pixels differ"
        remedy = (
            "Two libraries resize: their rounding differs by a grey level or two. Prepare pictures with one of them."
        )
        return Cause("preprocess", row.step, text, remedy, row.relative)
    text = "; ".join(
        f"{field} {_short(getattr(mine, field))} in {p.letter}, {_short(value)} in {r.letter}"
        for field, value in change.items()
    )
    values = ", ".join(f"{field}={value!r}" for field, value in change.items())
    remedy = saved_anew(p, r, f"preprocess=dict({values})")
    return Cause("preprocess", row.step, f"{name}: {text}", remedy, row.relative, after, p.letter)


def _settings(side: Side, size: tuple[int, int] | None) -> Any:
    return side.preprocess if size is None or size == side.input_size else side.preprocess.with_size(size)


def _short(value: Any) -> str:
    return f"({', '.join(f'{n:g}' for n in value)})" if isinstance(value, tuple) else str(value)
