"""Downloads of the named datasets; a file is complete and checked, or absent.

with watching(lambda url, done, total: ...):    # bytes so far, bytes in all (None: the server does not say)
    open_data("cifar10")
"""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from vitlab.advice import option_or_setting
from vitlab.errors import DataError

log = logging.getLogger(__name__)
TIMEOUT = 30  # seconds without a byte
CHUNK = 1 << 18
STALE = 3600  # seconds after which a partial file that nobody writes to is what a killed process left

Watch = Callable[[str, int, int | None], object]
_watch: ContextVar[Watch] = ContextVar("watch", default=lambda url, done, total: None)


@dataclass(frozen=True)
class Remote:
    mirrors: tuple[str, ...]
    files: dict[str, str]  # name -> MD5, as the publishers state it


REMOTES: dict[str, Remote] = {}  # named datasets that can be downloaded; the file of each source adds its own


class _MirrorError(Exception):
    """This mirror failed; another may work."""


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """While entered, every download reports its progress."""
    before = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(before)


def cache_dir() -> Path:
    """$VITLAB_CACHE, or ~/.cache/vitlab."""
    return Path(os.environ.get("VITLAB_CACHE") or "~/.cache/vitlab").expanduser()


def places(source: str) -> list[Path]:
    """Folders to look in before downloading: $VITLAB_DATA, then the cache."""
    shared = os.environ.get("VITLAB_DATA")
    data = [Path(shared).expanduser() / source, Path(shared).expanduser()] if shared else []
    return [*data, cache_dir() / source]


def fetch(source: str, file: str) -> Path:
    """Download a file of a named set into the cache, from the first mirror that delivers it whole."""
    remote, target = REMOTES[source], cache_dir() / source / file
    failures = []
    for mirror in remote.mirrors:
        try:
            _download(mirror + file, target, remote.files[file])
            return target
        except _MirrorError as failure:
            failures.append(f"  {mirror}{file}: {failure}")
    raise DataError(
        f"{source}: {file} could not be downloaded:\n"
        + "\n".join(failures)
        + "\nTry again later, or fetch it by other means and name its folder, "
        + f"{option_or_setting('data.path', 'FOLDER')}, or put it into a folder and set VITLAB_DATA to that."
    )


def again(source: str, path: Path, file: str | None = None) -> str:
    """How to replace a damaged file, for a message."""
    if path.is_relative_to(cache_dir()):
        return f"Delete {path} and run again: it will be downloaded anew."
    mirrors = REMOTES[source].mirrors
    return f"Fetch {mirrors[0] if mirrors else ''}{file or path.name} again."


def not_found(source: str, looked: list[Path]) -> DataError:
    """For download=False."""
    files = ", ".join(REMOTES[source].files)
    return DataError(
        f"{source}: not on this machine, and downloading is off. Looked in {', '.join(map(str, looked))} for {files}. "
        "Allow the download, pass a path, or set VITLAB_DATA to the folder that holds them."
    )


def _download(url: str, target: Path, md5: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as error:
        raise DataError(
            f"{target.parent}: cannot be written ({error.strerror}). Set VITLAB_CACHE to a folder that can."
        ) from None
    try:
        log.info("downloading %s to %s", url, target)
        with os.fdopen(handle, "wb") as file:
            digest = _receive(url, file)
            file.flush()
            os.fsync(file.fileno())
        if digest != md5:
            raise _MirrorError(f"wrong checksum: MD5 is {digest}, expected {md5}.")
        Path(partial).replace(target)
    finally:
        Path(partial).unlink(missing_ok=True)  # gone already if all went well


def _sweep(target: Path) -> None:
    """Remove partial files of killed processes."""
    for partial in target.parent.glob(f".{target.name}.*.part"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > STALE:
                partial.unlink()


def _receive(url: str, file) -> str:
    """Write what the URL gives into the file; returns its MD5."""
    digest, received, watch = hashlib.md5(usedforsecurity=False), 0, _watch.get()
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
            expected = int(response.headers.get("Content-Length") or 0)
            watch(url, 0, expected or None)
            while chunk := response.read1(CHUNK):  # what is there, so that a slow line is seen to move
                _write(file, chunk)
                digest.update(chunk)
                received += len(chunk)
                watch(url, received, expected or None)
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
        if isinstance(error, DataError):
            raise
        raise _MirrorError(f"{getattr(error, 'reason', None) or error or type(error).__name__}") from None
    if received < expected:
        raise _MirrorError(f"broke off after {received:,} of {expected:,} bytes.")
    return digest.hexdigest()


def _write(file, chunk: bytes) -> None:
    try:
        file.write(chunk)
    except OSError as error:
        raise DataError(
            f"{file.name if isinstance(file.name, str) else cache_dir()}: cannot be written ({error.strerror}). "
            "Free some space, or set VITLAB_CACHE to another disk."
        ) from None
