"""The linear head against transformers' DINOv2 backbone, with batch norm and convolution by their formulas."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf

import vitlab
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models import registry
from vitlab.models.base import Capability
from vitlab.models.dense import VOID, DenseTarget
from vitlab.models.linear_head import LinearHead, LinearHeadConfig, pixel_loss

TINY = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=7)


def around(encoder, **options) -> LinearHead:
    """A head whose batch norm has seen something."""
    model = LinearHead(LinearHeadConfig(classes=5).with_encoder(encoder.family, encoder.config).with_options(**options))
    model.load_encoder(encoder)
    with torch.no_grad():
        for value in (model.norm.running_mean, model.norm.weight, model.norm.bias, model.head.weight, model.head.bias):
            value.normal_()
        model.norm.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.mark.parametrize("size", [(28, 28), (21, 42)])
def test_logits_are_those_of_transformers_features(size, tmp_path):
    config = hf.Dinov2Config(**TINY, out_indices=[1, 3], apply_layernorm=True)
    theirs = hf.Dinov2Model(config).eval()
    theirs.save_pretrained(tmp_path)
    backbone = hf.Dinov2Backbone(config).eval()
    backbone.load_state_dict(theirs.state_dict())
    model = around(vitlab.load(tmp_path), layers=(0, 2))
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        x = torch.cat(backbone(images).feature_maps, dim=1)  # (B, 2 D, h, w)
        norm = model.norm
        x = (x - norm.running_mean[:, None, None]) / (norm.running_var + norm.eps).sqrt()[:, None, None]
        x = x * norm.weight[:, None, None] + norm.bias[:, None, None]
        logits = torch.einsum("kd,bdhw->bkhw", model.head.weight[:, :, 0, 0], x) + model.head.bias[:, None, None]
        torch.testing.assert_close(model(images).semantic, logits, atol=1e-5, rtol=0)


ENCODERS = {
    "vit_digits": {},
    "dinov3_digits": {},
    "swin_cifar": dict(depths=(1, 1), width=16, heads=(2, 4)),
    "resnet_cifar": dict(depths=(1, 1), widths=(8, 16), stem_width=8),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_any_encoder_carries_it_and_comes_back_from_its_folder(name, tmp_path):
    encoder = vitlab.create(name, classes=0, **ENCODERS[name]).eval()
    model = around(encoder, layers=(0, -1))
    able = model.capabilities
    assert {Capability.SEGMENT, Capability.EMBED} <= able and Capability.CLASSIFY not in able
    images = torch.randn(2, encoder.config.channels, *encoder.config.image_size)
    logits = model(images).semantic
    assert logits.shape[:2] == (2, 5)
    assert torch.equal(model.features(images), encoder(images))
    vitlab.save(model, tmp_path)
    assert torch.equal(vitlab.load(tmp_path)(images).semantic, logits)
    assert vitlab.load(tmp_path, classes=3)(images).semantic.shape[1] == 3
    alone = vitlab.load(tmp_path, encoder=True)
    assert alone.family == encoder.family and torch.equal(alone(images), encoder(images))


def test_trace_and_edit_reach_the_encoder():
    model = vitlab.create("linear_head_nano", depth=2, width=16, heads=2).eval()
    images = torch.randn(1, 3, 8, 12)
    trace = Trace("tokens", "semantic")
    logits = model(images, trace=trace).semantic
    assert trace.layout.grid == (2, 3) and trace["tokens", 1].shape == (1, 7, 16)
    assert torch.equal(trace["semantic"], logits)
    changed = model(images, edit=Edit().zero("mlp_out", layer=1)).semantic
    assert not torch.equal(changed, logits)
    assert torch.equal(model(images, edit=Edit().scale("mlp_out", 1.0, layer=1)).semantic, logits)


def test_the_loss_is_the_mean_over_pixels_whose_class_is_known():
    logits = torch.randn(2, 4, 3, 5, requires_grad=True)
    maps = torch.randint(4, (2, 6, 10))
    maps[0, :2] = VOID
    targets = [DenseTarget(torch.tensor([], dtype=torch.int64), semantic=m) for m in maps]
    enlarged = F.interpolate(logits, size=(6, 10), mode="bilinear")
    expected = F.cross_entropy(enlarged, maps, ignore_index=VOID)
    torch.testing.assert_close(pixel_loss(logits, targets), expected, atol=1e-6, rtol=0)
    nothing = [DenseTarget(torch.tensor([], dtype=torch.int64), semantic=torch.full((6, 10), VOID)) for _ in range(2)]
    assert pixel_loss(logits, nothing) == 0


def test_options_are_the_heads_or_the_encoders_and_wrong_ones_are_refused():
    model = vitlab.create("linear_head_nano", layers=(1, 3), registers=2, image_size=(16, 24))
    assert model.encoder.config.tokens.registers == 2 and model.grid_of((16, 24)) == (4, 6)
    with pytest.raises(vitlab.UsageError, match=r"no option 'layerz'\. Did you mean 'layers'"):
        vitlab.create("linear_head_nano", layerz=(1,))
    with pytest.raises(vitlab.UsageError, match=r"layers=\[4\] must name blocks or stages of the encoder: 0 to 3"):
        vitlab.create("linear_head_nano", layers=(4,))
    with pytest.raises(vitlab.UsageError, match="itself a network around an encoder"):
        LinearHeadConfig().with_encoder("mae", registry.MODELS["mae_digits"].config)
