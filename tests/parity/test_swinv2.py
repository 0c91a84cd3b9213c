"""transformers' Swin v2, built live with random weights, and stored tensors of timm: equal logits, maps and files."""

import json
import math

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import nn

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.layers.trace import Trace
from vitlab.models.registry import build, build_config

from .test_golden import GOLDEN, same, unpack

CONFIGS = {  # with the images they are given
    "as trained": (
        dict(embed_dim=12, depths=[2, 2, 2], num_heads=[1, 2, 3], window_size=4, image_size=64),
        (64, 64),
    ),
    "images filled up everywhere": (
        dict(embed_dim=12, depths=[2, 2], num_heads=[2, 3], window_size=3, image_size=64, patch_size=4),
        (75, 101),
    ),
    "windows fit the config's image, not the larger one given": (
        dict(embed_dim=8, depths=[2, 2, 2], num_heads=[2, 2, 4], window_size=5, image_size=40),
        (72, 100),
    ),
    "an image smaller than a shifted window": (
        dict(embed_dim=8, depths=[2], num_heads=[2], window_size=5, image_size=64),
        (9, 18),
    ),
    "fine-tuned to a larger window": (
        dict(
            **dict(embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=6, image_size=56),
            pretrained_window_sizes=[3, 2, 9, 9],  # more than it has stages
        ),
        (56, 56),
    ),
    "an image size that is not square: windows by its rows": (
        dict(embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=5, image_size=[24, 64]),
        (24, 64),
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
            if "logit_scale" in name:
                parameter.copy_(torch.linspace(1.0, 3.0, parameter.numel()).reshape(parameter.shape))
            if "projection" in name:
                parameter.mul_(0.01)
    return model.eval()


def classifier(name: str, classes: int = 7) -> nn.Module:
    return randomise(hf.Swinv2ForImageClassification(hf.Swinv2Config(**CONFIGS[name][0], num_labels=classes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_maps_agree_both_ways(name, tmp_path):
    torch.manual_seed(0)
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

    convert.write(ours, tmp_path / "back", "hf")
    same(*(load_file(tmp_path / place / "model.safetensors") for place in ("hf", "back")))
    back = hf.Swinv2ForImageClassification.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        torch.testing.assert_close(back(images).logits, out.logits, atol=0, rtol=0)


def test_the_largest_scale_and_the_mask_taken_twice(tmp_path):
    """Scales beyond 100 count as 100; scores then differ so much that a mask of -100 still shows, and -200 does not."""
    torch.manual_seed(2)
    theirs = classifier("as trained")
    for name, parameter in theirs.named_parameters():
        if "logit_scale" in name:
            nn.init.constant_(parameter, 5.0)
    theirs.save_pretrained(tmp_path)
    images = torch.randn(4, 3, 64, 64).double()
    with torch.inference_mode():
        expected = theirs.double()(images).logits
        torch.testing.assert_close(vitlab.load(tmp_path).double()(images), expected, atol=1e-11, rtol=0)
        once = vitlab.load(tmp_path, mask_twice=False).double()(images)
    assert (once - expected).abs().max() > 1e-9


def test_attention_agrees(tmp_path):
    theirs = classifier("as trained")
    theirs.save_pretrained(tmp_path)
    ours, images, trace = vitlab.load(tmp_path), torch.randn(2, 3, 64, 64), Trace("attention")
    with torch.inference_mode():
        ours(images, trace=trace)
        z = theirs.swinv2.embeddings(images)[0]
        for layer, block in enumerate(theirs.swinv2.encoder.layers[0].blocks):
            z, weights = block(z, (16, 16), output_attentions=True)
            torch.testing.assert_close(trace["attention", layer].transpose(1, 2).flatten(0, 1), weights)


def test_training_gives_the_same_gradients(tmp_path):
    theirs = classifier("images filled up everywhere")
    theirs.save_pretrained(tmp_path)
    ours, images = vitlab.load(tmp_path, stochastic_depth=0.0), torch.randn(2, 3, 75, 101).double()
    theirs.double()  # in evaluation mode, which has no stochastic depth
    ours.double().train()(images).square().sum().backward()
    theirs(images).logits.square().sum().backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    at, attention = "swinv2.encoder.layers.1.blocks.1.attention.self.", ours.stages[1][1].attention
    pairs = {
        "logit_scale": attention.log_scale,
        "continuous_position_bias_mlp.0.weight": attention.position_bias.fc1.weight,
        "continuous_position_bias_mlp.2.weight": attention.position_bias.fc2.weight,
        "query.bias": attention.qkv.q_bias,
        "value.bias": attention.qkv.v_bias,
    }
    for key, parameter in pairs.items():
        torch.testing.assert_close(parameter.grad, gradients[at + key], atol=1e-6, rtol=1e-5)
    assert gradients[at + "logit_scale"].abs().max() > 0
    qkv = torch.cat([gradients[f"{at}{part}.weight"] for part in ("query", "key", "value")])
    torch.testing.assert_close(attention.qkv.weight.grad, qkv, atol=1e-6, rtol=1e-5)


def test_a_model_without_head_or_with_a_decoder(tmp_path):
    config = hf.Swinv2Config(**CONFIGS["as trained"][0])
    theirs = randomise(hf.Swinv2ForMaskedImageModeling(config))
    theirs.save_pretrained(tmp_path / "masked")
    theirs.swinv2.save_pretrained(tmp_path / "hf")
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = theirs.swinv2(images).last_hidden_state
        for name in ("masked", "hf"):
            ours = vitlab.load(tmp_path / name)
            torch.testing.assert_close(ours.forward_features(images), expected, atol=1e-5, rtol=0)
            torch.testing.assert_close(ours(images), expected.mean(1), atol=1e-5, rtol=0)
    convert.write(ours, tmp_path / "back", "hf")
    rows = convert.compare(tmp_path / "hf", tmp_path / "back", ours, changed=False)
    assert len(rows) == 3 and all(row.difference is not None and row.difference < 1e-5 for row in rows), rows


@pytest.mark.parametrize("name", ["tiny", "base"])
def test_as_many_parameters_as_in_transformers(name):
    entry, config = build_config(f"swinv2_{name}")
    theirs = hf.Swinv2Config(embed_dim=config.width, depths=config.depths, num_heads=config.heads, num_labels=1000)
    with torch.device("meta"):
        models = build(entry.family, config), hf.Swinv2ForImageClassification(theirs)
    ours, other = (sum(p.numel() for p in model.parameters()) for model in models)
    assert ours == other


# ---------------------------------------------------------------- timm and the authors


def timm_folder(folder, args, architecture="swinv2_tiny_window8_256", **more):
    folder.mkdir(exist_ok=True)
    path, tensors = unpack("timm_swinv2", folder)
    path.rename(folder / "model.safetensors")
    cfg = {"input_size": [3, 256, 256], "mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.9}
    config = {"architecture": architecture, "num_classes": 7, "model_args": args, "pretrained_cfg": cfg, **more}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return tensors


def test_stored_outputs_of_timm_agree(tmp_path):
    args = {"img_size": 64, "embed_dim": 24, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    tensors = timm_folder(tmp_path, args)
    model, report = load_with_report(tmp_path)
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict()) == len(report.rows)
    assert (model.config.image_size, model.config.window, model.preprocess.mean) == ((64, 64), 4, (0.1,) * 3)
    with torch.inference_mode():
        logits, features = model(tensors["input.images"]), model.forward_features(tensors["input.images"])
    torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(features, tensors["output.features"].flatten(1, 2), atol=1e-5, rtol=0)
    wrong, _ = load_with_report(tmp_path, pretrained_windows=(8, 8))
    with torch.inference_mode():
        assert (wrong(tensors["input.images"]) - tensors["output.logits"]).abs().max() > 1e-4


def test_a_bare_file_must_be_told_its_window(tmp_path):
    path, tensors = unpack("timm_swinv2", tmp_path)
    with pytest.raises(ValueError, match=r"the window cannot be read .* vitlab.load\(path, window=8"):
        vitlab.load(path)
    with pytest.warns(AssumedWarning, match="do not say eps=1e-05, activation=gelu, mean"):
        model = vitlab.load(path, window=4, image_size=64)
    with torch.inference_mode():
        torch.testing.assert_close(model(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)


def log_offsets(window: int, trained: int) -> torch.Tensor:
    """One number at a time, as the authors' buffer has them."""
    side = range(1 - window, window)
    scaled = [[(8 * i / (trained - 1), 8 * j / (trained - 1)) for j in side] for i in side]
    logs = [[[math.copysign(math.log2(abs(x) + 1) / 3, x) for x in pair] for pair in row] for row in scaled]
    return torch.tensor(logs)[None]  # (1, 2M - 1, 2M - 1, 2)


@pytest.mark.parametrize("trained", [4, 3])
def test_the_authors_buffers_tell_the_windows(trained, tmp_path):
    tensors = load_file(GOLDEN / "timm_swinv2.safetensors")
    state = {}
    for key, value in tensors.items():
        if key.startswith("weights."):
            key = key.removeprefix("weights.").replace("head.fc.", "head.")
            state[key.replace("layers.1.downsample", "layers.0.downsample")] = value
    for stage in (0, 1):
        state[f"layers.{stage}.blocks.0.attn.relative_coords_table"] = log_offsets(4, trained)
        state[f"layers.{stage}.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
    save_file(state, tmp_path / "swin.safetensors")
    model, report = load_with_report(tmp_path / "swin.safetensors", image_size=64)
    assert report.dialect == "microsoft" and model.config.window == 4
    assert model.config.pretrained_windows == (() if trained == 4 else (3, 3))
    with torch.inference_mode():
        difference = (model(tensors["input.images"]) - tensors["output.logits"]).abs().max()
    assert difference < 1e-5 if trained == 4 else difference > 1e-4


@pytest.mark.parametrize(
    ("args", "more", "message"),
    [
        ({"always_partition": True}, {}, "always_partition=True is not known"),
        ({"window_size": [4, 8]}, {}, r"window_size=\[4, 8\]: only square windows"),
        ({}, {"architecture": "swinv2_cr_tiny_ns_224"}, "architecture 'swinv2_cr_tiny_ns_224' beside"),
        ({"pretrained_window_sizes": ["a"]}, {}, "a list of whole numbers from 0"),
    ],
)
def test_what_timm_may_say_is_used_or_refused(args, more, message, tmp_path):
    timm_folder(tmp_path, args, **more)
    with pytest.raises(ValueError, match=message):
        vitlab.load(tmp_path)


def test_timms_name_tells_windows_and_size(tmp_path):
    timm_folder(tmp_path, {"embed_dim": 24}, "swinv2_base_window12to16_192to256")
    with pytest.raises(ValueError, match=r"pretrained_windows=\[12, 12, 12, 6\] must have a number for each of 2"):
        vitlab.load(tmp_path)
    timm_folder(tmp_path, {"embed_dim": 24, "depths": [2, 2]}, "swinv2_base_window12to16_192to256")
    c = vitlab.load(tmp_path).config
    assert (c.window, c.image_size, c.pretrained_windows) == (16, (256, 256), (12, 12))


@pytest.mark.parametrize(
    ("name", "size", "window", "trained"),
    [
        ("SwinV2-T", 256, 8, ()),
        ("swinv2_small_window16_256", 256, 16, ()),
        ("swinv2-base-patch4-window8-256", 256, 8, ()),
        ("swinv2_large_window12_192.ms_in22k", 192, 12, ()),
        ("swinv2_base_window12to24_192to384.ms_in22k_ft_in1k", 384, 24, (12, 12, 12, 6)),
    ],
)
def test_names_from_elsewhere(name, size, window, trained):
    with torch.device("meta"):
        c = vitlab.create(name, depths=(1, 1, 1, 1)).config
    assert (c.image_size, c.window, c.pretrained_windows) == ((size, size), window, trained)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_absolute_embeddings": True}, "use_absolute_embeddings"),
        ({"hidden_act": "mish"}, "hidden_act 'mish'"),
        ({"pretrained_window_sizes": [4]}, r"pretrained_windows=\[4\] must have a number for each of 3"),
        ({"pretrained_window_sizes": [1, 4, 4]}, "at least 2"),
        ({"window_size": [7, 7]}, "window_size"),
        ({"mlp_ratio": 3.0}, "mlp_ratio=3.0 is stated, but the weights have 4"),
    ],
)
def test_configs_that_make_it_another_network_are_refused(changed, message, tmp_path):
    classifier("as trained").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        vitlab.load(tmp_path)


def test_what_transformers_cannot_express_is_said(tmp_path):
    model = vitlab.create("swinv2_cifar", image_size=(16, 32))  # windows of 2 x 4 in the last stage
    with pytest.raises(ValueError, match=r"square windows, cut to the rows of image_size=\[16, 32\]"):
        convert.write(model, tmp_path / "out", "hf")
    with pytest.raises(ValueError, match="merge_eps=1e-06"):
        convert.write(vitlab.create("swinv2_cifar", merge_eps=1e-6), tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    ours = vitlab.create("swinv2_cifar").eval()
    convert.write(ours, tmp_path / "out", "hf")
    theirs, images = hf.Swinv2ForImageClassification.from_pretrained(tmp_path / "out").eval(), torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)


def test_a_timm_name_of_another_size_than_the_weights_is_refused(tmp_path):
    """Its window would be that of the name, and the numbers wrong."""
    path, _ = unpack("timm_swinv2", tmp_path)
    path.rename(tmp_path / "model.safetensors")
    config = {"architecture": "swinv2_tiny_window8_256", "model_args": None, "pretrained_cfg": {}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ValueError, match="config says width=96 but the weights have"):
        vitlab.load(tmp_path)
