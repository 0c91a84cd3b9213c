"""timm's ViTs with relative positions against stored tensors, both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report

from .test_golden import unpack

WEIGHTS = "model.safetensors"


@pytest.mark.parametrize("name", ["timm_relpos", "timm_srelpos"])
@pytest.mark.parametrize("folder", [False, True])
def test_stored_outputs_agree(name, folder, tmp_path):
    path, tensors = unpack(name, tmp_path)
    if folder:
        path.rename(tmp_path / "model.safetensors")
        config = {"architecture": f"vit_{name[5:]}_small_patch16_224", "pretrained_cfg": {"input_size": [3, 32, 32]}}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, report = load_with_report(tmp_path if folder else path, image_size=32)
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict()) == len(report.rows)
    assert model.config.shared == (name == "timm_srelpos")
    with torch.inference_mode():
        torch.testing.assert_close(model(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)
        tokens = model.forward_features(tensors["input.images"])
        torch.testing.assert_close(tokens, tensors["output.features"], atol=1e-5, rtol=0)
        assert model(torch.randn(1, 3, 40, 24)).shape == (1, 7)
    convert.write(model, tmp_path / "back", "timm")
    before, after = (
        load_file(tmp_path / "model.safetensors" if folder else path),
        load_file(tmp_path / "back" / WEIGHTS),
    )
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = vitlab.load(tmp_path / "back")
    assert again.config == model.config


@pytest.mark.parametrize(
    "options", [dict(norm="branch", class_token=True, pooling="class"), dict(pooling="mean", eps=1e-5)]
)
def test_other_kinds_are_written_and_come_back(options, tmp_path):
    model = vitlab.create("vit_relpos_digits", **options).eval()
    notes = convert.write(model, tmp_path, "timm")
    assert [note for note in notes if "eps" in note] == notes and bool(notes) == ("eps" in options)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert ("_rpn_" in config["architecture"]) == ("norm" in options)
    again, images = vitlab.load(tmp_path), torch.randn(2, 1, 8, 12)
    assert again.config.eps == model.config.eps
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))
    with pytest.raises(vitlab.UsageError, match="activation=relu"):
        convert.write(vitlab.create("vit_relpos_digits", activation="relu"), tmp_path / "no", "timm")


def test_norms_at_the_end_of_each_branch(tmp_path):
    """timm's rpn variants: x + norm(attention(x)), then x + norm(mlp(x))."""
    model = vitlab.create("vit_relpos_digits", norm="branch", class_token=True, pooling="class", depth=1).eval()
    torch.manual_seed(0)
    block, images = model.blocks[0], torch.randn(2, 1, 8, 12)
    with torch.inference_mode():
        layout = model.layout(8, 12)
        z, _ = model.embed(images, layout)
        bias = model.offsets[0](layout, z)
        assert not bias[..., 0].any() and not bias[:, :, 0].any() and bias[..., 1:, 1:].any()
        z = z + block.norm1(block.attention(z, None, bias))
        z = z + block.norm2(block.mlp(z))
        torch.testing.assert_close(model.norm(z), model.forward_features(images))


def test_another_pooling_is_refused(tmp_path):
    path, _ = unpack("timm_relpos", tmp_path)
    path.rename(tmp_path / "model.safetensors")
    config = {"architecture": "vit_relpos_small_patch16_224", "model_args": {"global_pool": "map"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(vitlab.CheckpointError, match="global_pool='map' is not known"):
        vitlab.load(tmp_path)
