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

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.native import on_meta
from vitlab.errors import UsageError, VitlabError
from vitlab.explain.inspect import inspect
from vitlab.export.timing import alternate, summary
from vitlab.factory import create
from vitlab.models.base import Network
from vitlab.study.memory import peak_memory
from vitlab.study.model_spec import ModelSpec, parse_models
from vitlab.study.study import OTHER_FOLDER, Row, Study, read_study_json, write_json, write_study_json
from vitlab.training.loop import Show, Silent

MODELS = "vit_tiny,vit_tiny:attention=explicit,swin_tiny,resnet18"
SIZES = [96, 128, 192, 256, 384, 512, 768]  # multiples of the patch size, but not all of the window size
MEASURED = "measured.json"


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
class ScalingStudy(Study):
    points: list[Point]
    batch: int
    threads: int

    @property
    def rows(self) -> list[Row]:
        rows = []
        for point in self.points:
            low, median, high = (1000 * seconds for seconds in point.quartiles)
            row = {"model": point.model, "size": point.size, "batch": point.batch}
            row |= {"ms": median, "ms_quarter": low, "ms_three_quarters": high, "n": len(point.seconds)}
            rows.append({**row, "peak_bytes": point.peak, "macs": point.macs, "attention_macs": point.attention_macs})
        return rows

    @property
    def models(self) -> dict[str, list[Point]]:
        models: dict[str, list[Point]] = {}
        for point in self.points:
            models.setdefault(point.model, []).append(point)
        return models

    @property
    def growth(self) -> list[Growth]:
        return [growth_of(points) for points in self.models.values()]

    def to_json(self) -> object:
        return {"growth": [asdict(growth) for growth in self.growth], "measured": self.rows}

    def tables(self) -> list[list[Row]]:
        return [[_display_point(point) for point in self.points], [_display_growth(growth) for growth in self.growth]]

    def caption(self) -> str:
        """Explains the numbers."""
        return (
            f"cost ~ pixels^k. Time: median of {min(len(p.seconds) for p in self.points)} passes of "
            f"{_count(self.batch, 'image')} on {_count(self.threads, 'thread')}, interleaved; in brackets the middle "
            "half. Memory: the peak of all tensors of a pass, by torch's profiler, without weights and images. MACs: "
            "counted by `vitlab inspect`; attention: those of softmax(q k^T) v."
        )

    def draw(self, path: Path) -> None:
        """Measured time and memory, and counted MACs, over the image side; logarithmic axes."""
        from vitlab.study.plot import logarithmic, plots_file, shorten

        with plots_file(path, (13, 6.2), "".join(self.models), columns=3, dpi=130) as (
            time_axes,
            memory_axes,
            macs_axes,
        ):
            for number, ((name, points), growth) in enumerate(zip(self.models.items(), self.growth, strict=True)):
                x = [point.size for point in points]
                style: dict[str, Any] = dict(color=f"C{number % 10}", marker="osD^v"[number % 5], markersize=4)
                style["linestyle"] = ("-", "--")[number % 2]  # so that overlapping lines are visible

                def legend(over_all: float, end: float | None, name: str = name) -> str:
                    return f"{shorten(name)}: {over_all:.2f}, {end:.2f}"

                low, median, high = ([1000 * p.quartiles[i] for p in points] for i in range(3))
                errors = [[b - a for a, b in zip(*pair, strict=True)] for pair in ((low, median), (median, high))]
                bars = dict(yerr=errors, capsize=2, label=legend(growth.time, growth.time_end))
                time_axes.errorbar(x, median, **bars, **style)
                if growth.memory is not None:
                    peaks = [(p.peak or 0) / 1e6 for p in points]
                    memory_axes.plot(x, peaks, label=legend(growth.memory, growth.memory_end), **style)
                macs_axes.plot(x, [p.macs / 1e9 for p in points], label=legend(growth.macs, growth.macs_end), **style)
                if growth.attention is not None:
                    faint = {**style, "linestyle": ":", "marker": "", "label": f"its attention: {growth.attention:.2f}"}
                    macs_axes.plot(x, [p.attention_macs / 1e9 for p in points], **faint)
            timed = f"time of {_count(self.batch, 'image')}, {_count(self.threads, 'thread')}: ms"
            sizes = sorted({point.size for point in self.points})
            logarithmic(time_axes, sizes, timed)
            logarithmic(memory_axes, sizes, "memory of the pass: MB")
            logarithmic(macs_axes, sizes, "formula: GMACs")


