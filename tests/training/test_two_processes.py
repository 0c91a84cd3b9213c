"""Learning without labels in two processes: each has half of every batch, and all that moves is as in one process."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vitlab.models import mae
from vitlab.training.loop import fit
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import with_settings

# Plain steps: Adam and Muon make steps of full size out of rounding errors.
SGD = ["optim.name=sgd", "optim.lr=0.2", "optim.weight_decay=0.05", "optim.warmup_epochs=0", "optim.clip=0.5"]
SMALL = ["model.width=32", "model.depth=2", "data.per_class=16", "run.epochs=3", "run.eval_every=3", *SGD]
DINO = ["objective.final_weight_decay=0.2", "objective.freeze_last_epochs=1", "objective.temperature_epochs=2"]


def compare(recipe, settings: list[str], folder: Path, fit_in_two) -> dict[str, torch.Tensor]:
    """One process with batches of 64, two with 32 each; what the former ends with."""
    fit(with_settings(recipe, [*settings, "data.batch_size=64"]), folder / "one")
    assert fit_in_two(with_settings(recipe, [*settings, "data.batch_size=32"]), folder / "two") == [0, 0]
    one, two = (load_file(folder / run / "last" / "weights.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=2e-5, rtol=0, msg=key)
    results = [json.loads((folder / run / "result.json").read_text(encoding="utf-8")) for run in ("one", "two")]
    for key in ("top1", "steps", "best_epoch"):
        assert results[0][key] == results[1][key], key
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-4)
    return one


def test_dino(tmp_path, fit_in_two):
    """Student and teacher, both heads, and the centre, which is the mean over the batches of both."""
    recipe = find_recipe("dino_digits")[1]
    start = with_settings(recipe, [*SMALL, *DINO, "optim.lr=1e-30", "optim.weight_decay=0", "run.epochs=1"])
    fit(with_settings(start, ["data.batch_size=64", "objective.final_weight_decay=none"]), tmp_path / "start")
    found = compare(recipe, [*SMALL, *DINO, "objective.momentum=0.9"], tmp_path, fit_in_two)
    first = load_file(tmp_path / "start" / "last" / "weights.safetensors")
    for key in ("student.blocks.0.mlp.fc1.weight", "teacher.blocks.0.mlp.fc1.weight", "student_head.last.weight"):
        assert (found[key] - first[key]).abs().max() > 1e-3, key  # far more than what the two may differ by
    assert found["centre"].abs().max() > 1e-3


def test_mae(tmp_path, fit_in_two, monkeypatch):
    """Which patches are hidden is drawn by process, so here the pictures themselves decide it."""
    drawn = mae.choose_visible
    monkeypatch.setattr(mae, "choose_visible", lambda patches, ratio, _: drawn(patches, ratio, patches.sum(dim=-1)))
    compare(find_recipe("mae_digits")[1], SMALL, tmp_path, fit_in_two)
