"""transformers' Swin, built live with random weights, and stored tensors of timm: equal logits and maps both ways."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.layers.trace import Trace

from .test_golden import GOLDEN, same, unpack

CONFIGS = {  # with the images they are given
    "three stages of T": (
        dict(embed_dim=12, depths=[2, 2, 3], num_heads=[1, 2, 3], window_size=7, image_size=112),
        (112, 112),
    ),
    "filled up everywhere": (
        dict(embed_dim=12, depths=[2, 2, 2], num_heads=[2, 3, 4], window_size=4, image_size=64, patch_size=4),
        (75, 101),
    ),
    "a window as large as one side": (
        dict(embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=5, image_size=40, patch_size=4),
        (40, 76),
    ),
    "grey, no biases, another activation and eps": (
        dict(
            **dict(embed_dim=8, depths=[2, 1], num_heads=[2, 4], window_size=3, image_size=24, patch_size=2),
            **dict(num_channels=1, qkv_bias=False, hidden_act="gelu_pytorch_tanh", mlp_ratio=2.3, layer_norm_eps=1e-3),
        ),
        (24, 31),
    ),
}


def randomise(model: nn.Module) -> nn.Module:
    """Every parameter far from its start value, so that a forgotten one shows; embeddings small, so that eps does."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(mean=float(norm), std=0.3 if parameter.ndim < 2 else parameter[0].numel() ** -0.5)
            if "bias_table" in name:
                parameter.normal_()
            if "projection" in name:
                parameter.mul_(0.01)
    return model.eval()


