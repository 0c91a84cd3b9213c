"""A config beside the weights says what they are: every refusal names it, and what to do."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.declared import NOT_READ, declared_by
from vitlab.errors import CheckpointError

CONFIGS = {  # what config.json says -> what the refusal says
    "convnext": (dict(model_type="convnext"), ("model_type 'convnext'", "convolutional", "Known of transformers: vit")),
    "dinov3_convnext": (dict(model_type="dinov3_convnext"), ("convolutional network", "take the ViT")),
    "zoedepth": (dict(model_type="zoedepth"), ("depth estimator", "DINOv2")),
    "sam": (dict(model_type="sam"), ("model_type 'sam'", "outlines objects")),
    "llava": (
        dict(model_type="llava", vision_config=dict(model_type="clip_vision_model")),
        ("model_type 'llava'", "language model", "clip_vision_model"),
    ),
    "a long name": (
        dict(model_type="kyutai_speech_to_text_encoder"),
        ("model_type 'kyutai_speech_to_text_encoder'; known are",),
    ),
    "unheard-of": (dict(model_type="vitamin"), ("model_type 'vitamin'; known are vit, deit", "of transformers")),
    "timm's efficientnet": (
        dict(architecture="efficientnet_b0", model_args=None),
        ("architecture 'efficientnet_b0'", "convolutional", "Known of timm: vit", "keys, e.g. x.weight"),
    ),
    "timm's, by transformers": (
        dict(model_type="timm_wrapper", architecture="mixer_b16_224"),
        ("architecture 'mixer_b16_224'; known are vit", "of timm"),
    ),
    "open_clip's": (None, ("the image tower 'convnext_base'", "convolutional")),
}


@pytest.mark.parametrize(("config", "said"), CONFIGS.values(), ids=CONFIGS)
def test_what_a_config_says_is_named(config, said, tmp_path):
    save_file({"x.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    if config is None:
        cfg = {"model_cfg": {"vision_cfg": {"timm_model_name": "convnext_base"}, "text_cfg": {}}}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(cfg), encoding="utf-8")
    else:
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        vitlab.load(tmp_path)
    assert "unknown layout" not in str(caught.value)
    assert all(part in str(caught.value) for part in (str(tmp_path), *said)), str(caught.value)


def test_a_model_type_that_is_not_known_needs_no_weights_to_be_read(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "convnext"}', encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="convolutional"):
        vitlab.load(tmp_path)


def test_any_other_refusal_names_the_network_too(tmp_path):
    model = vitlab.create("vit_digits")
    for to, name in (("hf", "model_type 'vit'"), ("timm", "architecture 'vit_base_patch16_224'")):
        convert.write(model, tmp_path / to, to)
        state = vitlab.checkpoints.files.read_tensors(tmp_path / to / "model.safetensors")
        save_file({**state, "stray": torch.ones(2)}, tmp_path / to / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"stray.*\(config.json has {name}\.\)"):
            vitlab.load(tmp_path / to)
        state.pop(next(key for key in state if key.endswith(("mlp.fc2.bias", "0.output.dense.bias"))))
        save_file(state, tmp_path / to / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"is missing.*\(config.json has {name}\.\)"):
            vitlab.load(tmp_path / to)


def test_a_network_that_is_read_is_not_called_another(tmp_path):
    names = [name for family in vitlab.checkpoints.families.FAMILIES.values() for name in family.model_types]
    for name in (*names, "siglip", "siglip2", "dinov3_vit", "aimv2_vision_model", "beit", "swinv2", "ijepa"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}), encoding="utf-8")
        declared = declared_by(tmp_path)
        assert declared is not None and declared.what == "", (name, NOT_READ)
