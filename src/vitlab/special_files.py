"""Recognises FIFOs, devices and sockets: opening one may block forever or act on hardware, so readers check first."""

from __future__ import annotations

import os
import stat

KINDS = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def special_kind(path: str | os.PathLike[str]) -> str | None:
    """The kind of a path that is neither a regular file nor a folder; None also if nothing is there."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116 - also for a million texts
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    return KINDS.get(stat.S_IFMT(mode))
