"""What the tests of search share: the folder of pictures, and the command, in-process."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
import vitlab.cli.main


@pytest.fixture(autouse=True)
def one_thread():
    """So small a model only waits for a second one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def photos(tmp_path) -> Path:
    """23 pictures in three folders, no two alike."""
    for number in range(23):
        noise(tmp_path / "photos" / ("a", "b/c", "海边 d")[number % 3] / f"{number:02d}.png", number)
    return tmp_path / "photos"


@pytest.fixture
def draw():
    return noise


def noise(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (11, 17, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=3, classes=4)
    return vitlab.save(model, tmp_path_factory.mktemp("model") / "small")


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


def _in_two_processes(args: list[object]) -> list[int]:
    """The command with the environment that torchrun gives, in forks, which spares them the import of torch."""
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
                vitlab.cli.main.app(list(map(str, args)), standalone_mode=False)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.fixture(name="in_two_processes")
def two_processes():
    return _in_two_processes
