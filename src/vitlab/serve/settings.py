"""Settings of a server: its limits and who may use it."""

from __future__ import annotations

import ipaddress
import math
import os
import re
from dataclasses import dataclass, field
from typing import Literal

from vitlab.errors import UsageError

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # not ICO: it may hold a larger image than it declares
FORMAT_NAMES = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ALL_ADDRESSES = ("0.0.0.0", "::", "")  # listening there means every address of the machine
MAX_TEXT_LENGTH = 300  # characters of a label or sentence
MAX_TEXTS = 10  # sentences in one request
HOST = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z_.-]+))(?::(?P<port>[0-9]{1,5}))?")


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()  # further names accepted in the Host header
    origins: tuple[str, ...] = ()  # other sites whose pages may send requests
    token: str | None = None
    engine: Literal["eager", "exact"] = (
        "eager"  # exact: the fastest backend with the same scores, measured at the start
    )
    max_batch: int = 8
    max_wait: float = 0.005  # seconds a batch waits for images being decoded
    queue: int = 64  # requests a model has accepted and not yet answered
    timeout: float = 30.0  # seconds from a request's first line to its response
    drain: float = 0.5  # seconds after SIGTERM in which new connections are still accepted
    max_upload: int = 20_000_000  # bytes of a request
    max_pixels: int = 50_000_000
    max_labels: int = 100
    uploads: int = 256  # requests being received
    max_connections: int = 1000
    header_seconds: float = 10.0  # from accept, or from a later request's first byte, to the end of its headers
    write_seconds: float = 30.0  # in which the client reads nothing of its response
    linger_seconds: float = 5.0  # for discarding the rest of a refused body before the connection is cut
    runs: str = "runs"  # folder of training runs that the page shows
    decoders: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))  # threads

    def __post_init__(self) -> None:
        counts = ("max_batch", "queue", "max_upload", "max_pixels", "max_labels", "uploads", "decoders")
        for name in (*counts, "max_connections"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1.")
        if not (0 <= self.max_wait < math.inf and 0 <= self.drain < math.inf):
            raise UsageError(f"max_wait={self.max_wait} and drain={self.drain} must be finite and at least 0.")
        for name in ("timeout", "header_seconds", "write_seconds", "linger_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)} must be finite and above 0.")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise UsageError(
                "the token must be one or more printable ASCII characters. To make one: openssl rand -hex 24"
            )
        for name in self.hosts:
            match = HOST.fullmatch(f"[{name}]" if is_address(name) and ":" in name else name)
            if match is None or name not in (match["name"], match["ipv6"]):
                example = "such as vit.example.org: without scheme, port, path or *"
                raise UsageError(f"host {name!r} must be a name or an address, {example}.")
        for origin in self.origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise UsageError(f"origin {origin!r} must be like https://pages.example.org, without a path.")

    @property
    def local(self) -> bool:
        """Not reachable from the network."""
        return self.host in LOOPBACK

    def answers_to(self, name: str) -> bool:
        """Whether a Host header with this name, from `host_name`, is accepted.

        This stops DNS rebinding: a site can point its own name at this machine, but not an address or another's name.
        """
        if name in LOOPBACK or name in map(_canonical, (self.host, *self.hosts)):
            return True
        return self.host in ALL_ADDRESSES and is_address(name)


def host_name(header: str) -> str | None:
    """The canonical name in a Host header: Localhost:8000 -> localhost, [0::1]:8000 -> ::1. None: invalid."""
    match = HOST.fullmatch(header)
    if match is None or not 0 < int(match["port"] or 1) < 65536:
        return None
    if match["name"] is not None:
        return _canonical(match["name"])
    return _canonical(match["ipv6"]) if is_address(match["ipv6"]) and ":" in match["ipv6"] else None


def _canonical(name: str) -> str:
    """Names in lower case without the trailing dot, IPv6 addresses in their shortest form."""
    return str(ipaddress.ip_address(name)) if is_address(name) else name.lower().removesuffix(".")


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
