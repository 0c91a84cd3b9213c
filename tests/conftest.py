"""What all tests share: their order, a fixed seed, the command in-process, and two processes that work together."""

from __future__ import annotations

import os

# Some virtual machines report AMX and do not let it be used: torch then dies of an illegal instruction in bfloat16.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
os.environ["VITLAB_LANG"] = "en"  # whatever the locale: tests read what the command says

import faulthandler
import gc
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import distributed

gc.disable()  # until all is imported
torch.set_num_threads(1)  # the networks are small, and the tests run in as many processes as there are cores

SLOW_FILES = (  # the slowest first: pytest-xdist hands out files in this order, so only short ones are left for the end
    "export/test_families.py",
    "browser/test_page.py",
    "browser/test_stories.py",
    "browser/test_static_page.py",
    "training/test_sharding.py",
    "training/test_clip.py",
    "docs/test_guides.py",
    "training/test_verify.py",
    "training/test_resume.py",
    "export/test_speed.py",
    "study/test_reproduce.py",
    "examples/test_notebooks.py",
    "attacks/test_server.py",
    "training/test_ssl.py",
    "training/test_autopick.py",
    "models/test_hierarchy.py",
    "cli/test_explain.py",
    "serve/test_process.py",
    "models/test_registry.py",
    "examples/test_train_cifar10.py",
    "docs/test_look_inside.py",
    "explain/test_planted.py",
    "explain/test_inspect.py",
    "training/test_loop.py",
    "study/test_configs.py",
    "export/test_gate.py",
    "test_public.py",
    "training/test_evaluation.py",
    "checkpoints/test_push.py",
    "browser/test_hover.py",
    "training/test_ladder.py",
    "data_check/test_check.py",
    "learn/test_process.py",
    "search/test_cli.py",
    "cli/test_newcomer.py",
    "cli/test_cli.py",
    "attacks/test_configs.py",
    "explain/test_diff.py",
    "study/test_scaling.py",
    "cli/test_try.py",
    "identities/test_edit.py",
    "study/test_ssl.py",
    "study/test_data_efficiency.py",
    "training/test_bad_input.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: place for place, name in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # the imported libraries are not searched for garbage again
    gc.set_threshold(20_000, 20, 20)  # tracing a network makes a million small objects, of which few are garbage
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def no_pauses():
    """Tests do not judge speed, so timed runs need no rest between them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlab.export.timing.PAUSE", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_flushing():
    """No test cuts the power, so files need not reach the disk: a short training run flushes forty times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def few_heat_maps():
    """A report draws twelve, half of the work of a short training run, though they are all drawn alike: here two."""
    module = import_module("vitlab.training.run_report")
    draw = module._heat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_heat", lambda run, indices, outputs: draw(run, indices[:2], outputs))
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_built_once():
    """A user's process builds the tree of commands once too; it takes longer than many of them run."""
    main = import_module("vitlab.cli.main")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "get_command", cache(main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """Tests share a cache of downloads and features with each other, and with nobody else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported; tests of the hub set their own
        yield


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


class Done(NamedTuple):
    stdout: str
    stderr: str


@pytest.fixture
def command(capsys, monkeypatch):
    """`vitlab ...` by the console script's own function, which spares each call an import of torch."""
    main = import_module("vitlab.cli.main")

    def call(*args: object, code: int = 0) -> Done:
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main.run()
        found = Done(*capsys.readouterr())
        assert (stopped.value.code or 0) == code, found
        return found

    return call


@pytest.fixture
def in_two_processes():
    return _in_two_processes


def _in_two_processes(work: Callable[[int], object]) -> list[int]:
    """work(rank) with what torchrun gives, in forks, which spares them the import of torch; their exit codes.

    As under torchrun they meet at a store of their parent's, which has its port before anyone is told of it.
    """
    import_module("torch._dynamo")  # which DDP imports: here once, and not in each of the forks
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            code = 7
            try:
                faulthandler.dump_traceback_later(200, exit=True, file=sys.__stderr__)  # one that hangs says where
                os.environ |= meeting | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
                work(rank)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    return _wait(children)


def _wait(children: list[int]) -> list[int]:
    """A process that has lost the other would wait for it for long."""
    codes: dict[int, int] = {}
    patience = float("inf")
    while len(codes) < len(children):
        for child in children:
            if child not in codes and (ended := os.waitpid(child, os.WNOHANG))[0]:
                codes[child] = os.waitstatus_to_exitcode(ended[1])
                patience = time.monotonic() + 20 if codes[child] else patience
        if time.monotonic() > patience:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]
