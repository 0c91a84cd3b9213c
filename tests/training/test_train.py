"""vitlab.train: the function behind `vitlab train`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab
from vitlab.device import pick_device
from vitlab.errors import TrainingError, UsageError
from vitlab.training.loop import Silent, Stopped
from vitlab.training.processes import start
from vitlab.training.recipe import Recipe, setting, with_settings, with_value
from vitlab.training.train import train

SMALL = {"run.epochs": 1, "data.per_class": 8, "model.width": 24, "model.depth": 1, "model.heads": 2}


class StopAt(Silent):
    def step(self, done, numbers):
        if done == 1:
            raise Stopped("here")


def test_settings_runs_and_results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = train("digits", SMALL)
    assert str(first.folder) == "runs/digits" and first.report.is_file()
    assert first.result == json.loads((first.folder / "result.json").read_text(encoding="utf-8"))
    assert vitlab.load(first.model).config.width == 24
    with pytest.raises(Stopped):
        train("digits", [setting(*pair) for pair in SMALL.items()], show=StopAt())
    again = train(resume="runs/digits-2")
    assert again.result["top1"] == first.result["top1"]
    assert again.to_dict()["model"] == "runs/digits-2/best"


def test_a_setting_is_what_is_typed():
    values = {
        "run.epochs": 3,
        "augment.scale": (0.1, 1.0),
        "model.reducer": None,
        "run.dir": 'a "b"',
        "run.compile": True,
        "model.init_from": "runs/a/best",
    }
    typed = with_settings(Recipe(), [setting(*pair) for pair in values.items()])
    recipe = Recipe()
    for key, value in values.items():
        recipe = with_value(recipe, key, value)
    assert typed == recipe
    assert setting("model.init_from", Path("runs/a/best")) == 'model.init_from="runs/a/best"'
    assert [setting("a", value) for value in (np.float64(0.5), np.int64(3))] == ["a=0.5", "a=3"]


def test_changed_is_for_resumed_runs():
    with pytest.raises(UsageError, match="--changed is only valid with --resume"):
        train("digits", changed=True)


def test_a_new_run_and_a_resumed_one_exclude_each_other():
    with pytest.raises(UsageError, match=r"photos starts a new run, but resume=runs/a continues one"):
        train(Path("photos"), resume="runs/a")


def test_one_setting_needs_no_list():
    with pytest.raises(TrainingError, match=r"^run\.epochs=0 must be at least 1"):
        train("digits", "run.epochs=0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim.betas": [2.0, 3.0]}, r"optim\.betas=\(2\.0, 3\.0\) must both be at least 0 and below 1"),
        ({"optim.momentum": -1.0}, r"optim\.momentum=-1\.0 must be 0 or more"),
        ({"run.seed": 10**30}, r"run\.seed=1000.* does not fit into 64 bits"),
        ({"data.max_unreadable": -1}, r"data\.max_unreadable=-1 must be 0 or more"),
        ({"run.dir": "a\0b"}, r"a null byte cannot be part of a path"),
    ],
)
def test_settings_that_torch_or_the_system_would_refuse(values, message):
    with pytest.raises(TrainingError, match=message):
        train("digits", values)


def test_too_little_memory_is_no_bug(tmp_path, monkeypatch):
    def loss(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    monkeypatch.setattr("vitlab.training.objectives.supervised.Supervised.loss", loss)
    with pytest.raises(TrainingError, match=r"memory is too small .tried to allocate 9 GiB.*data\.batch_size"):
        train("digits", {**SMALL, "run.dir": str(tmp_path / "run")})


@pytest.mark.parametrize("device", ["vulkan", "meta", "no such"])
def test_a_device_that_cannot_train_is_refused(device):
    with pytest.raises(UsageError, match="is not known: use auto, cpu"):
        pick_device(device)


def test_processes_that_nobody_started_are_refused(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(TrainingError, match=r"WORLD_SIZE=2, but .* Start them with torchrun"):
        start("cpu")
