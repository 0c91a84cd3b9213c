"""Objectives that learn masks and boxes: they learn, start from an encoder, stop and go on to the bit, and say no."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitlab
from vitlab.checkpoints import native
from vitlab.errors import TrainingError, VitlabError
from vitlab.models.eomt import EoMT
from vitlab.models.set_loss import LossWeights
from vitlab.models.task import RegionTask, task_from_dict
from vitlab.training.job import data_of
from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.presets import find_recipe, split_arguments
from vitlab.training.recipe import Recipe, with_settings
from vitlab.training.runlog import read_log

COMMON = ["model.image_size=32", "data.batch_size=4", "run.epochs=2", "augment.flip=true", "augment.crop=scaled"]
COMMON += ["augment.scale=[0.8, 1.2]", "optim.lr=3e-3"]
METHODS = {
    "segment": ["model.name=linear_head_nano"],
    "instance": ["model.name=eomt_nano", "model.depth=3", "model.width=32", "model.queries=5"],
    "detect": ["model.name=yolos_nano", "model.depth=2", "model.width=32"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Red objects on blue."""
    place, rng = tmp_path_factory.mktemp("objects"), np.random.default_rng(0)
    for name in ("images", "instances"):
        (place / name).mkdir()
    for number in range(10):
        ids = np.zeros((32, 40), dtype=np.uint16)
        for k in range(1 + number % 2):
            top, left = rng.integers(0, 20, 2)
            ids[top : top + 10, left : left + 14] = k + 1
        colours = np.where(ids[..., None] > 0, [255, 0, 0], [0, 0, 255]).astype(np.uint8)
        Image.fromarray(colours).save(place / "images" / f"{number}.png")
        Image.fromarray(ids).save(place / "instances" / f"{number}.png")
    return place


def recipe_of(folder, name, *settings) -> Recipe:
    texts = [f"data.source={folder}", f"objective.name={name}", *COMMON, *METHODS[name], *settings]
    return with_settings(Recipe(), texts)


class StopAt(Silent):
    """Asks its own process to stop, as Ctrl-C does."""

    def __init__(self, step):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_goes_on_to_the_bit(name, folder, tmp_path):
    recipe = recipe_of(folder, name)
    result = fit(recipe, tmp_path / "straight")
    with pytest.raises(Stopped):
        fit(recipe, tmp_path / "stopped", show=StopAt(3))
    again = fit(recipe, tmp_path / "stopped", resume=True)
    for kind in ("last", "best"):
        weights = [load_file(tmp_path / run / kind / "weights.safetensors") for run in ("straight", "stopped")]
        assert weights[0].keys() == weights[1].keys()
        assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    shown = {"segment": {"miou", "pixel_accuracy"}, "instance": {"ap", "ap50", "pq"}, "detect": {"ap", "ap50"}}[name]
    assert shown <= result.keys() and {key: result[key] for key in shown} == {key: again[key] for key in shown}
    assert (tmp_path / "straight" / "report.html").is_file()
    card = native.read_card(tmp_path / "straight" / "best")
    kind = {"segment": "semantic"}.get(name, name)
    assert native.read_task(card, 1) == RegionTask(kind=kind) == task_from_dict(RegionTask(kind=kind).to_dict())
    terms = {"segment": {"pixels_loss"}, "instance": {"masks_loss", "dice_loss"}, "detect": {"boxes_loss"}}[name]
    line = next(event for event in read_log(tmp_path / "straight") if event["kind"] == "train")
    assert terms <= line.keys()
    assert line["loss"] == pytest.approx(sum(v for key, v in line.items() if key.endswith("_loss")), rel=1e-5)


def test_red_is_learned_from_blue(folder, tmp_path):
    result = fit(recipe_of(folder, "segment", "run.epochs=6"), tmp_path / "run")
    assert result["miou"] > 0.7 and result["judged_by"] == "mIoU"  # always background: about 0.4
    assert result["per_class"][1]["class"] == "object"


