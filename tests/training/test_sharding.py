"""FSDP2: two processes that share a model train it as one process does, leave the same files, and resume to the bit."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from safetensors.torch import load_file

import vitlab
from vitlab.images.datasets import open_data
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier
from vitlab.training.job import TrainingJob
from vitlab.training.loop import Silent, fit
from vitlab.training.recipe import Recipe, to_toml, with_settings

SMALL = ["data.per_class=16", "data.batch_size=32", "model.depth=2", "model.registers=3", "run.epochs=3"]
FSDP = "run.sharding=fsdp"


def recipe(*settings: str) -> Recipe:
    return with_settings(Recipe(), [*SMALL, *settings])


def files(run: Path, *which: str) -> dict[str, torch.Tensor]:
    which = which or ("weights", "optimizer", "ema")
    paths = [run / "last" / f"{name}.safetensors" for name in which]
    return {f"{path.stem}|{key}": value for path in paths if path.exists() for key, value in load_file(path).items()}


def result(run: Path) -> dict:
    return json.loads((run / "result.json").read_text(encoding="utf-8"))


SGD = ["optim.name=sgd", "optim.lr=0.3", "optim.weight_decay=0.1"]
# The rate of everything but the matrices is small: Adam makes steps of full size out of rounding errors.
MUON = ["optim.name=muon", "optim.lr=1e-6", "model.positions=relative", "optim.accumulate=2", "data.batch_size=16"]


@pytest.mark.parametrize(
    ("settings", "alone", "tolerance"),
    [
        ([*SGD, "optim.clip=0.5", "optim.ema=0.9"], ["data.batch_size=64"], 1e-6),
        (MUON, ["data.batch_size=32"], 2e-5),
    ],
    ids=["sgd, clip, ema", "muon, relative positions, micro-steps"],
)
def test_two_processes_that_share_the_model_equal_one(settings, alone, tolerance, tmp_path, fit_in_two):
    fit(recipe(*settings, *alone), tmp_path / "one")
    assert fit_in_two(recipe(*settings, FSDP), tmp_path / "two") == [0, 0]
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=tolerance, rtol=0, msg=key)
    results = [result(tmp_path / run) for run in ("one", "two")]
    for key in ("top1", "val_top1", "best_epoch", "steps", "params"):
        assert results[0][key] == results[1][key], key
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], abs=1e-5)
    best = vitlab.load(tmp_path / "two" / "best")
    scores = evaluate_classifier(best, ImageSet(open_data("digits").test, best.preprocess))
    assert scores.top(1) == results[1]["top1"]
    assert scores.loss() == pytest.approx(results[1]["loss"], abs=1e-6)
    last, weights = vitlab.load(tmp_path / "two" / "last"), load_file(tmp_path / "two" / "last" / "weights.safetensors")
    assert all(torch.equal(value, weights[key]) for key, value in last.state_dict().items())
    kinds = [json.loads((tmp_path / run / "last" / "model.json").read_text(encoding="utf-8")) for run in ("one", "two")]
    assert kinds[0].keys() == kinds[1].keys()
    rounding = {"digests", "seal"}  # of the weights, which agree to 1e-5 and not to the bit
    assert all(kinds[0][key] == kinds[1][key] for key in kinds[0].keys() - rounding)


def test_killed_and_resumed_is_identical_to_the_bit_and_goes_on_in_one_process(tmp_path, fit_in_two):
    everything = ["model.dropout=0.1", "model.stochastic_depth=0.1", "augment.mixup=0.5", "augment.erasing=0.3"]
    everything += ["augment.drop_patches=0.5", "optim.name=muon", "optim.clip=1.0", "optim.ema=0.9", "run.amp=bf16"]
    shared = recipe(*everything, FSDP, "run.save_every=2", "run.epochs=2")
    assert fit_in_two(shared, tmp_path / "straight") == [0, 0]
    assert fit_in_two(shared, tmp_path / "killed", kill_at=3)[0] == -signal.SIGKILL
    assert json.loads((tmp_path / "killed" / "last" / "state.json").read_text(encoding="utf-8"))["step"] == 2
    shutil.copytree(tmp_path / "killed", tmp_path / "alone")
    assert fit_in_two(shared, tmp_path / "killed", resume=True) == [0, 0]
    straight, killed = files(tmp_path / "straight"), files(tmp_path / "killed")
    assert straight.keys() == killed.keys() and any("|momentum" in key for key in straight)
    for key, value in straight.items():
        assert torch.equal(value, killed[key]), key
    assert result(tmp_path / "straight")["loss"] == result(tmp_path / "killed")["loss"]
    alone = with_settings(shared, ["run.sharding=none", "data.batch_size=64"])
    fit(alone, tmp_path / "alone", resume=True, changed=True)
    assert result(tmp_path / "alone")["steps"] == result(tmp_path / "straight")["steps"]


def test_torchrun_with_the_recipe_as_it_is(tmp_path):
    """The command of the manual; AdamW, without the key's bias, whose gradient is nothing but rounding errors."""
    settings = ["model.qkv_bias=false", "run.epochs=1"]
    (tmp_path / "recipe.toml").write_text(to_toml(recipe(*settings)), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d"]
    command += ["--rdzv_endpoint=localhost:0", "-m", "vitlab", "train", str(tmp_path / "recipe.toml"), FSDP]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, f"run.dir={tmp_path / 'two'}"],
        capture_output=True,
        text=True,
        timeout=200,
        env=env,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    fit(recipe(*settings, "data.batch_size=64"), tmp_path / "one")
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert one.keys() == two.keys() and any("|exp_avg_sq" in key for key in one)
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=5e-6, rtol=0, msg=key)
    assert result(tmp_path / "one")["top1"] == result(tmp_path / "two")["top1"]


