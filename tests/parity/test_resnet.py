"""transformers' ResNets, built live with random weights and random batch-norm statistics: equal logits and maps both
ways. timm and torchvision name alike; their names are written out here once more, and put on the same weights.
"""

import json
import re

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.convnext.image_processing_pil_convnext import ConvNextImageProcessorPil

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.hf import preprocess_from
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.images.preprocess import Preprocess
from vitlab.layers.trace import Trace

from .test_golden import unpack

CONFIGS = {  # 18 and 50 in their depths, narrow
    "18": dict(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[8, 12, 16, 24], embedding_size=8),
    "50": dict(layer_type="bottleneck", depths=[3, 4, 6, 3], hidden_sizes=[16, 24, 32, 48], embedding_size=12),
    "stride in the 1x1": dict(
        layer_type="bottleneck",
        depths=[1, 2, 1, 1],
        hidden_sizes=[16, 16, 20, 24],
        embedding_size=16,
        downsample_in_bottleneck=True,
    ),
    "grey, 3 stages, no change of width": dict(
        layer_type="basic", depths=[1, 2, 1], hidden_sizes=[8, 8, 16], embedding_size=8, num_channels=1
    ),
}


def randomise(model: nn.Module) -> nn.Module:
    """Every parameter and every statistic far from its start value, so that a forgotten one shows."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.weight.normal_(std=module.weight[0].numel() ** -0.5)
            if isinstance(module, nn.Linear):
                module.bias.normal_()
            if isinstance(module, nn.BatchNorm2d):
                module.weight.normal_(mean=1, std=0.2)
                module.bias.normal_(std=0.3)
                module.running_mean.normal_(std=0.3)
                module.running_var.uniform_(0.5, 2)
                module.num_batches_tracked.random_(1, 1000)
    return model.eval()


def classifier(name: str, classes: int = 7) -> nn.Module:
    return randomise(hf.ResNetForImageClassification(hf.ResNetConfig(**CONFIGS[name], num_labels=classes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_maps_agree_both_ways(name, tmp_path):
    theirs = classifier(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(3, ours.config.channels, 45, 70)
    trace = Trace("stem", "block", layers=ours.config.stage_ends)
    with torch.inference_mode():
        out = theirs(images, output_hidden_states=True)
        logits = ours(images, trace=trace)
    assert out.logits.std() > 0.1  # else equal would mean little
    torch.testing.assert_close(logits, out.logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(trace["stem"], out.hidden_states[0], atol=1e-5, rtol=0)
    with torch.inference_mode():
        pyramid = ours.forward_pyramid(images)
    for level, found, maps in zip(ours.pyramid, pyramid, out.hidden_states[1:], strict=True):
        torch.testing.assert_close(found, maps, atol=1e-4, rtol=1e-5)
        assert level.channels == maps.shape[1] and maps.shape[2] == -(-images.shape[2] // level.stride)
    for end, maps in zip(ours.config.stage_ends, out.hidden_states[1:], strict=True):
        torch.testing.assert_close(trace["block", end], maps, atol=1e-5, rtol=0)

    convert.write(ours, tmp_path / "back", "hf")
    source, written = (load_file(tmp_path / place / "model.safetensors") for place in ("hf", "back"))
    assert written.keys() == source.keys()
    for key, value in source.items():
        assert torch.equal(value, written[key]), key
    back = hf.ResNetForImageClassification.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        torch.testing.assert_close(back(images).logits, out.logits, atol=0, rtol=0)


def test_training_mode_agrees_too(tmp_path):
    """Batch statistics in the forward pass, and the running ones after it."""
    theirs = classifier("18")
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path)
    images = torch.randn(4, 3, 40, 56)
    torch.testing.assert_close(ours.train()(images), theirs.train()(images).logits, atol=1e-5, rtol=0)
    names = {key: ours.state_dict()[key] for key in ours.state_dict() if "running" in key or "tracked" in key}
    for (_, a), (_, b) in zip(names.items(), _statistics(theirs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def _statistics(model):
    """In the order of ours: within a block, transformers has its shortcut first."""
    found = {key: value for key, value in model.state_dict().items() if "running" in key or "tracked" in key}
    return sorted(found.items(), key=lambda row: _place(row[0], list(found)))


def _place(key: str, keys: list[str]) -> tuple:
    block = re.search(r"stages\.(\d+)\.layers\.(\d+)", key)
    where = (int(block[1]), int(block[2])) if block else (-1, 0)
    return *where, "shortcut" in key, keys.index(key)


def test_a_model_without_head(tmp_path):
    theirs = randomise(hf.ResNetModel(hf.ResNetConfig(**CONFIGS["50"])))
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(2, 3, 45, 70)
    with torch.inference_mode():
        out = theirs(images)
        torch.testing.assert_close(ours(images), out.pooler_output.flatten(1), atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.forward_features(images), out.last_hidden_state, atol=1e-5, rtol=0)
    convert.write(ours, tmp_path / "back", "hf")
    assert load_file(tmp_path / "back" / "model.safetensors").keys() == theirs.state_dict().keys()


def test_names_in_memory_and_in_a_bare_file(tmp_path):
    theirs = classifier("50")
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    with pytest.warns(AssumedWarning, match=r"do not say stride_in=3x3, mean=\(0.485"):
        ours = vitlab.load(tmp_path / "bare.pth")
    images = torch.randn(2, 3, 45, 70)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)


def test_convert_checks_itself_against_transformers(tmp_path):
    classifier("18").save_pretrained(tmp_path / "hf")
    model = vitlab.load(tmp_path / "hf", image_size=(45, 70))
    for target in (tmp_path / "out", tmp_path / "bare.safetensors"):
        convert.write(model, target, "hf")
        rows = convert.compare(tmp_path / "hf", target, model, changed=False)
        assert len(rows) == (3 if target.is_dir() else 2)
        assert all(row.difference is not None and row.difference < 1e-5 for row in rows), rows


def test_labels_and_preprocess_travel(tmp_path):
    names = {i: f"bird {i}" for i in range(3)}
    theirs = randomise(hf.ResNetForImageClassification(hf.ResNetConfig(**CONFIGS["18"], id2label=names)))
    theirs.save_pretrained(tmp_path)
    processor = {  # as microsoft/resnet-50 has it
        "crop_pct": 0.875,
        "do_normalize": True,
        "do_resize": True,
        "feature_extractor_type": "ConvNextFeatureExtractor",
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
        "resample": 3,
        "size": 224,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    model = vitlab.load(tmp_path)
    assert model.labels == list(names.values())
    colours = dict(mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    assert model.preprocess == Preprocess((224, 224), "crop", 256, "bicubic", **colours)
    assert model.config.image_size == (224, 224)
    larger = vitlab.load(tmp_path, image_size=(112, 168))
    assert (larger.preprocess.size, larger.preprocess.resize) == ((112, 168), 128)


@pytest.mark.parametrize("side", [28, 33, 384])
def test_what_convnexts_processor_does_to_a_picture(side):
    theirs = ConvNextImageProcessorPil(size={"shortest_edge": side})
    says = {**theirs.to_dict(), "image_processor_type": "ConvNextImageProcessor"}
    ours = Preprocess(**preprocess_from(says))
    picture = np.random.default_rng(0).integers(0, 256, (61, 97, 3), dtype=np.uint8)
    expected = theirs(picture, return_tensors="pt")["pixel_values"][0]
    torch.testing.assert_close(ours(picture), expected, atol=1e-5, rtol=0)


# ---------------------------------------------------------------- timm and torchvision

PARTS = {"convolution": "conv", "normalization": "bn"}


def as_torchvision(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """transformers' names -> conv1, bn1, layer1.0.conv1, layer1.0.downsample.0, fc."""
    found = {}
    for key, value in state.items():
        if key.startswith("classifier.1."):
            found[key.replace("classifier.1", "fc")] = value
        elif match := re.fullmatch(r"resnet\.embedder\.embedder\.(\w+)\.(\w+)", key):
            found[f"{PARTS[match[1]]}1.{match[2]}"] = value
        elif match := re.fullmatch(r"resnet\.encoder\.stages\.(\d)\.layers\.(\d+)\.layer\.(\d)\.(\w+)\.(\w+)", key):
            found[f"layer{int(match[1]) + 1}.{match[2]}.{PARTS[match[4]]}{int(match[3]) + 1}.{match[5]}"] = value
        elif match := re.fullmatch(r"resnet\.encoder\.stages\.(\d)\.layers\.(\d+)\.shortcut\.(\w+)\.(\w+)", key):
            number = list(PARTS).index(match[3])
            found[f"layer{int(match[1]) + 1}.{match[2]}.downsample.{number}.{match[4]}"] = value
        else:
            raise AssertionError(key)
    assert len(found) == len(state)
    return found


