"""How do time and memory grow with the image? Measured on this machine, beside what the formula says.

    study = study_scaling("vit_tiny,swin_tiny", [96, 192, 384])
    studies/scaling/{study.json, measured.json, results.csv, table.md, plot.png}

One forward pass of every model at every size is timed in turns, round after round in one process, so that whatever else
the machine does meets all alike. Memory is what the pass holds at once (study/memory.py). The formula is the number of
MACs that `vitlab inspect` counts, and of them those of softmax(q k^T) v, which in a ViT grow with the square of the
pixels. The exponent k of cost ~ pixels^k is the slope of a straight line through the logarithms. Tokens are as many as
pixels divided by the patch's, so k is the same for both.

The same command again goes on where it was stopped; more models, sizes or rounds are added to what is there.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.checkpoints.files import read_json
from vitlab.checkpoints.load import create
from vitlab.checkpoints.native import on_meta, write_whole
from vitlab.explain.inspect import inspect
from vitlab.export.timing import alternate, summary
from vitlab.models.registry import find
from vitlab.study.folder import ANOTHER, PLOT, read_about, without_matplotlib, write_about, write_texts
from vitlab.study.memory import peaks
from vitlab.study.model_spec import Named, read_models
from vitlab.training.runs import to_csv, to_markdown

MODELS = "vit_tiny,vit_tiny:attention=explicit,swin_tiny,resnet18"
SIZES = [96, 128, 192, 256, 384, 512, 768]  # whole windows or not, whole patches all
MEASURED = "measured.json"
WITHOUT_IMAGES = ("mae", "dino", "clip")  # their pass is not one of images to scores

Tell = Callable[[str], object]


@dataclass
class Point:
    """One model at one size."""

    model: str
    size: int
    batch: int
    macs: int  # of the batch
    attention_macs: int  # of them, softmax(q k^T) v
    seconds: list[float] = field(default_factory=list)
    peak: int | None = None  # bytes; None where it could not be measured

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
    """Exponents of one model: over all sizes, and `end` between the two largest."""

    model: str
    time: float
    time_low: float  # quartiles over the rounds, each fitted by itself
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
        found: dict[str, list[Point]] = {}
        for point in self.points:
            found.setdefault(point.model, []).append(point)
        return found

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
    """`models` as read_models reads them; `tell` is told in words what is being done."""
    tell = tell or (lambda text: None)
    named, sizes = read_models(models), sorted(set(sizes or SIZES))
    if len(sizes) < 2:
        raise ValueError(f"sizes={sizes}: a line needs two sizes at least, and tells more with four or five.")
    for called, asked in named.items():
        for size in sizes:
            _check(called, asked, size)
    folder, threads = folder or Path("studies/scaling"), torch.get_num_threads()
    _check_folder(folder, batch, threads)
    tell("counting MACs")
    points = [_counted(called, asked, size, batch) for called, asked in named.items() for size in sizes]
    about = {"batch": batch, "threads": threads, "torch": torch.__version__}
    write_about(folder, "scaling", {"models": list(named), "sizes": sizes, **about}, command)
    study = ScalingStudy(folder, points, batch, threads)
    _restore(study)
    _weigh(study, named, tell)
    _time(study, named, rounds, tell)
    _write(study)
    study.notes += without_matplotlib(lambda: _draw(study))
    return study


def growth_of(points: list[Point]) -> Growth:
    """Of one model, in the order of size."""
    pixels = [point.pixels for point in points]
    times = [point.quartiles[1] for point in points]
    whole = min(len(point.seconds) for point in points)
    each = [exponent(pixels, [point.seconds[number] for point in points]) for number in range(whole)]
    low, _, high = statistics.quantiles(each, n=4) if whole > 1 else each * 3
    memory = [point.peak for point in points if point.peak is not None]
    seen = len(memory) == len(points)
    macs, attention = [point.macs for point in points], [point.attention_macs for point in points]
    return Growth(
        points[0].model,
        *(exponent(pixels, times), low, high, exponent(pixels[-2:], times[-2:])),
        *(exponent(pixels, memory) if seen else None, exponent(pixels[-2:], memory[-2:]) if seen else None),
        *(exponent(pixels, macs), exponent(pixels[-2:], macs[-2:])),
        exponent(pixels, attention) if min(attention) else None,
        attention[-1] / macs[-1],
    )


def exponent(pixels: list[int], costs: Any) -> float:
    """k of cost ~ pixels^k: the slope of the straight line that fits the logarithms best."""
    return float(np.polyfit([math.log(n) for n in pixels], [math.log(cost) for cost in costs], 1)[0])


def _check(called: str, named: Named, size: int) -> None:
    """Refuse now what cannot be built or cannot be fed with images of this size."""
    name, options = named
    entry, _ = find(name)
    if entry.family in WITHOUT_IMAGES:
        raise ValueError(f"{called} is of the family {entry.family}: name the encoder, e.g. vit_tiny, or a CNN.")
    try:
        on_meta(lambda: create(name, **{**options, "image_size": size}))
    except ValueError as error:
        raise ValueError(f"{called} at {size} px: {error}") from None


def _check_folder(folder: Path, batch: int, threads: int) -> None:
    old = read_about(folder, "scaling")
    for name, now in {"batch": batch, "threads": threads, "torch": torch.__version__}.items():
        if old and old.get(name) != now:
            raise ValueError(
                f"{folder} was measured with {name}={old.get(name)}, now it is {now}: these times cannot stand in one "
                f"table. {ANOTHER}"
            )


def _counted(called: str, named: Named, size: int, batch: int) -> Point:
    name, options = named
    found = inspect(name, image_size=size, batch=batch, **options)
    attention = sum(step.macs for step in found.steps if step.name.split(".")[-1] == "heads")
    return Point(called, size, batch, found.macs, attention)


def _restore(study: ScalingStudy) -> None:
    path = study.folder / MEASURED
    known = read_json(path) if path.is_file() else {}
    for point in study.points:
        if point.name in known:
            point.seconds, point.peak = known[point.name]["seconds"], known[point.name]["peak_bytes"]


def _save(study: ScalingStudy) -> None:
    """After each round; what an earlier command measured of other models or sizes stays."""
    path = study.folder / MEASURED
    known = read_json(path) if path.is_file() else {}
    known |= {p.name: {"seconds": p.seconds, "peak_bytes": p.peak} for p in study.points}
    write_whole(path, lambda place: place.write_text(json.dumps(known) + "\n", encoding="utf-8"))


def _weigh(study: ScalingStudy, named: dict[str, Named], tell: Tell) -> None:
    waiting = [point for point in study.points if point.peak is None]
    while waiting:
        tell(f"memory of {', '.join(point.name for point in waiting)}")
        found = peaks({point.name: (named[point.model], point.size) for point in waiting}, study.batch)
        for point in waiting:
            point.peak = found.get(point.name)
        _save(study)
        if len(found) == len(waiting):
            return
        failed = waiting[len(found)]
        study.notes.append(
            f"{failed.name}: the process that measures memory ended, perhaps for want of it: {failed.model} has no "
            "exponent of memory."
        )
        waiting = [point for point in waiting[len(found) :] if point.model != failed.model]


def _time(study: ScalingStudy, named: dict[str, Named], rounds: int, tell: Tell) -> None:
    """In turns; the first pass of each does not count."""
    waiting = [point for point in study.points if len(point.seconds) < rounds]
    if not waiting:
        return
    done = min(len(point.seconds) for point in waiting)
    with torch.inference_mode():
        passes = {name: partial(model, images) for name, (model, images) in _networks(waiting, named).items()}
        alternate(passes, 0, warm=1)
        for number in range(done, rounds):
            tell(f"round {number + 1} of {rounds}: every model at every size, in turns")
            turn = [point for point in waiting if len(point.seconds) <= number]
            times = alternate({point.name: passes[point.name] for point in turn}, 1, warm=0)
            for point in turn:
                point.seconds += times[point.name]
            _save(study)


def _networks(points: list[Point], named: dict[str, Named]) -> dict[str, tuple[Any, Tensor]]:
    """A network for each size, as it would be trained. What does not depend on the size is held once."""
    found: dict[str, tuple[Any, Tensor]] = {}
    shared: dict[tuple[str, str, torch.Size], Tensor] = {}
    for point in points:
        name, options = named[point.model]
        model = create(name, **{**options, "image_size": point.size}).eval().requires_grad_(False)
        for key, parameter in model.named_parameters():
            parameter.data = shared.setdefault((point.model, key, parameter.shape), parameter.data)
        found[point.name] = model, torch.randn(point.batch, model.config.channels, point.size, point.size)
    return found


def _write(study: ScalingStudy) -> None:
    growth = [growth_for_people(growth) for growth in study.growth]
    table = to_markdown(growth) + "\n" + to_markdown([for_people(row) for row in study.rows])
    table += "\n" + "\n".join([words(study), *study.notes]) + "\n"
    write_texts(study.folder, {"results.csv": to_csv(study.rows), "table.md": table})


def words(study: ScalingStudy) -> str:
    """What the numbers are."""
    return (
        f"cost ~ pixels^k. Time: median of {min(len(p.seconds) for p in study.points)} passes of {study.batch} "
        f"image{'s' if study.batch > 1 else ''} on {study.threads} thread{'s' if study.threads > 1 else ''}, in turns; "
        "in brackets the middle half. Memory: the most that tensors of a pass take at once, by torch's profiler, "
        "without weights and images. MACs: counted by `vitlab inspect`; attention: those of softmax(q k^T) v."
    )


def for_people(row: dict[str, Any]) -> dict[str, str]:
    share = row["attention_macs"] / row["macs"]
    return {
        "model": row["model"],
        "px": str(row["size"]),
        "ms": f"{row['ms']:.1f} ({row['ms_quarter']:.1f} .. {row['ms_three_quarters']:.1f})",
        "memory": "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.2f} MB",
        "MACs": f"{row['macs'] / 1e9:.3f} G",
        "attention": f"{share:.1%} of them" if share else "none",
    }


def growth_for_people(growth: Growth) -> dict[str, str]:
    """Exponents over all sizes, and between the two largest."""

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
