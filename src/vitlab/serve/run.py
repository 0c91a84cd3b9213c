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
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from vitlab.serve.settings import Settings


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections from now on; they wait until the server is up. Port 0: any that is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=2048)
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
    settings: Settings = app.state.house.settings
    sys.setswitchinterval(5e-4)  # a model asks for the interpreter between any two operations, and must not wait long
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="info" if access_log else "error",
        access_log=access_log,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=math.ceil(settings.timeout) + 5,
    )
    _Server(config, app.state.house).run([listening])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, house: Any):
        super().__init__(config)
        self.house = house

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Unlike uvicorn's, it does not end the process by the same signal afterwards: an orderly end is code 0."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.house.draining = True
        until = time.monotonic() + self.house.settings.drain
        while time.monotonic() < until and not self.force_exit:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