def study_scaling(
    models: str = MODELS,
    sizes: list[int] | None = None,
    *,
    batch: int = 1,
    rounds: int = 15,
    folder: Path | None = None,
    command: str = "",
    show: Show | None = None,
) -> ScalingStudy:
    """`models` as parse_models reads them."""
    show = show or Silent()
    specs, sizes = parse_models(models), sorted(set(sizes or SIZES))
    if len(sizes) < 2:
        raise UsageError(f"sizes={sizes}: a fit needs at least two sizes, better four or five.")
    for label, spec in specs.items():
        for size in sizes:
            _check(label, spec, size)
    folder, threads = folder or Path("studies/scaling"), torch.get_num_threads()
    _check_folder(folder, batch, threads)
    show.note("counting MACs")
    points = [_count_macs(label, spec, size, batch) for label, spec in specs.items() for size in sizes]
    about = {"batch": batch, "threads": threads, "torch": torch.__version__}
    write_study_json(folder, "scaling", {"models": list(specs), "sizes": sizes, **about}, command)
    study = ScalingStudy(folder, points, batch, threads)
    _restore(study)
    _measure_memory(study, specs, show)
    _time(study, specs, rounds, show)
    study.notes.insert(0, study.caption())
    study.write()
    study.notes += study.write_plot()
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
    try:
        model = on_meta(lambda: create(name, **{**options, "image_size": size}))
    except VitlabError as error:
        raise UsageError(f"{label} at {size} px: {error}") from None
    if model.encoder is not model:  # its forward pass does not map images to scores
        raise UsageError(f"{label} is of the family {model.family}: name the encoder, e.g. vit_tiny, or a CNN.")


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
    write_json(path, measured)


def _measure_memory(study: ScalingStudy, specs: dict[str, ModelSpec], show: Show) -> None:
    waiting = [point for point in study.points if point.peak is None]
    while waiting:
        show.note(f"memory of {', '.join(point.name for point in waiting)}")
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


def _time(study: ScalingStudy, specs: dict[str, ModelSpec], rounds: int, show: Show) -> None:
    """Time all points interleaved, after one warm-up pass of each."""
    waiting = [point for point in study.points if len(point.seconds) < rounds]
    if not waiting:
        return
    done = min(len(point.seconds) for point in waiting)
    with torch.inference_mode():
        passes = {name: partial(model, images) for name, (model, images) in _networks(waiting, specs).items()}
        alternate(passes, 0, warm=1)
        for number in range(done, rounds):
            show.note(f"round {number + 1} of {rounds}: every model at every size")
            turn = [point for point in waiting if len(point.seconds) <= number]
            times = alternate({point.name: passes[point.name] for point in turn}, 1, warm=0)
            for point in turn:
                point.seconds += times[point.name]
            _save(study)


def _networks(points: list[Point], specs: dict[str, ModelSpec]) -> dict[str, tuple[Network, Tensor]]:
    """Network and images of each point. Weights that do not depend on the size are shared."""
    networks: dict[str, tuple[Network, Tensor]] = {}
    shared: dict[tuple[str, str, torch.Size], Tensor] = {}
    for point in points:
        name, options = specs[point.model]
        model = create(name, **{**options, "image_size": point.size}).eval().requires_grad_(False)
        for key, parameter in model.named_parameters():
            parameter.data = shared.setdefault((point.model, key, parameter.shape), parameter.data)
        networks[point.name] = model, torch.randn(point.batch, model.config.channels, point.size, point.size)
    return networks


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _display_point(point: Point) -> Row:
    low, median, high = (1000 * seconds for seconds in point.quartiles)
    share = point.attention_macs / point.macs
    return {
        "model": point.model,
        "px": str(point.size),
        "ms": f"{median:.1f} ({low:.1f} .. {high:.1f})",
        "memory": "" if point.peak is None else f"{point.peak / 1e6:.2f} MB",
        "MACs": f"{point.macs / 1e9:.3f} G",
        "attention": f"{share:.1%} of them" if share else "none",
    }


def _display_growth(growth: Growth) -> Row:
    """Exponents over all sizes and between the two largest."""

    def both(over_all: float | None, end: float | None) -> str:
        return "" if over_all is None or end is None else f"{over_all:.2f}, at the end {end:.2f}"

    spread = f"{growth.time:.2f} ({growth.time_low:.2f} .. {growth.time_high:.2f})"
    return {
        "model": growth.model,
        "k of time": f"{spread}, at the end {growth.time_end:.2f}",
        "k of memory": both(growth.memory, growth.memory_end),
        "k of MACs": both(growth.macs, growth.macs_end),
        "k of attention": "" if growth.attention is None else f"{growth.attention:.2f}",
    }
