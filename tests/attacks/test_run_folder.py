"""Damaged run folders: a resumed run ends with the weights of an unbroken one, or says in words why it cannot."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitlab.errors import CheckpointError
from vitlab.training.doctor import check_files
from vitlab.training.loop import Silent, fit
from vitlab.training.recipe import Recipe, with_settings
from vitlab.training.state import load_last

RECIPE = with_settings(
    Recipe(),
    [
        *("data.source=digits", "data.batch_size=32", "data.per_class=16", "model.width=16", "model.heads=2"),
        *("model.depth=1", "optim.ema=0.9", "optim.lr=0.02", "run.epochs=2", "run.save_every=2", "run.eval_every=2"),
    ],
)
FILES = ("weights.safetensors", "optimizer.safetensors", "ema.safetensors", "model.json", "state.json")


class StopAt(Silent):
    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            raise InterruptedError


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """An unbroken run, and one that was stopped after saves at steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    fit(RECIPE, folder / "unbroken")
    with pytest.raises(InterruptedError):
        fit(RECIPE, folder / "stopped", show=StopAt(5))
    return folder


@pytest.fixture
def stopped(runs, tmp_path) -> Path:
    shutil.copytree(runs / "stopped", tmp_path / "run")
    return tmp_path / "run"


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 1
    path.write_bytes(data)


