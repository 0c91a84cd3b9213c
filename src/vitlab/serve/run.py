"""The application on a socket, until SIGTERM or Ctrl-C: then what was accepted is answered, and nothing new comes in.

After the signal /ready says no, and answers end their connections; new connections are still answered for
`settings.drain` seconds, so that none is lost on its way. Then the socket closes, and the last answers are waited for.
"""

from __future__ import annotations

import asyncio
import math
import signal
import socket
import sys
import time
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from vitlab.serve.connections import ACCEPTS, Connection, ConnectionPool, connection_limit
from vitlab.serve.settings import Settings

BACKLOG = 2048  # connections that wait in the system until they are accepted


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; they wait until the server is up. Port 0: any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=BACKLOG)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or the end of an answer waits for 40 ms
        return found
    except OSError as error:
        why = (error.strerror or "").partition(" (while")[0]
        raise ValueError(
            f"cannot listen at {host}:{port} ({why}). Choose another --port, or 0 for any that is free; --host is an "
            "address of this machine."
        ) from None


def serve(app: FastAPI, listening: socket.socket, *, access_log: bool = False) -> None:
    """Returns when the server has ended in order."""
    sys.setswitchinterval(5e-4)  # a model asks for the interpreter between any two operations, and must not wait long
    create_server(app, access_log=access_log).run([listening])


def create_server(app: FastAPI, *, access_log: bool = False) -> uvicorn.Server:
    """uvicorn with this package's deadlines and limits."""
    settings: Settings = app.state.house.settings
    config = uvicorn.Config(
        app,
        http=partial(Connection, ConnectionPool(settings, connection_limit(settings))),  # type: ignore[arg-type]
        loop="asyncio",
        backlog=ACCEPTS,  # asyncio accepts so many at a time
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="info" if access_log else "error",
        access_log=access_log,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.timeout) + 5,
    )
    return _Server(config, app.state.house)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, house: Any):
        super().__init__(config)
        self.house = house

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, it does not end the process by the same signal afterwards: an orderly end is code 0."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)  # asyncio has set it to config.backlog

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.house.draining = True
        until = time.monotonic() + self.house.settings.drain
        while time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
