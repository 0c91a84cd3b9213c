"""Pictures that cannot be read: counted once each, named, skipped; too many stop a run, which can then go on."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitlab
from vitlab.errors import DataError
from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.recipe import Recipe, to_toml, with_settings
from vitlab.training.runlog import read_log

TINY = ["model.image_size=16", "model.patch_size=8", "model.channels=3", "model.depth=1", "data.batch_size=4"]


def class_folders(root: Path, count: int, broken: int = 0) -> Path:
    """Two classes; the first `broken` of cat are cut off, empty, or no pictures at all."""
    rng = np.random.default_rng(3)
    for shade, name in ((40, "cat"), (160, "dog")):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            pixels = rng.integers(shade, shade + 60, (16, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    for i in range(broken):
        file = root / "cat" / f"{i}.png"
        file.write_bytes((file.read_bytes()[:60], b"", b"no picture")[i % 3])
    return root


@pytest.fixture
def source(tmp_path) -> Path:
    """Three broken in train, two in val, one in test."""
    for split, count, broken in (("train", 8, 3), ("val", 5, 2), ("test", 4, 1)):
        class_folders(tmp_path / "data" / split, count, broken)
    return tmp_path / "data"


BROKEN = ["train/cat/0.png", "train/cat/1.png", "train/cat/2.png", "val/cat/0.png", "val/cat/1.png", "test/cat/0.png"]


def recipe(source: Path, *settings: str) -> Recipe:
    return with_settings(Recipe(), [f"data.source={source}", *TINY, "run.epochs=3", *settings])


def skips(run: Path) -> list[str]:
    return [line["message"] for line in read_log(run) if line["kind"] == "skip"]


def named(messages: list[str], source: Path) -> list[str]:
    return sorted(message.removeprefix(f"{source}/").split(": ")[0] for message in messages)


@pytest.mark.parametrize("workers", [0, 2])
def test_each_is_counted_once_however_many_epochs(workers, source, tmp_path):
    show = Silent()
    limit = f"data.max_unreadable={len(BROKEN)}"  # three epochs meet them 3 * 3 + 3 * 2 + 1 times
    result = fit(recipe(source, limit, f"data.workers={workers}"), tmp_path / "run", show=show)
    assert (
        result["unreadable"]
        == json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))["unreadable"]
        == len(BROKEN)
    )
    assert named(skips(tmp_path / "run"), source) == sorted(BROKEN)
    told = [note.removeprefix("skipped: ") for note in show.notes if note.startswith("skipped: ")]
    assert named(told, source) == sorted(name for name in BROKEN if not name.startswith("test"))
    assert "6 images could not be read" in show.notes[-1] and "log.jsonl" in show.notes[-1]


class StopAt(Silent):
    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("at", [1, 4, 7])
def test_the_count_survives_a_resume(at, source, tmp_path):
    limit = f"data.max_unreadable={len(BROKEN)}"
    fit(recipe(source, limit), tmp_path / "straight")
    with pytest.raises(Stopped):
        fit(recipe(source, limit), tmp_path / "run", show=StopAt(at))
    fit(recipe(source, limit), tmp_path / "run", resume=True)
    states = [
        json.loads((tmp_path / run / "last/state.json").read_text(encoding="utf-8")) for run in ("straight", "run")
    ]
    assert states[0]["skipped"] == states[1]["skipped"] and states[0]["images"] == states[1]["images"]
    assert named(skips(tmp_path / "run"), source) == sorted(BROKEN)
    one, two = (load_file(tmp_path / run / "last/weights.safetensors") for run in ("straight", "run"))
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def test_too_many_stop_the_run_with_a_list_and_it_can_go_on(source, tmp_path, command):
    (tmp_path / "r.toml").write_text(to_toml(recipe(source, "data.max_unreadable=4")), encoding="utf-8")
    run = tmp_path / "run"
    text = command("train", tmp_path / "r.toml", f"run.dir={run}", code=2).stderr
    assert "5 images could not be read, more than data.max_unreadable=4" in text and "Traceback" not in text
    assert f"vitlab train --resume {run} data.max_unreadable=... --changed" in text
    for name in BROKEN[:5]:
        assert f"  {source / name}: " in text
    done = command("train", "--resume", run, "data.max_unreadable=9", "--changed")
    assert "6 images could not be read" in done.stdout
    assert json.loads((run / "result.json").read_text(encoding="utf-8"))["unreadable"] == 6


def test_none_is_allowed(source, tmp_path):
    with pytest.raises(DataError, match=r"data\.max_unreadable=0 allows:\n  .*cat"):
        fit(recipe(source, "data.max_unreadable=0"), tmp_path / "run")


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_a_split_of_which_nothing_can_be_read(split, source, tmp_path, command):
    """Fewer than data.max_unreadable, and yet nothing to learn from, or to judge by."""
    for file in (source / split).glob("*/*.png"):
        file.write_bytes(b"\x89PNG")
    (tmp_path / "r.toml").write_text(to_toml(recipe(source, "data.max_unreadable=99")), encoding="utf-8")
    text = command("train", tmp_path / "r.toml", f"run.dir={tmp_path / 'run'}", code=2).stderr
    assert "images can be read" in text and f"{source}/{split}/dog/0.png" in text and "Traceback" not in text
    if split == "test":  # what was trained is there
        assert vitlab.load(tmp_path / "run/best").labels == ["cat", "dog"]


def test_a_batch_of_which_nothing_can_be_read_teaches_nothing(tmp_path):
    source = class_folders(tmp_path / "data/train", 3, broken=2).parent
    class_folders(source / "val", 2)
    run = tmp_path / "run"
    fit(recipe(source, "data.batch_size=1", "run.epochs=1", "optim.weight_decay=0"), run)
    lines = [line for line in read_log(run) if line["kind"] == "train"]
    empty = [line for line in lines if line["loss"] == 0]
    assert len(lines) == 6 and len(empty) == 2 and all(line["grad_norm"] == 0 for line in empty)
    assert all(line["grad_norm"] > 0 for line in lines if line not in empty)
    assert json.loads((run / "last/state.json").read_text(encoding="utf-8"))["images"] == 4


def test_two_processes_count_together(source, tmp_path, fit_in_two):
    """Each sees its own part; the log of the first, the limit and the result know of all."""
    shared = recipe(source, "data.batch_size=2", f"data.max_unreadable={len(BROKEN)}")
    assert fit_in_two(shared, tmp_path / "run") == [0, 0]
    assert json.loads((tmp_path / "run/result.json").read_text(encoding="utf-8"))["unreadable"] == len(BROKEN)
    assert named(skips(tmp_path / "run"), source) == sorted(BROKEN)


# Evaluation


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", image_size=16, patch_size=8, channels=3, depth=1, classes=2)
    torch.nn.init.normal_(model.head.weight)
    model.labels = ["cat", "dog"]
    return vitlab.save(model, tmp_path_factory.mktemp("model") / "small")


@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_evaluation_names_them_and_counts_the_others(batch_size, source, checkpoint, command):
    found = json.loads(
        command("eval", checkpoint, source, "--split", "val", "--batch-size", batch_size, "--json").stdout
    )
    assert (found["images"], found["unreadable"]) == (8, 2)
    assert named(found["unreadable_pictures"], source) == ["val/cat/0.png", "val/cat/1.png"]
    for name in BROKEN:
        (source / name).unlink()
    without = json.loads(command("eval", checkpoint, source, "--split", "val", "--json").stdout)
    assert without["unreadable"] == 0
    for key in ("top1", "loss", "ece"):
        assert found[key] == pytest.approx(without[key], rel=1e-5)
    assert found["confusion"] == without["confusion"]


def test_evaluation_on_a_screen_names_them_too(source, checkpoint, command):
    text = command("eval", checkpoint, source, "--split", "val", "--knn").stdout
    for name in BROKEN[:5]:  # k-NN reads train as well
        assert f"unreadable         {source / name}: " in text


def test_evaluation_stops_where_too_many_or_all_are_unreadable(source, checkpoint, command):
    text = command("eval", checkpoint, source, "--split", "val", "--max-unreadable", 1, code=2).stderr
    assert "2 images could not be read, more than --max-unreadable=1" in text and "val/cat/1.png" in text
    for file in (source / "val").glob("*/*.png"):
        file.write_bytes(b"")
    for flags in ([], ["--knn"]):
        text = command("eval", checkpoint, source, "--split", "val", *flags, code=2).stderr
        assert "none of the 10 images can be read" in text and "Traceback" not in text
