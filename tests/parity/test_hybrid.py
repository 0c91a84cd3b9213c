"""R + ViT: stored tensors of timm, whose hybrid has a stem alone; and for the stages transformers' BiT, built live."""

import json
from dataclasses import replace

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.models.hybrid import MODELS

from .test_golden import GOLDEN, unpack


def timm_folder(folder, **changed) -> dict[str, Tensor]:
    path, tensors = unpack("timm_hybrid", folder)
    path.rename(folder / "model.safetensors")
    args = {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 4, "patch_size": 8}
    config = {"architecture": "vit_tiny_r_s16_p8_224", "num_classes": 7, "model_args": args, **changed}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors


@pytest.mark.parametrize("bare", [True, False])
def test_stored_outputs_of_timm_agree(bare, tmp_path):
    tensors = timm_folder(tmp_path)
    model, report = load_with_report(
        tmp_path / "model.safetensors" if bare else tmp_path, **{"heads": 4} if bare else {}
    )
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict()) == len(report.rows)
    assert (model.config.image_size, model.config.patch_size, model.preprocess.mean) == ((64, 64), 32, (0.5,) * 3)
    with torch.inference_mode():
        logits, features = model(tensors["input.images"]), model.forward_features(tensors["input.images"])
    torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(features, tensors["output.features"], atol=1e-5, rtol=0)


PARTS = ("stem_width", "stage_depths", "stage_widths", "patch_size")
BIT = dict(layer_type="bottleneck", global_padding="same", embedding_dynamic_padding=True, embedding_size=32)


def with_stages(bit: hf.BitModel) -> dict[str, Tensor]:
    """timm's names: the blocks of the stored ViT, after transformers' stages."""
    stored = load_file(GOLDEN / "timm_hybrid.safetensors")
    state = {key.removeprefix("weights."): value for key, value in stored.items() if key.startswith("weights.")}
    state = {key: value for key, value in state.items() if "backbone" not in key}
    for key, value in bit.state_dict().items():
        key = key.replace("embedder.convolution", "stem.conv").replace("embedder.norm", "stem.norm")
        state["patch_embed.backbone." + key.replace("encoder.", "").replace(".layers.", ".blocks.")] = value
    state["patch_embed.proj.weight"] = torch.randn(48, bit.config.hidden_sizes[-1], 1, 1) * 0.1
    return state


def test_the_stages_agree_with_transformers_bit(tmp_path):
    torch.manual_seed(0)
    bit = hf.BitModel(hf.BitConfig(**BIT, hidden_sizes=[128, 256], depths=[2, 3])).eval()
    with torch.no_grad():
        for parameter in bit.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = with_stages(bit)
    save_file(state, tmp_path / "hybrid.safetensors")
    model, report = load_with_report(tmp_path / "hybrid.safetensors", heads=4)
    c = model.config
    assert (c.stage_depths, c.stage_widths, c.stem_width, c.patch_size) == ((2, 3), (128, 256), 32, 8)
    assert report.counts()["matched"] == len(model.state_dict()) == len(state)
    images = torch.randn(2, 3, 24, 40).double()  # in float32 the sums round by 2e-5
    model.double(), bit.double()
    with torch.inference_mode():
        maps = bit(images).last_hidden_state
        expected = model.patch_embed.proj(maps).flatten(2).transpose(1, 2)
        assert maps.shape[2:] == (3, 5) and expected.std() > 0.1
        torch.testing.assert_close(model.patch_embed(images), expected, atol=1e-10, rtol=0)
        assert model(images).shape == (2, 7)  # positions are resized


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "vit_base_mci_224"}, "architecture 'vit_base_mci_224' beside a ViT with a backbone"),
        ({"model_args": {"num_heads": 4, "patch_size": 4}}, "patch_size=16 but the weights have 32"),
        ({"model_args": {"num_heads": 4, "padding_same": False}}, "padding_same"),
    ],
)
def test_other_hybrids_are_refused(changed, message, tmp_path):
    timm_folder(tmp_path, **changed)
    with pytest.raises(ValueError, match=message):
        vitlab.load(tmp_path)


def test_transformers_vit_hybrid_is_refused_by_name(tmp_path):
    save_file(
        {"vit.embeddings.patch_embeddings.projection.weight": torch.zeros(8, 64, 1, 1)}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit_hybrid"}), encoding="utf-8")
    with pytest.raises(ValueError, match="vit_hybrid"):
        vitlab.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "parameters"),  # as timm counts them
    [("vit_tiny_r_s16_p8_224", 6_337_704), ("vit_small_r26_s32_224", 36_431_912), ("vit_base_r50_s16_384", 98_950_952)],
)
def test_names_and_sizes(name, parameters):
    with torch.device("meta"):
        model = vitlab.create(name)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model.config.image_size == (int(name[-3:]),) * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(stage_depths=(1, 1)), "equally many"),
        (dict(stage_widths=(64, 512, 1024)), "of 128"),
        (dict(patch_size=8), "patch_size=8 must be a multiple of 16"),
        (dict(stem="conv"), "leave stem"),
        (dict(stem_width=48), "a multiple of 32"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vitlab.create("vit_base_r50_s16", **options)


def test_it_is_saved(tmp_path):
    model = vitlab.create("vit_tiny_r_s16_p8", width=32, depth=1, heads=2, classes=3, image_size=64).eval()
    vitlab.save(model, tmp_path / "a")
    again, images = vitlab.load(tmp_path / "a"), torch.randn(1, 3, 64, 96)
    with torch.inference_mode():
        assert again.config == model.config and torch.equal(again(images), model(images))
    with pytest.raises(ValueError, match="not written as hf: use --to timm or native"):
        convert.write(model, tmp_path / "hf", "hf")
    other = vitlab.create("vit_tiny_r_s16_p8", stage_depths=(1,), stage_widths=(128,))
    with pytest.raises(ValueError, match=r"cannot express a ResNet of stages \(1,\)"):
        convert.write(other, tmp_path / "timm", "timm")


@pytest.mark.filterwarnings("ignore")  # bare weights
@pytest.mark.parametrize("stages", [False, True])
def test_written_as_timm_has_it(stages, tmp_path, monkeypatch):
    timm_folder(tmp_path)
    model, name = vitlab.load(tmp_path), "vit_tiny_r_s16_p8_224"
    if stages:
        bit = hf.BitModel(hf.BitConfig(**BIT, hidden_sizes=[128, 256], depths=[2, 3]))
        save_file(with_stages(bit), tmp_path / "model.safetensors")
        model, name = vitlab.load(tmp_path / "model.safetensors", heads=4), "vit_base_r50_s16_384"
        with pytest.raises(ValueError, match=r"cannot express a ResNet of stages \(2, 3\)"):  # timm has none by name
            convert.write(model, tmp_path / "back", "timm")
        small = replace(MODELS["vit_base_r50_s16"], **{part: getattr(model.config, part) for part in PARTS})
        monkeypatch.setitem(MODELS, "vit_base_r50_s16", small)
    convert.write(model, tmp_path / "back", "timm")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "back"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    config = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert (config["architecture"], config["model_args"]["patch_size"]) == (name, 1 if stages else 8)
    again, images = vitlab.load(tmp_path / "back"), torch.randn(2, 3, 64, 64)
    assert again.config == model.config
    with torch.inference_mode():
        assert torch.equal(again(images), model(images))
