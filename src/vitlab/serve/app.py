"""All of the server as one ASGI application.

Further routes are one more router in `create_app`; what they need is in app.state.desk.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from vitlab.serve import docs, inference_routes, page_routes, search_routes, status
from vitlab.serve.errors import handle_errors
from vitlab.serve.guard import Guard, SecurityHeaders
from vitlab.serve.metrics import Metrics
from vitlab.serve.model_pool import House, Served
from vitlab.serve.request import Desk
from vitlab.serve.search_index import Shelf
from vitlab.serve.settings import Settings
from vitlab.version import __version__

NAMED = {"/models/": "/models/{name}", "/search/pictures/": "/search/pictures/{number}"}  # what is counted as one


class _App(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        return SecurityHeaders(super().build_middleware_stack())


def create_app(models: Iterable[Served], settings: Settings | None = None, shelf: Shelf | None = None) -> FastAPI:
    """`shelf`: the index that is searched, by `open_index`."""
    settings = settings or Settings()
    house = House(models, settings)
    metrics = Metrics(house)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        house.start()
        for served in house.models.values():
            served.worker.watch = metrics.watching(served.name)
        with ThreadPoolExecutor(settings.decoders, thread_name_prefix="vitlab-decode") as decoders:
            app.state.desk = Desk(house, decoders, shelf)
            warming = asyncio.create_task(house.warm_up())
            yield
            warming.cancel()
            with suppress(asyncio.CancelledError):
                await warming
            await asyncio.to_thread(house.stop)

    app = _App(
        title="vitlab",
        version=__version__,
        description="Pictures in, answers of Vision Transformers out.",
        lifespan=lifespan,
        docs_url=None,  # they load scripts from other hosts; ours is in docs.py
        redoc_url=None,
    )
    app.state.house, app.state.metrics = house, metrics
    handle_errors(app)
    for part in (inference_routes, search_routes, status, docs, page_routes):
        app.include_router(part.router)
    known = {*app.openapi()["paths"], "/docs", "/openapi.json"}

    def answered(path: str, code: int, seconds: float) -> None:
        name = next((names for start, names in NAMED.items() if path.startswith(start)), path)
        metrics.answered(name if name in known else "other", code, seconds)  # names of strangers are not kept

    app.add_middleware(Guard, settings=settings, answered=answered, draining=lambda: house.draining)
    if settings.origins:  # outermost, so that a page can read why it was refused
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["Retry-After"],
        )
    return app
