"""One queue per model: images that arrive together run as one batch.

    worker = Worker("digits", max_batch=8, max_wait=0.005)
    result = await worker.run(function, "predict", tensor, deadline)    # function: list of tensors -> list of results

A batch holds jobs of one kind, in the order they came. Nothing is padded, so a result does not depend on the rest of
its batch. A batch waits only while `expect` announces images that are being decoded, so a single client never waits.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vitlab.serve.executor import compute

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Timing:
    """Seconds of one job, and the size of its batch."""

    waited: float
    ran: float
    batch: int


@dataclass
class BatchJob:
    function: Callable[[list[Any]], list[Any]]
    kind: Hashable  # jobs of one kind may share a batch; None: runs alone
    item: object
    deadline: float  # by time.monotonic
    done: Callable[[object, BaseException | None, Timing], object]
    queued_at: float = field(default_factory=time.monotonic)
    abandoned: bool = False  # the caller no longer waits


class Worker:
    def __init__(self, name: str, *, max_batch: int = 8, max_wait: float = 0.005):
        self.max_batch, self.max_wait = max_batch, max_wait
        self.seconds_per_image = 0.05  # a running mean
        self.on_batch: Callable[[Hashable, int, float], object] = lambda kind, count, seconds: None
        self._jobs: deque[BatchJob] = deque()
        self._expected = 0
        self._stopping = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name=f"vitlab-{name}", daemon=True)
        self._thread.start()

    @contextmanager
    def expect(self) -> Iterator[None]:
        """Announce an image that is being decoded: a batch may wait for it."""
        with self._changed:
            self._expected += 1
        try:
            yield
        finally:
            with self._changed:
                self._expected -= 1
                self._changed.notify()

    async def run(
        self, function: Callable[[list[Item]], list[Result]], kind: Hashable, item: Item, deadline: float
    ) -> tuple[Result, Timing]:
        """The result of one item; TimeoutError if it did not start in time. Abandoned jobs are not started."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[Any, Timing]] = loop.create_future()

        def settle(result: object, error: BaseException | None, timing: Timing) -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result((result, timing))

        job = BatchJob(function, kind, item, deadline, lambda *outcome: loop.call_soon_threadsafe(settle, *outcome))
        with self._changed:
            if self._stopping:
                raise RuntimeError("the worker has stopped")
            self._jobs.append(job)
            self._changed.notify()
        try:
            return await future
        finally:
            job.abandoned = True

    def stop(self) -> None:
        """Finish the queue and end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _loop(self) -> None:
        while batch := self._next_batch():
            began = time.monotonic()
            try:
                results = compute(batch[0].function, [job.item for job in batch])
                assert len(results) == len(batch)
                error = None
            except Exception as caught:  # a refusal or a bug: the request's error handler tells them apart
                results, error = [None] * len(batch), caught
            seconds = time.monotonic() - began
            if error is None:
                self.seconds_per_image += 0.2 * (seconds / len(batch) - self.seconds_per_image)
                self.on_batch(batch[0].kind, len(batch), seconds)
            for job, result in zip(batch, results, strict=True):
                self._settle(job, result, error, Timing(began - job.queued_at, seconds, len(batch)))
            del batch, results, error  # frees them before the next batch comes

    def _next_batch(self) -> list[BatchJob]:
        """The oldest job and those that can join it; empty when the worker stops."""
        with self._changed:
            while True:
                self._discard_late()
                if not self._jobs:
                    if self._stopping:
                        return []
                    self._changed.wait()
                    continue
                first = self._jobs[0]
                left = first.queued_at + self.max_wait - time.monotonic()
                if first.kind is None or self._stopping or not self._expected or left <= 0 or self._is_full(first.kind):
                    return self._take(first)
                self._changed.wait(left)

    def _discard_late(self) -> None:
        """Drop jobs that are abandoned or past their deadline."""
        now = time.monotonic()
        late = [job for job in self._jobs if job.deadline < now]
        if late or any(job.abandoned for job in self._jobs):
            self._jobs = deque(job for job in self._jobs if not job.abandoned and job.deadline >= now)
        for job in late:
            self._settle(job, None, TimeoutError(), Timing(now - job.queued_at, 0.0, 1))

    @staticmethod
    def _settle(job: BatchJob, result: object, error: BaseException | None, timing: Timing) -> None:
        with suppress(RuntimeError):  # the event loop has ended, so nobody waits
            job.done(result, error, timing)

    def _is_full(self, kind: Hashable) -> bool:
        return sum(job.kind == kind for job in self._jobs) >= self.max_batch

    def _take(self, first: BatchJob) -> list[BatchJob]:
        if first.kind is None:
            return [self._jobs.popleft()]
        batch = [job for job in self._jobs if job.kind == first.kind][: self.max_batch]
        taken = {id(job) for job in batch}
        self._jobs = deque(job for job in self._jobs if id(job) not in taken)
        return batch
