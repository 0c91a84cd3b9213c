"""vitlab train, vitlab verify-resume."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, print_json_text, print_plain, print_table, say
from vitlab.cli.options import FoldersAndSettings, Json, Recipe, Settings, argument, option
from vitlab.cli.progress import Meter, following_downloads
from vitlab.language import translate

WHAT = "A recipe, a data source, or a folder of your images. Default: digits."


def train(
    what: Annotated[str | None, argument("RECIPE|SOURCE|FOLDER", WHAT, complete.recipes)] = None,
    settings: FoldersAndSettings = None,
    resume: Annotated[Path | None, option("--resume", "RUN", "Resume a stopped run.", complete.runs)] = None,
    rejoin: Annotated[
        bool, typer.Option("--rejoin", help="Resume the run in run.dir if there is one already.")
    ] = False,
    changed: Annotated[bool, typer.Option("--changed", help="Resume even if the recipe was changed.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Choose all that is not given, to finish within this time.")
    ] = None,
    apply: Annotated[
        Path | None, typer.Option("--apply", metavar="CSV", help="Corrections of the data, from vitlab check.")
    ] = None,
    json: Json = False,
) -> None:
    """Train with a recipe, on a data source, or on your images.

    Your images lie in one folder per class, have captions, or stand in a table: classes, labels, or a number.
    """
    began = time.perf_counter()  # before torch is imported: --minutes includes that
    from vitlab.training.loop import Stopped
    from vitlab.training.presets import split_arguments
    from vitlab.training.recipe import setting
    from vitlab.training.target_scores import headline
    from vitlab.training.train import train

    changes = list(settings or [])
    if what is not None and (resume is not None or ("=" in what and not Path(what).exists())):
        what, changes = None, [what, *changes]  # vitlab train run.epochs=3
    if what is not None:
        what, changes = split_arguments(what, changes)
    if apply is not None:
        changes.append(setting("data.apply", str(apply)))
    show = StderrLines() if json else ProgressBar() if sys.stdout.isatty() else Lines()
    try:
        with show, following_downloads():
            run = train(
                what,
                changes,
                resume=resume,
                rejoin=rejoin,
                changed=changed,
                minutes=minutes,
                show=show,
                since=began,
            )
    except Stopped as stopped:
        say(f"vitlab: {stopped}")
        raise SystemExit(130) from None
    if json:
        print_json(run.to_dict())
        return
    result = run.result
    score = f"{result['split']} [bold]{headline(result, result.get('judged_by', 'top-1'))}[/bold]"
    rate = f"{result['images_per_second']:.0f} images/s, " if result["images_per_second"] else ""  # a probe has none
    console(markup=True).print(f"{score} after {result['seconds']:.0f} s ({rate}{result['params']:,} parameters)")
    console().print(f"model:  {run.model}\nreport: {run.report}")


class Lines:
    """For files and pipes: a line every 30 seconds."""

    def __enter__(self) -> Lines:
        self.meter = Meter("images")
        return self

    def __exit__(self, *error: object) -> None:
        self.meter.close()

    def start(self, done: int, total: int) -> None:
        self.total, self.last_line = total, time.monotonic()
        if done:
            self.note(f"going on at step {done} of {total}")

    def step(self, done: int, numbers: dict[str, float]) -> None:
        if time.monotonic() - self.last_line > 30:
            self.last_line = time.monotonic()
            self.note(f"step {done} of {self.total}: loss {numbers['loss']:.4f}, lr {numbers['lr']:.2e}")

    def count(self, what: str, done: int, total: int) -> None:
        self.meter.update(what, done, total)

    def note(self, text: str) -> None:
        print_plain(translate(text))


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
        self.meter, self.task = Meter("images"), None
        return self

    def __exit__(self, *error: object) -> None:
        self.meter.close()
        self.progress.stop()

    def start(self, done: int, total: int) -> None:
        if self.task is not None:  # of the rung before
            self.progress.remove_task(self.task)
        self.progress.start()  # not before: a download has a bar of its own
        self.task = self.progress.add_task("steps", total=total, completed=done, speed="", loss="-", lr="-")
        self.began, self.first = time.monotonic(), done

    def step(self, done: int, numbers: dict[str, float]) -> None:
        speed = (done - self.first) / max(time.monotonic() - self.began, 1e-9)
        fields = dict(speed=f"{speed:.1f} steps/s", loss=f"{numbers['loss']:.4f}", lr=f"{numbers['lr']:.1e}")
        self.progress.update(self.task, completed=done, **fields)  # type: ignore[arg-type]

    def count(self, what: str, done: int, total: int) -> None:
        self.meter.update(what, done, total)

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
    from vitlab.training.job import suited_recipe
    from vitlab.training.presets import find_recipe
    from vitlab.training.recipe import with_settings
    from vitlab.training.runlog import to_json
    from vitlab.training.verify import verify_resume

    # Python warns about resources that killed processes left behind
    os.environ["PYTHONWARNINGS"] = os.environ.get("PYTHONWARNINGS", "") + ",ignore:resource_tracker"
    recipe = suited_recipe(with_settings(find_recipe(what)[1], settings or []))
    with following_downloads():
        report = verify_resume(recipe, kills=kills, steps=steps, note=say)
    print_json_text(to_json(report.to_dict())) if json else print_table(report.table())
    if not report.identical:
        raise SystemExit(1)
