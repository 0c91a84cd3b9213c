"""What save writes, load reads: also of models that were wrapped, compiled or changed. Else nothing is written."""

from __future__ import annotations

import os
import re

import pytest
import torch
from torch import nn

import vitlab
from vitlab.errors import VitlabError


def tiny():
    return vitlab.create("vit_digits", image_size=16, patch_size=8, width=48, depth=2, channels=3, classes=5).eval()


def compiled_blocks(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block)
    return model


WRAPS = {
    "torch.compile": torch.compile,
    "DataParallel": nn.DataParallel,
    "both": lambda model: torch.compile(nn.DataParallel(model)),
    "compiled blocks": compiled_blocks,
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_wrapped_model_is_saved_as_the_model_inside(wrap, tmp_path):
    model = tiny()
    model.labels = list("abcde")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    vitlab.save(wrap(model), tmp_path / "m")
    after = vitlab.load(tmp_path / "m")
    assert after.labels == list("abcde")
    assert after.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.state_dict().items())


def change(name, value):
    def changed():
        model = tiny()
        setattr(model, name, value)
        return model

    return changed


def other_width():
    model = tiny()
    model.blocks[1].mlp.fc1 = nn.Linear(48, 7)
    return model


def on_meta():
    with torch.device("meta"):
        return tiny()


REFUSED = {
    "replaced head": (change("head", nn.Linear(48, 3)), "model.reset_classifier(3)"),
    "head of two layers": (change("head", nn.Sequential(nn.Linear(48, 5))), "head.0.weight is not part"),
    "other width": (other_width, "blocks.1.mlp.fc1.weight is (7, 48), expected (96, 48)"),
    "meta": (on_meta, "no values"),
    "float8": (lambda: tiny().to(torch.float8_e4m3fn), "float8_e4m3fn"),
    "short labels": (change("labels", ["a", "b"]), "a list of 5 texts, one for each class, or None; found 2 names"),
    "a dict of labels": (change("labels", dict(enumerate("abcde"))), "a list of 5 texts"),
    "numbers as labels": (change("labels", [0, 1, 2, 3, 4]), "found [0, 1, 2, 3, 4]"),
    "labels in one text": (change("labels", "abcde"), "found 'abcde'"),
    "another network": (lambda: nn.Linear(3, 5), "found a Linear"),
}


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED)
def test_what_could_not_be_loaded_is_not_written(make, says, tmp_path):
    with pytest.raises(VitlabError, match=re.escape(says)):
        vitlab.save(make(), tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_the_remedies_work(tmp_path):
    model = tiny()
    model.head = head = nn.Linear(48, 3)
    model.reset_classifier(3)
    model.head = head
    vitlab.save(model, tmp_path / "m")
    assert torch.equal(vitlab.load(tmp_path / "m").head.weight, head.weight)


def test_the_home_folder_is_meant_as_in_load(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    vitlab.save(tiny(), "~/m")
    assert (tmp_path / "m" / "model.json").is_file() and not (tmp_path / "~").exists()
    assert vitlab.load("~/m").config.width == 48


def test_others_may_read_what_the_user_lets_them(tmp_path):
    """As any other file of theirs: safetensors by itself makes files that nobody else can read."""
    before = os.umask(0o022)
    try:
        folder = vitlab.save(vitlab.create("vit_digits"), tmp_path / "model")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {
        "weights.safetensors": "0o644",
        "model.json": "0o644",
    }