@pytest.mark.parametrize("name", ["18", "50"])
def test_torchvisions_names_are_read(name, tmp_path):
    theirs = classifier(name)
    torch.save(as_torchvision(theirs.state_dict()), tmp_path / "resnet.pth")
    ours, report = load_with_report(tmp_path / "resnet.pth")
    assert report.dialect == "timm"
    assert report.counts()["matched"] == len(ours.state_dict()) == len(report.rows)
    images = torch.randn(2, 3, 45, 70)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)
    assert ours.preprocess == Preprocess(
        *((224, 224), "crop", 256, "bilinear"), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )


def test_the_stride_of_the_paper_shows(tmp_path):
    """The check above can fail: the same tensors halved in the 1x1, as the paper has it, are another network."""
    theirs = classifier("50")
    torch.save(as_torchvision(theirs.state_dict()), tmp_path / "resnet.pth")
    ours, _ = load_with_report(tmp_path / "resnet.pth", stride_in="1x1")
    images = torch.randn(2, 3, 45, 70)
    with torch.inference_mode():
        assert (ours(images) - theirs(images).logits).abs().max() > 1e-2


def test_old_files_without_counters_are_read(tmp_path):
    state = as_torchvision(classifier("18").state_dict())
    save_file({k: v for k, v in state.items() if "tracked" not in k}, tmp_path / "old.safetensors")
    model, _ = load_with_report(tmp_path / "old.safetensors")
    counters = [value for key, value in model.state_dict().items() if "tracked" in key]
    assert len(counters) == 20 and all(int(value) == 0 for value in counters)


