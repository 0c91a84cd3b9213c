"""Training tests run tiny networks, for which a second thread only waits for the first; and the command, in-process."""

import os
import signal
import socket
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import vitlab.cli.main
from vitlab.training.loop import Silent, fit
from vitlab.training.recipe import Recipe


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Done(NamedTuple):
    stdout: str
    stderr: str


@pytest.fixture
def command(capsys, monkeypatch):
    """`vitlab ...` by the console script's own function, which spares each call an import of torch."""

    def call(*args: object, code: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        found = Done(*capsys.readouterr())
        assert (stopped.value.code or 0) == code, found
        return found

    return call


class KillAt(Silent):
    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def _in_two_processes(recipe: Recipe, run: Path, *, resume: bool = False, kill_at: int = 0) -> list[int]:
    """`fit` with the environment that torchrun gives, in forks, which spares them the import of torch; exit codes."""
    import_module("torch._dynamo")  # which DDP imports: here once, and not in each of the forks
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 7
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
                os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
                fit(recipe, run, resume=resume, show=KillAt(kill_at))
                code = 0
            except BaseException as error:
                traceback.print_exc()
                run.with_name(f"{run.name}.error{rank}").write_text(str(error))
            finally:
                os._exit(code)
        children.append(child)
    first = os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1])
    if first < 0:  # without the first the second would wait for long
        os.kill(children[1], signal.SIGKILL)
    return [first, os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1])]


@pytest.fixture
def in_two_processes():
    return _in_two_processes
