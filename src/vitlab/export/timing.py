"""Times that can be compared: in one process, in turns, medians with their spread; and the memory that a run takes."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PAUSE = 0.1  # seconds between two runs: threads that one leaves waiting keep a core busy for a while
BRIEF = 0.02  # seconds: a shorter run would mostly time how its threads wake up, so one run wakes them


def alternate(runs: dict[str, Callable[[], object]], rounds: int, *, warm: int = 2) -> dict[str, list[float]]:
    """Seconds of every run, in turns, so that whatever else the machine does meets them equally."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm + rounds):
        for name, run in runs.items():
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


def memory_of(work: Callable[[], object]) -> int | None:
    """By how many bytes this raises what the process holds, at the highest; None where the system does not tell.

    It runs twice: what it makes once and keeps is not counted, and what was freed goes back to the system in between.
    """
    work()
    gc.collect()
    _give_back()
    before = _status("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    except OSError:
        return None
    work()
    peak = _status("VmHWM")
    return None if before is None or peak is None else max(0, peak - before)


def _give_back() -> None:
    """The C library keeps freed memory for later, where a next run finds it and seems to need none."""
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None)
