"""Training tests run tiny networks, for which a second thread only waits for the first; and the command, in-process."""

import sys
from typing import NamedTuple

import pytest
import torch

import vitlab.cli.main


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
