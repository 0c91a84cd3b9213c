"""Progress on stderr: a bar on a terminal, elsewhere a line every ten seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vitlab.cli.console import say
from vitlab.printable import one_line

EVERY = 10.0  # seconds between lines


class Meter:
    """Progress of one named task after another."""

    def __init__(self, unit: str, *, terminal: bool | None = None) -> None:
        self.unit = unit  # "bytes", or the name of what is counted
        self.terminal = sys.stderr.isatty() if terminal is None else terminal
        self.name: str | None = None
        self.bar: Any = None

    def __enter__(self) -> Meter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, name: str, done: int, total: int | None) -> None:
        name = one_line(name)  # a file name may hold any character
        if name != self.name:
            self.close()
            self.name, self.began, self.last_line = name, time.monotonic(), time.monotonic()
            self._start(total)
        if self.bar is not None:
            self.bar.update(self.task, completed=done)
        elif time.monotonic() - self.last_line >= EVERY:
            self.last_line = time.monotonic()
            say(self._line(done, total))
        if done == total:
            self.close()

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        self.bar = self.name = None

    def _start(self, total: int | None) -> None:
        if not self.terminal:
            if self.unit == "bytes":
                size = f" ({_megabytes(total)})" if total else ""
                say(f"downloading {self.name}{size}")
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        counted = [DownloadColumn(), TransferSpeedColumn()] if self.unit == "bytes" else [MofNCompleteColumn()]
        columns = [TextColumn("{task.description}", markup=False), BarColumn(), *counted, TimeRemainingColumn()]
        self.bar = Progress(*columns, console=Console(stderr=True), transient=self.unit != "bytes")
        self.task = self.bar.add_task((self.name or "").rpartition("/")[2], total=total)
        self.bar.start()

    def _line(self, done: int, total: int | None) -> str:
        speed = done / max(time.monotonic() - self.began, 1e-9)
        name = (self.name or "").rpartition("/")[2]
        left = f", {(total - done) / speed:.0f} s left" if total and speed else ""
        if self.unit == "bytes":
            far = f"{done / 1e6:.1f} of {_megabytes(total)} ({done / total:.0%})" if total else _megabytes(done)
            return f"{name}: {far}, {_megabytes(speed)}/s{left}"
        return f"{name}: {done:,} of {total:,} {self.unit}, {speed:.1f} a second{left}"


@contextmanager
def following_downloads() -> Iterator[None]:
    """Show downloads of data in this context."""
    from vitlab.images.sources.download import watching

    with Meter("bytes") as meter, watching(meter.update):
        yield


@contextmanager
def counting(name: str, total: int) -> Iterator[Callable[[int], object]]:
    """Yields a function to call with the number of images done since its last call."""
    done = 0
    with Meter("images") as meter:

        def add(count: int) -> None:
            nonlocal done
            done += count
            meter.update(name, done, total)

        yield add


def _megabytes(n: float) -> str:
    return f"{n / 1e6:.1f} MB"
