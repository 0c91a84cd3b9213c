"""The gate: what answers otherwise than the model is not kept; what travels in a file, and what reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from PIL import Image

import vitlab
import vitlab.cli.main
from vitlab.errors import DataError, UsageError
from vitlab.export import Comparison, ExportMismatchError, export_model, open_export, pipeline, verify
from vitlab.export.fold import fold
from vitlab.export.loader import open_network
from vitlab.export.metadata import model_metadata
from vitlab.export.onnx import Session, external_data_path, set_metadata
from vitlab.export.quantize import to_int8
from vitlab.export.samples import preprocess_batch, sample_images
from vitlab.images.datasets import open_data


@pytest.fixture(scope="module")
def digits():
    return vitlab.load("bundled:digits")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("shipped") / "model.onnx"
    export_model("bundled:digits", path, compare=Comparison(images=32))
    return path


def test_preprocess_labels_and_provenance_travel_in_the_file(digits, shipped):
    props = {entry.key: entry.value for entry in onnx.load(shipped).metadata_props}
    about = json.loads(props["vitlab"])
    assert about["preprocess"]["mean"] == list(digits.preprocess.mean)
    assert about["labels"] == digits.labels
    assert about["card"]["name"] == digits.card.name
    assert b".py" not in shipped.read_bytes()  # no step tells which line of whose file it comes from
    assert about["config"] == json.loads(json.dumps(digits.config.to_dict()))


def test_a_model_is_given_by_its_name(digits, shipped):
    expected = model_metadata(digits, "logits").to_json()
    assert open_network(shipped).metadata.to_json() == expected and open_network(digits) is digits
    with pytest.raises(UsageError, match="leave out heads"):
        open_network(shipped, heads=4)
    with pytest.raises(UsageError, match="16 x 16"):
        open_network(shipped, image_size=16)


def test_classifiers_give_no_features_and_read_no_text(shipped):
    exported = open_export(shipped)
    with pytest.raises(UsageError, match="no features"):
        exported.features(torch.zeros(1, 1, 8, 8))
    with pytest.raises(UsageError, match="reads no text"):
        exported.encode_text(torch.zeros(1, 8, dtype=torch.long))


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
        about = model_metadata(*args, **more)
        return replace(about, preprocess={**about.preprocess, "mean": [0.4] * 3, "std": [0.6] * 3})

    model_metadata = pipeline.model_metadata
    monkeypatch.setattr(pipeline, "model_metadata", wrong)
    path = tmp_path / "model.pt2"
    path.write_text("an older file", encoding="utf-8")
    with pytest.raises(ExportMismatchError, match=r"preprocesses images differently from the model: mean .*std"):
        export_model(tiny(), path, compare=Comparison(images=16))
    assert path.read_text(encoding="utf-8") == "an older file" and list(tmp_path.iterdir()) == [path]
    assert not export_model(tiny(), path, compare=Comparison(images=16), force=True).passed
    assert open_export(path).preprocess.mean == (0.4,) * 3  # type: ignore[union-attr]


def test_wrong_eps_is_caught(digits, tmp_path, monkeypatch):
    """1e-5, torch's own, where the weights were made with 1e-6: the mistake that no error tells."""

    def wrong(model):
        found = fold(model)
        for module in found.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = 1e-5
        return found

    assert digits.config.norm.eps == 1e-6
    monkeypatch.setattr(pipeline, "fold", wrong)
    with pytest.raises(ExportMismatchError, match="values differ"):
        export_model(digits, tmp_path / "model.pt2", compare=Comparison(images=16))
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


@pytest.mark.parametrize("name", ["model.onnx", "model.pt2"])
def test_a_stranger_s_file_is_refused_in_words(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=name):
        open_export(path)


def test_a_folder_without_classes_will_do(tmp_path):
    """What int8 is calibrated on is not what it is judged by; a folder without images is refused as before."""
    for number in range(5):
        Image.fromarray(np.full((9, 7, 3), 10 * number, np.uint8)).save(tmp_path / f"{number}.png")
    judged, calibrated = (sample_images(9, source=str(tmp_path), calibrate=value) for value in (False, True))
    assert [Path(str(name)).stem for name in judged] == ["1", "3"]
    assert [Path(str(name)).stem for name in calibrated] == ["0", "2", "4"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder is empty"):
        sample_images(9, source=str(tmp_path / "empty"))


def test_int8_that_answers_otherwise_is_caught(digits, shipped, tmp_path):
    """The scales of the activations are too small, as if they were found on other pictures: most are cut off."""
    path = tmp_path / "model.onnx"
    seen = sample_images(32, channels=1, source="digits")
    to_int8(shipped, path, "static", preprocess_batch(digits, seen))
    held = onnx.load(path)
    for part in held.graph.initializer:
        if part.name.endswith("_scale") and not part.dims:  # weights have one for each output
            part.CopyFrom(numpy_helper.from_array(np.float32(0.03) * numpy_helper.to_array(part), part.name))
    onnx.save(held, path)
    set_metadata(path, replace(open_export(shipped).metadata, int8="static"))
    verdict = verify(digits, open_export(path), seen, rounds=1)
    assert verdict.agreement < 0.9 and "images get the same answer, not 99%" in verdict.problems[0]
    assert verdict.answers is not None and verdict.answers > 5 and not verdict.notes
    alike = verify(digits, open_export(shipped), seen[:1] * 8, rounds=1)
    assert alike.passed and alike.answers == 1 and "says little" in alike.notes[0]


def test_int8_takes_no_float32_weights_with_it(tiny, tmp_path, monkeypatch):
    """Those of a large model lie beside its file; for torch anything above one byte is large here."""
    from torch.onnx._internal.exporter import _onnx_program

    wrote = []
    monkeypatch.setattr(_onnx_program, "_LARGE_MODEL_THRESHOLD", 1)
    monkeypatch.setattr(
        pipeline, "to_int8", lambda *args: [wrote.append(external_data_path(args[0]).is_file()), to_int8(*args)]
    )
    export_model(tiny(), tmp_path / "model.onnx", int8="dynamic", compare=Comparison(images=8, agreement=0.5))
    assert wrote == [True] and [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (dict(int8="static"), "--int8 static --data"),
        (dict(gives="text", reducer="tome:r=8"), "leave --reducer out"),
        (dict(gives="text", dynamic_size=True), "leave --dynamic-size out"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(asked, message, tiny, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_model(tiny(), tmp_path / "model.onnx", **asked)


def test_eval_of_a_file(command, shipped):
    ours, theirs = (
        json.loads(command("eval", which, "digits", "--json").stdout) for which in ("bundled:digits", shipped)
    )
    assert theirs["top1"] == ours["top1"] and theirs["confusion"] == ours["confusion"]
    assert abs(theirs["loss"] - ours["loss"]) < 1e-4
    assert "evaluate features" in command("eval", shipped, "digits", "--knn", code=2).stderr
    assert "runs on the CPU" in command("predict", shipped, "digits#3", "--device", "cuda", code=2).stderr


def test_commands(command, tiny, shipped, tmp_path):
    """The file of one of them, int8, is as far from the model as the gate lets it be."""
    checkpoint = vitlab.save(tiny(), tmp_path / "model")
    path = tmp_path / "model.onnx"
    asked = ["export", checkpoint, "-o", path, "--int8", "dynamic", "--agreement", 0.5, "--images", 16, "--json"]
    verdict = json.loads(command(*asked).stdout)
    assert verdict["passed"] and verdict["written"] == str(path) and verdict["max_difference"] > 0
    assert open_export(path).metadata.int8 == "dynamic"
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
