"""A run that is killed at any step and resumed ends with the weights of one that was never stopped, to the bit."""

import json
import os
import signal
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitlab.errors import CheckpointError
from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.recipe import Recipe, read_recipe, with_settings
from vitlab.training.runlog import read_log

EVERYTHING = [
    "data.source=digits",
    "data.batch_size=32",
    "data.per_class=16",
    "model.depth=2",
    "model.dropout=0.1",
    "model.stochastic_depth=0.1",
    "augment.crop=padded",
    "augment.padding=1",
    "augment.mixup=0.5",
    "augment.cutmix=0.5",
    "augment.erasing=0.3",
    "augment.drop_patches=0.5",
    "augment.drop_patches_until=0.5",
    "optim.ema=0.9",
    "optim.clip=1.0",
    "run.epochs=4",
    "run.eval_every=2",
    "run.save_every=3",
    "run.amp=bf16",
]
TOTAL = 4 * (160 // 32)
WITHOUT_LABELS = [
    *("data.source=digits", "data.batch_size=32", "data.per_class=16"),
    *("model.width=32", "model.depth=2", "run.epochs=4", "run.eval_every=2", "run.save_every=3"),
]
METHODS = {
    "supervised": EVERYTHING,
    "distill": [*EVERYTHING, "objective.name=distill", "objective.teacher=bundled:digits", "model.distill_token=true"],
    "mae": [*WITHOUT_LABELS, "objective.name=mae", "model.name=mae_digits", "augment.crop=padded", "augment.padding=1"],
    "dino": [
        *(*WITHOUT_LABELS, "objective.name=dino", "model.name=dino_digits", "objective.local_views=2"),
        *("objective.local_size=4", "objective.final_weight_decay=0.2", "model.stochastic_depth=0.1"),
    ],
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Callable[..., tuple[Path, dict]]:
    """A run that is never stopped, and its result; without workers, which change nothing."""

    @cache
    def once(*settings: str) -> tuple[Path, dict]:
        run = tmp_path_factory.mktemp("straight") / "run"
        return run, fit(with_settings(Recipe(), list(settings)), run)

    return once


def weights(run: Path, which: str = "last") -> dict[str, torch.Tensor]:
    return {**load_file(run / which / "weights.safetensors"), **_optional(run / which / "ema.safetensors")}


def _optional(path: Path) -> dict[str, torch.Tensor]:
    return {f"ema/{k}": v for k, v in load_file(path).items()} if path.exists() else {}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        assert torch.equal(value, b[key]), key


class KillAt(Silent):
    """SIGKILLs its own process when a step is done: nothing is saved, nothing is closed."""

    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(recipe: Recipe, run: Path, step: int, resume: bool) -> None:
    """In a forked child, which spares it the import of torch."""
    child = os.fork()
    if child == 0:
        try:
            fit(recipe, run, resume=resume, show=KillAt(step))
        finally:
            os._exit(7)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize(
    ("method", "workers"), [*(("supervised", n) for n in (0, 2)), ("distill", 0), ("mae", 0), ("dino", 2)]
)
def test_killed_at_five_steps_and_resumed_is_identical_to_the_bit(method, workers, tmp_path, straight):
    recipe = with_settings(Recipe(), [*METHODS[method], f"data.workers={workers}"])
    never_stopped, expected = straight(*METHODS[method], "data.workers=0")
    killed = tmp_path / "killed"
    for number, step in enumerate((2, 5, 7, 11, 18)):  # before the first save, between saves, late
        run_and_die(recipe, killed, step, resume=number > 0)
    result = fit(recipe, killed, resume=True)
    same(weights(never_stopped), weights(killed))
    same(weights(never_stopped, "best"), weights(killed, "best"))
    numbers = ("top1", "loss", "val_top1")
    assert [result[k] for k in numbers] == [expected[k] for k in numbers]
    logs = [read_log(run) for run in (never_stopped, killed)]
    losses = [[(e["step"], e["loss"]) for e in log if e["kind"] == "train"] for log in logs]
    assert losses[0] == losses[1] and len(losses[0]) == TOTAL


def test_the_check_can_fail(tmp_path):
    """Another seed gives other weights."""
    small = [*EVERYTHING, "run.epochs=1"]
    for seed in (0, 1):
        fit(with_settings(Recipe(), [*small, f"run.seed={seed}"]), tmp_path / str(seed))
    with pytest.raises(AssertionError):
        same(weights(tmp_path / "0"), weights(tmp_path / "1"))


def test_resuming_a_finished_run_says_so_and_changes_nothing(tmp_path):
    recipe = with_settings(Recipe(), [*EVERYTHING, "run.epochs=1"])
    result = fit(recipe, tmp_path / "run")
    before = weights(tmp_path / "run")
    show = Silent()
    saved = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert fit(recipe, tmp_path / "run", resume=True, show=show) == saved
    assert "finished" in show.notes[0]
    same(before, weights(tmp_path / "run"))
    for key in ("top1", "loss", "seconds", "images_per_second", "epochs", "params", "seed"):
        assert key in result


def test_a_run_is_not_written_over(tmp_path):
    recipe = with_settings(Recipe(), [*EVERYTHING, "run.epochs=1"])
    fit(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match="--resume"):
        fit(recipe, tmp_path / "run")
    with pytest.raises(ValueError, match="no run to resume"):
        fit(recipe, tmp_path / "nothing", resume=True)


class StopAt(Silent):
    def __init__(self, step: int, number: int):
        super().__init__()
        self.at, self.number = step, number

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_ctrl_c_save_first(number, tmp_path, straight):
    settings = [*EVERYTHING, "run.epochs=2", "run.save_every=100"]
    recipe, (never_stopped, _) = with_settings(Recipe(), settings), straight(*settings)
    with pytest.raises(Stopped, match="--resume"):
        fit(recipe, tmp_path / "run", show=StopAt(4, number))
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text(encoding="utf-8"))["step"] == 4
    fit(recipe, tmp_path / "run", resume=True)
    same(weights(never_stopped), weights(tmp_path / "run"))


def test_the_loss_scale_of_fp16_grows_as_if_nothing_had_happened(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "GradScaler", partial(torch.GradScaler, init_scale=8.0, growth_interval=3))
    small = [*EVERYTHING, "run.epochs=2", "run.save_every=100", "run.amp=fp16"]
    fit(with_settings(Recipe(), small), tmp_path / "straight")
    with pytest.raises(Stopped):
        fit(with_settings(Recipe(), small), tmp_path / "run", show=StopAt(5, signal.SIGTERM))
    fit(with_settings(Recipe(), small), tmp_path / "run", resume=True)
    states = [
        json.loads((tmp_path / run / "last" / "state.json").read_text(encoding="utf-8")) for run in ("straight", "run")
    ]
    assert states[0]["scaler"] == 64.0 == states[1]["scaler"]  # after 3, 6 and 9 of 10 steps
    same(weights(tmp_path / "straight"), weights(tmp_path / "run"))


class StopAllAt(StopAt):
    """The signal reaches the workers too, as from a terminal, systemd or a cluster."""

    def step(self, done, numbers):
        if done == self.at:
            if os.fork() == 0:  # not from the run itself, which torch's workers would take for an order
                os.killpg(0, self.number)
                os._exit(0)
            time.sleep(0.5)  # a worker that ends by it is noticed now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_saves_first_too(number, tmp_path):
    recipe = with_settings(Recipe(), [*EVERYTHING, "run.epochs=2", "run.save_every=100", "data.workers=2"])
    child = os.fork()
    if child == 0:
        code = 7
        try:
            os.setsid()
            fit(recipe, tmp_path / "run", show=StopAllAt(4, number))
        except Stopped:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text(encoding="utf-8"))["step"] == 4


