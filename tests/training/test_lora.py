"""model.lora in training: what learns, what is saved, resuming to the bit."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file

import vitlab
from vitlab.errors import TrainingError
from vitlab.layers.lora import lora_layers
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, fit
from vitlab.training.recipe import Recipe, with_settings

SMALL = [
    *("data.source=digits", "data.batch_size=32", "data.per_class=16", "run.epochs=2", "run.save_every=3"),
    *("model.init_from=bundled:digits", "model.lora=4", "model.lora_alpha=8", "model.dropout=0.1", "optim.ema=0.9"),
]
METHODS = {
    "mae": ["objective.name=mae", "model.name=mae_digits", "model.lora=2"],
    "dino": ["objective.name=dino", "model.name=dino_digits", "model.lora=2", "objective.local_size=4"],
}


class KillAt(Silent):
    def __init__(self, step: int):
        super().__init__()
        self.at = step

    def step(self, done, numbers):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of ten steps."""
    folder, show = tmp_path_factory.mktemp("lora") / "run", Silent()
    fit(with_settings(Recipe(), SMALL), folder, show=show)
    return folder, show.notes


def test_killed_and_resumed_is_identical_to_the_bit(run, tmp_path):
    recipe, killed = with_settings(Recipe(), SMALL), tmp_path / "killed"
    for number, step in enumerate((5, 8)):
        child = os.fork()
        if child == 0:
            try:
                fit(recipe, killed, resume=number > 0, show=KillAt(step))
            finally:
                os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    fit(recipe, killed, resume=True)
    for name in ("last/weights", "last/ema", "last/optimizer", "best/weights", "adapter/adapter_model"):
        straight, again = (load_file(folder / f"{name}.safetensors") for folder in (run[0], killed))
        assert straight.keys() == again.keys()
        assert all(torch.equal(value, again[key]) for key, value in straight.items()), name


def test_the_base_stays_and_only_the_rest_is_trained(run):
    folder, notes = run
    base, last = vitlab.load("bundled:digits").state_dict(), load_file(folder / "last" / "weights.safetensors")
    moved = {key for key, value in last.items() if key not in base or not torch.equal(value, base[key])}
    assert moved == {key for key in last if "lora_" in key} | {"head.weight", "head.bias"}
    state = load_file(folder / "last" / "optimizer.safetensors")
    assert {key.split("|")[0] for key in state} == moved
    learns = sum(last[key].numel() for key in moved)
    assert f"LoRA of rank 4 on 8 layers: {learns:,} of {sum(v.numel() for v in last.values()):,}" in " ".join(notes)


def test_the_best_model_is_plain_and_its_adapter_alone_is_small(run):
    folder, _ = run
    best, adapter = vitlab.load(folder / "best"), vitlab.load(folder / "adapter")
    assert not lora_layers(best)
    assert best.state_dict().keys() == vitlab.load("bundled:digits").state_dict().keys()
    assert all(torch.equal(value, adapter.state_dict()[key]) for key, value in best.state_dict().items())
    assert adapter.labels == best.labels and adapter.preprocess == best.preprocess
    images, last = torch.randn(8, 1, 8, 8), vitlab.load(folder / "last")
    assert not lora_layers(last) and (last(images) - vitlab.load("bundled:digits")(images)).abs().max() > 1e-3
    assert sum(path.stat().st_size for path in (folder / "adapter").iterdir()) < 40_000


def test_frozen_parts_are_in_no_group_of_the_optimiser(tmp_path):
    job = prepare(with_settings(Recipe(), SMALL), tmp_path)
    grouped = {name for part in job.optimisers.parts for group in part.param_groups for name in group["names"]}
    assert grouped == {name for name, p in job.model.named_parameters() if p.requires_grad}
    assert grouped and all("lora_" in name or name.startswith("head.") for name in grouped)


@pytest.mark.parametrize("method", METHODS)
def test_learning_without_labels(method, tmp_path):
    """The decoder or the head learns fully; the adapter that is saved belongs to the encoder."""
    recipe = with_settings(Recipe(), ["data.source=digits", "data.per_class=8", "run.epochs=1", *METHODS[method]])
    first = prepare(recipe, tmp_path / "first").model
    vitlab.save(first, tmp_path / "base")
    fit(with_settings(recipe, [f"model.init_from={tmp_path / 'base'}", "optim.lr=1e-2"]), tmp_path / "run")
    base, best = (vitlab.load(tmp_path / name, encoder=True) for name in ("base", "run/best"))
    adapter = vitlab.load(tmp_path / "run" / "adapter")
    changed = {key for key, value in best.state_dict().items() if not torch.equal(value, base.state_dict()[key])}
    assert changed == {f"blocks.{n}.attention.{part}.weight" for n in range(4) for part in ("qkv", "proj")}
    assert all(torch.equal(value, adapter.state_dict()[key]) for key, value in best.state_dict().items())


WRONG = {
    "model.lora=-1": "must be 0",
    "model.lora=100": "does not fit",
    "model.lora=4 model.lora_layers=qvk": "no matrix for 'qvk'.*qkv",
    "model.lora=4 model.freeze=encoder": "leave out model.freeze",
    "model.lora_alpha=4": "set model.lora=8",
    "model.lora=4 model.lora_alpha=0": "must be above 0",
    "model.lora=4 optim.name=muon": "model.lora leave none",
    "model.lora=4 model.init_from=none model.name=resnet18 model.channels=1": "no matrix for 'attention'",
}


@pytest.mark.parametrize(("settings", "message"), WRONG.items())
def test_what_does_not_belong_together_is_refused(settings, message, tmp_path):
    with pytest.raises(TrainingError, match=message):
        prepare(
            with_settings(Recipe(), ["data.source=digits", "model.init_from=bundled:digits", *settings.split()]),
            tmp_path,
        )


def test_random_frozen_weights_are_noted(tmp_path):
    job = prepare(with_settings(Recipe(), ["data.source=digits", "model.lora=2"]), tmp_path)
    assert any("are random" in note for note in job.notes)
