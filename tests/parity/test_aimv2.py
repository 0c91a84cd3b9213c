"""transformers' AIMv2, built live with random weights, both ways; and stored tensors of timm's."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import vitlab
from vitlab import convert
from vitlab.checkpoints.load import load_with_report

from .test_golden import unpack

CONFIGS = {
    "learned positions, a head": dict(image_size=32),
    "native": dict(image_size=32, is_native=True),
    "biases, no head": dict(image_size=40, qkv_bias=True, mlp_bias=True, use_head=False),
}


def vision_model(options: dict):
    sizes = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=72, patch_size=8)
    model = hf.Aimv2VisionModel(hf.Aimv2VisionConfig(**sizes, **options))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_and_pooled_features_agree_both_ways(name, tmp_path):
    theirs = vision_model(CONFIGS[name])
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    side = CONFIGS[name]["image_size"]
    for size in ((side, side), *([(24, 40)] if name == "native" else [])):
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            out = theirs(images)
            torch.testing.assert_close(ours.forward_features(images), out.last_hidden_state, atol=1e-5, rtol=0)
            if out.pooler_output is not None:
                torch.testing.assert_close(ours(images), out.pooler_output, atol=1e-5, rtol=0)
    convert(tmp_path / "hf", tmp_path / "back", to="hf")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = hf.Aimv2VisionModel.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        assert torch.equal(again(images).last_hidden_state, out.last_hidden_state)


@pytest.mark.parametrize("folder", [False, True])
def test_stored_outputs_of_timm_agree(folder, tmp_path):
    path, tensors = unpack("timm_aimv2", tmp_path)
    if folder:
        path.rename(tmp_path / "model.safetensors")
        config = {
            "architecture": "aimv2_large_patch14_224",
            "model_args": {"num_heads": 4},
            "pretrained_cfg": {"input_size": [3, 32, 32]},
        }
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, report = load_with_report(tmp_path if folder else path, **({} if folder else {"heads": 4}))
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)
        tokens = model.forward_features(tensors["input.images"])
        torch.testing.assert_close(tokens, tensors["output.features"], atol=1e-5, rtol=0)


@pytest.mark.parametrize("pooling", ["max", "token", ""])
def test_another_pooling_of_timm_is_refused(pooling, tmp_path):
    path, _ = unpack("timm_aimv2", tmp_path)
    path.rename(tmp_path / "model.safetensors")
    config = {"architecture": "aimv2_large_patch14_224", "model_args": {"num_heads": 4, "global_pool": pooling}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(vitlab.CheckpointError, match=f"global_pool='{pooling}' is not known"):
        vitlab.load(tmp_path)