def test_each_process_keeps_about_half(tmp_path, monkeypatch, fit_in_two):
    """Of the parameters, of the running average, and of the optimiser's two numbers for each."""
    save = TrainingJob.save

    def counted(job, progress):
        state = job.optimisers.tensors()
        kept = {"model": job.model.state_dict(), "average": job.evaluated_model.state_dict()}
        kept |= {name: {k: v for k, v in state.items() if k.endswith(name)} for name in ("|exp_avg", "|exp_avg_sq")}
        sums = {name: sum(v.to_local().numel() for v in tensors.values()) for name, tensors in kept.items()}
        (tmp_path / f"{job.who.rank}.json").write_text(json.dumps(sums), encoding="utf-8")
        save(job, progress)

    monkeypatch.setattr(TrainingJob, "save", counted)
    assert fit_in_two(recipe(FSDP, "run.epochs=1", "optim.ema=0.9"), tmp_path / "run") == [0, 0]
    params = result(tmp_path / "run")["params"]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2))
    for name in first:
        assert first[name] + second[name] == params, name
        assert 0.45 < first[name] / params < 0.55, name


def test_one_process_keeps_everything_and_says_so(tmp_path):
    show = Silent()
    fit(recipe(FSDP, "run.epochs=1"), tmp_path / "one", show=show)
    assert any("torchrun" in note for note in show.notes)
    fit(recipe("run.epochs=1"), tmp_path / "plain")
    for key, value in files(tmp_path / "plain").items():
        assert torch.equal(value, files(tmp_path / "one")[key]), key


def test_a_loss_that_is_not_finite_stops_all_with_layer_and_advice(tmp_path, fit_in_two):
    start = vitlab.create("vit_digits", depth=2)
    start.labels = [str(i) for i in range(10)]
    with torch.no_grad():
        start.blocks[1].mlp.fc1.weight.mul_(1e30)
        start.blocks[1].mlp.fc2.weight.mul_(1e30)
    vitlab.save(start, tmp_path / "start")
    broken = with_settings(Recipe(), [f"model.init_from={tmp_path / 'start'}", "run.epochs=1", FSDP])
    assert fit_in_two(broken, tmp_path / "run") == [7, 7]
    said = [(tmp_path / f"run.error{rank}").read_text(encoding="utf-8") for rank in range(2)]
    assert "step 0" in said[0] and "block 1, fc" in said[0] and "process 0" in said[1]
    replay = load_file(tmp_path / "run" / "replay" / "weights.safetensors")
    assert torch.equal(replay["blocks.1.mlp.fc1.weight"], start.blocks[1].mlp.fc1.weight)
