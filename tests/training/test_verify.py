"""verify-resume: says identical where resuming is exact, and finds planted faults."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vitlab.training import loop, verify
from vitlab.training.optim import Optimisers
from vitlab.training.recipe import Recipe, with_settings
from vitlab.training.verify import Kill, TensorDifference, differences, shortened, verify_resume

SMALL = ["data.batch_size=32", "model.depth=2", "model.dropout=0.1", "augment.mixup=0.5", "optim.ema=0.9"]


def recipe(*settings: str) -> Recipe:
    return with_settings(Recipe(), [*SMALL, *settings])


@pytest.fixture
def forks(monkeypatch, tmp_path):
    """Forks spare the import of torch, and know of what a test has planted."""
    monkeypatch.setattr(verify, "START", "fork")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_resuming_is_exact(name, forks):
    said = []
    verdict = verify_resume(recipe(f"optim.name={name}"), kills=4, steps=14, note=said.append)
    assert verdict.identical and verdict.repeatable is None and verdict.steps == 16
    assert len(verdict.kills) == 4 and verdict.tensors > 100
    for kill in verdict.kills:
        assert 1 <= kill.after < 16 and kill.resumed % verify.SAVE_EVERY == 0
        assert 0 <= kill.after - kill.resumed <= verify.SAVE_EVERY  # a kill may fall between a step and its save
    assert sum("killed after step" in text for text in said) == 4
    assert verdict.folder is None and not list(forks.glob("vitlab-verify-*"))


def test_kills_are_real(forks, monkeypatch):
    """Each process but the last ends by SIGKILL, and leaves the run unfinished."""
    codes, join = [], multiprocessing.Process.join
    context = multiprocessing.get_context("fork")

    class Recorded(context.Process):
        def join(self, timeout=None):
            join(self, timeout)
            codes.append(self.exitcode)

    monkeypatch.setattr(context, "Process", Recorded)
    verify_resume(recipe(), kills=2, steps=8)
    assert codes == [-9, -9, 0]


def test_an_optimiser_that_forgets_is_found(forks, monkeypatch):
    load = Optimisers.load

    def forgetful(self, tensors):
        load(self, {key: torch.zeros_like(value) if "exp_avg" in key else value for key, value in tensors.items()})

    monkeypatch.setattr(Optimisers, "load", forgetful)
    verdict = verify_resume(recipe(), kills=2, steps=12)
    assert not verdict.identical and verdict.repeatable
    names = {difference.name: difference.largest for difference in verdict.differences}
    assert (
        names["optimizer|head.weight|exp_avg"] > 0
        and names["weights|head.weight"] > 0
        and "ema|n_averaged" not in names
    )
    assert verdict.folder is not None
    assert {path.name for path in verdict.folder.iterdir()} == {"straight", "killed", "again"}


def test_data_that_start_again_are_found(forks, monkeypatch):
    batches = loop.batches
    monkeypatch.setattr(loop, "batches", lambda steps, first, workers: batches(steps, 0, workers))
    verdict = verify_resume(recipe(), kills=1, steps=12)
    assert not verdict.identical and verdict.repeatable and verdict.kills[0].resumed > 0


def test_a_machine_that_does_not_repeat_itself_is_told_from_a_resume_that_fails(forks, monkeypatch):
    update = loop.update

    def noisy(session, step):
        with torch.no_grad():
            session.job.model.head.bias[0] += int.from_bytes(os.urandom(2), "big") * 1e-9
        return update(session, step)

    monkeypatch.setattr(loop, "update", noisy)
    verdict = verify_resume(recipe(), kills=1, steps=8)
    assert not verdict.identical and verdict.repeatable is False


def test_a_run_that_cannot_be_resumed_is_a_failure(forks, monkeypatch):
    def broken(self, tensors):
        raise ValueError("planted")

    monkeypatch.setattr(Optimisers, "load", broken)
    verdict = verify_resume(recipe(), kills=1, steps=8)
    assert not verdict.identical and "error" in verdict.broke and verdict.folder is not None


def test_bits_are_compared():
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor(1.0)
    assert not differences({"a": nan, "b": one}, {"a": nan.clone(), "b": one.clone()})
    assert differences({"a": torch.zeros(2)}, {"a": torch.tensor([0.0, -0.0])}) == [TensorDifference("a", 0.0)]
    assert differences({"a": one}, {"a": one + 0.5}) == [TensorDifference("a", 0.5)]
    assert differences({"a": one, "b": one}, {"a": one}) == [TensorDifference("b", None)]
    assert differences({"a": one}, {"a": one.double()}) == [TensorDifference("a", None)]


def test_the_run_is_cut_down_and_otherwise_the_recipes():
    full = recipe("data.per_class=90", "optim.accumulate=2", "optim.warmup_epochs=1", "track.tensorboard=true")
    short = shortened(full, 12)
    assert short.data.per_class == 90 * (32 * 2 * 4) // 900
    assert (short.model, short.augment, short.optim) == (full.model, full.augment, full.optim)
    assert not short.track.tensorboard and short.run.eval_every > short.run.epochs
    per_epoch = short.data.per_class * 10 // 64
    assert 12 < short.run.epochs * per_epoch <= 12 + per_epoch
    few = recipe("data.per_class=2", "run.epochs=3")
    assert shortened(few, 12).data == few.data  # there is nothing to leave out


def test_what_does_not_fit_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="12 kills do not fit into 12 steps"):
        verify_resume(recipe(), kills=12, steps=12)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun"):
        verify_resume(recipe())


def test_on_the_command_line(tmp_path):
    """In new processes, as a user runs it."""
    vitlab = Path(sys.executable).parent / "vitlab"
    command = [
        vitlab,
        "verify-resume",
        "digits",
        "model.depth=1",
        "data.workers=1",
        "--kills",
        "1",
        "--steps",
        "8",
        "--json",
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=env, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["identical"] and found["steps"] == 8 and len(found["kills"]) == 1
    assert "leaked" not in done.stderr
    assert "killed after step" in done.stderr and not list(tmp_path.glob("vitlab-verify-*"))


@pytest.mark.parametrize("repeatable", [True, False])
def test_what_is_said_of_a_difference(repeatable, monkeypatch, capsys, tmp_path):
    from vitlab.cli.train import verify_resume as command

    found = [TensorDifference("weights|head.bias", 0.125), TensorDifference("ema|head.bias", None)]
    wrong = verify.ResumeReport(8, [Kill(6, 4)], 9, found, "", repeatable, 3.0, tmp_path)
    monkeypatch.setattr(verify, "verify_resume", lambda *a, **k: wrong)
    monkeypatch.setenv("PYTHONWARNINGS", "")  # which the command adds to
    with pytest.raises(SystemExit) as ended:
        command("digits", [], 1, 8, False)
    text = capsys.readouterr().out
    assert ended.value.code == 1
    assert (
        "2 of 9 tensors" in text
        and "weights|head.bias by up to 0.125" in text
        and str(tmp_path) in text.replace("\n", "")
    )
    assert ("differ too" in text) == (not repeatable)
