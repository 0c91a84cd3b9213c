"""The time that a run has: how much is left, which optional work still fits, and how busy the machine is.

clock = Clock(since=time.perf_counter(), limit=300.0)
for image in clock.deadline(keep=5.0).while_it_fits(images):   # ends early where the next one would be late
    ...
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

BUSIEST = 8.0  # times longer than alone, at most: one measurement may be unlucky
SPIN = 1_000_000  # additions: some hundredths of a second, longer than a turn of another process

T = TypeVar("T")
Count = Callable[[str, int, int], None]  # what is counted, done, total


class Late(Exception):  # noqa: N818  (nothing went wrong)
    """Optional work has reached its deadline."""


@dataclass(frozen=True)
class Deadline:
    """A time, by time.perf_counter(), by which optional work must be done. The default never comes."""

    end: float = math.inf

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    def while_it_fits(self, items: Iterable[T], guess: float = 0.0) -> Iterator[T]:
        """The items, as long as the work on one more would end in time, if it takes as long as the slowest so far.

        `guess`: seconds for the first.
        """
        slowest = guess
        for item in items:
            if slowest > self.left or self.left <= 0:
                return
            began = time.perf_counter()
            yield item
            slowest = max(slowest, time.perf_counter() - began)

    def checked(self, count: Count) -> Count:
        """Counts as `count` does, and raises `Late` after the deadline."""

        def checked(what: str, done: int, total: int) -> None:
            if self.left < 0:
                raise Late
            count(what, done, total)

        return checked


@dataclass
class Clock:
    """Seconds of a run; earlier parts of it took `before`."""

    since: float
    limit: float = math.inf
    before: float = 0.0

    @property
    def gone(self) -> float:
        return time.perf_counter() - self.since + self.before

    @property
    def left(self) -> float:
        return self.limit - self.gone

    def deadline(self, keep: float = 0.0) -> Deadline:
        """`keep` seconds before the end."""
        return Deadline() if math.isinf(self.limit) else Deadline(self.since - self.before + self.limit - keep)


def busyness() -> float:
    """How many times longer work takes now because other processes use this machine too, from 1."""
    began, computed, total = time.perf_counter(), time.thread_time(), 0
    for number in range(SPIN):
        total += number
    taken, computed = time.perf_counter() - began, time.thread_time() - computed
    return min(max(taken / max(computed, 1e-6), 1.0), BUSIEST)
