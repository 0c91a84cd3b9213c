"""The example as a user runs it: it learns, its model loads, wandb stays offline; and it makes the recipe's weights."""

import colorsys
import dataclasses
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vitlab
from vitlab.images.sources import cifar
from vitlab.training.loop import fit
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import with_settings

SCRIPT = Path(__file__).parents[2] / "examples" / "train_cifar10.py"
RECORDS = 20  # in each of the six files
# The published files have 10,000 records and known checksums; these are smaller. One thread, as in this process.
LAUNCH = f"""
import dataclasses, runpy, sys
import torch
from vitlab.images.sources import cifar
kind = cifar.KINDS["cifar10"]
small = {{n: dataclasses.replace(m, records={RECORDS}, sha1=None) for n, m in kind.members.items()}}
cifar.KINDS["cifar10"] = dataclasses.replace(kind, members=small)
torch.set_num_threads(1)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_bins(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Six files in the binary layout; each class is a colour, under noise. Returns test's (N, 3, 32, 32) and labels."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    labels = np.arange(RECORDS) % 10
    colours = np.array([colorsys.hsv_to_rgb(i / 10, 0.9, 0.4 + 0.5 * (i % 2)) for i in range(10)]) * 255
    planes = np.empty(0)
    for name in cifar.CIFAR10.members:  # test comes last
        planes = colours[labels][:, :, None, None] + rng.normal(0, 20, (RECORDS, 3, 32, 32))
        planes = planes.clip(0, 255).astype(np.uint8)
        records = [bytes([label]) + image.tobytes() for label, image in zip(labels.tolist(), planes, strict=True)]
        (folder / name).write_bytes(b"".join(records))
    return planes, labels


def test_it_learns_saves_and_tracks_offline(tmp_path):
    planes, labels = write_bins(tmp_path / "bins")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "VITLAB"))}
        environment |= {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "HOME": str(tmp_path)}
        command = [sys.executable, "-c", LAUNCH, str(SCRIPT), "--data", str(tmp_path / "bins"), "--epochs", "8"]
        command += ["--limit", "60", "--out", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=120)
        assert done.returncode == 0, done.stderr
        with pytest.raises(TimeoutError):  # nobody was called
            server.accept()
    assert done.stdout.startswith("60 images") and "epoch  8 of 8: loss" in done.stdout
    assert list((tmp_path / "out" / "wandb").glob("offline-run-*/*.wandb"))

    model = vitlab.load(tmp_path / "out")
    assert model.labels == cifar.CIFAR10.classes
    x = torch.from_numpy(planes).float() / 127.5 - 1  # mean and std 0.5
    with torch.inference_mode():
        alone, both = model(x), model(x) + model(x.flip(-1))
    top1 = float((both.argmax(dim=1) == torch.from_numpy(labels)).float().mean())
    assert f"test top-1 {top1:.2%}" in done.stdout
    assert top1 > 0.7  # chance is 0.1
    said = [p.label for p in vitlab.predict(model, list(planes.transpose(0, 2, 3, 1)))]
    assert said == [cifar.CIFAR10.classes[i] for i in alone.argmax(dim=1)]


def test_it_makes_the_weights_of_the_recipe_to_the_bit(tmp_path, monkeypatch):
    write_bins(tmp_path / "bins")
    kind = cifar.KINDS["cifar10"]
    small = {name: dataclasses.replace(m, records=RECORDS, sha1=None) for name, m in kind.members.items()}
    monkeypatch.setitem(cifar.KINDS, "cifar10", dataclasses.replace(kind, members=small))
    data, out = str(tmp_path / "bins"), tmp_path / "out"
    epochs = "3"  # of one step each: two with dropped patches, one without
    command = [str(SCRIPT), "--data", data, "--epochs", epochs, "--wandb", "off", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    example = runpy.run_path(str(SCRIPT), run_name="example")
    example["main"]()
    name, recipe = find_recipe("cifar10_30min")
    assert (example["EPOCHS"], name) == (recipe.run.epochs, "cifar10_30min")
    fit(with_settings(recipe, [f"data.path={data}", f"run.epochs={epochs}", "run.device=cpu"]), tmp_path / "run")
    ours, theirs = (vitlab.load(place).state_dict() for place in (out, tmp_path / "run" / "last"))
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert torch.equal(ours[key], value), key
    assert not re.search(r"\bfit\b", SCRIPT.read_text(encoding="utf-8"))  # its loop is its own
