"""transformers' Depth Anything with the same weights: depth at any image size, relative and metric."""

import json

import pytest
import torch
import transformers as hf

import vitlab
from vitlab.checkpoints import convert
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability
from vitlab.models.dpt import DPT, DPTConfig

BACKBONE = dict(hidden_size=24, num_hidden_layers=5, num_attention_heads=2, image_size=28, patch_size=7, mlp_ratio=2)
HEAD = dict(patch_size=7, reassemble_hidden_size=24, neck_hidden_sizes=[4, 6, 8, 10], fusion_hidden_size=8)
CONFIGS = {
    "relative": dict(backbone=dict(out_indices=[1, 2, 4, 5]), head_hidden_size=5),
    "metric": dict(
        backbone=dict(out_indices=[2, 3, 4, 5], apply_layernorm=False, use_swiglu_ffn=True),
        depth_estimation_type="metric",
        max_depth=20,
    ),
}


def their_depth(name: str) -> hf.DepthAnythingForDepthEstimation:
    torch.manual_seed(0)
    options = dict(CONFIGS[name])
    inner = hf.Dinov2Config(**BACKBONE, **options.pop("backbone"), reshape_hidden_states=False)
    model = hf.DepthAnythingForDepthEstimation(hf.DepthAnythingConfig(backbone_config=inner, **HEAD, **options)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in key and key.endswith("weight"):
                parameter.add_(1)
        model.head.conv3.bias.fill_(0.5)  # relative depths end in a ReLU
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_depth_agrees_at_any_size(name, tmp_path):
    theirs = their_depth(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    assert isinstance(ours, DPT) and ours.capabilities >= {Capability.DEPTH, Capability.EMBED}
    for size in ((28, 28), (35, 63), (30, 45)):  # the last ones are no multiples of the patches
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            found, expected = ours(images).depth, theirs(images).predicted_depth
        assert (expected > 0).float().mean() > 0.3
        torch.testing.assert_close(found, expected, atol=1e-5 * ours.config.max_depth, rtol=0)
    vitlab.save(ours, tmp_path / "native")
    assert torch.equal(vitlab.load(tmp_path / "native")(images).depth, ours(images).depth)
    rows = convert.convert(str(tmp_path / "hf"), tmp_path / "again", check=True).checks
    assert len(rows) == 2 and not any(row.wrong for row in rows)


def test_bare_weights_tell_all_but_heads_and_layers(tmp_path):
    their_depth("relative").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="layers="):
        bare = vitlab.load(tmp_path / "model.safetensors", heads=2)
    assert bare.config.layers == (0, 1, 2, 4) and bare.config.widths == (4, 6, 8, 10)


def test_what_cannot_be_is_refused(tmp_path):
    their_depth("relative").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, "reassemble_factors": [2, 1, 1, 0.5]}), encoding="utf-8")
    with pytest.raises(vitlab.CheckpointError, match="reassemble_factors"):
        vitlab.load(tmp_path)
    path.write_text(json.dumps({**values, "backbone_config": {"model_type": "swin"}}), encoding="utf-8")
    with pytest.raises(vitlab.CheckpointError, match="model_type 'swin'"):
        vitlab.load(tmp_path)
    with pytest.raises(vitlab.UsageError, match="names no classes"):
        vitlab.create("depth_anything_v2_nano", classes=3)
    with pytest.raises(vitlab.UsageError, match="a swin is none"):
        DPTConfig().with_encoder("swin", vitlab.create("swin_cifar").config)


def test_trace_and_edit():
    model = vitlab.create("depth_anything_v2_nano").eval()
    images = torch.randn(1, 3, 24, 40)
    trace = Trace("tokens", "fused", "depth")
    out = model(images, trace=trace)
    assert out.depth.shape == (1, 24, 40) and torch.equal(trace["depth"], out.depth)
    assert trace["fused"].shape == (1, 16, 48, 80)
    assert not torch.equal(model(images, edit=Edit().zero("heads", layer=0)).depth, out.depth)
