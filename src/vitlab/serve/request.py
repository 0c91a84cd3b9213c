"""The life of one request, the same for every verb: check the queue, receive, take a slot, decode, run, respond."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from torch import Tensor

from vitlab.serve.batching import Item, Result
from vitlab.serve.errors import RequestError, busy_error
from vitlab.serve.image_io import PreparedImage, Upload, prepare, read_upload
from vitlab.serve.model_pool import LRUCache, ModelPool, ServedModel
from vitlab.serve.page_photo import PagePhoto
from vitlab.serve.page_queries import PageImage
from vitlab.serve.search_index import SearchIndex

Value = TypeVar("Value")

MAX_PAGE_IMAGES = 64


@dataclass
class ServerContext:
    """What requests share."""

    pool: ModelPool
    decoders: Executor
    index: SearchIndex | None = None
    photo: PagePhoto | None = None  # the first of the page's samples
    page_images: LRUCache[PageImage] = field(default_factory=lambda: LRUCache(MAX_PAGE_IMAGES))  # by ID
    receiving: int = 0  # requests

    async def run_blocking(self, function: Callable[[], Value]) -> Value:
        """Runs on the decoder pool."""
        return await asyncio.get_running_loop().run_in_executor(self.decoders, function)


def context_of(request: Request) -> ServerContext:
    return request.app.state.context


class InferenceJob:
    """One request to one model: its upload, deadline and timings."""

    def __init__(self, context: ServerContext, served: ServedModel, verb: str | None = None):
        self.context, self.served, self.verb = context, served, verb
        self.settings = context.pool.settings
        self.began = time.monotonic()
        self.deadline = self.began + self.settings.timeout
        self.upload = Upload(b"")
        self.milliseconds: dict[str, float] = {}
        self.batch = 1

    async def receive(self, request: Request, field_names: Iterable[str], *, image_required: bool) -> None:
        if self.context.receiving >= self.settings.uploads:
            raise busy_error(f"{self.context.receiving} other requests are being received.", 1)
        self.context.receiving += 1
        try:
            self.upload = await read_upload(request, field_names, self.settings, image_required=image_required)
        finally:
            self.context.receiving -= 1
        self.record("received", self.began)

    async def image(self, *, keep_original: bool = False, one_size: bool = False) -> PreparedImage:
        """Decode the uploaded image; `one_size`: to the size that the model states, also where it reads others."""
        began, content = time.monotonic(), self.upload.image
        preprocess = self.served.preprocess.at_one_size() if one_size else self.served.preprocess
        function = lambda: prepare(preprocess, content, self.settings, keep_original=keep_original)
        with self.served.worker.expect():
            image = await self.context.run_blocking(function)
        self.upload.image = b""
        self.record("decoded", began)
        return image

    async def run_verb(self, tensor: Tensor) -> Tensor:
        """Run the request's verb on an image, in a batch with others."""
        assert self.verb is not None
        return await self._run(self.served.batch_function(self.verb), self.verb, tensor)

    async def run_alone(self, function: Callable[[Item], Result], item: Item) -> Result:
        """Run a function in the model's turn, not batched."""
        return await self._run(lambda items: [function(items[0])], None, item)

    async def _run(self, function: Callable[[list[Item]], list[Result]], kind: str | None, item: Item) -> Result:
        result, timing = await self.served.worker.run(function, kind, item, self.deadline)
        for stage, seconds in (("waited", timing.waited), ("ran", timing.ran)):
            self.milliseconds[stage] = round(self.milliseconds.get(stage, 0) + 1e3 * seconds, 3)
        self.batch = max(self.batch, timing.batch)
        return result

    def fields(self, name: str) -> list[str]:
        return self.upload.fields.get(name, [])

    def record(self, stage: str, began: float) -> None:
        self.milliseconds[stage] = round(1e3 * (time.monotonic() - began), 3)

    @asynccontextmanager
    async def time_limit(
        self, status: int = 504, error: str = "there was no answer", remedy: str = "Try again later, or for less."
    ) -> AsyncIterator[None]:
        """Refuse the request when its deadline passes."""
        try:
            async with asyncio.timeout(self.deadline - time.monotonic()):
                yield
        except TimeoutError:
            raise RequestError(status, f"{error} within {self.settings.timeout:g} s.", remedy) from None


async def respond(
    request: Request,
    verb: str | None,
    model: str | None,
    answer: Callable[[InferenceJob], Awaitable[Mapping[str, object] | Response]],
    field_names: Iterable[str] = (),
    *,
    image_required: bool = True,
) -> Response:
    """Receive a form and respond with what `answer` returns. `verb`: what the model must support."""
    context = context_of(request)
    job = InferenceJob(context, context.pool.find(model, verb), verb)
    job.served.check_capacity()  # before anything is received
    async with job.time_limit(408, "the request did not arrive", "Send a smaller image."):
        await job.receive(request, field_names, image_required=image_required)
    async with job.time_limit():
        with job.served.slot():
            content = await until_disconnect(request, answer(job))
    if isinstance(content, Response):
        return content
    job.record("total", job.began)
    return JSONResponse({"model": job.served.name, **content, "batch": job.batch, "milliseconds": job.milliseconds})


async def until_disconnect(request: Request, work: Awaitable[Value]) -> Value:
    """The result of `work`, which is cancelled when the client disconnects."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result, disconnected = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait([result, disconnected], return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise RequestError(499, "the client has disconnected.", "")
        return result.result()
    finally:
        result.cancel()
        disconnected.cancel()
        await asyncio.gather(result, disconnected, return_exceptions=True)
