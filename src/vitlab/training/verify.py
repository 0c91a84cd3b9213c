"""Checks that a run that is killed and resumed equals one that is not: trains the first steps of a recipe both ways and
compares every bit.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UsageError
from vitlab.tables import Table, Tabular
from vitlab.training.batches import Plan
from vitlab.training.job import data_of
from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.recipe import Recipe, TrackRecipe, single_run
from vitlab.training.state import load_last

SAVE_EVERY = 4  # steps: a kill loses up to three
NAMED = 5  # tensors that differ and are named
START = "spawn"  # a killed run is a process of its own, started from nothing


@dataclass(frozen=True)
class Kill:
    after: int  # the last step the process had done
    resumed: int  # the step of its last save, from where the next one went on


@dataclass(frozen=True)
class TensorDifference:
    name: str  # of a tensor, e.g. weights|head.bias or optimizer|head.bias|exp_avg
    largest: float | None  # None: only one of the two has it, or in another shape

    def __str__(self) -> str:
        by = "only in one of the two" if self.largest is None else f"by up to {self.largest:.3g}"
        return f"{self.name} {by}"


@dataclass
class ResumeReport(Tabular):
    steps: int
    kills: list[Kill] = field(default_factory=list)
    tensors: int = 0  # compared
    differences: list[TensorDifference] = field(default_factory=list)
    broke: str = ""  # why a resumed run did not come to its end
    repeatable: bool | None = None  # whether two uninterrupted runs agree; tested only where bits differ
    seconds: float = 0.0
    folder: Path | None = None  # both runs, kept where something is wrong

    @property
    def identical(self) -> bool:
        return not self.differences and not self.broke

    def to_dict(self) -> dict[str, Any]:
        return {"identical": self.identical, **asdict(self)}

    def table(self) -> Table:
        titles = ["kill", "after step", "resumed at", "done again"]
        rows = [
            [str(number), str(kill.after), str(kill.resumed), str(kill.after - kill.resumed)]
            for number, kill in enumerate(self.kills, 1)
        ]
        return Table(titles, rows, right=titles, notes=self._findings())

    def _findings(self) -> list[str]:
        run = f"after {self.steps} steps and {len(self.kills)} kills ({self.seconds:.0f} s)"
        if self.identical:
            return [f"identical to the bit: {self.tensors} tensors of weights and optimiser {run}"]
        lines = [f"DIFFERENT: {len(self.differences)} of {self.tensors} tensors {run}"]
        lines = [f"FAILED: {self.broke}."] if self.broke else lines
        lines += [f"  {difference}" for difference in self.differences[:NAMED]]
        if self.repeatable is False:
            lines.append("Two uninterrupted runs differ too: this device does not repeat its own results.")
        elif self.repeatable:
            lines.append("Two uninterrupted runs are identical: resuming is what changes them.")
        return [*lines, f"Both runs are kept in {self.folder}"]


def verify_resume(
    recipe: Recipe, *, kills: int = 3, steps: int = 24, note: Callable[[str], object] = lambda text: None
) -> ResumeReport:
    """Train `steps` steps without a stop; then again in processes that are killed and resumed; and compare."""
    steps = -(-steps // SAVE_EVERY) * SAVE_EVERY  # the last of them is saved
    if not 1 <= kills < steps:
        raise UsageError(f"{kills} kills do not fit into {steps} steps: use 1 to {steps - 1}, or more steps.")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise UsageError("verify-resume starts its processes itself: run it without torchrun.")
    begun = time.perf_counter()
    short = shortened(single_run(recipe), steps)
    folder = Path(tempfile.mkdtemp(prefix="vitlab-verify-"))
    report = ResumeReport(steps, folder=folder)
    try:
        watch = Watch(steps, [0, 0])
        train(short, folder / "straight", False, watch, torch.get_num_threads())
        pace = (time.perf_counter() - watch.began) / steps
        note(f"{steps} steps without a stop, {pace:.2g} s each")
        train_and_kill(short, folder / "killed", report, kills, pace, note)
        if not report.broke:
            straight, killed = (resumable_state(folder / name) for name in ("straight", "killed"))
            report.tensors, report.differences = len(straight), differences(straight, killed)
        if report.differences:  # a machine that does not repeat itself cannot resume to the bit either
            train(short, folder / "again", False, Watch(steps, [0, 0]), torch.get_num_threads())
            report.repeatable = not differences(resumable_state(folder / "straight"), resumable_state(folder / "again"))
        report.seconds = time.perf_counter() - begun
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if report.identical:
        shutil.rmtree(folder, ignore_errors=True)
        report.folder = None
    return report


def shortened(recipe: Recipe, steps: int) -> Recipe:
    """The recipe's own run, cut down: so few images that epochs end within the steps, and nothing is evaluated."""
    data, o = recipe.data, recipe.optim
    n, wanted = len(data_of(recipe).train), data.batch_size * o.accumulate * max(1, steps // 3)
    if n > wanted and data.per_class is not None:
        data = replace(data, per_class=max(1, data.per_class * wanted // n))
    elif n > wanted:
        data = replace(data, fraction=(data.fraction or 1.0) * wanted / n)
    n = len(data_of(replace(recipe, data=data)).train)
    plan = Plan(n=n, batch_size=data.batch_size, epochs=1, seed=recipe.run.seed, accumulate=o.accumulate)
    epochs = steps // plan.steps_per_epoch + 1  # the final evaluation comes right after the last step
    run = replace(recipe.run, epochs=epochs, eval_every=epochs + 1, save_every=SAVE_EVERY, minutes=0.0)
    return replace(recipe, data=data, run=run, track=TrackRecipe())


class Enough(Exception):  # noqa: N818  (nothing went wrong)
    """The last wanted step is saved."""


class Watch(Silent):
    """Shares the first and the current step of a run with another process, and ends it after `steps`."""

    def __init__(self, steps: int, where: Any, to_be_killed: bool = False):
        super().__init__()
        self.steps, self.where, self.to_be_killed = steps, where, to_be_killed

    def start(self, done: int, total: int) -> None:
        self.where[0], self.began = done, time.perf_counter()

    def step(self, done: int, numbers: dict[str, float]) -> None:
        self.where[1] = done
        parent = multiprocessing.parent_process()
        if self.to_be_killed and parent is not None and done >= self.steps - 1:
            parent.join()  # too fast: wait here for the end
        if done > self.steps:
            raise Enough


def train(recipe: Recipe, run: Path, resume: bool, watch: Watch, threads: int) -> None:
    """To the last step of `watch`; with a fixed number of threads, because sums depend on it."""
    torch.set_num_threads(threads)
    with suppress(Enough):
        try:
            fit(recipe, run, resume=resume, show=watch)
        except Stopped:
            raise KeyboardInterrupt from None


def train_and_kill(
    recipe: Recipe, run: Path, report: ResumeReport, kills: int, pace: float, note: Callable[[str], object]
) -> None:
    """One process after another resumes the run; each but the last is killed, at a moment drawn by the seed."""
    draw, context = random.Random(recipe.run.seed), multiprocessing.get_context(START)
    moments: list[int | None] = [*sorted(draw.sample(range(1, report.steps), kills)), None]
    last_done: int | None = None
    for moment in moments:
        where = context.RawArray("q", 2)  # started from, done
        watch = Watch(report.steps, where, to_be_killed=moment is not None)
        child = context.Process(target=train, args=(recipe, run, last_done is not None, watch, torch.get_num_threads()))
        child.start()
        try:
            while child.is_alive() and (moment is None or where[1] < moment):
                time.sleep(0.002)
            if moment is not None:
                time.sleep(pace * draw.random())  # anywhere in the next step, or in a save
            ended = not child.is_alive()
        finally:
            child.kill()  # SIGKILL, or what Windows has for it
            child.join()
        if last_done is not None:
            report.kills.append(Kill(after=last_done, resumed=where[0]))
        if ended and (moment is not None or child.exitcode):
            report.broke = f"the run that went on from step {where[0]} ended at step {where[1]} with an error"
            return
        last_done = where[1]
        if moment is not None:
            note(f"killed after step {last_done}")


def resumable_state(run: Path) -> dict[str, Tensor]:
    """Resumable state by name, without elapsed time."""
    saved = load_last(run)
    assert saved is not None, run
    state = {f"weights|{key}": value for key, value in saved.weights.items()}
    state |= {f"ema|{key}": value for key, value in (saved.ema or {}).items()}
    state |= {f"optimizer|{key}": value for key, value in saved.optimizer.items()}
    numbers = {k: v for k, v in asdict(saved.progress).items() if isinstance(v, int | float) and k != "seconds"}
    return state | {f"progress|{key}": torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}


def differences(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[TensorDifference]:
    """The tensors whose bits differ: 0 is not -0, and NaN is itself."""
    results = [TensorDifference(name, None) for name in a.keys() ^ b.keys()]
    for name in (name for name in a if name in b):
        x, y = a[name], b[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            results.append(TensorDifference(name, None))
        elif not torch.equal(_bytes(x), _bytes(y)):
            results.append(TensorDifference(name, float((x.double() - y.double()).abs().max())))
    return results


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
