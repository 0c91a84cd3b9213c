"""transformers' BEiT and data2vec, built live with random weights: equal logits and tokens both ways, at other image
sizes too; and stored tensors of timm's BEiT and BEiT v2.
"""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import vitlab
from vitlab import convert
from vitlab.checkpoints.load import load_with_report

from .test_golden import unpack

SIZES = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, patch_size=8)
CONFIGS = {
    "a table in each layer": dict(use_relative_position_bias=True),
    "one table and absolute positions": dict(
        use_shared_relative_position_bias=True, use_absolute_position_embeddings=True, use_mask_token=True
    ),
    "class token, no scales": dict(use_relative_position_bias=True, use_mean_pooling=False, layer_scale_init_value=0.0),
    "both tables": dict(use_relative_position_bias=True, use_shared_relative_position_bias=True, hidden_act="relu"),
    "no square": dict(use_relative_position_bias=True, image_size=(32, 48)),
}


def randomise(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    return model.eval()


def classifier(options: dict, kind: str = "Beit"):
    config = getattr(hf, f"{kind}Config")(**{"image_size": 32, "num_labels": 7, **SIZES, **options})
    return randomise(getattr(hf, f"{kind}ForImageClassification")(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_tokens_agree_both_ways(name, tmp_path):
    theirs = classifier(CONFIGS[name])
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    for size in (ours.config.image_size, (40, 56), (24, 24)):
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)
            tokens = theirs.beit(images).last_hidden_state
            torch.testing.assert_close(ours.forward_features(images), tokens, atol=1e-5, rtol=0)
    convert(tmp_path / "hf", tmp_path / "back", to="hf")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = hf.BeitForImageClassification.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        torch.testing.assert_close(again(images).logits, theirs(images).logits, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["a table in each layer", "one table and absolute positions"])
def test_names_of_version_5_in_memory(name, tmp_path):
    theirs = classifier(CONFIGS[name])
    theirs.config.save_pretrained(tmp_path)
    save_file({key: value.clone() for key, value in theirs.state_dict().items()}, tmp_path / "model.safetensors")
    images = torch.randn(2, 3, 32, 40)
    with torch.inference_mode():
        torch.testing.assert_close(vitlab.load(tmp_path)(images), theirs(images).logits, atol=1e-5, rtol=0)


def test_data2vec(tmp_path):
    theirs = classifier(CONFIGS["a table in each layer"], "Data2VecVision")
    theirs.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 32, 40)
    with torch.inference_mode():
        torch.testing.assert_close(vitlab.load(tmp_path)(images), theirs(images).logits, atol=1e-5, rtol=0)


def test_the_encoder_of_a_pre_training(tmp_path):
    options = dict(image_size=32, vocab_size=11, use_mask_token=True, use_shared_relative_position_bias=True)
    theirs = randomise(hf.BeitForMaskedImageModeling(hf.BeitConfig(**SIZES, **options)))
    theirs.save_pretrained(tmp_path)
    ours, report = load_with_report(tmp_path)
    assert ours.config.pooling == "mean" and not ours.config.classes and report.counts()["unused"] == 4
    images = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        tokens = theirs.beit(images).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), tokens, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["timm_beit", "timm_beitv2"])
@pytest.mark.parametrize("folder", [False, True])
def test_stored_outputs_of_timm_agree(name, folder, tmp_path):
    path, tensors = unpack(name, tmp_path)
    if folder:
        path.rename(tmp_path / "model.safetensors")
        config = {"architecture": f"{name[5:]}_base_patch16_224", "pretrained_cfg": {"input_size": [3, 32, 32]}}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model, report = load_with_report(tmp_path if folder else path)
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(model(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)
        tokens = model.forward_features(tensors["input.images"])
        torch.testing.assert_close(tokens, tensors["output.features"], atol=1e-5, rtol=0)
        other, _ = load_with_report(path if path.exists() else tmp_path, eps=1e-3)
        assert (other(tensors["input.images"]) - tensors["output.logits"]).abs().max() > 1e-4


def test_a_grid_that_is_no_square_is_not_written(tmp_path):
    vitlab.save(vitlab.create("beit_digits", image_size=(8, 12)), tmp_path / "mine")
    with pytest.raises(vitlab.errors.UsageError, match="rows as columns"):
        convert(tmp_path / "mine", tmp_path / "hf", to="hf")