def test_a_small_stem_is_seen(tmp_path):
    """The CIFAR ResNets with torchvision's names: 3x3 by 1, and no pooling after it."""
    ours = vitlab.create("resnet_cifar", depths=(2, 2, 2), widths=(8, 12, 16), stem_width=8)
    randomise(ours)
    renamed = {}
    for key, value in ours.state_dict().items():
        key = re.sub(r"stages\.(\d)\.(\d+)\.", lambda m: f"layer{int(m[1]) + 1}.{m[2]}.", key)
        key = re.sub(r"convs\.(\d)\.(conv|norm)", lambda m: f"{m[2].replace('norm', 'bn')}{int(m[1]) + 1}", key)
        key = key.replace("shortcut.conv", "downsample.0").replace("shortcut.norm", "downsample.1")
        key = key.replace("stem.conv", "conv1").replace("stem.norm", "bn1").replace("head", "fc")
        renamed[key] = value
    save_file(renamed, tmp_path / "cifar.safetensors")
    again, _ = load_with_report(tmp_path / "cifar.safetensors")
    assert again.config == ours.config and again.preprocess.size == (32, 32)
    images = torch.randn(2, 3, 32, 48)
    with torch.inference_mode():
        assert torch.equal(again(images), ours(images))


def timm_folder(folder, **changed) -> None:
    save_file(as_torchvision(classifier("50").state_dict()), folder / "model.safetensors")
    cfg = dict(input_size=[3, 224, 224], crop_pct=0.95, interpolation="bicubic", mean=[0.4, 0.5, 0.6], std=[1, 1, 1])
    config = {"architecture": "resnet50", "num_classes": 7, "pretrained_cfg": cfg, **changed}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_timm_folder_tells_its_preprocess(tmp_path):
    timm_folder(tmp_path)
    model = vitlab.load(tmp_path)
    assert model.preprocess == Preprocess((224, 224), "crop", 235, "bicubic", (0.4, 0.5, 0.6), (1, 1, 1))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"architecture": "resnetblur50"}, "'resnetblur50'; known are timm's resnet18"),
        ({"model_args": {"output_stride": 8}}, "output_stride=8 is not known"),
    ],
)
def test_variants_that_only_their_config_tells_are_refused(changed, message, tmp_path):
    timm_folder(tmp_path, **changed)
    with pytest.raises(ValueError, match=message):
        vitlab.load(tmp_path)


# ---------------------------------------------------------------- deep stems and pooled shortcuts


def test_stored_outputs_of_a_resnet_d_agree(tmp_path):
    path, tensors = unpack("timm_resnet_d", tmp_path)
    model, report = load_with_report(path)
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict()) == len(report.rows)
    c = model.config
    assert (c.stem, c.stem_inner, c.stem_width, c.shortcut) == ("deep", (32, 32), 64, "pool")
    with torch.inference_mode():
        maps, logits = model.forward_features(tensors["input.images"]), model(tensors["input.images"])
        torch.testing.assert_close(maps, tensors["output.features"], atol=1e-5, rtol=0)
        torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-5, rtol=0)
    (tmp_path / "timm").mkdir()
    path.rename(tmp_path / "timm" / "model.safetensors")
    args = {"layers": [1, 1, 1, 1], "channels": [16, 24, 32, 48]}
    config = {"architecture": "resnet26d", "num_classes": 7, "model_args": args}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert vitlab.load(tmp_path / "timm").config == c


