"""Checks of Host, Origin, token and size, before any of a request's body is read."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitlab.serve.errors import RequestError, error_response
from vitlab.serve.settings import Settings, host_name

PUBLIC_PATHS = ("/health", "/ready", "/")  # need no token: for supervisors, and for the page, which asks for the token
PUBLIC_FILES = "/page/files/"  # the page's own files
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",  # the pages have longer ones, which contain this
}


class SecurityHeaders:
    """Outermost ASGI middleware, so that responses of the others carry the headers too."""

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
    """ASGI middleware. Calls `on_response(path, status, seconds)`; closes connections while `draining()`."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        on_response: Callable[[str, int, float], object],
        draining: Callable[[], bool],
    ):
        self.app, self.settings = app, settings
        self.on_response, self.draining = on_response, draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.monotonic(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self.draining():
                    MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        try:
            error = self.check(scope)
            if error is not None:
                await error_response(error)(scope, receive, send_and_note)
            else:
                await self.app(scope, self._limit_size(receive), send_and_note)
        finally:
            self.on_response(scope["path"], status, time.monotonic() - began)

    def check(self, scope: Scope) -> RequestError | None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ", ".join(hosts)
        name = host_name(host)
        if name is None or not self.settings.answers_to(name):
            error = f"this server does not answer to the Host {host[:200]!r}."
            return RequestError(400, error, "Use the address it was started with, or start it with --allow-host NAME.")
        if not scope.get("raw_path", b"/").startswith(b"/"):  # a URL may name another host than the Host header
            remedy = "Send a path, such as GET /health HTTP/1.1."
            return RequestError(400, "the request's target is not a path.", remedy)
        if (origin := self._foreign_origin(headers, host)) is not None:
            error = f"pages of {origin[:200]!r} may not send requests to this server."
            return RequestError(403, error, "Use a page of this server, or start it with --allow-origin ORIGIN.")
        protected = scope["path"] not in PUBLIC_PATHS and not scope["path"].startswith(PUBLIC_FILES)
        if self.settings.token is not None and protected and not self._has_token(headers):
            remedy = "Send the header Authorization: Bearer TOKEN, with the server's --token."
            return RequestError(401, "the token is missing or wrong.", remedy, {"WWW-Authenticate": "Bearer"})
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.settings.max_upload:
            return self._too_large()
        return None

    def _foreign_origin(self, headers: Headers, host: str) -> str | None:
        """The origin of a request that comes from a page of another site; "cross-site" if only that is known.

        Browsers send Origin with POST and fetch, and Sec-Fetch-Site also with images, scripts and frames. A link on
        another site may open this server in a tab.
        """
        origins = headers.getlist("origin")
        own = (f"http://{host}".lower(), f"https://{host}".lower())
        foreign = [origin for origin in origins if origin not in self.settings.origins and origin.lower() not in own]
        if foreign:
            return foreign[0]
        site = headers.get("sec-fetch-site")
        navigation = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return site if site in ("cross-site", "same-site") and not origins and not navigation else None

    def _has_token(self, headers: Headers) -> bool:
        kind, _, token = headers.get("authorization", "").partition(" ")
        expected = (self.settings.token or "").encode()
        return hmac.compare_digest(token.strip().encode("latin-1"), expected) and kind.lower() == "bearer"

    def _limit_size(self, receive: Receive) -> Receive:
        """Stops a body that has no Content-Length when it becomes too large."""
        left = self.settings.max_upload

        async def receive_limited() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise self._too_large()
            return message

        return receive_limited

    def _too_large(self) -> RequestError:
        limit = self.settings.max_upload
        return RequestError(413, f"the request is larger than {limit:,} bytes.", "Send a smaller image.")
