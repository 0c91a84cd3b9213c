"""The gate: what answers otherwise than the model is not kept; what travels in a file, and what reads it."""

from __future__ import annotations

import json
import pickle
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import vitlab
import vitlab.cli.main
from vitlab.export import RefusedError, export_model, open_export, ship
from vitlab.export.fold import folded
from vitlab.export.onnx import Session
from vitlab.export.quantize import to_int8
from vitlab.images.datasets import open_data


@pytest.fixture(scope="module")
def digits():
    return vitlab.load("bundled:digits")


@pytest.fixture(scope="module")
def shipped(digits, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shipped") / "model.onnx"
    export_model(digits, path, images=32)
    return path


def test_preprocess_labels_and_provenance_travel_in_the_file(digits, shipped):
    props = {entry.key: entry.value for entry in onnx.load(shipped).metadata_props}
    about = json.loads(props["vitlab"])
    assert about["preprocess"]["mean"] == list(digits.preprocess.mean)
    assert about["labels"] == digits.labels
    assert about["card"]["name"] == digits.card.name
    assert b".py" not in shipped.read_bytes()  # no step tells which line of whose file it comes from
    assert about["config"] == json.loads(json.dumps(digits.config.to_dict()))


def test_predict_reads_what_travels(digits, shipped):
    split = open_data("digits").test
    pictures = [split.read(n)[:, :, 0] for n in range(20)]
    ours, theirs = (
        vitlab.predict(m, [np.repeat(p[:, :, None], 3, 2) for p in pictures]) for m in (digits, open_export(shipped))
    )
    for a, b in zip(ours, theirs, strict=True):
        assert [label for label, _ in a.scores][:1] == [label for label, _ in b.scores][:1]
        np.testing.assert_allclose(a.scores[0][1], b.scores[0][1], atol=1e-5)


def test_wrong_mean_and_std_in_the_metadata_are_caught(tiny, tmp_path, monkeypatch):
    def wrong(*args, **more):
        about = about_model(*args, **more)
        return replace(about, preprocess={**about.preprocess, "mean": [0.4] * 3, "std": [0.6] * 3})

    about_model = ship.about_model
    monkeypatch.setattr(ship, "about_model", wrong)
    path = tmp_path / "model.pt2"
    path.write_text("an older file")
    with pytest.raises(RefusedError, match=r"prepares pictures otherwise than the model: mean .*std"):
        export_model(tiny(), path, images=16)
    assert path.read_text() == "an older file" and list(tmp_path.iterdir()) == [path]
    assert not export_model(tiny(), path, images=16, force=True).passed
    assert open_export(path).preprocess.mean == (0.4,) * 3  # type: ignore[union-attr]


def test_wrong_eps_is_caught(digits, tmp_path, monkeypatch):
    """1e-5, torch's own, where the weights were made with 1e-6: the mistake that no error tells."""

    def wrong(model):
        found = folded(model)
        for module in found.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-5
        return found

    assert digits.config.norm.eps == 1e-6
    monkeypatch.setattr(ship, "folded", wrong)
    with pytest.raises(RefusedError, match="values differ"):
        export_model(digits, tmp_path / "model.pt2", images=16)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["dynamic", "static"])
def test_int8(way, digits, shipped, tmp_path):
    """On digits that neither training nor calibration has seen."""
    data = open_data("digits")
    seen, asked = (
        torch.stack([digits.preprocess(split.read(n)[:, :, 0]) for n in range(count)])
        for split, count in ((data.train, 48), (data.test, 200))
    )
    path = tmp_path / "model.onnx"
    to_int8(shipped, path, way, seen)
    with torch.no_grad():
        right = digits(asked).argmax(1)
    assert (Session(path)(asked).argmax(1) == right).float().mean() >= 0.97
    assert path.stat().st_size < 0.5 * shipped.stat().st_size
    types = {node.op_type for node in onnx.load(path).graph.node}
    assert ("MatMulInteger" if way == "dynamic" else "QuantizeLinear") in types


def test_a_pickle_in_a_program_is_not_run(tiny, tmp_path):
    path, mark = tmp_path / "model.pt2", tmp_path / "it ran"
    export_model(tiny(), path, images=8)

    class Evil:
        def __reduce__(self):
            return Path.touch, (mark,)

    evil = tmp_path / "evil.pt2"
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(evil, "w") as after:
        for name in before.namelist():
            held = before.read(name)
            after.writestr(name, pickle.dumps(Evil()) if "sample_inputs" in name else held)
    with pytest.raises(ValueError, match="cannot be read"):
        open_export(evil)
    assert not mark.exists()


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_a_stranger_s_file_is_refused_in_words(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=name):
        open_export(path)


def test_commands(command, tiny, shipped, tmp_path):
    """The file of one of them, int8, is as far from the model as the gate lets it be."""
    checkpoint = vitlab.save(tiny(), tmp_path / "model")
    path = tmp_path / "model.onnx"
    asked = ["export", checkpoint, "-o", path, "--int8", "dynamic", "--agreement", 0.5, "--images", 16, "--json"]
    verdict = json.loads(command(*asked).stdout)
    assert verdict["passed"] and verdict["written"] == str(path) and verdict["max_difference"] > 0
    assert open_export(path).about.int8 == "dynamic"
    asked = ["export", checkpoint, "-o", tmp_path / "no.pt2", "--tolerance", 1e-12, "--images", 8]
    refused = command(*asked, code=1)
    assert "--force" in refused.stderr and not (tmp_path / "no.pt2").exists()
    command("export", checkpoint, "-o", tmp_path / "model.txt", code=2)
    answers: list[Any] = [
        json.loads(command("predict", which, "digits#3", "--top", 1, "--json").stdout)[0]["scores"][0]
        for which in ("bundled:digits", shipped)
    ]
    assert answers[0]["label"] == answers[1]["label"]
    assert abs(answers[0]["probability"] - answers[1]["probability"]) < 1e-5
