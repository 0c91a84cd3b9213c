"""vitlab train, vitlab verify-resume."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, print_json_text, print_plain, say, table
from vitlab.cli.options import Json, Recipe, Settings
from vitlab.cli.progress import following_downloads
from vitlab.errors import UsageError

if TYPE_CHECKING:
    from vitlab.training.verify import ResumeReport

DIFFERENT = 5  # tensors that are named


def train(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|SOURCE|FOLDER",
            help="A recipe, a data source, or a folder of your images. Default: digits.",
            autocompletion=complete.recipes,
        ),
    ] = None,
    settings: Settings = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="Resume a stopped run.", autocompletion=complete.runs),
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Resume even if the recipe was changed.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Choose all that is not given, to finish within this time.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to stderr.")] = False,
) -> None:
    """Train with a recipe, on a data source, or on your images.

    Your images lie in one folder per class, or have captions.
    """
    began = time.perf_counter()  # before torch is imported: --minutes includes that
    _train(what, settings or [], resume, changed, minutes, began, json)


def _train(
    what: str | None,
    settings: list[str],
    resume: Path | None,
    changed: bool,
    minutes: float | None,
    began: float,
    json: bool,
) -> None:
    """began: time.perf_counter() at the start of the command."""
    from vitlab.training import processes, run_lock
    from vitlab.training.autopick import pick
    from vitlab.training.loop import Stopped, check_is_run, fit
    from vitlab.training.presets import find_recipe
    from vitlab.training.recipe import Recipe, read_recipe, with_settings, with_value
    from vitlab.training.state import check_place

    if what is not None and "=" in what and not Path(what).exists():  # vitlab train run.epochs=3
        what, settings = None, [what, *settings]
    if changed and resume is None:
        raise UsageError("--changed is only valid with --resume: add --resume RUN, or leave it out.")
    source = _source(what, minutes, resume) if minutes is not None else None
    if source is not None:
        recipe = with_settings(with_value(Recipe(), "data.source", source), settings)
        name = _name(recipe.data.source)
    elif resume is None:
        name, recipe = find_recipe(what)
        recipe = with_settings(recipe, settings)
    else:
        check_is_run(resume)
        settings = settings if what is None else [what, *settings]
        name, recipe = "", Recipe()
    show = StderrLines() if json else ProgressBar() if sys.stdout.isatty() else Lines()
    try:
        with show, ExitStack() as held, following_downloads():
            folder = resume or (Path(recipe.run.dir) if recipe.run.dir else None)
            if folder is None:  # the first process of torchrun chooses a name for all
                free = partial(_claim, Path("runs") / name, held, show.note)
                folder = processes.start(recipe.run.device).from_first(free)
            else:
                check_place(folder)
                held.enter_context(run_lock.hold(folder, show.note))
            if source is not None and minutes is not None:
                picked = pick(source, minutes, settings, since=began, show=show)
                for reason in picked.reasons:
                    show.note(reason)
                result = fit(picked.recipe, folder, show=show, data=picked.data, notes=picked.reasons, since=began)
            else:
                if resume is not None:
                    recipe = with_settings(read_recipe(folder / "recipe.toml"), settings)
                result = fit(recipe, folder, resume=resume is not None, changed=changed, show=show, since=began)
    except Stopped as stopped:
        say(f"vitlab: {stopped}")
        raise SystemExit(130) from None
    if json:
        print_json({"model": str(folder / "best"), "report": str(folder / "report.html"), **result})
        return
    console(markup=True).print(
        f"{result['split']} {result.get('judged_by', 'top-1')} [bold]{result['top1']:.2%}[/bold] "
        f"after {result['seconds']:.0f} s "
        f"({result['images_per_second']:.0f} images/s, {result['params']:,} parameters)"
    )
    console().print(f"model:  {folder / 'best'}\nreport: {folder / 'report.html'}")


def _source(what: str | None, minutes: float, resume: Path | None) -> str:
    """The data that --minutes is asked for; a recipe is refused, because it has made the choice itself."""
    from vitlab.images.datasets import SOURCES
    from vitlab.training.presets import find_recipe, recipes
    from vitlab.training.recipe import Recipe

    if resume is not None:
        raise UsageError(f"--minutes {minutes:g} plans a new run, but --resume goes on with the plan of {resume}.")
    source = what or "digits"
    is_recipe = source in recipes() and source not in SOURCES and not Path(source).is_dir()
    if is_recipe or Path(source).suffix == ".toml":
        data = find_recipe(source)[1].data.source
        data = data if data != Recipe().data.source else "FOLDER"
        raise UsageError(
            f"{source} is a recipe, which fixes the model and the schedule that --minutes would pick. Leave --minutes "
            f"out, or name the data: vitlab train {data} --minutes {minutes:g}"
        )
    return source


def _name(source: str) -> str:
    """What a run on this source is called: photos for pictures/photos, train-0..9 for train-{0..9}.tar."""
    path = Path(source)
    return re.sub(r"[^\w.-]+", "", path.resolve().stem if path.exists() else path.stem) or "run"


def _claim(folder: Path, held: ExitStack, note: Callable[[str], object]) -> Path:
    """runs/name, or runs/name-2, ... where that is taken; locked, so that no other process takes it."""
    from vitlab.training import run_lock

    number, free = 1, folder
    while True:
        with suppress(FileExistsError, run_lock.RunLockedError):
            held.enter_context(run_lock.hold(free, note, new=True))
            return free
        number += 1
        free = folder.with_name(f"{folder.name}-{number}")


class Lines:
    """For files and pipes: a line every 30 seconds."""

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None: ...

    def start(self, done: int, total: int) -> None:
        self.total, self.last_line = total, time.monotonic()
        if done:
            self.note(f"going on at step {done} of {total}")

    def step(self, done: int, numbers: dict[str, float]) -> None:
        if time.monotonic() - self.last_line > 30:
            self.last_line = time.monotonic()
            self.note(f"step {done} of {self.total}: loss {numbers['loss']:.4f}, lr {numbers['lr']:.2e}")

    def note(self, text: str) -> None:
        print_plain(text)


class StderrLines(Lines):
    """The same on stderr, so that only the result is on stdout."""

    def note(self, text: str) -> None:
        say(text)


class ProgressBar:
    """For a terminal: a bar with the time left, speed, loss and learning rate."""

    def __enter__(self) -> ProgressBar:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns: list[Any] = [BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}")]
        columns += [TextColumn("loss {task.fields[loss]}"), TextColumn("lr {task.fields[lr]}")]
        self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console(markup=True))
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def start(self, done: int, total: int) -> None:
        self.progress.start()  # not before: a download has a bar of its own
        self.task = self.progress.add_task("steps", total=total, completed=done, speed="", loss="-", lr="-")
        self.began, self.first = time.monotonic(), done

    def step(self, done: int, numbers: dict[str, float]) -> None:
        speed = (done - self.first) / max(time.monotonic() - self.began, 1e-9)
        fields = dict(speed=f"{speed:.1f} steps/s", loss=f"{numbers['loss']:.4f}", lr=f"{numbers['lr']:.1e}")
        self.progress.update(self.task, completed=done, **fields)  # type: ignore[arg-type]

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False)


def verify_resume(
    what: Recipe,
    settings: Settings = None,
    kills: Annotated[int, typer.Option(help="How often the run is killed.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=4)] = 24,
    json: Json = False,
) -> None:
    """Prove that a resumed run ends with the same weights.

    It is killed and resumed; the weights must be the same to the bit (exit code 1 if not).
    """
    from vitlab.training.presets import find_recipe
    from vitlab.training.recipe import with_settings
    from vitlab.training.runlog import to_json
    from vitlab.training.verify import verify_resume

    # Python warns about resources that killed processes left behind
    os.environ["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS", "") + ",ignore:resource_tracker"
    recipe = with_settings(find_recipe(what)[1], settings or [])
    with following_downloads():
        report = verify_resume(recipe, kills=kills, steps=steps, note=say)
    if json:
        print_json_text(to_json({"identical": report.identical, **asdict(report)}))
    else:
        _show_resume(report)
    if not report.identical:
        raise SystemExit(1)


def _show_resume(report: ResumeReport) -> None:
    out = console()
    titles = ("kill", "after step", "resumed at", "done again")
    grid = table(*titles, right=titles)
    for number, kill in enumerate(report.kills, 1):
        grid.add_row(str(number), str(kill.after), str(kill.resumed), str(kill.after - kill.resumed))
    out.print(grid)
    run = f"after {report.steps} steps and {len(report.kills)} kills ({report.seconds:.0f} s)"
    if report.identical:
        out.print(f"identical to the bit: {report.tensors} tensors of weights and optimiser {run}")
        return
    if report.broke:
        out.print(f"FAILED: {report.broke}.")
    else:
        out.print(f"DIFFERENT: {len(report.differences)} of {report.tensors} tensors {run}")
    for difference in report.differences[:DIFFERENT]:
        by = "only in one of the two" if difference.largest is None else f"by up to {difference.largest:.3g}"
        out.print(f"  {difference.name} {by}")
    if report.repeatable is False:
        out.print("Two uninterrupted runs differ too: this device does not repeat its own results.")
    elif report.repeatable:
        out.print("Two uninterrupted runs are identical: resuming is what changes them.")
    out.print(f"Both runs are kept in {report.folder}")
