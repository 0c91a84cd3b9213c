"""One run, one writer: an flock on RUN/run.lock, held from before anything is read until the end.

The kernel releases the lock when its holder dies, however it dies, so a stale file is no obstacle.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from vitlab.errors import TrainingError
from vitlab.parsing import parse_json

try:
    import fcntl
except ImportError:  # Windows has no flock
    fcntl = None

LOCK = "run.lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}  # a file system without locks
TRIES, PAUSE = 4, 0.05  # `lock_holder` holds the lock for a moment: that is no reason to refuse

_held: dict[Path, int | None] = {}  # run folder -> descriptor of its locked file (None: no locks), in this process


@dataclass(frozen=True)
class Holder:
    """Who writes into a run folder."""

    process: int
    host: str
    since: str  # UTC

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}, since {self.since} UTC"


class RunLockedError(TrainingError):
    """Another process writes into the run folder."""


def is_first_process() -> bool:
    """The one that writes: rank 0 under torchrun, or the only one."""
    return int(os.environ.get("WORLD_SIZE", 1)) == 1 or int(os.environ.get("RANK", 0)) == 0


@contextmanager
def hold(run: Path, note: Callable[[str], object] = lambda text: None, *, new: bool = False) -> Iterator[None]:
    """Keep all other processes out of a run folder, which is created. Nested calls in one process are no-ops.

    Under torchrun the first process locks for all. A new folder in which no run was begun is removed again. `new`: a
    folder that exists is a FileExistsError.
    """
    key = run.absolute()
    if key in _held or not is_first_process():
        yield
        return
    created = [folder for folder in (key, *key.parents) if not folder.exists()]
    run.mkdir(parents=True, exist_ok=not new)
    descriptor = _held[key] = _lock(run, note)
    try:
        yield
    finally:
        del _held[key]
        if descriptor is not None:
            _release(run, descriptor, created)


def _release(run: Path, descriptor: int, created: list[Path]) -> None:
    try:
        if (run / "recipe.toml").exists():
            os.ftruncate(descriptor, 0)
        elif _is_at(descriptor, run / LOCK):
            (run / LOCK).unlink()
            with suppress(OSError):  # not empty, which keeps its parents too
                for folder in created:
                    folder.rmdir()
    finally:
        os.close(descriptor)


def check_held(run: Path) -> None:
    """Refuse to write into a folder that was removed, or replaced by another, while this process held it."""
    descriptor = _held.get(run.absolute())
    if descriptor is not None and not _is_at(descriptor, run / LOCK):
        raise RunLockedError(
            f"{run} was removed or replaced while this run was writing into it, so nothing more is written there. "
            "Start again with another folder: run.dir=..."
        )


def lock_holder(run: Path) -> Holder | None:
    """Who holds a run's lock now; None: nobody."""
    if run.absolute() in _held:
        return _read_holder(run)
    if fcntl is None or not (run / LOCK).is_file():
        return None
    try:
        descriptor = os.open(run / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _read_holder(run) or Holder(0, "an unknown host", "an unknown time")
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(descriptor)


def _lock(run: Path, note: Callable[[str], object]) -> int | None:
    """The descriptor of the locked file; None where files cannot be locked."""
    if fcntl is None:
        note(f"{run}: files cannot be locked on this system. Do not start two runs with the same folder.")
        return None
    for attempt in range(TRIES):
        descriptor = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, run / LOCK):  # not removed by its last holder in the meantime
                _write_holder(descriptor)
                return descriptor
        except BlockingIOError:
            pass
        except OSError as error:
            os.close(descriptor)
            if error.errno in NO_LOCKS:
                note(f"{run}: its file system has no locks. Do not start two runs with the same folder.")
                return None
            raise
        os.close(descriptor)
        if attempt < TRIES - 1:
            time.sleep(PAUSE)
    holder = _read_holder(run) or "another process"
    raise RunLockedError(f"{run} is being written by {holder}. Wait until it ends, or name another folder: run.dir=...")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _write_holder(descriptor: int) -> None:
    holder = Holder(os.getpid(), socket.gethostname(), time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()))
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)


def _read_holder(run: Path) -> Holder | None:
    try:
        values = parse_json((run / LOCK).read_bytes())
        return Holder(**{field.name: values[field.name] for field in fields(Holder)})
    except (OSError, ValueError, TypeError, KeyError):  # the holder is about to write it
        return None


def _close_in_child() -> None:
    """Data workers are forks: one that outlives its parent must not keep the parent's lock."""
    for descriptor in _held.values():
        if descriptor is not None:
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
