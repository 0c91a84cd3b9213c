"""Benchmark a model on this machine with every backend: time, memory, size and agreement.

    bench = run_bench(model, batch=8, against=["transformers"])
    bench.rows, bench.picked

Outputs are compared with the eager model with all tokens, on real images. Backends are timed interleaved in one
process; times are medians with quartiles, and ratios are between those medians.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import fspath
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.checkpoints.load import ModelOrName, as_network, is_checkpoint
from vitlab.errors import UsageError
from vitlab.export.program import first_line
from vitlab.export.runners import EXACT, LIBRARIES, Runner, RunnerFactory, check_backend, library_runner
from vitlab.export.samples import preprocess_batch
from vitlab.export.timing import alternate, peak_memory, summary
from vitlab.export.verify import TOLERANCE, Comparison, agreement_rate
from vitlab.factory import create
from vitlab.models.base import Capability, Network
from vitlab.models.config import nearest
from vitlab.models.plain import PlainTransformer
from vitlab.models.task import CLASSES, ModelTask
from vitlab.optional import require
from vitlab.reduce import r_for, reducer_of
from vitlab.tables import Table, Tabular

CPU = torch.device("cpu")
DEFAULT_BACKENDS = (*EXACT, "int8")
MERGED = 0.5  # share of the patches that the default reducer merges over all layers


@dataclass
class BackendResult:
    """Measurements of one backend. Seconds are per batch."""

    name: str
    reducer: str | None
    agreement: float  # with the eager model with all tokens
    difference: float  # largest, of an output value
    within: bool  # whether the difference is within rounding
    bytes: int
    memory: int | None  # peak bytes of a batch, without the weights
    seconds: list[float] = field(default_factory=list)
    speedup: float = 1.0  # over eager
    ours: bool = True  # False: another library

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

    def cells(self, batch: int) -> list[str]:
        """The numbers as people read them."""
        times = summary(self.seconds)
        return [
            f"{1000 * times['median']:.2f}",
            f"{1000 * times['quarter']:.2f} .. {1000 * times['three_quarters']:.2f}",
            f"{batch / times['median']:.1f}",
            f"{self.speedup:.2f} x",
            f"{self.agreement:.1%}",
            f"{self.difference:.1e}",
            "-" if self.memory is None else f"{self.memory / 1e6:.1f}",
            f"{self.bytes / 1e6:.1f}",
        ]


@dataclass
class Bench(Tabular):
    batch: int
    images: int
    rows: list[BackendResult]
    picked: BackendResult | None
    agreement: float  # required of the picked backend
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "batch": self.batch,
            "pictures": self.images,
            "agreement_asked": self.agreement,
            "threads": torch.get_num_threads(),
            "picked": None if self.picked is None else self.picked.title,
            "rows": [row.to_dict(self.batch) for row in self.rows],
            "notes": self.notes,
        }

    def table(self) -> Table:
        times = (f"ms, batch {self.batch}", "half of the runs", "images/s", "speed-up")
        numbers = (*times, "agreement", "difference", "memory MB", "size MB", "")
        rows = [[row.title, *row.cells(self.batch), "*" * (row is self.picked)] for row in self.rows]
        note = f"none agrees on {self.agreement:.0%} of the images"
        if self.picked is not None:
            share = f"{self.agreement:.0%} of {self.images} images"
            note = f"* the fastest that agrees on {share}: {self.picked.title}"
        return Table(["way", *numbers], rows, numbers, notes=[note])


def run_bench(
    model: ModelOrName,
    *,
    batch: int = 8,
    rounds: int = 15,
    backends: Sequence[str] = DEFAULT_BACKENDS,
    reducers: Sequence[str] | None = None,
    against: Sequence[str] = (),
    compare: Comparison | None = None,
    progress: Callable[[str], object] | None = None,
) -> Bench:
    """`model`: a model, a checkpoint, or the name of a new model. `reducers`: tried in addition to all tokens; None:
    ToMe that merges half of the patches, where possible.
    """
    model = open_or_create(model)
    compare = compare or Comparison(images=64)
    check_options(backends, reducers or (), against)
    if "int8_static" in backends and compare.source is None:
        raise UsageError("int8_static is calibrated on images like those of its later use: name them with --data.")
    channels = model.config.channels
    images = preprocess_batch(model, compare.sample(channels))
    calibration = None
    if "int8_static" in backends:
        calibration = preprocess_batch(model, compare.sample(channels, calibrate=True))
    factory = RunnerFactory(model, calibration)
    reducers = default_reducers(model) if reducers is None else reducers
    libraries, missing = try_runners(
        {name: partial(library_runner, name, model, factory) for name in against}, images[:batch], progress
    )
    runners, notes = make_runners(factory, backends, (None, *reducers), images[:batch], progress)
    rows = measure(
        [*runners, *libraries],
        images,
        factory.gives,
        batch=batch,
        rounds=rounds,
        task=factory.model.task,
        device=factory.device,
    )
    for row in rows[len(runners) :]:
        row.ours = False
    return Bench(batch, len(images), rows, fastest(rows, compare.agreement), compare.agreement, missing + notes)


def open_or_create(model: ModelOrName, device: str | None = None, **options: Any) -> Network:
    """A model as it is; a checkpoint is loaded; of any other name a new, untrained model is made."""
    if isinstance(model, nn.Module) or is_checkpoint(fspath(model)):
        return as_network(model, device=device, **options)
    warnings.warn(f"{model} is a new, untrained model: its times are right, its agreement says little.", stacklevel=2)
    return as_network(create(str(model), **options).eval(), device=device)


def check_options(backends: Sequence[str], reducers: Sequence[str], against: Sequence[str]) -> None:
    """Refuse unknown names before anything is timed."""
    for backend in backends:
        check_backend(backend)
    for text in reducers:
        reducer_of(text)
    if "transformers" in against:
        require("--against transformers", "transformers")
    for name in against:
        if name not in LIBRARIES:
            near = nearest(name, list(LIBRARIES))
            raise UsageError(f"--against {name!r} is not known.{near} Use {', '.join(LIBRARIES)}.")


def make_runners(
    factory: RunnerFactory,
    backends: Sequence[str],
    reducers: Sequence[str | None],
    batch: Tensor,
    progress: Callable[[str], object] | None = None,
) -> tuple[list[Runner], list[str]]:
    """Runners of every backend and reducer, the eager model first, and notes on those that do not run here."""
    makers = {
        backend if reducer is None else f"{backend} + {reducer}": partial(factory.make, backend, reducer)
        for reducer in reducers
        for backend in backends
    }
    makers.pop("eager", None)
    runners, notes = try_runners(makers, batch, progress)
    return [factory.make("eager"), *runners], notes


def try_runners(
    makers: Mapping[str, Callable[[], Runner]], batch: Tensor, progress: Callable[[str], object] | None = None
) -> tuple[list[Runner], list[str]]:
    """Make and run each once; those that fail here leave a note."""
    runners, notes = [], []
    for title, make in makers.items():
        if progress is not None:
            progress(title)
        try:
            runner = make()
            runner.run(batch)
            runners.append(runner)
        except Exception as error:  # compilers and other libraries raise many kinds
            notes.append(f"{title} does not run here: {first_line(error)}")
    return runners, notes


def measure(
    runners: Sequence[Runner],
    images: Tensor,
    gives: str,
    *,
    batch: int,
    rounds: int,
    task: ModelTask = CLASSES,
    device: torch.device = CPU,
) -> list[BackendResult]:
    """`images` (n, C, H, W); all runners are compared with the first one."""
    timed = images[:batch] if len(images) >= batch else images.repeat(-(-batch // len(images)), 1, 1, 1)[:batch]
    rows: list[BackendResult] = []
    expected = _outputs(runners[0], images, batch)
    for runner in runners:
        actual = _outputs(runner, images, batch)
        difference = float((actual - expected).abs().max())
        within = difference <= TOLERANCE * float(expected.abs().max()) < math.inf  # false for NaN and infinity
        memory = peak_memory(partial(runner.without_arena(), timed)) if device.type == "cpu" else None
        agrees = agreement_rate(expected, actual, gives, task)
        rows.append(BackendResult(runner.name, runner.reducer, agrees, difference, within, runner.bytes, memory))
    times = alternate({str(n): (lambda run=r.run: run(timed)) for n, r in enumerate(runners)}, rounds)
    for row, seconds in zip(rows, times.values(), strict=True):
        row.seconds = seconds
    base = summary(rows[0].seconds)["median"]
    for row in rows:
        row.speedup = base / summary(row.seconds)["median"]
    return rows


def _outputs(runner: Runner, images: Tensor, batch: int) -> Tensor:
    """Run in full batches of the timed size, so that a compiler makes one graph; the last batch is padded."""
    outputs = []
    for part in images.split(batch):
        missing = batch - len(part)
        padded = part if not missing else torch.cat([part, images[:1].expand(missing, *images.shape[1:])])
        outputs.append(runner.run(padded)[: len(part)].float())
    return torch.cat(outputs)


def fastest(rows: Sequence[BackendResult], agreement: float) -> BackendResult | None:
    """The fastest of our backends with this agreement; 1.0 allows only float32 rounding."""
    fitting = [row for row in rows if row.ours and (row.within or (agreement < 1 and row.agreement >= agreement))]
    return min(fitting, key=lambda row: summary(row.seconds)["median"], default=None)


def default_reducers(model: Network) -> list[str]:
    encoder = model.encoder
    if not isinstance(encoder, PlainTransformer) or Capability.REDUCE not in encoder.capabilities:
        return []
    patches = math.prod(encoder.layout(*model.input_size).grid)
    return [f"tome:r={r_for(MERGED, patches=patches, depth=len(encoder.blocks))}"]
