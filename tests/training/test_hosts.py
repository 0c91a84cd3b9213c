"""Hosts that share no disk: only the first has the run folder, and what the others need of it is sent to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitlab.errors import UsageError
from vitlab.training import processes
from vitlab.training.loop import Silent
from vitlab.training.train import train

SETTINGS = [
    "model.width=16",
    "model.depth=1",
    "model.heads=2",
    "data.per_class=16",
    "data.batch_size=32",
    "run.device=cpu",
]
SETTINGS += ["run.epochs=3", "run.save_every=1", "run.dir=run", "optim.name=adamw", "optim.warmup_epochs=0"]


class Dies(Silent):
    """The whole host, in the middle of an epoch."""

    def step(self, done: int, numbers: dict[str, float]) -> None:
        if done == 4:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_is_resumed_from_the_first_host_alone(tmp_path, in_two_processes):
    """A process's working folder is its host's disk. The second host comes back with an empty one."""

    def on_hosts(names: tuple[str, str], show: Silent | None = None, *, resume: bool = False) -> list[int]:
        def work(rank: int) -> None:
            (tmp_path / names[rank]).mkdir(exist_ok=True)
            os.chdir(tmp_path / names[rank])
            train("digits", SETTINGS, rejoin=resume, show=show)

        return in_two_processes(work)

    assert on_hosts(("one", "one")) == [0, 0]
    assert on_hosts(("first", "second"), Dies()) == [-signal.SIGKILL] * 2
    assert not (tmp_path / "second" / "run").exists()
    assert on_hosts(("first", "empty"), resume=True) == [0, 0]
    assert not (tmp_path / "empty" / "run").exists()
    unbroken, resumed = (
        load_file(tmp_path / host / "run" / "last" / "weights.safetensors") for host in ("one", "first")
    )
    assert unbroken.keys() == resumed.keys() and len(unbroken) > 10
    for key, value in unbroken.items():
        assert torch.equal(resumed[key], value), key
    assert (tmp_path / "first" / "run" / "result.json").is_file()


def test_files_are_sent_only_to_hosts_that_lack_them(tmp_path, in_two_processes, monkeypatch):
    monkeypatch.setattr(processes, "PIECE", 10)  # bytes: files go in several pieces
    files = {"a.bin": bytes(range(25)), "deeper/b.bin": b"", "deeper/c.bin": bytes(10)}
    for host in ("first", "stale"):
        for name, content in files.items():
            path = tmp_path / host / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if host == "first" else b"of another run")

    def work(rank: int) -> None:
        who = processes.start("cpu")
        assert who.local_folder(tmp_path / "first") == tmp_path / "first"  # a shared disk: nothing is copied
        own = tmp_path / ("first", "stale")[rank]
        folder: Path = who.local_folder(own)
        assert (folder == own) == (rank == 0)
        assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == files
        processes.stop()

    assert in_two_processes(work) == [0, 0]


def test_rejoin_needs_a_place_to_look_at():
    with pytest.raises(UsageError, match=r"run\.dir=runs/mine"):
        train("digits", rejoin=True)