def test_pooled_shortcuts_of_odd_maps_are_means_of_what_is_there():
    model = vitlab.create("resnet50d", depths=(1, 1), widths=(8, 16), stem_width=8, stem_inner=(4, 6), classes=3).eval()
    trace = Trace("block", "shortcut")
    with torch.inference_mode():
        model(torch.randn(2, 3, 42, 35), trace=trace)  # 11 x 9, then 6 x 5
        x, block = trace["block", 0], model.stages[1][0]
        means = [[x[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((2, 3)) for j in range(5)] for i in range(6)]
        pooled = torch.stack([torch.stack(row, dim=-1) for row in means], dim=-2)
        torch.testing.assert_close(trace["shortcut", 1], block.shortcut(pooled), atol=1e-6, rtol=0)


def test_a_deep_stem_without_pooled_shortcuts_is_read(tmp_path):
    """timm's resnet50c: the names of a D in the stem, those of a plain ResNet in the shortcuts."""
    state = as_torchvision(classifier("50").state_dict())
    for key in [key for key in state if key.startswith("conv1.")]:
        del state[key]
    width = len(state["bn1.weight"])
    norms = {name: state[f"bn1.{name}"][:4].clone() for name in ("weight", "bias", "running_mean", "running_var")}
    norms["num_batches_tracked"] = state["bn1.num_batches_tracked"]
    for number, shape in ((0, (4, 3)), (3, (4, 4)), (6, (width, 4))):
        state[f"conv1.{number}.weight"] = torch.randn(*shape, 3, 3) * 0.2
        if number < 6:
            state |= {f"conv1.{number + 1}.{name}": value for name, value in norms.items()}
    torch.save(state, tmp_path / "resnet50c.pth")
    model, report = load_with_report(tmp_path / "resnet50c.pth")
    assert (model.config.stem, model.config.stem_inner, model.config.shortcut) == ("deep", (4, 4), "stride")
    assert report.counts()["matched"] == len(state) == len(model.state_dict())


# ---------------------------------------------------------------- what is not a ResNet


def _squeeze(state):
    state["layer1.0.se.fc1.weight"] = torch.zeros(2, 8, 1, 1)


def _grouped(state):
    state["layer1.0.conv2.weight"] = state["layer1.0.conv2.weight"][:, :2].clone()


def _gap(state):
    for key in [key for key in state if key.startswith("layer3.1.")]:
        del state[key]


def _half(state):
    del state["layer2.0.bn1.running_var"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_squeeze, r"1 key\(s\) are not known in timm weights, e.g. layer1.0.se.fc1.weight"),
        (_grouped, "a ResNeXt or a wide ResNet"),
        (_gap, r"stage 2 has \[0, 2, 3, 4, 5\]"),
        (_half, r"stages.1.0.convs.0.norm.running_var is missing"),
    ],
)
def test_other_networks_are_refused(change, message, tmp_path):
    state = as_torchvision(classifier("50").state_dict())
    change(state)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=message):
        load_with_report(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_act": "gelu"}, "only relu"),
        ({"downsample_in_first_stage": True}, "downsample_in_first_stage"),
        ({"depths": [3, 4, 6, 4]}, r"depths=\(3, 4, 6, 4\) but the weights have \(3, 4, 6, 3\)"),
        ({"model_type": "vit"}, "'vit' beside the weights of a ResNet"),
    ],
)
def test_configs_that_make_it_another_network_are_refused(changed, message, tmp_path):
    classifier("50").save_pretrained(tmp_path)
    says = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**says, **changed}), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        vitlab.load(tmp_path)


def test_what_is_not_written_is_said(tmp_path):
    small = vitlab.create("resnet_cifar")
    with pytest.raises(ValueError, match=r"cannot express stem=small\. Use --to native"):
        convert.write(small, tmp_path / "hf", "hf")
    with pytest.raises(ValueError, match="not written as timm: use --to hf or native"):
        convert.write(small, tmp_path / "timm", "timm")
    with pytest.raises(ValueError, match="cannot express shortcut=pool"):
        convert.write(vitlab.create("resnet18", shortcut="pool"), tmp_path / "hf", "hf")
    assert not list(tmp_path.iterdir())
