"""Rank, device and collectives of one process or many, from torchrun's environment."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vitlab.device import pick_device
from vitlab.errors import TrainingError

PIECE = 64 * 2**20  # bytes of a file that are sent at a time
T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over all processes."""
        if self.world > 1:
            moved = tensor.to(self.device)
            dist.all_reduce(moved)
            return moved.to(tensor.device)
        return tensor

    def join(self, table: dict[str, str]) -> dict[str, str]:
        """The tables of all processes merged; all must call this together."""
        if not self.any(bool(table)) or self.world == 1:
            return table
        return {key: value for part in self.gather(table) for key, value in part.items()}

    def gather(self, value: T) -> list[T]:
        """Every process's value, in their order; all must call this together."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def only_first(self, work: Callable[[], T]) -> T | None:
        """`work()` in the first process, None in the others; all must call this together, and fail together."""
        result, failure = None, None
        if self.first:
            try:
                result = work()
            except Exception as error:
                failure = error
        if self.any(failure is not None):
            raise failure or TrainingError("the first process failed; its message says why.")
        return result

    def from_first(self, make: Callable[[], T]) -> T:
        """The first process's `make()`, in every process; as `only_first` otherwise."""
        received: list[Any] = [self.only_first(make)]
        if self.world > 1:
            dist.broadcast_object_list(received, src=0)
        return received[0]

    def local_folder(self, folder: Path) -> Path:
        """A folder of the first process as every host can read it: itself on a shared disk, else a copy of its files,
        which is gone when the process ends. All must call this together, while nobody writes there.
        """
        files = self.from_first(lambda: _listing(folder))
        missing = files != _listing(folder)
        if not self.any(missing):
            return folder
        copy = Path(tempfile.mkdtemp(prefix="vitlab-")) if missing else folder
        if missing:
            atexit.register(shutil.rmtree, copy, ignore_errors=True)
        for name, size, _ in files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            for start in range(0, max(size, 1), PIECE):
                piece = self.from_first(partial(_piece, folder / name, start))
                if missing:
                    with (copy / name).open("ab") as file:
                        file.write(piece)
        return copy

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process; all must call this together."""
        return self.first_with(flag) is not None

    def first_with(self, flag: bool) -> int | None:
        """The first process whose flag is set, if any; all must call this together."""
        up = self.sum(torch.tensor([float(flag and rank == self.rank) for rank in range(self.world)]))
        return int(up.argmax()) if up.any() else None


def _listing(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of every file: equal on two hosts where they share the disk."""
    files = [(path, path.stat()) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [(path.relative_to(folder).as_posix(), about.st_size, about.st_mtime_ns) for path, about in files]


def _piece(path: Path, start: int) -> bytes:
    with path.open("rb") as file:
        file.seek(start)
        return file.read(PIECE)


def start(device: str = "auto", *, patience: timedelta | None = None) -> Processes:
    """Join the group that torchrun made, or be the only process. `patience`: how long one may wait for the others."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0)) if world > 1 else 0
    chosen = pick_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if world > 1 and not dist.is_initialized():
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)  # where nccl and fsdp work
        try:
            dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=patience)
        except (ValueError, RuntimeError) as error:  # torch's own, for what the environment lacks or who does not come
            raise TrainingError(
                f"WORLD_SIZE={world}, but the processes do not find each other ({error}). Start them with torchrun, or "
                "unset WORLD_SIZE."
            ) from None
    return Processes(rank, world, chosen)


def stop() -> None:
    """Leave the group. What still holds it (DDP) must be gone: the group's threads may wait for the interpreter, which
    the last holder would keep locked while it waits for them.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
