"""The way of one request, the same for every verb: refused early, received, given a place, decoded, run, answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vitlab.serve.batching import Timing
from vitlab.serve.errors import RefusedError, busy
from vitlab.serve.image_io import Prepared, Upload, prepare, read_upload
from vitlab.serve.model_pool import House, Served, task
from vitlab.serve.search_index import Shelf


class Desk:
    """What requests share: the models, the threads that decode, an index, and how many requests are being received."""

    def __init__(self, house: House, decoders: Executor, shelf: Shelf | None = None):
        self.house, self.decoders, self.shelf, self.receiving = house, decoders, shelf, 0

    async def read(self, work: Callable[[], Any]) -> Any:
        """In a thread of those that read files."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, work)


class Case:
    """One request to one model."""

    def __init__(self, desk: Desk, served: Served, verb: str | None):
        self.desk, self.served, self.verb = desk, served, verb
        self.settings = desk.house.settings
        self.began = time.monotonic()
        self.deadline = self.began + self.settings.timeout
        self.upload: Upload | None = None
        self.milliseconds: dict[str, float] = {}
        self.batch = 1

    async def receive(self, request: Request, known: Iterable[str], needed: bool) -> None:
        if self.desk.receiving >= self.settings.uploads:
            raise busy(f"{self.desk.receiving} other requests are being received.", 1)
        self.desk.receiving += 1
        try:
            self.upload = await read_upload(request, known, self.settings, needed=needed)
        finally:
            self.desk.receiving -= 1
        self._note("received", self.began)

    async def picture(self, *, keep: bool = False) -> Prepared:
        """Decoded and laid out for the model; `keep`: with the picture itself."""
        assert self.upload is not None
        began, image = time.monotonic(), self.upload.image
        work = lambda: prepare(self.served.model.preprocess, image, self.settings, keep=keep)
        with self.served.worker.expect():
            found = await self.desk.read(work)
        self.upload.image = b""
        self._note("decoded", began)
        return found

    async def run(self, item: Any, work: Callable[[list[Any]], list[Any]] | None = None) -> Any:
        """In a batch of this verb; or by other work, alone."""
        if work is None:
            assert self.verb is not None
            result, timing = await self.served.worker.run(*task(self.served, self.verb), item, self.deadline)
        else:
            result, timing = await self.served.worker.run(work, None, item, self.deadline)
        self._note_timing(timing)
        return result

    def fields(self, name: str) -> list[str]:
        return self.upload.fields.get(name, []) if self.upload is not None else []

    def _note(self, what: str, since: float) -> None:
        self.milliseconds[what] = round(1e3 * (time.monotonic() - since), 3)

    def _note_timing(self, timing: Timing) -> None:
        for what, seconds in (("waited", timing.waited), ("ran", timing.ran)):
            self.milliseconds[what] = round(self.milliseconds.get(what, 0) + 1e3 * seconds, 3)
        self.batch = max(self.batch, timing.batch)


async def answer(
    request: Request,
    verb: str | None,
    model: str | None,
    work: Callable[[Case], Awaitable[dict[str, Any] | Response]],
    known: Iterable[str] = (),
    *,
    needed: bool = True,
) -> Response:
    """`verb`: what the model must be able to do, if anything. `work` finds the answer; `known` are the form's fields
    beside the picture, which is `needed` or not.
    """
    desk: Desk = request.app.state.desk
    case = Case(desk, desk.house.find(model, verb), verb)
    case.served.check_room()  # before anything is received
    async with in_time(case):
        await case.receive(request, known, needed)
        with case.served.place():
            found = await unless_gone(request, work(case))
    if isinstance(found, Response):
        return found
    case._note("total", case.began)
    return JSONResponse({"model": case.served.name, **found, "batch": case.batch, "milliseconds": case.milliseconds})


@asynccontextmanager
async def in_time(case: Case) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(case.settings.timeout):
            yield
    except TimeoutError:
        limit = f"{case.settings.timeout:g} s"
        if case.upload is None:
            raise RefusedError(408, f"the request did not arrive within {limit}.", "Send a smaller picture.") from None
        raise RefusedError(504, f"there was no answer within {limit}.", "Ask again later, or for less.") from None


async def unless_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of the work, which ends as soon as the client hangs up."""

    async def hung_up() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(hung_up())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise RefusedError(499, "the client has gone.", "")
        return tasks[0].result()
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
