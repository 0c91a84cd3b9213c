"""Two processes, one run folder: one of them writes, the other is told who does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from vitlab.training import run_lock
from vitlab.training.loop import Silent, fit
from vitlab.training.recipe import Recipe, with_settings
from vitlab.training.run_lock import RunLockedError, hold, lock_holder

HOLD = """
import os, sys, time
from pathlib import Path
from vitlab.training.run_lock import hold
with hold(Path(sys.argv[1])):
    Path(sys.argv[1], "recipe.toml").touch()
    if len(sys.argv) > 2 and os.fork() == 0:  # as a data worker, which outlives its parent
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path / "run"; it is killed in the end."""
    children = []

    def start(*more: str) -> subprocess.Popen:
        arguments = [sys.executable, "-c", HOLD, str(tmp_path / "run"), *more]
        child = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True, encoding="utf-8")
        children.append(child)
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        return child

    yield start
    for child in children:
        with suppress(ProcessLookupError):  # the test has killed it
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()


def test_the_second_writer_is_told_who_the_first_is(tmp_path, holder, command):
    child = holder()
    message = command("train", "digits", f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert f"is being written by process {child.pid} on {socket.gethostname()}, since 20" in message
    assert "run.dir=" in message and message.count("\n") == 1
    message = command("train", "--resume", tmp_path / "run", code=2).stderr
    assert f"is being written by process {child.pid}" in message
    assert (tmp_path / "run" / "recipe.toml").read_text(encoding="utf-8") == ""
    assert str(child.pid) in command("doctor", tmp_path / "run").stdout


@pytest.mark.parametrize("worker", [(), ("with a worker",)])
def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, holder, worker):
    child = holder(*worker)
    holding = lock_holder(tmp_path / "run")
    assert holding is not None and holding.process == child.pid
    child.kill()
    child.wait()
    deadline = time.monotonic() + 60
    while lock_holder(tmp_path / "run") is not None:  # a worker that is just being forked has not closed its copy yet
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with hold(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / "run.lock").read_text(encoding="utf-8"))["process"] == os.getpid()


def test_a_start_that_fails_leaves_nothing_behind(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command("train", "no-such-data", code=2)
    (tmp_path / "empty").mkdir()
    command("train", "empty", code=2)
    command("train", "empty", "run.dir=a/b/c", code=2)
    command("train", "--resume", "nowhere", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_without_locks_it_is_said_once_and_the_run_goes_on(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    notes: list[str] = []
    with hold(tmp_path / "run", notes.append), hold(tmp_path / "run", notes.append):
        pass
    assert len(notes) == 1 and "has no locks" in notes[0]


def test_a_folder_that_was_replaced_is_not_written(tmp_path):
    recipe = with_settings(
        Recipe(), ["data.per_class=8", "data.batch_size=16", "model.depth=1", "run.epochs=1", "run.save_every=2"]
    )

    class Replace(Silent):
        def step(self, done, numbers):
            if done == 1:
                (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises((RunLockedError, OSError)):
        fit(recipe, tmp_path / "run", show=Replace())
    assert not (tmp_path / "run").exists()


def test_of_many_at_once_exactly_one_gets_the_lock(tmp_path):
    """Forks that try together; the winner stays until all have tried."""
    (tried, report), (released, release) = os.pipe(), os.pipe()
    children = []
    for _ in range(8):
        child = os.fork()
        if child == 0:
            code = 3
            try:
                os.close(release)
                with hold(tmp_path / "run"):
                    os.write(report, b"1")
                    os.read(released, 1)  # until the parent closes its end
                code = 0
            except RunLockedError as error:
                code = 1 if "is being written by" in str(error) else 2
                os.write(report, b"0")
            finally:
                os._exit(code)
        children.append(child)
    for _ in children:
        os.read(tried, 1)
    os.close(release)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    for end in (tried, report, released):
        os.close(end)
    assert codes == [0, *[1] * 7]