def test_a_changed_recipe_is_refused_with_what_differs(tmp_path):
    recipe = with_settings(Recipe(), [*EVERYTHING, "run.epochs=2"])
    with pytest.raises(Stopped):
        fit(recipe, tmp_path / "run", show=StopAt(2, signal.SIGTERM))
    other = with_settings(recipe, ["optim.lr=0.5"])
    with pytest.raises(ValueError, match=r"optim\.lr: 0\.001 -> 0\.5"):
        fit(other, tmp_path / "run", resume=True)
    fit(with_settings(recipe, ["run.epochs=3"]), tmp_path / "run", resume=True, changed=True)
    assert read_recipe(tmp_path / "run" / "recipe.toml").run.epochs == 3


def test_a_full_disk_leaves_an_intact_last(tmp_path, monkeypatch):
    from vitlab.training import state

    recipe = with_settings(Recipe(), [*EVERYTHING, "run.epochs=1", "run.save_every=2"])
    fit(recipe, tmp_path / "straight")
    real, calls = state.save_file, []

    def full(tensors, path, **kw):
        calls.append(path)
        if len(calls) > 3:  # the second save
            raise OSError(28, "No space left on device")
        real(tensors, path, **kw)

    with monkeypatch.context() as patch:
        patch.setattr(state, "save_file", full)
        with pytest.raises(CheckpointError, match=r"No space left.*last is untouched.*--resume"):
            fit(recipe, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "last" / "state.json").read_text(encoding="utf-8"))["step"] == 2
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["last", "log.jsonl", "recipe.toml", "run.lock"]
    fit(recipe, tmp_path / "run", resume=True)
    same(weights(tmp_path / "straight"), weights(tmp_path / "run"))


def test_a_kill_between_the_two_renames_is_mended(tmp_path):
    from vitlab.training.state import recover

    (tmp_path / ".last.old").mkdir()
    (tmp_path / ".last.old" / "state.json").write_text("{}", encoding="utf-8")
    recover(tmp_path / "last")
    assert (tmp_path / "last" / "state.json").exists() and not (tmp_path / ".last.old").exists()


def test_the_command_line_resumes(tmp_path, command):
    settings = ["data.per_class=8", "run.epochs=2", f"run.dir={tmp_path / 'run'}"]
    assert "report.html" in command("train", "digits", *settings).stdout
    assert "finished" in command("train", "--resume", tmp_path / "run").stdout
