"""The training loop, for one process or many. Everything random is a function of (seed, step), so a run that is killed
at any moment and resumed ends with the same weights, to the bit.

    runs/<name>/{recipe.toml, log.jsonl, result.json, last/, last-1/, best/, report.html, run.lock}
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from vitlab.checkpoints import native
from vitlab.checkpoints.digests import file_digest
from vitlab.errors import CheckpointError, TrainingError
from vitlab.images.datasets import Data
from vitlab.images.randomness import torch_seed
from vitlab.training import doctor, processes, run_lock
from vitlab.training.batches import TrainingBatch, batches
from vitlab.training.batchnorm import share_statistics, update_average
from vitlab.training.clock import Clock
from vitlab.training.dense_scores import RegionScores
from vitlab.training.finish import finish
from vitlab.training.job import MODEL, TrainingJob, prepare
from vitlab.training.objectives.base import MicroStep
from vitlab.training.optim import has_gradients, lr_factor, warmup_steps
from vitlab.training.recipe import Recipe, difference, read_recipe, to_tables, to_toml
from vitlab.training.runlog import RunLog, read_log
from vitlab.training.runs import read_result
from vitlab.training.sharding import full_model, full_tensor
from vitlab.training.state import (
    BEST,
    Progress,
    Saved,
    check_best,
    check_place,
    check_recipe_file,
    check_result,
    forget_other_best,
    load_last,
    read_save,
    recover,
)
from vitlab.training.target_scores import TargetScores, headline
from vitlab.training.timelimit import TimeLimit
from vitlab.training.unreadable import check_skipped, none_readable, note_skipped

Finishing = Callable[[TrainingJob, Progress, RunLog | None, Clock], dict[str, Any]]


class Show(Protocol):
    """Displays a run; the command line draws a progress bar."""

    def start(self, done: int, total: int) -> None: ...
    def step(self, done: int, numbers: dict[str, float]) -> None: ...
    def count(self, what: str, done: int, total: int) -> None: ...  # images, outside of training steps
    def note(self, text: str) -> None: ...


@dataclass
class Silent:
    notes: list[str] = field(default_factory=list)

    def start(self, done: int, total: int) -> None: ...
    def step(self, done: int, numbers: dict[str, float]) -> None: ...
    def count(self, what: str, done: int, total: int) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class TrainingSession:
    """A job as it is run: how far it is, and where it reports to."""

    job: TrainingJob
    progress: Progress
    show: Show
    log: RunLog | None = None  # of the first process
    scaler: torch.GradScaler = field(init=False)  # of the loss; does nothing unless run.amp=fp16

    def __post_init__(self) -> None:
        amp, device = self.job.recipe.run.amp, self.job.who.device
        self.scaler = torch.GradScaler(device.type, enabled=amp == "fp16")
        if self.progress.scaler:
            saved = {"scale": self.progress.scaler, "_growth_tracker": self.progress.scaler_steps}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **saved})

    def note_skipped(self, skipped: dict[str, str], step: int) -> None:
        """Report unreadable images, the same in all processes; too many stop the run."""
        for message in note_skipped(self.job.who.join(skipped), self.progress, self.log, step):
            self.show.note(f"skipped: {message}")
        more = f"vitlab train --resume {self.job.run} data.max_unreadable=... --changed"
        check_skipped(self.progress.skipped, self.job.recipe.data.max_unreadable, "data.max_unreadable", more)


@dataclass(frozen=True)
class Beginning:
    """How a run begins: the arguments of `fit`."""

    resume: bool = False
    changed: bool = False
    data: Data | None = None
    notes: Sequence[str] = ()
    since: float = field(default_factory=time.perf_counter)


class Stopped(Exception):  # noqa: N818  (nothing went wrong)
    """SIGTERM or Ctrl-C: the run was saved and can be resumed."""


def fit(
    recipe: Recipe,
    run: Path,
    *,
    resume: bool = False,
    changed: bool = False,
    show: Show | None = None,
    data: Data | None = None,
    notes: Sequence[str] = (),
    since: float | None = None,
) -> dict[str, Any]:
    """Train to the end and return what result.json holds. `resume` continues from the last save of the run folder.

    `changed`: even if the recipe differs from the saved one. `data` are those of the recipe, where they are open
    already; `notes` go into the log; run.minutes count from `since` (time.perf_counter(); default: now).
    """
    try:
        begin = Beginning(resume, changed, data, notes, time.perf_counter() if since is None else since)
        return fit_part(recipe, run, begin, show=show or Silent(), finishing=finish)
    finally:
        processes.stop()


def fit_part(recipe: Recipe, run: Path, begin: Beginning, *, show: Show, finishing: Finishing) -> dict[str, Any]:
    """`fit` as a part of something larger: `finishing` says what is done with the best model, and the processes of
    torchrun stay together.
    """
    if begin.resume and run_lock.is_first_process():  # other hosts need not have the folder
        check_is_run(run)
    elif not begin.resume:
        check_place(run)
    try:
        with run_lock.hold(run, show.note):
            saved = None
            if begin.resume:
                recipe = _resumed_recipe(recipe, run, begin.changed)
                saved = choose_save(recipe, run, begin.changed, show)
                if saved is not None and saved.progress.finished:
                    show.note(f"{run} is finished: nothing to resume.")
                    return processes.start(recipe.run.device).from_first(lambda: read_result(run))
            elif (run / "recipe.toml").exists():
                raise TrainingError(
                    f"{run} holds a run already: --resume {run} continues it, run.dir=... makes another."
                )
            return _fit(recipe, run, saved, begin, show, finishing)
    except torch.OutOfMemoryError as error:
        less = "data.batch_size, with optim.accumulate to make up for it; run.amp=bf16; or a smaller model"
        raise TrainingError(f"the device's memory is too small ({error}). Use less of it: a smaller {less}.") from None


def _fit(
    recipe: Recipe, run: Path, saved: Saved | None, begin: Beginning, show: Show, finishing: Finishing
) -> dict[str, Any]:
    """A function of its own, so that the job is gone before its processes leave their group: see `processes.stop`."""
    job = prepare(recipe, run, begin.data, None if saved is None else saved.folder, show.count)
    progress = job.restore(saved, begin.changed) if saved is not None else Progress()
    session = TrainingSession(job, progress, show)
    if job.who.first:
        if begin.changed or not (run / "recipe.toml").exists():
            native.write_text(run / "recipe.toml", to_toml(recipe))
        job.recipe_digest = file_digest(run / "recipe.toml")
        session.log = RunLog(
            run,
            wandb=recipe.track.wandb,
            tensorboard=recipe.track.tensorboard,
            config=to_tables(recipe),
            name=run.name,
            start_step=progress.step,
        )
        session.log.write("start", progress.step, steps=job.plan.total)
        opened = job.data.notes if begin.data is None and saved is None else []  # else who opened the data has said it
        for note in (*opened, *begin.notes):
            session.log.write("note", progress.step, text=note)
    for note in job.notes:
        show.note(note)
    try:
        if saved is not None and begin.changed:
            job.save(progress)  # with the new recipe: a kill before the next save does not lose it
        clock = Clock(begin.since, 60 * recipe.run.minutes or math.inf, progress.seconds)
        train(session, clock)
        result = finishing(job, progress, session.log, clock)
        score = f"{result['split']} {headline(result, result['judged_by'])}"
        show.note(f"{score}, by the model of epoch {result['best_epoch']}")
        if result["unreadable"]:
            show.note(f"{result['unreadable']} images could not be read: {run / 'log.jsonl'} names them.")
        return result
    finally:
        if session.log is not None:
            session.log.close()


def _resumed_recipe(recipe: Recipe, run: Path, changed: bool) -> Recipe:
    """What the first process continues with, in all of them: only its host needs the run folder."""
    return processes.start(recipe.run.device).from_first(lambda: check_resume(recipe, run, changed))


def check_is_run(run: Path) -> None:
    if not (run / "recipe.toml").is_file():
        raise TrainingError(
            f"{run}: holds no recipe.toml, so there is no run to resume. `vitlab runs` lists those in runs/."
        )


def check_resume(recipe: Recipe | None, run: Path, changed: bool) -> Recipe:
    """The recipe to continue with: the saved one; another is refused with what differs, unless `changed`."""
    check_is_run(run)
    old = read_recipe(run / "recipe.toml")
    if recipe is None or recipe == old:
        return old
    if not changed:
        lines = "\n  ".join(difference(old, recipe))
        raise TrainingError(
            f"{run} was started with another recipe:\n  {lines}\nPass --changed to continue with the new one."
        )
    return recipe


def choose_save(recipe: Recipe, run: Path, changed: bool, show: Show) -> Saved | None:
    """The save to continue from; None: the run was killed before its first. The first process chooses for all."""
    who, chosen = processes.start(recipe.run.device), []

    def choose() -> tuple[Path, Progress] | None:
        saved = load_last(run, with_ema=recipe.optim.ema > 0 and not changed, note=show.note)
        if saved is None:
            return None
        if not changed:
            check_recipe_file(run, saved)
        recover(run / BEST)
        check_best(run, saved)
        try:
            check_result(run, saved)
        except CheckpointError as error:
            show.note(f"{error} The end of the run is done again.")
            saved.progress.finished = False
        forget_other_best(run, saved)
        chosen.append(saved)
        return saved.folder, saved.progress

    answer = who.from_first(choose)
    if answer is None:
        return None
    folder, progress = answer
    folder = who.local_folder(folder)
    return chosen[0] if chosen else replace(read_save(folder), progress=progress)


def train(session: TrainingSession, run_clock: Clock) -> None:
    """To the last step, or until run.minutes leave no time for another."""
    job, progress, log, show = session.job, session.progress, session.log, session.show
    recipe, plan, o = job.recipe, job.plan, job.recipe.optim
    _, warmup = warmup_steps(o, plan.steps_per_epoch, plan.total)
    save_every = recipe.run.save_every or plan.steps_per_epoch
    limit = TimeLimit(job, run_clock) if recipe.run.minutes else None
    clock = time.perf_counter() - progress.seconds
    stream = batches(job.steps, progress.step, recipe.data.workers)
    show.start(progress.step, plan.total)
    with StopSignal() as stop:
        for step in range(progress.step, plan.total):
            began, epoch = time.perf_counter(), step // plan.steps_per_epoch
            factor = lr_factor(step, plan.total, warmup=warmup, schedule=o.schedule, final=o.final_lr)
            lr = job.optimisers.set_factor(factor)
            loss, more = backward(session, stream, step, lr)
            norm = update(session, step)
            progress.step, progress.seconds = step + 1, time.perf_counter() - clock
            scaling = session.scaler.state_dict()  # empty unless run.amp=fp16
            progress.scaler, progress.scaler_steps = scaling.get("scale", 0.0), scaling.get("_growth_tracker", 0)
            show.step(step + 1, {"loss": loss, "lr": lr})
            if log is not None and (step + 1) % plan.log_every == 0:
                numbers = dict(epoch=epoch, loss=loss, lr=lr, grad_norm=norm, seconds=progress.seconds)
                log.write("train", step + 1, **numbers, images=progress.images, **more)
            ended = (step + 1) % plan.steps_per_epoch == 0
            due = ended and ((epoch + 1) % recipe.run.eval_every == 0 or epoch + 1 == recipe.run.epochs)
            late = limit is not None and job.who.any(limit.near(began, due)) and step + 1 < plan.total
            if limit is not None and late and progress.best_rank is not None:  # then there is a model to end with
                due = not job.who.any(not limit.evaluates_in_time)
            elif late:
                due = True
            if due:
                validate(session, epoch)
            halt = job.who.any(stop.requested)
            if (step + 1) % save_every == 0 or halt or late or step + 1 == plan.total:
                job.save(progress)
            if halt:
                raise Stopped(f"saved at step {step + 1} of {plan.total}. Resume: vitlab train --resume {job.run}")
            if late:
                note = f"ended at step {step + 1} of {plan.total}: run.minutes={recipe.run.minutes:g} allows no more"
                show.note(note)
                if log is not None:
                    log.write("note", step + 1, text=note)
                return


def backward(
    session: TrainingSession, stream: Iterator[TrainingBatch], step: int, lr: float
) -> tuple[float, dict[str, float]]:
    """Gradients of one step, over its micro-steps; returns the loss and the objective's numbers."""
    job, progress = session.job, session.progress
    recipe, who, objective = job.recipe, job.who, job.objective
    objective.begin_step(step, job.optimisers)
    job.optimisers.zero_grad()
    total, means, skipped = 0.0, {}, {}
    for micro in range(job.plan.accumulate):
        batch = next(stream)
        skipped |= batch.skipped
        inputs = objective.inputs(batch, MicroStep(recipe.run.seed, step, who.rank, micro))
        torch.manual_seed(torch_seed(recipe.run.seed, MODEL, step, who.rank, micro))
        last = micro == job.plan.accumulate - 1
        with job.forward.no_sync() if isinstance(job.forward, DistributedDataParallel) and not last else nullcontext():
            with _autocast(recipe.run.amp, who.device):
                loss, numbers = objective.loss(job.forward, inputs)
            loss = loss / job.plan.accumulate
            loss = loss if len(batch.indices) else 0 * loss  # no image could be read: a blank gives no gradient
            session.scaler.scale(loss).backward()
        total += float(loss.detach())
        means |= {key: means.get(key, 0.0) + value / job.plan.accumulate for key, value in numbers.items()}
        progress.images += len(batch.indices) * who.world
        broken = who.first_with(doctor.explodes(total))
        if broken is not None:  # all stop together: a sharded model can only be gathered by all
            model = full_model(job.model, keep=broken == who.rank)
            if model is None:
                raise doctor.DivergedError(f"step {step}: the loss of process {broken} broke; its message says where.")
            about: dict[str, Any] = dict(step=step, epoch=step // job.plan.steps_per_epoch, loss=total, lr=lr)
            about["indices"] = batch.indices.tolist()
            raise doctor.stop_run(job.run, model.to(who.device), inputs, about)
    session.note_skipped(skipped, step + 1)
    if not progress.images and (step + 1) % job.plan.steps_per_epoch == 0:
        raise none_readable(progress.skipped)
    return total, means


def update(session: TrainingSession, step: int) -> float:
    """One step of the optimisers and of the running average; returns the gradient's norm before clipping."""
    job, scaler = session.job, session.scaler
    job.objective.before_update(step)
    parts = [part for part in job.optimisers.parts if has_gradients(part)]
    for part in parts:
        scaler.unscale_(part)
    trained = [p for p in job.model.parameters() if p.requires_grad]
    norm = torch.nn.utils.clip_grad_norm_(trained, job.recipe.optim.clip or float("inf"))
    for part in parts:
        scaler.step(part)
    scaler.update()
    share_statistics(job.model, job.who)
    if job.ema is not None:
        update_average(job.ema, job.model, job.recipe.optim.ema)
    job.objective.end_step(step)
    return float(full_tensor(norm))


def validate(session: TrainingSession, epoch: int) -> None:
    """Evaluate on the validation split, and save the model if it is the best so far."""
    job, progress, log, show = session.job, session.progress, session.log, session.show
    scores = job.objective.evaluate(job.evaluated_model, job.val)
    session.note_skipped(scores.skipped, progress.step)
    scores = job.objective.after_validation(job.evaluated_model, scores)
    rank, numbers = job.objective.rank(scores, job.evaluated_model, job.val)
    if isinstance(scores, TargetScores | RegionScores):
        numbers, value, shown = {**scores.numbers(), **numbers}, scores.value, set(scores.numbers()) - {"loss"}
    else:
        numbers, value, shown = {"top1": scores.top(1), "loss": scores.loss(), **numbers}, scores.top(1), {"top1"}
    others = ", ".join(f"{key} {number:.4f}" for key, number in numbers.items() if key not in shown)
    epochs = f"epoch {epoch + 1} of {job.recipe.run.epochs}"
    show.note(", ".join(filter(None, [f"{epochs}: val {headline(numbers, job.objective.metric)}", others])))
    if log is not None:
        log.write("val", progress.step, epoch=epoch, **numbers)
        for finding in job.objective.diagnose([event for event in read_log(job.run) if event["kind"] == "train"]):
            log.write("doctor", progress.step, text=f"{finding.message} {finding.remedy}")
            show.note(f"doctor: {finding.message} {finding.remedy}")
    if progress.best_rank is None or rank > progress.best_rank:
        progress.best_rank, progress.best_top1, progress.best_epoch = rank, value, epoch
        job.save_best()


class StopSignal:
    """While entered, SIGTERM and Ctrl-C stop the run after its step; a second one ends it at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._request)
        return self

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _autocast(amp: str, device: torch.device) -> AbstractContextManager[object]:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, dtype=kinds[amp]) if amp in kinds else nullcontext()
