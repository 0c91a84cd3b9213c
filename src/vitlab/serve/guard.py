"""Who may ask at all: the Host, Origin, token and size of a request, before anything of it is read."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitlab.serve.errors import RefusedError, response
from vitlab.serve.settings import Settings

OPEN = ("/health", "/ready", "/")  # where no token is asked for: by what starts and stops servers; the page asks for it
FILES = "/page/files/"  # nor for what the page itself is made of


class Guard:
    """ASGI middleware. `answered` is told of every answer; `draining`: whether connections should come to an end."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        answered: Callable[[str, int, float], object],
        draining: Callable[[], bool],
    ):
        self.app, self.settings = app, settings
        self.answered, self.draining = answered, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(raw=message["headers"])
                headers["X-Content-Type-Options"] = "nosniff"
                headers.setdefault("Cache-Control", "no-store")
                if self.draining():
                    headers["Connection"] = "close"
            await send(message)

        try:
            refusal = self.refuse(scope)
            if refusal is not None:
                await response(refusal)(scope, receive, sending)
            else:
                await self.app(scope, self._counting(receive), sending)
        finally:
            self.answered(scope["path"], status, time.monotonic() - began)

    def refuse(self, scope: Scope) -> RefusedError | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self.settings.answers_to(_name(host)):
            return RefusedError(
                400,
                f"this server does not answer to the Host {host[:200]!r}.",
                "Ask by the address that it was started with, or start it with --allow-host NAME.",
            )
        origin = headers.get("origin")
        if origin is not None and origin not in self.settings.origins and _authority(origin) != host.lower():
            return RefusedError(
                403,
                f"pages of {origin[:200]!r} may not ask this server.",
                "Ask from a page of this server, or start it with --allow-origin ORIGIN.",
            )
        secret = scope["path"] not in OPEN and not scope["path"].startswith(FILES)
        if self.settings.token is not None and secret and not self._knows_token(headers):
            return RefusedError(
                401,
                "the token is missing or wrong.",
                "Send the header Authorization: Bearer TOKEN, with the server's --token.",
                {"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.settings.max_upload:
            return self._too_large()
        return None

    def _knows_token(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        right = (self.settings.token or "").encode()
        return hmac.compare_digest(token.strip().encode("latin-1"), right) and kind.lower() == "bearer"

    def _counting(self, receive: Receive) -> Receive:
        """A request that does not tell its length is stopped when it has sent too much."""
        left = self.settings.max_upload

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> RefusedError:
        limit = self.settings.max_upload
        return RefusedError(413, f"the request is larger than {limit:,} bytes.", "Send a smaller picture.")


def _name(host: str) -> str:
    """localhost:8000 -> localhost, [::1]:8000 -> ::1."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _authority(origin: str) -> str | None:
    """https://example.org:8000 -> example.org:8000, as a Host header has it."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None
