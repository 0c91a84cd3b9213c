"""Images in a folder, with size and time to detect new, changed and removed files without opening them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from vitlab.errors import SearchError
from vitlab.images.sources.folder import images_under


class Stamp(NamedTuple):
    size: int
    mtime: int  # nanoseconds


def scan(folder: Path) -> dict[str, Stamp]:
    """All images at any depth, by path relative to the folder with / as separator."""
    if not folder.is_dir():
        raise SearchError(f"{folder}: {'is a file: name its folder' if folder.exists() else 'no such folder'}.")
    start = len(os.path.join(folder, ""))  # noqa: PTH118  (a Path has no separator at its end)
    return {path[start:].replace(os.sep, "/"): _stamp(path) for path in images_under(folder)}


def identity(path: Path) -> tuple[int, int, int]:
    """Inode, size and time: while they stay the same, so do the contents."""
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _stamp(path: str) -> Stamp:
    try:
        status = Path(path).stat()
    except OSError:  # a broken link: opening it reports the error
        return Stamp(0, 0)
    return Stamp(status.st_size, status.st_mtime_ns)
