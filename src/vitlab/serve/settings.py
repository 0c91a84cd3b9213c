"""What a server allows, and when it says no."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # an ICO may hold a picture larger than it says
KINDS = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
ANYWHERE = ("0.0.0.0", "::", "")  # to listen there is to listen at every address of the machine


@dataclass(frozen=True)
class Settings:
    host: str = "127.0.0.1"
    hosts: tuple[str, ...] = ()  # further names that requests may call this server by
    origins: tuple[str, ...] = ()  # pages of other servers that may ask
    token: str | None = None
    max_batch: int = 8
    max_wait: float = 0.005  # seconds that a batch waits for pictures that are being decoded
    queue: int = 64  # requests that a model has accepted and not answered
    timeout: float = 30.0  # seconds from a request's first line to its answer
    drain: float = 0.5  # seconds after SIGTERM in which new connections are still answered
    max_upload: int = 20_000_000  # bytes of a request
    max_pixels: int = 50_000_000
    max_labels: int = 100
    uploads: int = 256  # requests that are being received
    runs: str = "runs"  # the folder of training runs that the page follows
    decoders: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))  # threads

    def __post_init__(self) -> None:
        whole = ("max_batch", "queue", "max_upload", "max_pixels", "max_labels", "uploads", "decoders")
        for name in whole:
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.max_wait < 0 or self.drain < 0:
            raise ValueError(f"max_wait={self.max_wait} and drain={self.drain} must not be below 0.")
        if self.timeout <= 0:
            raise ValueError(f"timeout={self.timeout} must be above 0.")
        if self.token is not None and (not self.token or not self.token.isascii() or not self.token.isprintable()):
            raise ValueError(
                "the token must be one or more plain characters, e.g. what this prints: openssl rand -hex 24"
            )
        for origin in self.origins:
            if not origin.startswith(("http://", "https://")) or origin.count("/") != 2:
                raise ValueError(f"origin {origin!r} must be like https://pages.example.org, without a path.")

    @property
    def local(self) -> bool:
        """Nobody else on the network can reach it."""
        return self.host in LOOPBACK

    def answers_to(self, name: str) -> bool:
        """Whether a Host header with this name (and no port) is meant for us.

        A page elsewhere can let its own name point at this machine and so ask through a visitor's browser; it cannot do
        so with an address, nor with a name that is not its own.
        """
        name = name.lower().rstrip(".")
        if name in LOOPBACK or name == self.host.lower() or name in (host.lower() for host in self.hosts):
            return True
        return self.host in ANYWHERE and is_address(name)


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
