"""Twins against stored tensors of timm, which are read and not written."""

import json

import pytest
import torch

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.layers.reduced import Merge, Reduced
from vitlab.layers.windows import Windows

from .test_golden import unpack

FILES = {"timm_twins_pcpvt": {}, "timm_twins_svt": dict(window=4)}  # what weights do not tell, beside the heads
HEADS = (1, 2, 4, 8)


@pytest.mark.parametrize("name", FILES)
def test_stored_outputs_agree(name, tmp_path):
    path, tensors = unpack(name, tmp_path)
    model, report = load_with_report(path, heads=HEADS, **FILES[name])
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict()) == len(report.rows)
    c = model.config
    assert (c.eps, c.merge_eps, c.reduction_eps, c.reductions) == (1e-6, 1e-5, 1e-5, (8, 4, 2, 1))
    images = tensors["input.images"]
    with torch.inference_mode():
        torch.testing.assert_close(model(images), tensors["output.logits"], atol=1e-6, rtol=0)
        torch.testing.assert_close(model.forward_features(images), tensors["output.features"], atol=1e-5, rtol=0)
        for wrong in (dict(merge_eps=1e-6), dict(eps=1e-4), dict(reduction_eps=1e-3)):
            other, _ = load_with_report(path, heads=HEADS, **FILES[name], **wrong)
            assert (other(images) - tensors["output.logits"]).abs().max() > 2e-5, wrong


def test_windows_and_reduced_keys_by_turns(tmp_path):
    """Of 64 pixels 16, 8, 4 and 2 tokens a side; the last map is smaller than a window, which is filled up."""
    path, _ = unpack("timm_twins_svt", tmp_path)
    model, _ = load_with_report(path, heads=HEADS, window=4)
    places = model.places(64, 64)
    assert places[:2] == (Windows((16, 16), (4, 4)), Reduced((16, 16), Merge(8, 8)))
    assert places[2:4] == (Windows((8, 8), (4, 4)), Reduced((8, 8), Merge(4, 4)))
    assert places[6:] == (Windows((2, 2), (4, 4)), Reduced((2, 2), Merge(1, 1)))


def test_a_bare_file_is_taken_with_the_usual_window(tmp_path):
    path, tensors = unpack("timm_twins_svt", tmp_path)
    model, report = load_with_report(path, heads=HEADS)
    assert model.config.window == 7 and "window=7" in report.notes[0]
    with torch.inference_mode():
        assert (model(tensors["input.images"]) - tensors["output.logits"]).abs().max() > 1e-3
    path, _ = unpack("timm_twins_pcpvt", tmp_path)
    with pytest.raises(ValueError, match=r"heads cannot be read from weights of widths \[16, 32, 48, 64\]"):
        load_with_report(path)
    with pytest.raises(ValueError, match="the weights have windowed=False"):
        load_with_report(path, heads=HEADS, window=4)


def test_a_timm_folder(tmp_path):
    path, tensors = unpack("timm_twins_svt", tmp_path)
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / "model.safetensors")
    config = {
        "architecture": "twins_svt_small",
        "model_args": {"num_heads": list(HEADS), "wss": [4] * 4},
        "pretrained_cfg": {"input_size": [3, 64, 64]},
    }
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = vitlab.load(tmp_path / "folder")
    with torch.inference_mode():
        torch.testing.assert_close(model(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="a Twins is not written as hf: use --to native"):
        convert.write(model, tmp_path / "out", "hf")
    config["model_args"]["wss"] = [4, 4, 7, 7]
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="one size in all stages"):
        vitlab.load(tmp_path / "folder")
