"""What timm's names say: facts typed from timm 1.0.30's model definitions (width, heads, activation, eps)."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.timm_names import facts_of
from vitlab.errors import CheckpointError

from ..parity.test_golden import unpack

FACTS = {  # name -> width, heads, activation, eps
    "vit_wee_patch16_reg1_gap_256.sbb_in1k": (256, 4, "gelu", 1e-6),
    "vit_little_patch16_reg4_gap_256": (320, 5, "gelu", 1e-6),
    "vit_medium_patch16_gap_240": (512, 8, "gelu", 1e-6),
    "vit_mediumd_patch16_reg4_gap_384": (512, 8, "gelu", 1e-6),
    "vit_betwixt_patch16_reg1_gap_256": (640, 10, "gelu", 1e-6),
    "vit_base_patch16_gap_224": (768, 16, "gelu", 1e-6),
    "vit_base_patch16_reg4_gap_256": (768, 12, "gelu", 1e-6),
    "vit_base_patch16_plus_clip_240": (896, 14, "gelu", 1e-5),
    "vit_so150m_patch16_reg4_gap_384": (896, 14, "gelu", 1e-6),
    "vit_so150m2_patch16_reg1_gap_448": (832, 13, "gelu", 1e-6),
    "vit_so400m_patch14_siglip_gap_378": (1152, 16, "gelu", 1e-6),
    "vit_so400m_patch16_siglip_gap_256": (1152, 16, "gelu_tanh", 1e-6),
    "vit_giantopt_patch16_siglip_gap_256": (1536, 16, "gelu_tanh", 1e-6),
    "vit_giant_patch14_224": (1408, 16, "gelu", 1e-6),
    "vit_giant_patch14_reg4_dinov2": (1536, 24, "gelu", 1e-6),
    "vit_gigantic_patch14_clip_quickgelu_224": (1664, 16, "quick_gelu", 1e-5),
    "vit_xsmall_patch16_clip_224": (256, 4, "gelu", 1e-5),
    "deit3_medium_patch16_224": (512, 8, "gelu", 1e-6),
    "test_vit": (64, 2, "gelu", 1e-6),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts(name):
    width, heads, activation, eps = FACTS[name]
    facts = facts_of(name, width)
    assert (facts["heads"], facts["activation"], facts["eps"]) == (heads, activation, eps)
    assert "heads" not in facts_of(name, width + 64) and facts_of(name) == facts


def folder(tmp_path, name: str, model, **config):
    convert.write(model, tmp_path / "timm", "timm")
    path = tmp_path / "timm" / "config.json"
    usual = {
        k: v for k, v in json.loads(path.read_text(encoding="utf-8")).items() if k in ("num_classes", "pretrained_cfg")
    }
    path.write_text(json.dumps({"architecture": name, **usual, **config}), encoding="utf-8")
    return tmp_path / "timm"


def test_a_hub_folder_of_a_width_that_bare_weights_do_not_tell(tmp_path):
    """As on timm's hub: no model_args (or null), and the pooling beside them."""
    options = dict(image_size=32, patch_size=16, width=640, depth=1, mlp_ratio=1.0, classes=3, layer_scale=1e-5)
    tokens = dict(class_token=False, registers=1, prefix_positions="none", pooling="mean_norm")
    model = vitlab.create("vit_base", heads=10, eps=1e-6, **options, **tokens)
    args = {"global_pool": "avg", "model_args": None, "label_names": ["a", "b", "c"]}
    place = folder(tmp_path, "vit_betwixt_patch16_reg1_gap_256", model, **args)
    again, report = load_with_report(place)
    assert again.config.heads == 10 and again.config.tokens.registers == 1 and again.labels == ["a", "b", "c"]
    assert not any("heads" in note or "eps" in note for note in report.notes)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(again(images), model.eval()(images))


def test_a_width_that_was_changed_keeps_the_names_heads(tmp_path):
    """timm.create_model("vit_base_patch16_224", embed_dim=384) has 12 heads, not the 6 that are usual for 384."""
    model = vitlab.create("vit_base", image_size=32, width=384, depth=1, mlp_ratio=1.0, classes=3, heads=12)
    place = folder(tmp_path, "vit_base_patch16_224", model, model_args={"embed_dim": 384, "img_size": 32})
    assert load_with_report(place)[0].config.heads == 12


@pytest.mark.parametrize("name", ["vit_base_patch16_rpn_224", "vit_dlittle_patch16_reg1_gap_256", "test_vit4"])
def test_other_blocks_under_the_same_names_are_refused(name, tmp_path):
    model = vitlab.create("vit_base", image_size=32, width=64, depth=1, heads=2, classes=3)
    with pytest.raises(CheckpointError, match=f"timm's {name} has .*, which is not known here"):
        vitlab.load(folder(tmp_path, name, model))


def test_registers_and_mean_of_so150m_and_the_prefix_of_transformers(tmp_path):
    path, tensors = unpack("timm_so150m", tmp_path)
    place = tmp_path / "folder"
    place.mkdir()
    args = dict(embed_dim=48, depth=2, num_heads=4, img_size=32, patch_size=8)
    config = {"architecture": "vit_so150m_patch16_reg4_gap_256", "num_classes": 7, "model_args": args}
    wrapper = {"model_type": "timm_wrapper", "architectures": ["TimmWrapperForImageClassification"]}
    wrapper |= {"label_names": [f"LABEL_{i}" for i in range(7)], "do_pooling": True}
    for prefix, more in (("", {}), ("timm_model.", wrapper)):
        state = {prefix + key: value for key, value in load_file(path).items()}
        save_file(state, place / "model.safetensors")
        (place / "config.json").write_text(json.dumps({**config, **more}), encoding="utf-8")
        model, report = load_with_report(place)
        assert model.config.head.pooling == "mean" and model.config.positions.prefix_positions == "all"
        assert model.labels is None and report.dialect == "timm"
        with torch.inference_mode():
            tokens, logits = model.forward_features(tensors["input.images"]), model(tensors["input.images"])
        torch.testing.assert_close(tokens, tensors["output.features"], atol=1e-5, rtol=0)
        torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-5, rtol=0)
    convert.write(model, tmp_path / "back", "timm")
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == load_file(path).keys()
    assert all(torch.equal(value, written[key]) for key, value in load_file(path).items())


def test_a_norm_after_the_class_token(tmp_path):
    """timm's fc_norm=True with global_pool="token"; without class token the same tensors are a mean's."""
    options = dict(image_size=32, width=64, depth=1, heads=2, classes=3, eps=1e-6, pooling="class_norm")
    model = vitlab.create("vit_base", **options).eval()
    torch.nn.init.normal_(model.head_norm.bias)
    convert.write(model, tmp_path / "timm", "timm")
    args = json.loads((tmp_path / "timm" / "config.json").read_text(encoding="utf-8"))["model_args"]
    assert (args["fc_norm"], args["global_pool"]) == (True, "token")
    again, _ = load_with_report(tmp_path / "timm")
    assert again.config.head.pooling == "class_norm" and again.norm is None
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = model.head(model.head_norm(model.forward_features(images)[:, 0]))
        torch.testing.assert_close(again(images), expected)
