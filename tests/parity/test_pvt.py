"""transformers' PVT and PVT v2, built live with random weights, and stored tensors of timm: equal both ways."""

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

from .test_golden import same, unpack

TWO = dict(num_encoder_blocks=2, depths=[2, 1], hidden_sizes=[12, 18], num_attention_heads=[2, 3], mlp_ratios=[3, 2])
THREE = dict(
    **dict(num_encoder_blocks=3, depths=[1, 2, 1], hidden_sizes=[8, 16, 24], num_attention_heads=[1, 2, 4]),
    mlp_ratios=[4, 3, 2],
)
CONFIGS = {  # with the images they are given
    "pvt": (
        dict(**THREE, sequence_reduction_ratios=[4, 2, 1], patch_sizes=[4, 2, 2], strides=[4, 2, 2], image_size=64),
        (64, 64),
    ),
    "pvt, a rest that no patch and no key reads": (
        dict(**THREE, sequence_reduction_ratios=[5, 2, 1], patch_sizes=[4, 2, 2], strides=[4, 2, 2], image_size=76),
        (79, 77),
    ),
    "pvt, grey, no biases, another activation and eps": (
        dict(
            **dict(**TWO, sequence_reduction_ratios=[3, 1], patch_sizes=[4, 2], strides=[4, 2], image_size=36),
            **dict(num_channels=1, qkv_bias=False, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-3),
        ),
        (36, 36),
    ),
    "pvt_v2": (
        dict(**THREE, sr_ratios=[4, 2, 1], patch_sizes=[7, 3, 3], strides=[4, 2, 2]),
        (64, 64),
    ),
    "pvt_v2, odd sizes": (
        dict(**THREE, sr_ratios=[4, 3, 2], patch_sizes=[5, 3, 3], strides=[3, 2, 2], image_size=[50, 71]),
        (50, 71),
    ),
    "pvt_v2, linear attention": (
        dict(**TWO, sr_ratios=[8, 4], patch_sizes=[7, 3], strides=[4, 2], linear_attention=True),
        (50, 71),
    ),
    "pvt_v2, grey, no biases, another activation and eps": (
        dict(
            **dict(**TWO, sr_ratios=[3, 1], patch_sizes=[3, 3], strides=[2, 2], image_size=24),
            **dict(num_channels=1, qkv_bias=False, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-3),
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
            if "position_embeddings" in name or "cls_token" in name:
                parameter.normal_()
            if ".projection." in name or "embedding.proj." in name:
                parameter.mul_(0.01)
    return model.eval()


def theirs_of(name: str, head: bool = True, **more) -> nn.Module:
    options = {**CONFIGS[name][0], **more}
    second = name.startswith("pvt_v2")
    config = (hf.PvtV2Config if second else hf.PvtConfig)(**options, num_labels=7)
    if head:
        return randomise((hf.PvtV2ForImageClassification if second else hf.PvtForImageClassification)(config))
    return randomise((hf.PvtV2Model if second else hf.PvtModel)(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_tokens_and_attention_agree_both_ways(name, tmp_path):
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(2, ours.config.channels, *CONFIGS[name][1])
    trace = Trace("tokens", "attention")
    with torch.inference_mode():
        out = theirs(images, output_hidden_states=True, output_attentions=True)
        logits = ours(images, trace=trace)
        maps = ours.forward_pyramid(images)
    assert out.logits.std() > 0.1  # else equal would mean little
    torch.testing.assert_close(logits, out.logits, atol=1e-5, rtol=0)
    if ours.family == "pvt":  # one of each block, and one after the norm
        hidden, attention = out.hidden_states[:-1], out.attentions
        found = [trace["tokens", layer] for layer in range(len(ours.blocks))]
    else:  # one of each stage, normed: the maps
        hidden, attention, found = out.hidden_states, [a for stage in out.attentions for a in stage], maps
    for a, b in zip(found, hidden, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)
    for layer, (weights, at) in enumerate(zip(attention, ours.places(*images.shape[-2:]), strict=True)):
        torch.testing.assert_close(trace["attention", layer], weights, atol=1e-5, rtol=1e-5)
        rows, columns = at.grid
        assert weights.shape[2:] == (at.prefix + rows * columns, at.prefix + at.keys[0] * at.keys[1])
    assert [m.shape[1] for m in maps] == [level.channels for level in ours.pyramid]

    convert.write(ours, tmp_path / "back", "hf")
    same(*(load_file(tmp_path / place / "model.safetensors") for place in ("hf", "back")))
    back = type(theirs).from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        torch.testing.assert_close(back(images).logits, out.logits, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["pvt", "pvt_v2", "pvt_v2, linear attention"])
def test_training_gives_the_same_gradients(name, tmp_path):
    theirs = theirs_of(name)
    theirs.save_pretrained(tmp_path)
    ours, images = vitlab.load(tmp_path).double().train(), torch.randn(2, 3, *CONFIGS[name][1]).double()
    theirs = theirs.double().train()
    ours(images).square().sum().backward()
    theirs(images).logits.square().sum().backward()
    gradients = {key: value.grad for key, value in theirs.named_parameters()}
    second = name.startswith("pvt_v2")
    at = "pvt_v2.encoder.layers.0.blocks.0.attention." if second else "pvt.encoder.block.0.0.attention.self."
    kv = torch.cat([gradients[f"{at}{part}.weight"] for part in ("key", "value")])
    torch.testing.assert_close(ours.stages[0][0].attention.kv.weight.grad, kv, atol=1e-9, rtol=1e-7)
    reduction = gradients[f"{at}{'spatial' if second else 'sequence'}_reduction.weight"]
    torch.testing.assert_close(ours.stages[0][0].attention.reduction.weight.grad, reduction, atol=1e-9, rtol=1e-7)
    if not second:
        first = gradients["pvt.encoder.patch_embeddings.0.position_embeddings"]
        torch.testing.assert_close(ours.embeds[0].positions.table.grad, first, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("name", ["pvt", "pvt_v2"])
def test_a_model_without_head(name, tmp_path):
    theirs = theirs_of(name, head=False)
    theirs.save_pretrained(tmp_path / "hf")
    ours, images = vitlab.load(tmp_path / "hf"), torch.randn(2, 3, *CONFIGS[name][1])
    with torch.inference_mode():
        tokens = theirs(images).last_hidden_state
        tokens = tokens.flatten(2).transpose(1, 2) if name == "pvt_v2" else tokens
        torch.testing.assert_close(ours.forward_features(images), tokens, atol=1e-5, rtol=0)
        pooled = tokens.mean(dim=1) if name == "pvt_v2" else tokens[:, 0]
        torch.testing.assert_close(ours(images), pooled, atol=1e-5, rtol=0)
    convert.write(ours, tmp_path / "back", "hf")
    rows = convert.compare(tmp_path / "hf", tmp_path / "back", ours, changed=False)
    assert len(rows) == 3 and all(row.difference is not None and row.difference < 1e-5 for row in rows), rows


def test_the_pyramid_is_that_of_transformers_backbone(tmp_path):
    theirs = randomise(hf.PvtV2Backbone(hf.PvtV2Config(**CONFIGS["pvt_v2"][0], out_indices=[0, 1, 2])))
    theirs.save_pretrained(tmp_path)
    ours, images = vitlab.load(tmp_path), torch.randn(2, 3, 50, 71)
    with torch.inference_mode():
        for a, b in zip(ours.forward_pyramid(images), theirs(images).feature_maps, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_bare_file_is_told_its_heads(tmp_path):
    theirs = theirs_of("pvt")
    torch.save(theirs.state_dict(), tmp_path / "bare.pth")
    with pytest.raises(ValueError, match=r"heads cannot be read from weights of widths \[8, 16, 24\]"):
        vitlab.load(tmp_path / "bare.pth")
    with pytest.warns(AssumedWarning, match="do not say eps=1e-06, merge_eps=1e-06, reduction_eps=1e-06, activation"):
        ours = vitlab.load(tmp_path / "bare.pth", heads=(1, 2, 4))
    assert ours.config.image_size == (64, 64)  # the table's
    images = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)


def test_another_size_resizes_every_table_as_the_paper_does(tmp_path):
    theirs = theirs_of("pvt")
    theirs.save_pretrained(tmp_path)
    ours, report = load_with_report(tmp_path, image_size=(96, 80))
    assert [row.note for row in report.rows if row.status == "resized"] == [
        "from 1x256x8, grid 16x16 to 24x20",
        "from 1x64x16, grid 8x8 to 12x10",
        "from 1x17x24, grid 4x4 to 6x5",
    ]
    table = theirs.pvt.encoder.patch_embeddings[2].position_embeddings
    grid = table[:, 1:].reshape(1, 4, 4, 24).permute(0, 3, 1, 2)
    expected = nn.functional.interpolate(grid, (6, 5), mode="bilinear").flatten(2).transpose(1, 2)
    found = ours.embeds[2].positions.table
    torch.testing.assert_close(found, torch.cat([table[:, :1], expected], dim=1))
    images = torch.randn(1, 3, 96, 80)
    with torch.inference_mode():  # the same while it runs
        torch.testing.assert_close(vitlab.load(tmp_path)(images), ours(images))


def test_timm_stored_outputs_agree(tmp_path):
    path, tensors = unpack("timm_pvt_v2", tmp_path)
    model, report = load_with_report(path, heads=(1, 2, 4, 8))
    assert report.dialect == "timm" and report.counts()["matched"] == len(model.state_dict()) == len(report.rows)
    assert (model.config.eps, model.config.merge_eps, model.config.reduction_eps) == (1e-6, 1e-5, 1e-5)
    with torch.inference_mode():
        logits, maps = model(tensors["input.images"]), model.forward_pyramid(tensors["input.images"])
        torch.testing.assert_close(logits, tensors["output.logits"], atol=1e-6, rtol=0)
        torch.testing.assert_close(maps[-1], tensors["output.features"], atol=1e-5, rtol=0)
        for wrong in (dict(merge_eps=1e-6), dict(eps=1e-3), dict(reduction_eps=1e-2)):
            other, _ = load_with_report(path, heads=(1, 2, 4, 8), **wrong)
            assert (other(tensors["input.images"]) - tensors["output.logits"]).abs().max() > 1e-4, wrong


def test_a_timm_folder_and_what_is_saved_of_it(tmp_path):
    path, tensors = unpack("timm_pvt_v2", tmp_path)
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / "model.safetensors")
    config = {
        "architecture": "pvt_v2_b0",
        "num_classes": 7,
        "model_args": {"num_heads": [1, 2, 4, 8], "sr_ratios": [8, 4, 2, 1]},
        "pretrained_cfg": {"input_size": [3, 64, 64], "mean": [0.1] * 3, "std": [0.2] * 3, "crop_pct": 0.9},
    }
    (tmp_path / "folder" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = vitlab.load(tmp_path / "folder")
    assert model.preprocess.size == (64, 64) and model.preprocess.mean == (0.1,) * 3
    vitlab.save(model, tmp_path / "native")
    again = vitlab.load(tmp_path / "native")
    assert again.config == model.config and again.config.merge_eps == 1e-5
    with torch.inference_mode():
        torch.testing.assert_close(again(tensors["input.images"]), tensors["output.logits"], atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="cannot express eps=1e-06 beside merge_eps=1e-05"):
        convert.write(again, tmp_path / "hf", "hf")
    with pytest.raises(ValueError, match="PVTv2 is not written as timm: use --to hf or native"):
        convert.write(again, tmp_path / "timm", "timm")


def test_what_is_not_known_is_refused(tmp_path):
    theirs_of("pvt_v2", patch_sizes=[5, 3, 3]).save_pretrained(tmp_path / "v2")
    with pytest.raises(ValueError, match=r"patch_sizes \[5, 3, 3\] and strides \[4, 2, 2\]: known are"):
        vitlab.load(tmp_path / "v2")
    path, _ = unpack("timm_pvt_v2", tmp_path)
    state = load_file(path)
    for part in ("fc1.weight", "fc1.bias", "dwconv.weight", "dwconv.bias"):
        state[f"stages.0.blocks.0.mlp.{part}"] = state[f"stages.0.blocks.0.mlp.{part}"][:100].clone()
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="only whole numbers are known"):
        load_with_report(tmp_path / "other.safetensors", heads=(1, 2, 4, 8))
    with pytest.raises(ValueError, match=r"a first patch of 4 alone: this network has image_size=\(32, 32\) and patch"):
        convert.write(vitlab.create("pvt_cifar"), tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()
    convert.write(vitlab.create("pvt_v2_cifar"), tmp_path / "out", "hf")
