"""transformers' I-JEPA and ViT-MSN, which are ViTs, built live with random weights: equal outputs both ways."""

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import vitlab
from vitlab import convert

SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, patch_size=8)


def network(name: str, image_size: int | tuple[int, int]):
    family = name.removesuffix("ForImageClassification").removesuffix("Model")
    config = getattr(hf, f"{family}Config")(**SIZES, image_size=image_size, num_labels=7)
    model = getattr(hf, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize("name", ["IJepaForImageClassification", "ViTMSNForImageClassification"])
def test_classifiers_agree(name, tmp_path):
    theirs = network(name, 32)
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path)
    with torch.inference_mode():
        for size in ((32, 32), (40, 24)):
            images = torch.randn(2, 3, *size)
            expected = theirs(images, interpolate_pos_encoding=size != (32, 32)).logits
            torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["IJepaModel", "ViTMSNModel"])
def test_encoders_agree_both_ways(name, tmp_path):
    theirs = network(name, (32, 48))
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(2, 3, 32, 48)
    with torch.inference_mode():
        tokens = theirs(images).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), tokens, atol=1e-5, rtol=0)
    convert(tmp_path / "hf", tmp_path / "back", to="hf")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    left_out = {key for key in before if key.startswith("pooler")}  # of I-JEPA's first patch
    assert after.keys() == before.keys() - left_out and all(torch.equal(before[key], after[key]) for key in after)
