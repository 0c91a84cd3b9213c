"""transformers' SegFormer with the same weights: logits and loss at any image size; both ways."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

import vitlab
from vitlab.checkpoints import convert
from vitlab.models.dense import DenseTarget
from vitlab.models.segformer import SegFormer, SegFormerConfig

SIZE = dict(hidden_sizes=[8, 12, 16, 20], depths=[2, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], sr_ratios=[4, 2, 2, 1])


def their_segformer() -> hf.SegformerForSemanticSegmentation:
    torch.manual_seed(0)
    config = hf.SegformerConfig(**SIZE, mlp_ratios=[2, 2, 3, 4], decoder_hidden_size=12, num_labels=3)
    model = hf.SegformerForSemanticSegmentation(config).eval()
    with torch.no_grad():
        for key, value in model.state_dict().items():
            if value.is_floating_point():
                value.uniform_(0.5, 1.5) if "norm" in key and not key.endswith("bias") else value.normal_(std=0.2)
    return model


def test_logits_agree_both_ways(tmp_path):
    theirs = their_segformer()
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    assert isinstance(ours, SegFormer) and ours.encoder.family == "pvt_v2"
    convert.write(ours, tmp_path / "back", "hf")
    back = hf.SegformerForSemanticSegmentation.from_pretrained(tmp_path / "back").eval()
    for size in ((64, 64), (51, 90)):
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            expected = theirs(images).logits
            torch.testing.assert_close(ours(images).semantic, expected, atol=1e-5, rtol=1e-6)
            torch.testing.assert_close(back(images).logits, expected, atol=0, rtol=0)
    written, source = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "hf"))
    assert written.keys() == source.keys()
    assert all(torch.equal(value, written[key]) for key, value in source.items())
    configs = [json.loads((tmp_path / folder / "config.json").read_text(encoding="utf-8")) for folder in ("hf", "back")]
    left_out = ("transformers_version", "initializer_range", "layer_norm_eps", "semantic_loss_ignore_index")
    assert all(configs[1].get(k) == v for k, v in configs[0].items() if k not in (*left_out, "reshape_last_stage"))


def test_the_loss_agrees(tmp_path):
    theirs = their_segformer()
    theirs.save_pretrained(tmp_path)
    ours, images = vitlab.load(tmp_path), torch.randn(2, 3, 64, 64)
    maps = torch.randint(3, (2, 64, 64))
    maps[1, :9] = 255
    targets = [DenseTarget(torch.zeros(0, dtype=torch.int64), semantic=m) for m in maps]
    found = ours.loss(ours(images), targets)["pixels"]
    torch.testing.assert_close(found, theirs(images, labels=maps).loss, atol=1e-5, rtol=0)


def test_other_encoders_and_what_is_refused(tmp_path):
    swin = vitlab.create("swin_cifar", classes=0, depths=(1, 1), width=16, heads=(2, 4))
    model = SegFormer(SegFormerConfig(classes=4, head_width=8).with_encoder("swin", swin.config)).eval()
    images = torch.randn(1, 3, 32, 32)
    vitlab.save(model, tmp_path)
    assert torch.equal(vitlab.load(tmp_path)(images).semantic, model(images).semantic)
    with pytest.raises(vitlab.UsageError, match="around a PVT v2"):
        convert.write(model, tmp_path / "hf", "hf")
    with pytest.raises(vitlab.UsageError, match="a vit is none"):
        SegFormerConfig().with_encoder("vit", vitlab.create("vit_digits").config)
