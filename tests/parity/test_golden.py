"""Other libraries' stored weights, inputs and outputs: do we compute the same thing?"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report

GOLDEN = Path(__file__).parent.parent / "data" / "golden"
WIDE = dict(heads=4, image_size=(32, 48))
FILES = {  # file -> what a bare state dict cannot tell
    "timm_vit_cls": WIDE,
    "timm_vit_mean_fcnorm": WIDE,
    "timm_vit_mlp_ratio_quickgelu": {**WIDE, "activation": "quick_gelu"},
    "timm_vit_prenorm_nobias": dict(**WIDE, eps=1e-6, activation="gelu"),  # not what a CLIP's trunk has
    "timm_vit_registers_layerscale": WIDE,
    "timm_deit_distilled": WIDE,
    "torchvision_vit": dict(heads=4),
    "lucidrains_vit": dict(heads=4),
    "facebook_dinov2_plain": dict(heads=4),
    "facebook_dinov2_registers": dict(heads=4),
    "hf4_vit": WIDE,
    "hf4_deit_distilled": WIDE,
    "jax_vit_outputs": {},  # the JAX layout tells its heads
}


def unpack(name: str, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The weights alone, as a file of that library, and everything else."""
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    if name.startswith("jax"):
        return GOLDEN / "jax_vit.npz", tensors
    weights = {key.removeprefix("weights."): value for key, value in tensors.items() if key.startswith("weights.")}
    save_file(weights, folder / f"{name}.safetensors")
    return folder / f"{name}.safetensors", tensors


@pytest.mark.parametrize("name", FILES)
def test_outputs_agree(name, tmp_path):
    path, tensors = unpack(name, tmp_path)
    model, report = load_with_report(path, **FILES[name])
    expected = "facebook" if "deit_distilled" in name and "timm" in name else name.split("_")[0].replace("hf4", "hf")
    assert report.dialect == expected  # a distilled DeiT has the same names there, and facebook's mean and std
    assert report.counts()["matched"] == len(model.state_dict()) == len(report.rows)
    compared = 0
    with torch.inference_mode():
        tokens = model.forward_features(tensors["input.images"])
        outputs = {"logits": model(tensors["input.images"]), "features": tokens}
        if model.head_distill is not None:
            outputs["cls_logits"], outputs["distillation_logits"] = model.forward_heads(tokens)
    for key, ours in outputs.items():
        if f"output.{key}" in tensors:
            torch.testing.assert_close(ours, tensors[f"output.{key}"], atol=1e-5, rtol=0)
            compared += 1
    assert compared == sum(key.startswith("output.") for key in tensors)


@pytest.mark.parametrize("name", ["timm_vit_cls", "lucidrains_vit", "hf4_vit"])
def test_a_wrong_eps_shows(name, tmp_path):
    """The check above can fail: with another library's eps it does."""
    path, tensors = unpack(name, tmp_path)
    wrong = {"timm_vit_cls": 1e-5, "lucidrains_vit": 1e-6, "hf4_vit": 1e-6}[name]
    with pytest.warns(AssumedWarning, match="activation"):
        model = vitlab.load(path, **FILES[name], eps=wrong)
    with torch.inference_mode():
        assert (model(tensors["input.images"]) - tensors["output.logits"]).abs().max() > 1e-4


def test_what_is_assumed_is_said(tmp_path):
    path, _ = unpack("timm_vit_cls", tmp_path)
    with pytest.warns(AssumedWarning, match=r"timm weights do not say eps=1e-06, activation=gelu"):
        vitlab.load(path, **WIDE)
    vitlab.load(path, **WIDE, eps=1e-6, activation="gelu")  # told: nothing to say


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("timm")])
def test_timm_weights_come_back_identical(name, tmp_path):
    path, _ = unpack(name, tmp_path)
    model, _ = load_with_report(path, **FILES[name])
    convert.write(model, tmp_path / "back", "timm")
    same(load_file(path), load_file(tmp_path / "back" / "model.safetensors"))


def test_a_timm_folder_needs_no_telling(tmp_path):
    """config.json says heads, size, eps, activation and pooling."""
    for name in ("timm_vit_mlp_ratio_quickgelu", "timm_vit_mean_fcnorm", "timm_deit_distilled"):
        path, tensors = unpack(name, tmp_path)
        model, _ = load_with_report(path, **FILES[name])
        convert.write(model, tmp_path / name, "timm")
        again, _ = load_with_report(tmp_path / name)
        assert again.config.image_size == (32, 48)
        with torch.inference_mode():
            torch.testing.assert_close(again(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)


def test_jax_weights_come_back_identical(tmp_path):
    import numpy as np

    model, _ = load_with_report(GOLDEN / "jax_vit.npz")
    convert.write(model, tmp_path / "back.npz", "jax")
    with np.load(GOLDEN / "jax_vit.npz") as theirs, np.load(tmp_path / "back.npz") as ours:
        assert set(theirs.files) == set(ours.files)
        for key in theirs.files:
            np.testing.assert_array_equal(theirs[key], ours[key])


@pytest.mark.parametrize("name", ["hf4_vit", "hf4_deit_distilled"])
def test_transformers_4_weights_come_back_identical(name, tmp_path):
    path, _ = unpack(name, tmp_path)
    model, _ = load_with_report(path, **FILES[name])
    convert.write(model, tmp_path / "back", "hf")
    same(load_file(path), load_file(tmp_path / "back" / "model.safetensors"))


@pytest.mark.parametrize("name", ["facebook_dinov2_plain", "facebook_dinov2_registers"])
def test_dinov2_keeps_its_mask_token_for_the_way_back(name, tmp_path):
    path, _ = unpack(name, tmp_path)
    model, _ = load_with_report(path, **FILES[name])
    vitlab.save(model, tmp_path / "native")
    again = vitlab.load(tmp_path / "native")
    assert torch.equal(again.mask_token, load_file(path)["mask_token"])
    convert.write(again, tmp_path / "hf", "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(written["embeddings.mask_token"], load_file(path)["mask_token"])


def same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        assert torch.equal(value, ours[key]), key
