"""transformers' EoMT, around DINOv2 and DINOv3, with the same weights: masks, classes, losses; both ways."""

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from transformers.models.eomt.modeling_eomt import EomtForUniversalSegmentation

import vitlab
from vitlab.checkpoints import convert
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.dense import DenseTarget
from vitlab.models.eomt import EoMT, EoMTConfig, annealed
from vitlab.models.set_loss import LossWeights

SIZE = dict(hidden_size=24, num_hidden_layers=4, num_attention_heads=2, image_size=42, patch_size=7, num_labels=5)
HEAD = dict(num_blocks=2, num_queries=6, train_num_points=50)
CONFIGS = {
    "DINOv2": dict(num_register_tokens=2, mlp_ratio=2),
    "giant": dict(num_register_tokens=0, mlp_ratio=2, use_swiglu_ffn=True, num_upscale_blocks=1, num_channels=1),
    "DINOv3": dict(intermediate_size=40),
    "gated DINOv3": dict(intermediate_size=40, use_gated_mlp=True, num_register_tokens=0, key_bias=True),
}


def their_eomt(name: str, masking: tuple[float, ...] = (0.0, 0.0)):
    torch.manual_seed(0)
    kind, network = hf.EomtConfig, EomtForUniversalSegmentation
    if "DINOv3" in name:
        kind, network = hf.EomtDinov3Config, hf.EomtDinov3ForUniversalSegmentation
    model = network(kind(**SIZE, **HEAD, **CONFIGS[name])).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.normal_(std=0.2)
            if "norm" in key and key.endswith("weight"):
                parameter.add_(1)
        model.attn_mask_probs.copy_(torch.tensor(masking))
    return model


def images_for(model: EoMT) -> torch.Tensor:
    return torch.randn(2, model.config.channels, *model.config.image_size)


def agree(ours: EoMT, theirs, images: torch.Tensor) -> None:
    with torch.inference_mode():
        a, b = ours(images), theirs(images)
    torch.testing.assert_close(a.classes, b.class_queries_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.masks, b.masks_queries_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_masks_and_classes_agree_both_ways(name, tmp_path):
    theirs = their_eomt(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    assert isinstance(ours, EoMT) and ours.encoder.family == ("dinov3" if "DINOv3" in name else "vit")
    images = images_for(ours)
    agree(ours, theirs, images)
    convert.write(ours, tmp_path / "back", "hf")
    written, source = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "hf"))
    assert written.keys() == source.keys()
    assert all(torch.equal(value, written[key]) for key, value in source.items())
    configs = [json.loads((tmp_path / folder / "config.json").read_text(encoding="utf-8")) for folder in ("hf", "back")]
    left_out = ("transformers_version", "initializer_range", "train_num_points")
    assert all(configs[1][key] == value for key, value in configs[0].items() if key not in left_out)
    agree(ours, type(theirs).from_pretrained(tmp_path / "back").eval(), images)
    vitlab.save(ours, tmp_path / "native")
    with torch.inference_mode():
        assert torch.equal(vitlab.load(tmp_path / "native")(images).masks, ours(images).masks)


@pytest.mark.parametrize("name", ["DINOv2", "DINOv3"])
def test_masked_attention_agrees(name, tmp_path):
    theirs = their_eomt(name, masking=(1.0, 1.0))
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path)
    images = images_for(ours)
    agree(ours, theirs, images)
    free = vitlab.load(tmp_path, masking=())
    assert not torch.allclose(free(images).masks, ours(images).masks, atol=1e-3)  # the mask does something


@pytest.mark.parametrize("masking", [(1.0, 1.0), (0.3, 0.8)])
def test_the_loss_of_training_agrees(masking, tmp_path):
    """With every block's prediction, random queries without a mask, random points; and gradients."""
    theirs = their_eomt("DINOv2", masking=masking).train()
    theirs.save_pretrained(tmp_path)
    ours = vitlab.load(tmp_path).train()
    ours.loss_weights = LossWeights(points=50)
    images = images_for(ours)
    targets = [DenseTarget(torch.tensor(labels), torch.rand(len(labels), 42, 42) > 0.5) for labels in ([0, 3], [2])]
    torch.manual_seed(1)
    expected = theirs(images, [t.masks.float() for t in targets], [t.labels for t in targets]).loss
    torch.manual_seed(1)
    output = ours(images)
    assert len(output.auxiliary) == 2
    found = sum(ours.loss(output, targets).values())
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-6)
    found.backward()
    expected.backward()
    grads = {key: value.grad for key, value in theirs.named_parameters()}
    torch.testing.assert_close(ours.queries.grad[0], grads["query.weight"], atol=1e-4, rtol=1e-3)
    weight = ours.encoder.patch_embed.proj.weight.grad
    torch.testing.assert_close(weight, grads["embeddings.patch_embeddings.projection.weight"], atol=1e-4, rtol=1e-3)


