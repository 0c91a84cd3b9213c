"""One model, one queue: pictures that arrive together are run together.

    worker = Worker("digits", max_batch=8, max_wait=0.005)
    result = await worker.run(work, "predict", tensor, deadline)    # work: a list of tensors -> a list of results

Work of one kind on pictures of one shape goes in one batch, in the order it came; nothing is padded, so an answer is
the same in any company. A batch waits for others only while there are others: those that are being decoded are told by
`expect`. A single client that asks again and again never waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from vitlab.serve.executor import compute

Work = Callable[[list[Any]], list[Any]]


@dataclass
class Timing:
    """Of one job, in seconds; and in how large a batch it was run."""

    waited: float
    ran: float
    batch: int


@dataclass
class Job:
    work: Work
    kind: Hashable  # jobs of one kind may be run together; None: alone
    item: Any
    deadline: float  # on time.monotonic
    done: Callable[[Any, BaseException | None, Timing], object]
    since: float = field(default_factory=time.monotonic)
    dropped: bool = False  # nobody waits for it any more


class Worker:
    def __init__(self, name: str, *, max_batch: int = 8, max_wait: float = 0.005):
        self.max_batch, self.max_wait = max_batch, max_wait
        self.pace = 0.05  # seconds of a picture, a running mean
        self.watch: Callable[[Hashable, int, float], object] = lambda kind, count, seconds: None
        self._jobs: deque[Job] = deque()
        self._coming = 0
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=f"vitlab-{name}", daemon=True)
        self._thread.start()

    @contextmanager
    def expect(self) -> Iterator[None]:
        """While inside, a picture is on its way, and a batch may wait for it."""
        with self._changed:
            self._coming += 1
        try:
            yield
        finally:
            with self._changed:
                self._coming -= 1
                self._changed.notify()

    async def run(self, work: Work, kind: Hashable, item: Any, deadline: float) -> tuple[Any, Timing]:
        """The result of one item; TimeoutError if its turn came too late. What nobody waits for is not begun."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, Timing]] = loop.create_future()

        def settle(result: Any, error: BaseException | None, timing: Timing) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result((result, timing))

        job = Job(work, kind, item, deadline, lambda *found: loop.call_soon_threadsafe(settle, *found))
        with self._changed:
            if self._stopping:
                raise RuntimeError("the worker has stopped")
            self._jobs.append(job)
            self._changed.notify()
        try:
            return await future
        finally:
            job.dropped = True

    def stop(self) -> None:
        """Finish what was handed in, and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while batch := self._next():
            began = time.monotonic()
            try:
                results = compute(batch[0].work, [job.item for job in batch])
                assert len(results) == len(batch)
                error = None
            except Exception as caught:  # what a request cannot have, or a fault: its own handler tells them apart
                results, error = [None] * len(batch), caught
            seconds = time.monotonic() - began
            if error is None:
                self.pace += 0.2 * (seconds / len(batch) - self.pace)
                self.watch(batch[0].kind, len(batch), seconds)
            for job, result in zip(batch, results, strict=True):
                self._settle(job, result, error, Timing(began - job.since, seconds, len(batch)))
            del batch, results, error  # so that nothing is kept until the next one comes

    def _next(self) -> list[Job]:
        """The oldest job with all that can join it; empty when there will be no more."""
        with self._changed:
            while True:
                self._forget()
                if not self._jobs:
                    if self._stopping:
                        return []
                    self._changed.wait()
                    continue
                first = self._jobs[0]
                left = first.since + self.max_wait - time.monotonic()
                if first.kind is None or self._stopping or not self._coming or left <= 0 or self._enough(first.kind):
                    return self._take(first)
                self._changed.wait(left)

    def _forget(self) -> None:
        """Jobs that nobody waits for, or that are late, are not run."""
        now = time.monotonic()
        late = [job for job in self._jobs if job.deadline < now]
        if late or any(job.dropped for job in self._jobs):
            self._jobs = deque(job for job in self._jobs if not job.dropped and job.deadline >= now)
        for job in late:
            self._settle(job, None, TimeoutError(), Timing(now - job.since, 0.0, 1))

    @staticmethod
    def _settle(job: Job, result: Any, error: BaseException | None, timing: Timing) -> None:
        with suppress(RuntimeError):  # the event loop has ended, so nobody waits
            job.done(result, error, timing)

    def _enough(self, kind: Hashable) -> bool:
        return sum(job.kind == kind for job in self._jobs) >= self.max_batch

    def _take(self, first: Job) -> list[Job]:
        if first.kind is None:
            return [self._jobs.popleft()]
        batch = [job for job in self._jobs if job.kind == first.kind][: self.max_batch]
        taken = {id(job) for job in batch}
        self._jobs = deque(job for job in self._jobs if id(job) not in taken)
        return batch
