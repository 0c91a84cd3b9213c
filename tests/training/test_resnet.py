"""A ResNet through the loop and the commands: batch-norm statistics resume to the bit, and can be frozen."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from vitlab.training.loop import Silent, fit
from vitlab.training.recipe import Recipe, with_settings

SETTINGS = [
    *("data.source=digits", "data.per_class=16", "data.batch_size=32", "augment.crop=padded", "augment.padding=1"),
    *("model.name=resnet_cifar", "model.image_size=8", "model.stem_width=8", "model.widths=[8, 12, 16]"),
    *("optim.name=sgd", "optim.lr=0.1", "optim.weight_decay=5e-4", "optim.ema=0.9", "run.epochs=4", "run.save_every=3"),
]


class StopAt(Silent):
    """Ends the run in the middle, without a save."""

    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            raise InterruptedError


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "resnet"
    result = fit(with_settings(Recipe(), SETTINGS), run)
    assert result["top1"] > 0.2  # far above chance, after 20 steps
    return run


def weights(run: Path, which: str) -> dict[str, torch.Tensor]:
    found = load_file(run / which / "weights.safetensors")
    return found if which == "best" else {**found, **load_file(run / which / "ema.safetensors")}


def test_a_stopped_run_goes_on_to_the_bit(finished, tmp_path):
    recipe = with_settings(Recipe(), SETTINGS)
    with pytest.raises(InterruptedError):
        fit(recipe, tmp_path / "run", show=StopAt(8))
    fit(recipe, tmp_path / "run", resume=True)
    for which in ("last", "best"):
        a, b = weights(finished, which), weights(tmp_path / "run", which)
        assert a.keys() == b.keys() and "stem.norm.running_var" in a
        for key, value in a.items():
            assert torch.equal(value, b[key]), (which, key)
    assert int(weights(finished, "last")["stem.norm.num_batches_tracked"]) == 20


def test_a_frozen_encoder_keeps_its_statistics(finished, tmp_path):
    settings = ["data.source=digits", "data.per_class=16", f"model.init_from={finished / 'best'}", "run.epochs=1"]
    fit(with_settings(Recipe(), [*settings, "model.freeze=encoder"]), tmp_path / "run")
    before, after = (load_file(run / "weights.safetensors") for run in (finished / "best", tmp_path / "run" / "last"))
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed == {"head.weight", "head.bias"}


def test_the_commands_take_it(finished, tmp_path, command):
    judged = json.loads(command("eval", finished / "best", "digits", "--knn", "--json").stdout)
    assert (
        judged["top1"] == json.loads((finished / "result.json").read_text(encoding="utf-8"))["top1"]
        and judged["knn"] > 0.2
    )
    Image.new("L", (8, 8), 90).save(tmp_path / "grey.png")
    (found,) = json.loads(command("predict", finished / "best", tmp_path / "grey.png", "--json").stdout)
    assert sum(row["probability"] for row in found["scores"]) <= 1.001 and len(found["scores"]) == 5
    text = command("inspect", finished / "best", "--depth", 2).stdout
    assert "stages.2" in text and "tokens" not in text and "attention" not in text
    rows = {row["name"]: row for row in json.loads(command("models", "resnet", "--json").stdout)}
    assert list(rows) == ["resnet18", "resnet34", "resnet50", "resnet50d", "resnet_cifar"]
    assert rows["resnet50"]["parameters"] == 25_557_032 and rows["resnet50"]["macs"] == pytest.approx(4.09e9, rel=1e-3)
    said = command("explain", "attention", finished / "best", tmp_path / "grey.png", code=2).stderr
    assert "neither tokens nor attention" in said


def test_inspect_shows_every_convolution(command):
    text = command("inspect", "resnet18").stdout
    assert all(f"stages.{stage}.1.conv2" in text for stage in range(4))
    assert "stages.1.0.shortcut" in text and "11,689,512" in text
