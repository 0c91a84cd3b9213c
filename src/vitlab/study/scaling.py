"""How do time and memory grow with the image? Measured on this machine, next to the MACs that a formula counts.

    study = study_scaling("vit_tiny,swin_tiny", [96, 192, 384])
    studies/scaling/{study.json, measured.json, results.csv, table.md, plot.png}

The forward passes of all models and sizes are timed interleaved in one process, so that other load affects all equally.
Memory is the peak of a pass (study/memory.py). MACs are counted by `vitlab inspect`, separately for softmax(q k^T) v,
which in a ViT grows with the square of the pixels. The exponent k of cost ~ pixels^k is the slope of a line fitted to
the logarithms. The number of tokens is proportional to the pixels, so k is the same for both.

The same command again resumes an interrupted study; more models, sizes or rounds are added to it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.native import on_meta, write_whole
from vitlab.errors import UsageError
from vitlab.explain.inspect import inspect
from vitlab.export.timing import alternate, summary
from vitlab.factory import create
from vitlab.models.registry import find
from vitlab.study.folder import OTHER_FOLDER, PLOT, read_study_json, try_draw, write_study_json, write_texts
from vitlab.study.memory import peak_memory
from vitlab.study.model_spec import ModelSpec, parse_models
from vitlab.training.runs import to_csv, to_markdown

MODELS = "vit_tiny,vit_tiny:attention=explicit,swin_tiny,resnet18"
SIZES = [96, 128, 192, 256, 384, 512, 768]  # whole windows or not, whole patches all
MEASURED = "measured.json"
WRAPPERS = ("mae", "dino", "clip")  # their forward pass does not map images to scores

Tell = Callable[[str], object]


@dataclass
class Point:
    """One model at one size."""

    model: str
    size: int
    batch: int
    macs: int  # of the batch
    attention_macs: int  # of softmax(q k^T) v
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None  # bytes; None if it could not be measured

    @property
    def name(self) -> str:
        return f"{self.model}@{self.size}"

    @property
    def pixels(self) -> int:
        return self.size**2

    @property
    def quartiles(self) -> tuple[float, float, float]:
        times = summary(self.seconds)
        return times["quarter"], times["median"], times["three_quarters"]

    def row(self) -> dict[str, Any]:
        low, median, high = (1000 * seconds for seconds in self.quartiles)
        return {
            "model": self.model,
            "size": self.size,
            "batch": self.batch,
            "ms": median,
            "ms_quarter": low,
            "ms_three_quarters": high,
            "n": len(self.seconds),
            "peak_bytes": self.peak,
            "macs": self.macs,
            "attention_macs": self.attention_macs,
        }


@dataclass
class Growth:
    """Exponents of one model over all sizes; `end`: between the two largest."""

    model: str
    time: float
    time_low: float  # quartiles of a fit per round
    time_high: float
    time_end: float
    memory: float | None
    memory_end: float | None
    macs: float
    macs_end: float
    attention: float | None  # of softmax(q k^T) v alone
    attention_share: float  # of the MACs, at the largest size


@dataclass
class ScalingStudy:
    folder: Path
    points: list[Point]
    batch: int
    threads: int
    notes: list[str] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [point.row() for point in self.points]

    @property
    def models(self) -> dict[str, list[Point]]:
        models: dict[str, list[Point]] = {}
        for point in self.points:
            models.setdefault(point.model, []).append(point)
        return models

    @property
    def growth(self) -> list[Growth]:
        return [growth_of(points) for points in self.models.values()]


def study_scaling(
    models: str = MODELS,
    sizes: list[int] | None = None,
    *,
    batch: int = 1,
    rounds: int = 15,
    folder: Path | None = None,
    command: str = "",
    tell: Tell | None = None,
) -> ScalingStudy:
    """`models` as parse_models reads them; `tell` reports progress."""
    tell = tell or (lambda text: None)
    specs, sizes = parse_models(models), sorted(set(sizes or SIZES))
    if len(sizes) < 2:
        raise UsageError(f"sizes={sizes}: a fit needs at least two sizes, better four or five.")
    for label, spec in specs.items():
        for size in sizes:
            _check(label, spec, size)
    folder, threads = folder or Path("studies/scaling"), torch.get_num_threads()
    _check_folder(folder, batch, threads)
    tell("counting MACs")
    points = [_count_macs(label, spec, size, batch) for label, spec in specs.items() for size in sizes]
    about = {"batch": batch, "threads": threads, "torch": torch.__version__}
    write_study_json(folder, "scaling", {"models": list(specs), "sizes": sizes, **about}, command)
    study = ScalingStudy(folder, points, batch, threads)
    _restore(study)
    _measure_memory(study, specs, tell)
    _time(study, specs, rounds, tell)
    _write(study)
    study.notes += try_draw(lambda: _draw(study))
    return study


def growth_of(points: list[Point]) -> Growth:
    """Exponents of one model; points in order of size."""
    pixels = [point.pixels for point in points]
    times = [point.quartiles[1] for point in points]
    rounds = min(len(point.seconds) for point in points)
    each = [exponent(pixels, [point.seconds[number] for point in points]) for number in range(rounds)]
    low, _, high = statistics.quantiles(each, n=4) if rounds > 1 else each * 3
    memory = [point.peak for point in points if point.peak is not None]
    measured = len(memory) == len(points)
    macs, attention = [point.macs for point in points], [point.attention_macs for point in points]
    return Growth(
        points[0].model,
        *(exponent(pixels, times), low, high, exponent(pixels[-2:], times[-2:])),
        *(exponent(pixels, memory) if measured else None, exponent(pixels[-2:], memory[-2:]) if measured else None),
        *(exponent(pixels, macs), exponent(pixels[-2:], macs[-2:])),
        exponent(pixels, attention) if min(attention) else None,
        attention[-1] / macs[-1],
    )


def exponent(pixels: Sequence[int], costs: Sequence[float]) -> float:
    """k of cost ~ pixels^k: the slope of a line fitted to the logarithms."""
    return float(np.polyfit([math.log(n) for n in pixels], [math.log(cost) for cost in costs], 1)[0])


def _check(label: str, spec: ModelSpec, size: int) -> None:
    """Refuse a model that cannot be built for images of this size."""
    name, options = spec
    entry, _ = find(name)
    if entry.family in WRAPPERS:
        raise UsageError(f"{label} is of the family {entry.family}: name the encoder, e.g. vit_tiny, or a CNN.")
    try:
        on_meta(lambda: create(name, **{**options, "image_size": size}))
    except ValueError as error:
        raise UsageError(f"{label} at {size} px: {error}") from None


def _check_folder(folder: Path, batch: int, threads: int) -> None:
    old = read_study_json(folder, "scaling")
    for name, now in {"batch": batch, "threads": threads, "torch": torch.__version__}.items():
        if old and old.get(name) != now:
            raise UsageError(
                f"{folder} was measured with {name}={old.get(name)}, now it is {now}: these times cannot be "
                f"compared. {OTHER_FOLDER}"
            )


def _count_macs(label: str, spec: ModelSpec, size: int, batch: int) -> Point:
    name, options = spec
    inspection = inspect(name, image_size=size, batch=batch, **options)
    attention = sum(step.macs for step in inspection.steps if step.name.split(".")[-1] == "heads")
    return Point(label, size, batch, inspection.macs, attention)


def _restore(study: ScalingStudy) -> None:
    path = study.folder / MEASURED
    measured = read_json(path) if path.is_file() else {}
    for point in study.points:
        if point.name in measured:
            point.seconds, point.peak = measured[point.name]["seconds"], measured[point.name]["peak_bytes"]


def _save(study: ScalingStudy) -> None:
    """Save after each round. Other models and sizes of earlier commands stay."""
    path = study.folder / MEASURED
    measured = read_json(path) if path.is_file() else {}
    measured |= {p.name: {"seconds": p.seconds, "peak_bytes": p.peak} for p in study.points}
    write_whole(path, lambda place: place.write_text(json.dumps(measured) + "\n", encoding="utf-8"))


def _measure_memory(study: ScalingStudy, specs: dict[str, ModelSpec], tell: Tell) -> None:
    waiting = [point for point in study.points if point.peak is None]
    while waiting:
        tell(f"memory of {', '.join(point.name for point in waiting)}")
        peaks = peak_memory({point.name: (specs[point.model], point.size) for point in waiting}, study.batch)
        for point in waiting:
            point.peak = peaks.get(point.name)
        _save(study)
        if len(peaks) == len(waiting):
            return
        failed = waiting[len(peaks)]
        study.notes.append(
            f"{failed.name}: the process that measures memory was killed, perhaps out of memory: {failed.model} has no "
            "memory exponent."
        )
        waiting = [point for point in waiting[len(peaks) :] if point.model != failed.model]


def _time(study: ScalingStudy, specs: dict[str, ModelSpec], rounds: int, tell: Tell) -> None:
    """Time all points interleaved, after one warm-up pass of each."""
    waiting = [point for point in study.points if len(point.seconds) < rounds]
    if not waiting:
        return
    done = min(len(point.seconds) for point in waiting)
    with torch.inference_mode():
        passes = {name: partial(model, images) for name, (model, images) in _networks(waiting, specs).items()}
        alternate(passes, 0, warm=1)
        for number in range(done, rounds):
            tell(f"round {number + 1} of {rounds}: every model at every size, in turns")
            turn = [point for point in waiting if len(point.seconds) <= number]
            times = alternate({point.name: passes[point.name] for point in turn}, 1, warm=0)
            for point in turn:
                point.seconds += times[point.name]
            _save(study)


def _networks(points: list[Point], specs: dict[str, ModelSpec]) -> dict[str, tuple[Any, Tensor]]:
    """Network and images of each point. Weights that do not depend on the size are shared."""
    networks: dict[str, tuple[Any, Tensor]] = {}
    shared: dict[tuple[str, str, torch.Size], Tensor] = {}
    for point in points:
        name, options = specs[point.model]
        model = create(name, **{**options, "image_size": point.size}).eval().requires_grad_(False)
        for key, parameter in model.named_parameters():
            parameter.data = shared.setdefault((point.model, key, parameter.shape), parameter.data)
        networks[point.name] = model, torch.randn(point.batch, model.config.channels, point.size, point.size)
    return networks


def _write(study: ScalingStudy) -> None:
    growth = [display_growth(growth) for growth in study.growth]
    table = to_markdown(growth) + "\n" + to_markdown([display_row(row) for row in study.rows])
    table += "\n" + "\n".join([caption(study), *study.notes]) + "\n"
    write_texts(study.folder, {"results.csv": to_csv(study.rows), "table.md": table})


def caption(study: ScalingStudy) -> str:
    """Explains the numbers."""
    return (
        f"cost ~ pixels^k. Time: median of {min(len(p.seconds) for p in study.points)} passes of {study.batch} "
        f"image{'s' if study.batch > 1 else ''} on {study.threads} thread{'s' if study.threads > 1 else ''}, in turns; "
        "in brackets the middle half. Memory: the most that tensors of a pass take at once, by torch's profiler, "
        "without weights and images. MACs: counted by `vitlab inspect`; attention: those of softmax(q k^T) v."
    )


def display_row(row: dict[str, Any]) -> dict[str, str]:
    share = row["attention_macs"] / row["macs"]
    return {
        "model": row["model"],
        "px": str(row["size"]),
        "ms": f"{row['ms']:.1f} ({row['ms_quarter']:.1f} .. {row['ms_three_quarters']:.1f})",
        "memory": "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.2f} MB",
        "MACs": f"{row['macs'] / 1e9:.3f} G",
        "attention": f"{share:.1%} of them" if share else "none",
    }


def display_growth(growth: Growth) -> dict[str, str]:
    """Exponents over all sizes and between the two largest."""

    def both(over_all: float | None, end: float | None) -> str:
        return "" if over_all is None or end is None else f"{over_all:.2f}, at the end {end:.2f}"

    return {
        "model": growth.model,
        "k of time": f"{growth.time:.2f} ({growth.time_low:.2f} .. {growth.time_high:.2f}), at the end "
        f"{growth.time_end:.2f}",
        "k of memory": both(growth.memory, growth.memory_end),
        "k of MACs": both(growth.macs, growth.macs_end),
        "k of attention": "" if growth.attention is None else f"{growth.attention:.2f}",
    }


def _draw(study: ScalingStudy) -> None:
    from vitlab.study.plot import draw_scaling

    draw_scaling(study, study.folder / PLOT)
