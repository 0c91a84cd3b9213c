"""Comparable timings: interleaved in one process, medians with quartiles; and the peak memory of a run."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PAUSE = 0.1  # seconds between two runs: spinning threads of the last run keep a core busy for a while
BRIEF = 0.02  # seconds: a shorter run is timed again right away, with its threads awake


@dataclass(frozen=True)
class TimingOptions:
    """How a model is timed."""

    batch: int = 8
    rounds: int = 15


def alternate(runs: dict[str, Callable[[], object]], rounds: int, *, warm: int = 2) -> dict[str, list[float]]:
    """Seconds of every run, interleaved, so that other load on the machine affects all equally.

    Every second round goes backwards, for what ran before can make a run slower.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm + rounds):
        for name, run in list(runs.items())[:: 1 if number % 2 else -1]:
            time.sleep(PAUSE)
            seconds = _timed(run)
            if number >= warm:
                times[name].append(seconds if seconds > BRIEF else _timed(run))
    return times


def _timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def summary(seconds: list[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return {"median": median, "quarter": low, "three_quarters": high, "n": len(seconds)}


def peak_memory(work: Callable[[], object]) -> int | None:
    """Peak bytes that this adds to the process; None where the system does not report it.

    It runs twice: what the first run allocates and keeps is not counted.
    """
    work()
    gc.collect()
    _trim_heap()
    before = _status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    except OSError:
        return None
    work()
    peak = _status("VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def _trim_heap() -> None:
    """Return freed memory to the system; a next run would reuse it and seem to need none."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
