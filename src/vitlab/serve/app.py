"""The ASGI application. Further routes are one more router in `create_app`."""

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
from vitlab.serve.model_pool import ModelPool, ServedModel
from vitlab.serve.page_photo import PagePhoto
from vitlab.serve.request import ServerContext
from vitlab.serve.search_index import SearchIndex
from vitlab.serve.settings import Settings
from vitlab.version import __version__

PATH_PATTERNS = {"/models/": "/models/{name}", "/search/pictures/": "/search/pictures/{number}"}  # counted as one


class _App(FastAPI):
    def build_middleware_stack(self) -> ASGIApp:
        return SecurityHeaders(super().build_middleware_stack())


def create_app(
    models: Iterable[ServedModel],
    settings: Settings | None = None,
    index: SearchIndex | None = None,
    photo: PagePhoto | None = None,
) -> FastAPI:
    """`index`: what POST /search searches, from `open_index`. `photo`: the first image that the page offers."""
    settings = settings or Settings()
    pool = ModelPool(models, settings)
    metrics = Metrics(pool)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pool.start()
        for served in pool.models.values():
            served.worker.on_batch = metrics.batch_observer(served.name)
        with ThreadPoolExecutor(settings.decoders, thread_name_prefix="vitlab-decode") as decoders:
            app.state.context = ServerContext(pool, decoders, index, photo)
            warm_up = asyncio.create_task(pool.warm_up())
            yield
            warm_up.cancel()
            with suppress(asyncio.CancelledError):
                await warm_up
            await asyncio.to_thread(pool.stop)

    app = _App(
        title="vitlab",
        version=__version__,
        description="Vision Transformers over HTTP: images in, predictions out.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's pages load scripts from other hosts; ours is in docs.py
        redoc_url=None,
    )
    app.state.pool, app.state.metrics = pool, metrics
    handle_errors(app)
    for module in (inference_routes, search_routes, status, docs, page_routes):
        app.include_router(module.router)
    paths = {*app.openapi()["paths"], "/docs", "/openapi.json"}

    def count_response(path: str, code: int, seconds: float) -> None:
        name = next((pattern for start, pattern in PATH_PATTERNS.items() if path.startswith(start)), path)
        metrics.count_response(name if name in paths else "other", code, seconds)  # unknown paths share one label

    app.add_middleware(Guard, settings=settings, on_response=count_response, draining=lambda: pool.draining)
    if settings.origins:  # outermost, so that a page can read error responses
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
            expose_headers=["Retry-After"],
        )
    return app