def classifier(name: str, classes: int = 7) -> nn.Module:
    return randomise(hf.SwinForImageClassification(hf.SwinConfig(**CONFIGS[name][0], num_labels=classes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_maps_agree_both_ways(name, tmp_path):
    theirs = classifier(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(2, ours.config.channels, *CONFIGS[name][1])
    ends = ours.config.stage_ends
    trace = Trace("patch_embed", "tokens", "merge", layers=sorted({*ends, *(n + 1 for n in ends[:-1])}))
    with torch.inference_mode():
        out = theirs(images, output_hidden_states=True)
        logits = ours(images, trace=trace)
        maps = ours.forward_pyramid(images)
    assert out.logits.std() > 0.1  # else equal would mean little
    torch.testing.assert_close(logits, out.logits, atol=1e-5, rtol=0)
    hidden = [trace["patch_embed"], *(trace["merge", n + 1] for n in ends[:-1]), trace["tokens", -1]]
    for a, b in zip(hidden, out.hidden_states, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(maps[-1], out.reshaped_hidden_states[-1], atol=1e-4, rtol=1e-5)
    assert [m.shape[1] for m in maps] == [level.channels for level in ours.pyramid]

    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "back"))
    same(source, {key: value for key, value in written.items() if "position_index" not in key})
    back = hf.SwinForImageClassification.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        torch.testing.assert_close(back(images).logits, out.logits, atol=0, rtol=0)


def test_pyramid_equals_transformers_stages(tmp_path):
    """Their backbone norms each map once more; before that they are ours."""
    theirs = classifier("filled up everywhere")
    theirs.save_pretrained(tmp_path)
    ours, images = vitlab.load(tmp_path), torch.randn(2, 3, 75, 101)
    with torch.inference_mode():
        z, size = theirs.swin.embeddings(images)
        out = theirs.swin.encoder(z, size, output_hidden_states=True, output_hidden_states_before_downsampling=True)
        maps = ours.forward_pyramid(images)
    for a, b in zip(maps, out.reshaped_hidden_states[1:], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)


def test_training_gives_the_same_gradients(tmp_path):
    theirs = classifier("filled up everywhere")
    theirs.save_pretrained(tmp_path)
    ours, images = vitlab.load(tmp_path), torch.randn(2, 3, 75, 101)
    for model in (ours.double().train(), theirs.double().train()):
        for module in model.modules():
            if hasattr(module, "rate"):
                module.rate = 0.0
            if hasattr(module, "drop_prob"):
                module.drop_prob = 0.0
    images = images.double()
    ours(images).square().sum().backward()
    theirs(images).logits.square().sum().backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    at = "swin.encoder.layers.1.blocks.1.attention"
    table = gradients[f"{at}.relative_position_bias.relative_position_bias_table"]
    torch.testing.assert_close(ours.stages[1][1].attention.relative.table.grad, table, atol=1e-9, rtol=1e-7)
    qkv = torch.cat([gradients[f"{at}.{part}_proj.weight"] for part in "qkv"])
    torch.testing.assert_close(ours.stages[1][1].attention.qkv.weight.grad, qkv, atol=1e-9, rtol=1e-7)
    first = gradients["swin.embeddings.patch_embeddings.projection.weight"]
    torch.testing.assert_close(ours.embeds[0].proj.weight.grad, first, atol=1e-7, rtol=1e-7)


def test_a_model_without_head(tmp_path):
    theirs = randomise(hf.SwinModel(hf.SwinConfig(**CONFIGS["filled up everywhere"][0])))
    theirs.save_pretrained(tmp_path / "hf")
    ours, images = vitlab.load(tmp_path / "hf"), torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        out = theirs(images)
        torch.testing.assert_close(ours(images), out.pooler_output, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.forward_features(images), out.last_hidden_state, atol=1e-5, rtol=0)
    model = vitlab.load(tmp_path / "hf")
    convert.write(model, tmp_path / "back", "hf")
    rows = convert.compare(tmp_path / "hf", tmp_path / "back", model, changed=False)
    assert len(rows) == 3 and all(row.difference is not None and row.difference < 1e-5 for row in rows), rows


def test_names_in_memory_and_in_a_bare_file(tmp_path):
    theirs = classifier("filled up everywhere")
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    with pytest.warns(AssumedWarning, match=r"do not say eps=1e-05, activation=gelu, mean=\(0.485"):
        ours = vitlab.load(tmp_path / "bare.pth", image_size=64)
    assert ours.config.image_size == (64, 64) and (ours.config.window, ours.config.heads) == (4, (2, 3, 4))
    images = torch.randn(2, 3, 75, 101)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["timm_swin", "hf4_swin"])
def test_stored_outputs_agree(name, tmp_path):
    path, tensors = unpack(name, tmp_path)
    model, report = load_with_report(path)
    assert report.dialect == name.split("_")[0].replace("hf4", "hf")
    assert report.counts()["matched"] == len(model.state_dict())
    unused = [row.theirs[0] for row in report.rows if row.status == "unused"]
    assert all(key.endswith("relative_position_index") for key in unused)
    with torch.inference_mode():
        logits, features = model(tensors["input.images"]), model.forward_features(tensors["input.images"])
    torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-5, rtol=0)
    if "output.features" in tensors:
        torch.testing.assert_close(features, tensors["output.features"].flatten(1, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["timm_swin", "hf4_swin"])
def test_a_wrong_eps_shows(name, tmp_path):
    path, tensors = unpack(name, tmp_path)
    model, _ = load_with_report(path, merge_eps=1e-6)
    with torch.inference_mode():
        assert (model(tensors["input.images"]) - tensors["output.logits"]).abs().max() > 1e-4


def test_transformers_4_weights_come_back_identical(tmp_path):
    path, _ = unpack("hf4_swin", tmp_path)
    model, _ = load_with_report(path)
    convert.write(model, tmp_path / "back", "hf")
    same(load_file(path), load_file(tmp_path / "back" / "model.safetensors"))


def test_the_authors_count_merging_to_the_stage_before(tmp_path):
    """Their files: merging under the stage before, a plain head, and buffers that are computed here."""
    tensors = load_file(GOLDEN / "timm_swin.safetensors")
    state = {}
    for key, value in tensors.items():
        if key.startswith("weights."):
            key = key.removeprefix("weights.").replace("head.fc.", "head.")
            state[key.replace("layers.1.downsample", "layers.0.downsample")] = value
    state["layers.0.blocks.1.attn_mask"] = torch.zeros(24, 16, 16)
    state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    save_file(state, tmp_path / "swin.safetensors")
    model, report = load_with_report(tmp_path / "swin.safetensors")
    assert report.dialect == "microsoft" and model.config.shift_axes == "together"
    with torch.inference_mode():
        logits = model(tensors["input.images"])
    torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-5, rtol=0)


def test_a_timm_folder(tmp_path):
    path, tensors = unpack("timm_swin", tmp_path)
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / "model.safetensors")
    config = {
        "architecture": "swin_tiny_patch4_window7_224",
        "num_classes": 7,
        "model_args": {"window_size": 4, "embed_dim": 24},
        "pretrained_cfg": {"input_size": [3, 64, 96], "mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.9},
    }
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = vitlab.load(tmp_path / "folder")
    assert (model.config.image_size, model.preprocess.size) == ((64, 96), (64, 96))
    assert model.preprocess.mean == (0.1,) * 3 and model.preprocess.resize == 71
    with torch.inference_mode():
        torch.testing.assert_close(model(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)
    config["model_args"]["always_partition"] = True
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="always_partition=True is not known"):
        vitlab.load(tmp_path / "folder")


def test_a_last_stage_with_a_smaller_window(tmp_path):
    """timm makes a window no larger than the map at the size that the network is built for; maps of 16 and 8 tokens
    are no multiples of 6, so that rolling before padding shows too.
    """
    path, tensors = unpack("timm_swin_last_window", tmp_path)
    model, _ = load_with_report(path)
    assert model.config.window == (6, 6, 4)
    with torch.inference_mode():
        logits, features = model(tensors["input.images"]), model.forward_features(tensors["input.images"])
        torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-5, rtol=0)
        torch.testing.assert_close(features, tensors["output.features"].flatten(1, 2), atol=1e-5, rtol=0)
        other = load_with_report(path, roll_first=False)[0](tensors["input.images"])
    assert (other - logits).abs().max() > 1e-3
    vitlab.save(model, tmp_path / "native")
    assert vitlab.load(tmp_path / "native").config == model.config
    with pytest.raises(ValueError, match=r"one window for all stages, and this network \(6, 6, 4\)"):
        convert.write(model, tmp_path / "out", "hf")
    resized = vitlab.load(tmp_path / "native", window=6)
    assert resized.stages[2][0].attention.relative.table.shape == (121, 4)
    notes = convert.write(resized, tmp_path / "out", "hf")
    assert any("rolls" in note for note in notes)
    with pytest.raises(ValueError, match=r"window=\(6, 6\) must be one number, or one for each of the 3 stages"):
        vitlab.load(tmp_path / "native", window=(6, 6))


def test_what_is_not_known_is_refused(tmp_path):
    options = {**CONFIGS["filled up everywhere"][0], "use_absolute_embeddings": True}
    randomise(hf.SwinForImageClassification(hf.SwinConfig(**options))).save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match="use_absolute_embeddings"):
        vitlab.load(tmp_path / "hf")
    path, _ = unpack("timm_swin", tmp_path)
    state = load_file(path)
    state["layers.1.blocks.0.attn.relative_position_bias_table"] = torch.zeros(16, 4)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"bias tables of \[49, 16\] entries"):
        load_with_report(tmp_path / "other.safetensors")
    model = vitlab.create("swin_cifar")
    with pytest.raises(ValueError, match="not written as timm: use --to hf or native"):
        convert.write(model, tmp_path / "timm", "timm")
    with pytest.raises(ValueError, match="merge_eps=1e-06"):
        convert.write(vitlab.create("swin_cifar", merge_eps=1e-6), tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