def zero_from_the_middle(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


DAMAGES = {
    "truncate": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "delete": lambda path: path.unlink(),
    "flip one bit": flip_a_bit,
    "zeros from the middle": zero_from_the_middle,
}
EDITS = {
    "step=-5": {"step": -5},
    "step=10**9": {"step": 10**9},
    "step=2": {"step": 2},
    "step=true": {"step": True},
    "step='4'": {"step": "4"},
    "step=null": {"step": None},
    "best_epoch=7": {"best_epoch": 7},
    "finished=true": {"finished": True},
    "skipped=[]": {"skipped": []},
    "images=NaN": {"images": float("nan")},
    "seconds=-1": {"seconds": -1},
    "unknown=1": {"unknown": 1},
}


def edit(path: Path, values: dict, *, unseal: bool = False) -> None:
    state = {**json.loads(path.read_text(encoding="utf-8")), **values}
    if unseal:
        del state["seal"], state["digests"]
    path.write_text(json.dumps(state), encoding="utf-8")


def check_resumed(runs: Path, run: Path) -> list[str]:
    """Resume, and compare with the unbroken run: all tensors to the bit, and what result.json says. Its notes."""
    show = Silent()
    result = fit(RECIPE, run, resume=True, show=show)
    for name in ("weights", "optimizer", "ema"):
        expected = load_file(runs / "unbroken" / "last" / f"{name}.safetensors")
        found = load_file(run / "last" / f"{name}.safetensors")
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    expected = json.loads((runs / "unbroken" / "result.json").read_text(encoding="utf-8"))
    timings = {"seconds", "images_per_second"}
    assert {k: v for k, v in result.items() if k not in timings} == {
        k: v for k, v in expected.items() if k not in timings
    }
    return show.notes


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_save_falls_back_to_the_one_before(stopped, name, damage):
    before = load_file(stopped / "last-1" / "weights.safetensors")
    damage(stopped / "last" / name)
    notes: list[str] = []
    saved = load_last(stopped, with_ema=True, note=notes.append)
    assert saved is not None and saved.progress.step == 2
    assert all(torch.equal(saved.weights[key], before[key]) for key in before)
    assert len(notes) == 1 and name in notes[0] and "Resuming from last-1, saved at step 2" in notes[0]
    assert "last-damaged" in notes[0] and "\n" not in notes[0]
    assert (stopped / "last-damaged").is_dir()


@pytest.mark.parametrize("values", EDITS.values(), ids=EDITS)
def test_an_edited_state_falls_back_to_the_one_before(stopped, values):
    edit(stopped / "last" / "state.json", values)
    notes: list[str] = []
    saved = load_last(stopped, note=notes.append)
    assert saved is not None and saved.progress.step == 2 and "state.json" in notes[0]


UNSEALED = {name: values for name, values in EDITS.items() if name not in ("step=2", "step=10**9", "best_epoch=7")}


@pytest.mark.parametrize("values", [v for v in UNSEALED.values() if v != {"finished": True}])
def test_values_of_a_save_without_digests_are_checked(stopped, values):
    """As of an earlier version: types and ranges are all there is to go by."""
    edit(stopped / "last" / "state.json", values, unseal=True)
    shutil.rmtree(stopped / "last-1")
    with pytest.raises(CheckpointError, match=r"state\.json.*(expected|not known|JSON)"):
        load_last(stopped)


def test_a_save_without_digests_still_loads(stopped):
    edit(stopped / "last" / "state.json", {}, unseal=True)
    saved = load_last(stopped, with_ema=True)
    assert saved is not None and saved.progress.step == 4


def test_a_step_beyond_the_recipe_is_refused(stopped):
    edit(stopped / "last" / "state.json", {"step": 10**9}, unseal=True)
    with pytest.raises(ValueError, match="was saved at step 1,000,000,000, but the recipe ends at 10"):
        fit(RECIPE, stopped, resume=True)


def test_a_save_of_an_older_version_has_defaults_for_newer_fields(stopped):
    path = stopped / "last" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    for name in ("seal", "digests", "run_digests", "scaler_steps", "best_rank"):
        del state[name]
    path.write_text(json.dumps(state), encoding="utf-8")
    saved = load_last(stopped)
    assert saved is not None and saved.progress.step == 4 and saved.progress.scaler_steps == 0


@pytest.mark.parametrize("change", [{"format": 99}, {"config": None}])
def test_a_save_of_a_newer_version_is_not_thrown_away(stopped, change):
    """It is refused, and stays where it is: only damage falls back."""
    edit(stopped / "last" / "state.json", {}, unseal=True)
    path = stopped / "last" / "model.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**card, **change, "seal": None, "digests": None}), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"model\.json"):
        load_last(stopped)
    assert (stopped / "last" / "weights.safetensors").is_file() and not (stopped / "last-damaged").exists()


def test_folders_of_the_user_stay(stopped):
    for name in ("last-500", "best-1", "best-2024"):
        (stopped / name).mkdir()
    fit(with_settings(RECIPE, ["run.keep=0"]), stopped, resume=True, changed=True)
    left = {path.name for path in stopped.iterdir()}
    assert {"last-500", "best-1", "best-2024", "last"} <= left and "last-1" not in left


def test_a_best_model_written_after_the_save_is_decided_anew(runs, stopped):
    """As after a kill between the two: best/ is of an epoch that comes again."""
    shutil.copytree(runs / "unbroken" / "best", stopped / "best", dirs_exist_ok=True)
    check_resumed(runs, stopped)


def test_a_recipe_edited_while_the_run_trains_is_not_taken_for_its_own(tmp_path):
    class Edit(Silent):
        def step(self, done, numbers):
            if done == 3:
                recipe = tmp_path / "run" / "recipe.toml"
                recipe.write_text(
                    recipe.read_text(encoding="utf-8").replace("\nlr = 0.02\n", "\nlr = 0.03\n"), encoding="utf-8"
                )
            if done == 7:
                raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(RECIPE, tmp_path / "run", show=Edit())
    with pytest.raises(CheckpointError, match="was changed since step 6 was saved"):
        fit(with_settings(RECIPE, ["optim.lr=0.03"]), tmp_path / "run", resume=True)


def test_a_changed_recipe_survives_a_kill_before_the_next_save(stopped):
    changed = with_settings(RECIPE, ["optim.lr=0.01"])
    with pytest.raises(InterruptedError):
        fit(changed, stopped, resume=True, changed=True, show=StopAt(5))
    fit(changed, stopped, resume=True)


def test_other_images_than_before_are_refused(stopped):
    """E.g. what model.init_from names was replaced, or is read at another size by this version."""
    edit(stopped / "last" / "state.json", {}, unseal=True)
    path = stopped / "last" / "model.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    card["preprocess"]["mean"] = [0.25]
    path.write_text(json.dumps({**card, "seal": None, "digests": None}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"prepared with \{'mean': \[0.25\]\}, and now it would be .*--changed"):
        fit(RECIPE, stopped, resume=True)


def test_an_average_that_the_recipe_asks_for_must_be_there(stopped):
    """Without digests nothing lists it; the recipe does."""
    edit(stopped / "last" / "state.json", {}, unseal=True)
    (stopped / "last" / "ema.safetensors").unlink()
    notes: list[str] = []
    saved = load_last(stopped, with_ema=True, note=notes.append)
    assert saved is not None and saved.progress.step == 2 and "ema.safetensors" in notes[0]


@pytest.mark.parametrize("damage", [flip_a_bit, shutil.rmtree], ids=["flip one bit", "delete the folder"])
def test_a_run_resumed_from_the_save_before_ends_as_the_unbroken_one(runs, stopped, damage):
    damage(stopped / "last" if damage is shutil.rmtree else stopped / "last" / "optimizer.safetensors")
    assert "Resuming from last-1" in check_resumed(runs, stopped)[0]


def test_with_no_save_left_it_is_refused_in_words(stopped, command):
    for folder in ("last", "last-1"):
        flip_a_bit(stopped / folder / "weights.safetensors")
    message = command("train", "--resume", stopped, code=2).stderr
    assert "no save of this run is whole" in message and "run.dir=" in message and message.count("\n") == 1
    assert (stopped / "last").is_dir() and (stopped / "last-1").is_dir()


def test_a_finished_run_whose_last_save_is_damaged_ends_again_with_the_same(runs, tmp_path):
    shutil.copytree(runs / "unbroken", tmp_path / "run")
    flip_a_bit(tmp_path / "run" / "last" / "state.json")
    check_resumed(runs, tmp_path / "run")


def test_a_result_that_was_edited_is_written_again(runs, tmp_path):
    shutil.copytree(runs / "unbroken", tmp_path / "run")
    result = tmp_path / "run" / "result.json"
    result.write_text(result.read_text(encoding="utf-8").replace('"top1": 0.', '"top1": 0.9'), encoding="utf-8")
    assert "result.json" in check_resumed(runs, tmp_path / "run")[0]


def test_an_edited_recipe_is_refused_unless_that_is_said(stopped, command):
    recipe = stopped / "recipe.toml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace("\nlr = 0.02\n", "\nlr = 0.03\n"), encoding="utf-8")
    message = command("train", "--resume", stopped, code=2).stderr
    assert "recipe.toml: was changed since step 4 was saved" in message and "--changed" in message
    command("train", "--resume", stopped, "--changed")


def test_a_damaged_best_model_is_refused(runs, tmp_path):
    shutil.copytree(runs / "unbroken", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "last")
    flip_a_bit(tmp_path / "run" / "best" / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"best/weights\.safetensors.*damaged.*epoch 2.*run\.dir="):
        fit(RECIPE, tmp_path / "run", resume=True)


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_as_many_saves_are_kept_as_the_recipe_says(tmp_path, keep):
    fit(with_settings(RECIPE, [f"run.keep={keep}"]), tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run").glob("last*"))
    assert kept == ["last", *(f"last-{n}" for n in range(1, keep + 1))]
    steps = [json.loads((tmp_path / "run" / name / "state.json").read_text(encoding="utf-8"))["step"] for name in kept]
    assert steps == [10, 10, 8, 6][: keep + 1]  # the last two differ in `finished`


def test_doctor_tells_a_whole_run_from_a_damaged_one(stopped, command):
    whole = [(True, "last: whole, saved at step 4"), (True, "last-1: whole, saved at step 2")]
    assert check_files(stopped) == [*whole, (True, "recipe.toml: whole")]
    flip_a_bit(stopped / "last" / "ema.safetensors")
    rows = command("doctor", stopped, code=1).stdout
    assert "BAD last: damaged" in rows and "ema.safetensors" in rows and "last-1: whole" in rows
    assert (stopped / "last").is_dir()  # it only looks


@pytest.mark.skipif(os.name != "posix", reason="limits on a file's size are POSIX")
def test_a_full_disk_ends_with_a_message(stopped, runs):
    """A limit on the size of files stands for the disk: writing fails in the middle of a save."""
    import resource

    child = os.fork()
    if child == 0:
        code = 1
        try:
            size = (stopped / "last" / "optimizer.safetensors").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, size - 100))
            fit(RECIPE, stopped, resume=True)
        except CheckpointError as error:
            right = "cannot be saved" in str(error) and "untouched" in str(error) and "--resume" in str(error)
            code = 0 if right else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    check_resumed(runs, stopped)