def test_a_head_starts_from_an_encoder_and_a_run_from_a_run(folder, tmp_path):
    encoder = vitlab.create("vit_digits", image_size=32, channels=3, width=32, depth=2, heads=2, classes=5)
    vitlab.save(encoder, tmp_path / "encoder")
    recipe = recipe_of(folder, "segment", f"model.init_from={tmp_path / 'encoder'}", "optim.lr=1e-9", "run.epochs=1")
    run = fit(recipe, tmp_path / "run")
    assert run["params"] > 0
    best = vitlab.load(tmp_path / "run" / "best")
    torch.testing.assert_close(
        best.encoder.blocks[0].mlp.fc1.weight, encoder.blocks[0].mlp.fc1.weight, atol=1e-6, rtol=0
    )
    assert best.labels == ["background", "object"] and best.preprocess.how == "stretch"
    show = Silent()
    again = with_settings(recipe, [f"model.init_from={tmp_path / 'run' / 'best'}"])
    fit(again, tmp_path / "again", show=show)
    assert any(note.startswith(f"started from {tmp_path / 'run' / 'best'}.") for note in show.notes)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("augment.mixup=0.5", "augment.mixup=0.5 is not for objective.name=segment"),
        ("augment.randaugment=2", "augment.randaugment=2 is not for"),
        ("augment.crop=resized", "augment.crop=resized does not move masks"),
        ("run.ladder=true", "compares classifiers"),
        ("model.name=vit_tiny", "model.name=linear_head_small"),
        ("model.classes=7", "leave model.classes out"),
    ],
)
def test_what_does_not_fit_is_refused(setting, message, folder, tmp_path):
    texts = [f"data.source={folder}", "objective.name=segment", *METHODS["segment"], "model.image_size=32", setting]
    recipe = with_settings(Recipe(), texts)
    with pytest.raises(VitlabError, match=message):
        fit(recipe, tmp_path / "run")


def test_data_and_objective_must_fit(folder, tmp_path):
    with pytest.raises(TrainingError, match=r"has a mask for each object.*vitlab train instance_folder"):
        data_of(with_settings(Recipe(), [f"data.source={folder}"]))
    with pytest.raises(TrainingError, match="digits has no masks or boxes"):
        data_of(with_settings(Recipe(), ["data.source=digits", "objective.name=detect"]))


def test_recipes_are_found_by_the_data(folder, monkeypatch):
    assert find_recipe(str(folder))[1].objective.name == "instance"
    for name, objective in (("seg_folder", "segment"), ("instance_folder", "instance"), ("detect_folder", "detect")):
        assert find_recipe(name)[1].objective.name == objective
        assert split_arguments(name, [str(folder), "run.epochs=3"]) == (
            name,
            [f'data.source="{folder}"', "run.epochs=3"],
        )


@pytest.mark.parametrize("name", ["instance", "detect"])
def test_two_processes_equal_one(name, folder, tmp_path, fit_in_two, monkeypatch):
    """What a process draws for itself (points of masks, which queries are masked) is left out."""
    monkeypatch.setattr(EoMT, "loss_weights", LossWeights(points=0))
    monkeypatch.setattr(EoMT, "anneal", lambda self, progress: None)
    plain = ["optim.name=sgd", "optim.lr=0.05", "run.epochs=2", "run.eval_every=2"]
    fit(recipe_of(folder, name, *plain, "data.batch_size=8"), tmp_path / "one")
    assert fit_in_two(recipe_of(folder, name, *plain, "data.batch_size=4"), tmp_path / "two") == [0, 0]
    one, two = (load_file(tmp_path / run / "last" / "weights.safetensors") for run in ("one", "two"))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=2e-5, rtol=0, msg=key)
    results = [json.loads((tmp_path / run / "result.json").read_text(encoding="utf-8")) for run in ("one", "two")]
    assert results[1]["ap50"] == pytest.approx(results[0]["ap50"], abs=1e-6) and results[0]["steps"] == 2
