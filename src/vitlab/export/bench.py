"""How fast is a model here, run in every way we know, and what does each way cost? One process, in turns.

    bench = run_bench(model, batch=8, against=["transformers"])
    bench.rows, bench.picked

Agreement and differences are with the eager model with all its tokens, on real pictures; times are medians with the
middle half of the runs, and every ratio is between medians of the same turns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vitlab.export.pictures import pictures, prepared
from vitlab.export.rivals import RIVALS, rival
from vitlab.export.runners import EXACT, Runner, Workshop, check_way
from vitlab.export.timing import alternate, memory_of, summary
from vitlab.export.verify import AGREEMENT, TOLERANCE, agreement_of
from vitlab.models.config import nearest
from vitlab.reduce import r_for, reducer_of

USUAL = (*EXACT, "int8")
MERGED = 0.5  # share of the patches that the usual reducer merges away, over all layers


@dataclass
class Row:
    """One way, measured. Seconds are of a batch."""

    name: str
    reducer: str | None
    agreement: float  # with the eager model with all tokens
    difference: float  # the largest, of values
    within: bool  # whether that is rounding
    bytes: int
    memory: int | None  # bytes that a batch takes at its peak, beside the weights; nothing is kept from batches before
    seconds: list[float] = field(default_factory=list)
    speedup: float = 1.0  # over eager
    ours: bool = True

    @property
    def title(self) -> str:
        return self.name if self.reducer is None else f"{self.name} + {self.reducer}"

    def to_dict(self, batch: int) -> dict[str, Any]:
        times = summary(self.seconds)
        return {
            "way": self.name,
            "reducer": self.reducer,
            "ms": 1000 * times["median"],
            "ms_quarter": 1000 * times["quarter"],
            "ms_three_quarters": 1000 * times["three_quarters"],
            "n": times["n"],
            "images_per_second": batch / times["median"],
            "speedup": self.speedup,
            "agreement": self.agreement,
            "max_difference": self.difference,
            "memory_bytes": self.memory,
            "size_bytes": self.bytes,
        }


@dataclass
class Bench:
    batch: int
    images: int
    rows: list[Row]
    picked: Row | None
    asked: float  # agreement
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "pictures": self.images,
            "agreement_asked": self.asked,
            "threads": torch.get_num_threads(),
            "picked": None if self.picked is None else self.picked.title,
            "rows": [row.to_dict(self.batch) for row in self.rows],
            "notes": self.notes,
        }


def run_bench(
    model: Any,
    *,
    batch: int = 8,
    rounds: int = 15,
    ways: Sequence[str] = USUAL,
    reducers: Sequence[str] | None = None,
    against: Sequence[str] = (),
    images: int = 64,
    source: str | None = None,
    path: str | None = None,
    agreement: float = AGREEMENT,
    progress: Callable[[str], object] | None = None,
) -> Bench:
    """`reducers`: what is tried beside all tokens; left out, ToMe that merges half of the patches, where it can."""
    check_names(ways, reducers or (), against)
    if "int8_static" in ways and source is None:
        raise ValueError("int8_static is calibrated on pictures of the kind that it will see: name them with --data.")
    if model.preprocess is None:
        raise ValueError("the model has no preprocess, so it cannot look at pictures: set model.preprocess first.")
    seen = prepared(model.preprocess, pictures(images, channels=model.config.channels, source=source, path=path))
    calibration = None
    if "int8_static" in ways:
        calibrated = pictures(images, channels=model.config.channels, source=source, path=path, part="calibrate")
        calibration = prepared(model.preprocess, calibrated)
    workshop = Workshop(model, calibration)
    tried = default_reducers(model) if reducers is None else reducers
    rivals, missing = make_each(
        {name: partial(rival, name, model, workshop) for name in against}, seen[:batch], progress
    )
    runners, notes = make_all(workshop, ways, (None, *tried), seen[:batch], progress)
    found = measure([*runners, *rivals], seen, workshop.gives, batch=batch, rounds=rounds)
    for row in found[len(runners) :]:
        row.ours = False
    return Bench(batch, len(seen), found, fastest(found, agreement), agreement, missing + notes)


def check_names(ways: Sequence[str], reducers: Sequence[str], against: Sequence[str]) -> None:
    """A name that is not known is told before anything is timed."""
    for way in ways:
        check_way(way)
    for text in reducers:
        reducer_of(text)
    for name in against:
        if name not in RIVALS:
            raise ValueError(f"--against {name!r} is not known.{nearest(name, list(RIVALS))} Use {', '.join(RIVALS)}.")


def make_all(
    workshop: Workshop,
    ways: Sequence[str],
    reducers: Sequence[str | None],
    batch: Tensor,
    progress: Callable[[str], object] | None = None,
) -> tuple[list[Runner], list[str]]:
    """The eager model first."""
    asked = {
        way if reducer is None else f"{way} + {reducer}": partial(workshop.make, way, reducer)
        for reducer in reducers
        for way in ways
    }
    asked.pop("eager", None)
    runners, notes = make_each(asked, batch, progress)
    return [workshop.make("eager"), *runners], notes


def make_each(
    asked: Mapping[str, Callable[[], Runner]], batch: Tensor, progress: Callable[[str], object] | None = None
) -> tuple[list[Runner], list[str]]:
    """What does not run here leaves a note: the others are still worth knowing."""
    runners, notes = [], []
    for title, make in asked.items():
        if progress is not None:
            progress(title)
        try:
            runner = make()
            runner.run(batch)
            runners.append(runner)
        except Exception as error:  # compilers and other libraries fail in many ways
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            notes.append(f"{title} does not run here: {first}")
    return runners, notes


def measure(runners: Sequence[Runner], seen: Tensor, gives: str, *, batch: int, rounds: int) -> list[Row]:
    """`seen` (n, C, H, W); the first runner is what the others are compared with."""
    timed = seen[:batch] if len(seen) >= batch else seen.repeat(-(-batch // len(seen)), 1, 1, 1)[:batch]
    rows: list[Row] = []
    right = _answers(runners[0], seen, batch)
    for runner in runners:
        found = _answers(runner, seen, batch)
        difference = float((found - right).abs().max())
        within = difference <= TOLERANCE * float(right.abs().max()) < math.inf  # false for NaN and infinity
        memory = memory_of(partial(runner.lean(), timed))
        agrees = agreement_of(right, found, gives)
        rows.append(Row(runner.name, runner.reducer, agrees, difference, within, runner.bytes, memory))
    times = alternate({str(n): (lambda run=r.run: run(timed)) for n, r in enumerate(runners)}, rounds)
    for row, seconds in zip(rows, times.values(), strict=True):
        row.seconds = seconds
    base = summary(rows[0].seconds)["median"]
    for row in rows:
        row.speedup = base / summary(row.seconds)["median"]
    return rows


def _answers(runner: Runner, seen: Tensor, batch: int) -> Tensor:
    """In whole batches of the size that is timed, so that a compiler makes one graph; the last is filled up."""
    parts = []
    for part in seen.split(batch):
        short = batch - len(part)
        whole = part if not short else torch.cat([part, seen[:1].expand(short, *seen.shape[1:])])
        parts.append(runner.run(whole)[: len(part)].float())
    return torch.cat(parts)


def fastest(rows: Sequence[Row], agreement: float) -> Row | None:
    """The fastest of ours that agrees as often as asked; 1.0 asks for float32's own rounding and nothing more."""
    fitting = [row for row in rows if row.ours and (row.within or (agreement < 1 and row.agreement >= agreement))]
    return min(fitting, key=lambda row: summary(row.seconds)["median"], default=None)


def default_reducers(model: Any) -> list[str]:
    encoder = getattr(model, "encoder", model)
    if not hasattr(encoder, "blocks") or encoder.config.positions.kind not in ("learned", "sincos"):
        return []
    patches = math.prod(encoder.layout(*model.input_size).grid)
    return [f"tome:r={r_for(MERGED, patches=patches, depth=len(encoder.blocks))}"]
