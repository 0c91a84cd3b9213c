"""vitlab train."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from vitlab.cli.console import out, print_json, print_plain, say
from vitlab.cli.progress import following_downloads
from vitlab.training.loop import Stopped
from vitlab.training.train import train


def run(
    what: str | None,
    settings: list[str],
    resume: Path | None,
    changed: bool,
    minutes: float | None,
    began: float,
    json: bool,
) -> None:
    """`began`: time.perf_counter() at the start of the command, from where minutes count."""
    if what is not None and (resume is not None or ("=" in what and not Path(what).exists())):
        what, settings = None, [what, *settings]  # vitlab train run.epochs=3
    show = Beside() if json else Bar() if sys.stdout.isatty() else Plain()
    options: dict[str, Any] = dict(resume=resume, changed=changed, minutes=minutes)
    try:
        with show, following_downloads():
            trained = train(what, settings, show=show, since=began, **options)
    except Stopped as stopped:
        say(f"vitlab: {stopped}")
        raise SystemExit(130) from None
    if json:
        print_json(trained.to_dict())
        return
    console, result = out(), trained.result
    console.print(
        f"{result['split']} {result.get('judged_by', 'top-1')} [bold]{result['top1']:.2%}[/bold] "
        f"after {result['seconds']:.0f} s "
        f"({result['images_per_second']:.0f} images/s, {result['params']:,} parameters)"
    )
    console.print(f"model:  {trained.model}\nreport: {trained.report}", markup=False, emoji=False)


class Plain:
    """For files and pipes: a line now and then."""

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None: ...

    def start(self, done: int, total: int) -> None:
        self.total, self.spoke = total, time.monotonic()
        if done:
            self.note(f"going on at step {done} of {total}")

    def step(self, done: int, numbers: dict[str, float]) -> None:
        if time.monotonic() - self.spoke > 30:
            self.spoke = time.monotonic()
            self.note(f"step {done} of {self.total}: loss {numbers['loss']:.4f}, lr {numbers['lr']:.2e}")

    def note(self, text: str) -> None:
        print_plain(text)


class Beside(Plain):
    """The same on stderr, so that the result alone is on stdout."""

    def note(self, text: str) -> None:
        say(text)


class Bar:
    """For a terminal: a bar with the time left, speed, loss and learning rate."""

    def __enter__(self) -> Bar:
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
        self.progress = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=out())
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
