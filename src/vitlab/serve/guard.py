"""Who may ask at all: the Host, Origin, token and size of a request, before anything of it is read."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitlab.serve.errors import RefusedError, response
from vitlab.serve.settings import Settings, host_name

OPEN = ("/health", "/ready", "/")  # where no token is asked for: by what starts and stops servers; the page asks for it
FILES = "/page/files/"  # nor for what the page itself is made of
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the pages have longer ones, which contain this
}


class SecurityHeaders:
    """ASGI middleware around all others, so that also what they answer themselves carries the headers."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**SECURITY_HEADERS, "Cache-Control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers)


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
                if self.draining():
                    MutableHeaders(scope=message)["Connection"] = "close"
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
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ", ".join(hosts)
        name = host_name(host)
        if name is None or not self.settings.answers_to(name):
            return RefusedError(
                400,
                f"this server does not answer to the Host {host[:200]!r}.",
                "Ask by the address that it was started with, or start it with --allow-host NAME.",
            )
        if not scope.get("raw_path", b"/").startswith(b"/"):  # http://evil.example/ names another host than Host
            return RefusedError(
                400, "the request's target is not a path.", "Ask for a path, such as GET /health HTTP/1.1."
            )
        if (stranger := self._foreign_page(headers, host)) is not None:
            return RefusedError(
                403,
                f"pages of {stranger[:200]!r} may not ask this server.",
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

    def _foreign_page(self, headers: Headers, host: str) -> str | None:
        """The origin of the request if it is a page of another site; "cross-site" if the browser says no more.

        Browsers send Origin with POST and fetch, and Sec-Fetch-Site also with the images, scripts and frames of a page.
        A link elsewhere may open this server in a tab.
        """
        origins = headers.getlist("origin")
        ours = (f"http://{host}".lower(), f"https://{host}".lower())
        strangers = [origin for origin in origins if origin not in self.settings.origins and origin.lower() not in ours]
        if strangers:
            return strangers[0]
        site = headers.get("sec-fetch-site")
        opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site if site in ("cross-site", "same-site") and not origins and not opened else None

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