def test_images_of_another_shape_are_those_of_a_model_made_for_them(tmp_path):
    """transformers takes one square size: here the positions are resized, by antialiased bicubic."""
    their_eomt("DINOv2").save_pretrained(tmp_path)
    ours, wide = vitlab.load(tmp_path), vitlab.load(tmp_path, image_size=(28, 49))
    images = torch.randn(1, 3, 28, 49)
    assert ours(images).masks.shape == (1, 6, 16, 28)
    torch.testing.assert_close(wide(images).masks, ours(images).masks, atol=1e-5, rtol=0)


def test_a_class_token_with_a_position_is_written_as_their_sum(tmp_path):
    """As around released DINOv2 encoders; without LayerScale, whose factors are then 1."""
    torch.manual_seed(0)
    encoder = vitlab.create("vit_digits", classes=0, image_size=8, channels=3)
    model = EoMT(EoMTConfig(classes=3, joined=1, queries=4).with_encoder("vit", encoder.config)).eval()
    model.load_encoder(encoder)
    convert.write(model, tmp_path, "hf")
    agree(model, EomtForUniversalSegmentation.from_pretrained(tmp_path).eval(), torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("name", ["beit_digits", "eva02_digits", "vit_relpos_digits"])
def test_other_plain_encoders_carry_it(name):
    """Queries have no positions: in another order they give the same answers in that order."""
    encoder = vitlab.create(name, classes=0)
    model = EoMT(EoMTConfig(classes=3, joined=2, queries=5).with_encoder(encoder.family, encoder.config)).eval()
    images = torch.randn(2, encoder.config.channels, *encoder.config.image_size)
    out = model(images)
    model.queries.data = model.queries.data.flip(1)
    torch.testing.assert_close(model(images).masks.flip(1), out.masks, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_is_refused(tmp_path):
    swin = vitlab.create("swin_cifar", classes=0)
    with pytest.raises(vitlab.UsageError, match=r"a swin is none\. Around it: linear_head"):
        EoMTConfig().with_encoder("swin", swin.config)
    with pytest.raises(vitlab.UsageError, match="joined=5 is more than the encoder's 4 blocks"):
        vitlab.create("eomt_nano", joined=5)
    model = vitlab.create("eomt_nano", image_size=(32, 48))
    with pytest.raises(vitlab.UsageError, match="square images only"):
        convert.write(model, tmp_path / "out", "hf")


def test_trace_edit_and_new_classes(tmp_path):
    model = vitlab.create("eomt_nano", classes=3).eval()
    images = torch.randn(1, 3, 32, 32)
    trace = Trace("tokens", "masks", "attention", layers=[1, 3])
    out = model(images, trace=trace)
    assert torch.equal(trace["masks"], out.masks) and trace["tokens", 1].shape == (1, 65, 64)
    assert trace["attention", 3].shape == (1, 4, 85, 85)  # whom the queries look at: the last 20 rows
    assert not torch.equal(model(images, edit=Edit().zero("mlp_out", layer=3)).masks, out.masks)
    vitlab.save(model, tmp_path)
    other = vitlab.load(tmp_path, classes=7)
    assert other(images).classes.shape == (1, 20, 8) and torch.equal(other(images).masks, out.masks)
    model.reset_classifier(4)
    assert model(images).classes.shape == (1, 20, 5) and model.classes == 4


def test_masking_falls_block_by_block():
    """Where the authors' configs have it: COCO in 14782 x 6 steps with four blocks, 29564 x 6 with three."""
    for starts, end in (((14782, 29564, 44346, 59128), 14782 * 6), ((29564, 73910, 118256), 29564 * 6)):
        for block, start in enumerate(starts):
            before, half, after = (
                annealed((start + step) / end, len(starts))[block] for step in (0, end / 12, end / 6)
            )
            assert (before, half, after) == pytest.approx((1.0, 0.5**0.9, 0.0), abs=1e-4)
    assert annealed(0.0, 1) == (1.0,) and annealed(1.0, 3) == (0.0, 0.0, 0.0)
    model = vitlab.create("eomt_nano").train()
    model.anneal(0.0)
    assert model.config.masking == (1.0, 1.0)


def test_check_compares_with_transformers(tmp_path):
    their_eomt("DINOv2").save_pretrained(tmp_path / "hf")
    rows = convert.convert(str(tmp_path / "hf"), tmp_path / "native", check=True).checks
    assert len(rows) == 2 and all(row.difference is not None and not row.wrong for row in rows)
    assert Path(tmp_path / "native" / "model.json").is_file()
