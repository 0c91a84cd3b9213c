"""Deadlines for every stage of a connection, and a cap on connections, on top of uvicorn's HTTP/1.1 protocol.

    accept -> headers -> body -> response -> (keep-alive) -> headers ...

A client that stops sending or reading loses its connection after seconds. Above the cap a new connection replaces the
one that has waited longest without a request under way, so that idle clients cannot lock out others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from enum import Enum, auto
from http import HTTPStatus
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitlab.serve.guard import SECURITY_HEADERS
from vitlab.serve.settings import Settings

ACCEPTS = 64  # connections that asyncio accepts in one turn of its loop, before any of them is counted
SPARE_FILES = 64 + 2 * ACCEPTS  # open files besides connections and uploads; aborted connections close a turn later
MAX_DISCARDED = 100_000_000  # bytes of a refused body
WRITE_CHECK_SECONDS = 1.0  # between two looks at whether a client reads its response


class Stage(Enum):
    HEADERS = auto()  # waiting for the end of a request's headers
    REQUEST = auto()  # receiving the body, computing, sending the response
    IDLE = auto()  # waiting for the next request
    BLOCKED = auto()  # the client reads nothing of its response
    CLOSING = auto()  # answered early; what the client still sends is discarded


class ConnectionPool:
    """The open connections of one server; those outside of Stage.REQUEST may be dropped to make room."""

    def __init__(self, settings: Settings, limit: int):
        self.settings, self.limit = settings, limit
        self.connections: set[Connection] = set()
        self.droppable: dict[Connection, None] = {}  # the one that has been in its stage longest comes first

    def enter(self, connection: Connection, stage: Stage) -> None:
        if connection in self.connections and connection.stage is stage:
            return
        self.leave(connection)
        connection.stage = stage
        self.connections.add(connection)
        if stage is not Stage.REQUEST:
            self.droppable[connection] = None

    def leave(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.droppable.pop(connection, None)

    def make_room(self) -> bool:
        """Drop connections until the limit leaves room; False: all that remain have a request under way.

        Refused newcomers count until they are closed: each displaces the one before, so at most one is above the limit.
        """
        while len(self.connections) >= self.limit:
            if not self.droppable:
                return False
            next(iter(self.droppable)).drop()  # the newest is most likely about to send its request
        return True


class Connection(H11Protocol):
    """One client's connection."""

    def __init__(self, pool: ConnectionPool, **uvicorn_arguments: Any):
        super().__init__(**uvicorn_arguments)
        self.pool, self.settings = pool, pool.settings
        self.stage = Stage.HEADERS
        self.read_deadline: asyncio.TimerHandle | None = None
        self.write_check: asyncio.TimerHandle | None = None
        self.unsent = 0  # bytes that wait for the client to read, at the last check
        self.last_read = 0.0  # when the client was last seen to read, by the loop's clock
        self.blocked = False
        self.discarded = 0  # bytes
        self._application: Any = self.app
        self.app = self._run_application  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        transport.set_write_buffer_limits(high=0)  # pause_writing is called as soon as the client does not keep up
        super().connection_made(_LingeringTransport(transport, self.close))  # type: ignore[arg-type]
        has_room = self.pool.make_room()
        self._await_headers()
        if not has_room:
            text = f"all {self.pool.limit} connections of this server are in use."
            self._refuse(503, text, "Try again in 1 s.", {"Retry-After": "1"})

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_read_deadline(None)
        self.resume_writing()  # cancels the check
        self.pool.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.stage is Stage.CLOSING:
            self.discarded += len(data)
            if self.discarded > MAX_DISCARDED:
                self.transport.abort()
            return
        if not self._under_way and self.read_deadline is None:  # the first byte of another request
            self._await_headers()
        super().data_received(data)

    def handle_events(self) -> None:
        cycle = self.cycle
        super().handle_events()
        if self.cycle is not cycle and self.stage is not Stage.CLOSING:  # the headers of a request are complete
            # The application answers 408 after `timeout`; this deadline is for whatever does not read its body.
            wait = self.settings.timeout + self.settings.linger_seconds
            self._set_read_deadline(wait if self.cycle.more_body else None)
            self._update_stage()

    def on_response_complete(self) -> None:
        if self.stage is not Stage.CLOSING:
            self._set_read_deadline(None)
            self._update_stage()
        super().on_response_complete()  # handles the next request if it was pipelined

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unsent, self.last_read = self.transport.get_write_buffer_size(), self.loop.time()
        self._schedule_write_check()
        self._update_stage()

    def resume_writing(self) -> None:
        """The transport calls this when everything is sent, which may take a slow client minutes."""
        super().resume_writing()
        if self.write_check is not None:
            self.write_check.cancel()
            self.write_check, self.blocked = None, False
            self._update_stage()

    def _schedule_write_check(self) -> None:
        wait = min(WRITE_CHECK_SECONDS, self.settings.write_seconds / 4)
        self.write_check = self.loop.call_later(wait, self._check_write)

    def _check_write(self) -> None:
        """A client that has read nothing since the last check is blocked; after `write_seconds` of that it is cut."""
        unsent, now = self.transport.get_write_buffer_size(), self.loop.time()
        self.blocked = unsent >= self.unsent
        if not self.blocked:
            self.last_read = now
        elif now - self.last_read >= self.settings.write_seconds:
            self.transport.abort()
            return
        self.unsent = unsent
        self._schedule_write_check()
        self._update_stage()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for bytes that are not HTTP; its own version fails if a response has already begun."""
        if self._under_way and self.cycle.response_started:
            self.transport.abort()
            return
        self._refuse(400, "this is not an HTTP/1.1 request.", "Use an HTTP client, such as curl.")
        if self._under_way:  # the application is still waiting for the rest of a broken body
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def shutdown(self) -> None:
        if self.stage is Stage.CLOSING:
            self.transport.abort()
        else:
            super().shutdown()

    def drop(self) -> None:
        """End the connection now, to make room for another."""
        self._set_read_deadline(None)
        self.pool.leave(self)
        self.connections.discard(self)
        self.transport.abort()

    def close(self, transport: asyncio.Transport) -> None:
        """Close as soon as the response is sent; called instead of `transport.close`."""
        if self.conn.their_state is h11.SEND_BODY and not transport.is_closing():  # it is where the client has gone
            self._linger(transport)
        else:
            transport.close()

    def _linger(self, transport: asyncio.Transport) -> None:
        """End our half of the connection, and discard what the client still sends for a while.

        Closing both halves with bytes unread resets the connection, and the client may never see the response.
        """
        self._set_read_deadline(self.settings.linger_seconds)
        self.pool.enter(self, Stage.CLOSING)
        try:
            transport.write_eof()
        except OSError:  # the client has gone
            transport.abort()
            return
        self.flow.resume_reading()

    async def _run_application(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self.cycle

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and cycle.more_body:  # the rest of the body is not wanted
                headers = [header for header in message["headers"] if header[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        await self._application(scope, receive, send_and_close)

    @property
    def _under_way(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _update_stage(self) -> None:
        """The stage after headers have arrived, a response is complete, or the client has begun or ceased to read."""
        if self.stage is not Stage.CLOSING:
            if self.blocked:
                stage = Stage.BLOCKED
            elif self._under_way or self.flow.write_paused:
                stage = Stage.REQUEST
            else:
                stage = Stage.IDLE if self.read_deadline is None else Stage.HEADERS
            self.pool.enter(self, stage)

    def _await_headers(self) -> None:
        self._set_read_deadline(self.settings.header_seconds)
        self.pool.enter(self, Stage.HEADERS)

    def _set_read_deadline(self, seconds: float | None) -> None:
        if self.read_deadline is not None:
            self.read_deadline.cancel()
        self.read_deadline = None if seconds is None else self.loop.call_later(seconds, self._end_slow_client)

    def _end_slow_client(self) -> None:
        if self._under_way and not self.cycle.more_body:  # the body arrived in time
            return
        if self.stage is Stage.HEADERS and self.conn.trailing_data[0]:  # a part of them has come
            limit = f"{self.settings.header_seconds:g} s"
            self._refuse(408, f"the request's headers did not arrive within {limit}.", "Try again.")
        self.transport.abort()

    def _refuse(self, status: int, error: str, remedy: str, headers: dict[str, str] | None = None) -> None:
        """Answer without the application, and close."""
        body = json.dumps({"error": error, "remedy": remedy}).encode()
        all_headers = {**SECURITY_HEADERS, "Cache-Control": "no-store", "Content-Type": "application/json"}
        all_headers |= {"Content-Length": str(len(body)), "Connection": "close", **(headers or {})}
        response = h11.Response(
            status_code=status, headers=list(all_headers.items()), reason=HTTPStatus(status).phrase.encode()
        )
        to_head = self._under_way and self.scope["method"] == "HEAD"  # its response has no body
        for event in (response, *([] if to_head else [h11.Data(data=body)]), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self._linger(self.transport)


class _LingeringTransport:
    """A transport whose `close` is the connection's; uvicorn calls it in several places."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[asyncio.Transport], None]):
        self._transport, self._close, self._closing = transport, close, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._close(self._transport)

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()


def connection_limit(settings: Settings) -> int:
    """`settings.max_connections`, or fewer where the system allows fewer open files. Raises the soft limit on them."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return settings.max_connections
    reserved = settings.uploads + SPARE_FILES  # a large upload is a temporary file
    wanted = settings.max_connections + reserved
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY:
        return settings.max_connections
    return min(settings.max_connections, max(soft - reserved, soft // 4))
