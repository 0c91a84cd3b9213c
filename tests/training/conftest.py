"""Training in two processes that share the work, or of which one is killed."""

import os
import signal
from pathlib import Path

import pytest

from vitlab.training.loop import Silent, fit
from vitlab.training.recipe import Recipe


class KillAt(Silent):
    """SIGKILLs its own process when a step is done: nothing is saved, nothing is closed."""

    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def fit_in_two(in_two_processes):
    """`fit` in two processes; their exit codes. What one of them fails of stands beside the run."""

    def call(recipe: Recipe, run: Path, *, resume: bool = False, kill_at: int = 0) -> list[int]:
        def work(rank: int) -> None:
            try:
                fit(recipe, run, resume=resume, show=KillAt(kill_at))
            except BaseException as error:
                run.with_name(f"{run.name}.error{rank}").write_text(str(error), encoding="utf-8")
                raise

        return in_two_processes(work)

    return call
