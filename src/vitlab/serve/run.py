"""Run the application on a socket until SIGTERM or Ctrl-C, then shut down without losing a request.

    with open_server(["bundled:digits"], port=8000) as server:
        server.run()

After the signal /ready responds 503 and responses close their connections; new connections are still accepted for
`settings.drain` seconds. Then the socket closes, and the server waits for the remaining responses.
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from urllib.parse import quote

import torch
import uvicorn
from fastapi import FastAPI

from vitlab.errors import UsageError
from vitlab.serve.app import create_app
from vitlab.serve.connections import ACCEPTS, Connection, ConnectionPool, connection_limit
from vitlab.serve.engine import exact_engine
from vitlab.serve.executor import compute
from vitlab.serve.model_pool import ModelPool, ServedModel, open_models
from vitlab.serve.page_photo import PagePhoto
from vitlab.serve.search_index import SearchIndex, open_index
from vitlab.serve.settings import Settings

BACKLOG = 2048  # connections that the system queues until they are accepted


class Server:
    """Opened models behind a listening socket. `run` answers until SIGTERM or Ctrl-C; `close` frees the port."""

    def __init__(
        self,
        models: list[ServedModel],
        index: SearchIndex | None,
        settings: Settings,
        port: int,
        photo: PagePhoto | None = None,
    ):
        self.models, self.index, self.settings, self.photo = models, index, settings, photo
        self.socket = listen(settings.host, port)
        host, port = self.socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @property
    def url(self) -> str:
        """The page; where there is a photo, open on it."""
        return f"http://{self.address}/" + ("" if self.photo is None else f"#sample={quote(self.photo.name)}")

    def run(self, *, access_log: bool = False) -> None:
        """Returns after an orderly shutdown."""
        serve(create_app(self.models, self.settings, self.index, self.photo), self.socket, access_log=access_log)

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_server(
    models: Iterable[str] = (),
    index: str | Path | None = None,
    *,
    port: int = 8000,
    settings: Settings | None = None,
    threads: int | None = None,
    image_size: tuple[int, int] | None = None,
    device: str = "cpu",
    photo: PagePhoto | None = None,
) -> Server:
    """Open models, an index to search, and the port; 0: any free one.

    `models`, `image_size` and `device` as in `open_models`; an index keeps the size that it was made with. `threads`:
    how many a model runs with; None leaves torch's number. `photo`: what the page opens with.
    """
    if threads is not None:
        compute(torch.set_num_threads, threads)
    served = compute(open_models, models, image_size, device)
    settings = settings or Settings()
    if settings.engine == "exact":
        for one in served:
            one.engine = compute(exact_engine, one.model, settings.max_batch)
    search_index = None if index is None else compute(open_index, index, served)
    return Server(served, search_index, settings, port, photo)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; connections wait until the server is up. Port 0: any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or the end of a response waits for 40 ms
        return listening
    except OSError as error:
        reason = (error.strerror or "").partition(" (while")[0]
        raise UsageError(
            f"cannot listen at {host}:{port} ({reason}). Choose another --port, or 0 for any free one; --host must be "
            "an address of this machine."
        ) from None


def serve(app: FastAPI, listening: socket.socket, *, access_log: bool = False) -> None:
    """Returns after an orderly shutdown."""
    sys.setswitchinterval(5e-4)  # models reacquire the GIL after every operation
    create_server(app, access_log=access_log).run([listening])


def create_server(app: FastAPI, *, access_log: bool = False) -> uvicorn.Server:
    """uvicorn with this package's deadlines and limits."""
    settings: Settings = app.state.pool.settings
    config = uvicorn.Config(
        app,
        http=partial(Connection, ConnectionPool(settings, connection_limit(settings))),  # type: ignore[arg-type]
        loop="asyncio",
        backlog=ACCEPTS,  # asyncio accepts this many at a time
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="info" if access_log else "error",
        access_log=access_log,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.timeout) + 5,
    )
    return _Server(config, app.state.pool)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, pool: ModelPool):
        super().__init__(config)
        self.pool = pool

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn, do not raise the signal again afterwards: an orderly shutdown exits with 0."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)  # asyncio has set it to config.backlog

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.pool.draining = True
        until = time.monotonic() + self.pool.settings.drain
        while time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
