"""transformers' own models, built live with random weights: equal logits, identical tensors after a round trip."""

import json

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn

import vitlab
from vitlab.checkpoints import convert
from vitlab.layers.trace import Trace

SMALL = dict(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, patch_size=8)


def randomise(model: nn.Module) -> nn.Module:
    """Every parameter far from its start value, so that a forgotten one shows; tokens small, so that eps shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=0.002 if "embeddings" in name else 0.2)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model.eval()


def saved(model: nn.Module, folder) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def returns_identical(model, source: dict[str, torch.Tensor], folder) -> None:
    convert.write(model, folder, "hf")
    written = load_file(folder / "model.safetensors")
    assert written.keys() == source.keys()
    for key, value in source.items():
        assert torch.equal(value, written[key]), key


VIT_CONFIGS = {
    "square": dict(image_size=32, intermediate_size=96, num_labels=7),
    "non-square": dict(image_size=(32, 48), intermediate_size=96, num_labels=3),
    "no qkv bias, grey, relu, eps 1e-5": dict(
        image_size=(40, 24),
        intermediate_size=80,
        num_channels=1,
        qkv_bias=False,
        hidden_act="relu",
        layer_norm_eps=1e-5,
    ),
    "quick_gelu": dict(image_size=48, intermediate_size=192, hidden_act="quick_gelu", layer_norm_eps=1e-6),
    "gelu tanh": dict(image_size=48, intermediate_size=100, hidden_act="gelu_pytorch_tanh", num_labels=11),
}


@pytest.mark.parametrize("options", VIT_CONFIGS.values(), ids=VIT_CONFIGS)
def test_vit_agrees_both_ways(options, tmp_path):
    theirs = randomise(hf.ViTForImageClassification(hf.ViTConfig(**SMALL, **options)))
    source = saved(theirs, tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    size = ours.config.image_size
    images = torch.randn(3, ours.config.channels, *size)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)
    returns_identical(ours, source, tmp_path / "back")
    back = hf.ViTForImageClassification.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        torch.testing.assert_close(back(images).logits, theirs(images).logits, atol=0, rtol=0)


@pytest.mark.parametrize("size", [(48, 48), (24, 56), (16, 32), (40, 32)])
def test_interpolated_positions_agree(size, tmp_path):
    theirs = randomise(hf.ViTForImageClassification(hf.ViTConfig(**SMALL, image_size=32, intermediate_size=96)))
    nn.init.normal_(theirs.vit.embeddings.position_embeddings)
    saved(theirs, tmp_path)
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        expected = theirs(images, interpolate_pos_encoding=True).logits
        torch.testing.assert_close(vitlab.load(tmp_path)(images), expected, atol=1e-5, rtol=0)
        resized = vitlab.load(tmp_path, image_size=size)
        assert resized.config.grid == (size[0] // 8, size[1] // 8)
        torch.testing.assert_close(resized(images), expected, atol=1e-5, rtol=0)


def test_the_keys_of_transformers_5_in_memory_are_read_too(tmp_path):
    theirs = randomise(hf.ViTForImageClassification(hf.ViTConfig(**SMALL, image_size=32, intermediate_size=96)))
    torch.save(theirs.state_dict(), tmp_path / "v5.pth")
    ours = vitlab.load(tmp_path / "v5.pth", heads=4, eps=1e-12, activation="gelu")
    assert "vit.layers.0.attention.q_proj.weight" in theirs.state_dict()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)


def test_attention_maps_agree(tmp_path):
    config = hf.ViTConfig(**SMALL, image_size=(32, 48), intermediate_size=96, attn_implementation="eager")
    theirs = randomise(hf.ViTForImageClassification(config))
    nn.init.normal_(theirs.vit.embeddings.position_embeddings)
    saved(theirs, tmp_path)
    images, trace = torch.randn(2, 3, 32, 48), Trace("attention")
    with torch.inference_mode():
        expected = theirs(images, output_attentions=True).attentions
        vitlab.load(tmp_path)(images, trace=trace)
    for layer in range(3):
        torch.testing.assert_close(trace["attention", layer], expected[layer], atol=1e-6, rtol=0)


def test_a_model_with_pooler_gives_the_pooled_output(tmp_path):
    theirs = randomise(hf.ViTModel(hf.ViTConfig(**SMALL, image_size=32, intermediate_size=96)))
    source = saved(theirs, tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        out = theirs(images)
        torch.testing.assert_close(ours(images), out.pooler_output, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.forward_features(images), out.last_hidden_state, atol=1e-5, rtol=0)
    returns_identical(ours, source, tmp_path / "back")


@pytest.mark.parametrize("kind", [hf.DeiTForImageClassification, hf.DeiTModel])
def test_deit_with_one_head_or_a_pooler_agrees_both_ways(kind, tmp_path):
    """Nothing reads its second token, so it is a register with a position."""
    theirs = randomise(kind(hf.DeiTConfig(**SMALL, image_size=32, intermediate_size=96, num_labels=5)))
    nn.init.normal_(theirs.base_model.embeddings.position_embeddings)
    source = saved(theirs, tmp_path / "hf")
    with pytest.warns(UserWarning, match="kept as a register"):
        ours = vitlab.load(tmp_path / "hf")
    for size in ((32, 32), (48, 24)):
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            out = theirs(images, interpolate_pos_encoding=True)
            expected = out.logits if ours.classes else out.pooler_output
            torch.testing.assert_close(ours(images), expected, atol=1e-5, rtol=0)
            tokens = theirs.base_model(images, interpolate_pos_encoding=True).last_hidden_state
            torch.testing.assert_close(ours.forward_features(images), tokens, atol=1e-5, rtol=0)
    returns_identical(ours, source, tmp_path / "back")
    assert kind.from_pretrained(tmp_path / "back").config.architectures == [kind.__name__]


def test_distilled_deit_agrees_both_ways(tmp_path):
    config = hf.DeiTConfig(**SMALL, image_size=(32, 48), intermediate_size=96, num_labels=5)
    theirs = randomise(hf.DeiTForImageClassificationWithTeacher(config))
    source = saved(theirs, tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(2, 3, 32, 48)
    with torch.inference_mode():
        out = theirs(images)
        torch.testing.assert_close(ours(images), out.logits, atol=1e-5, rtol=0)
        first, second = ours.forward_heads(ours.forward_features(images))
        torch.testing.assert_close(first, out.cls_logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(second, out.distillation_logits, atol=1e-5, rtol=0)
    returns_identical(ours, source, tmp_path / "back")


DINOV2 = {
    "plain": (hf.Dinov2Config, hf.Dinov2ForImageClassification, {}),
    "swiglu": (hf.Dinov2Config, hf.Dinov2ForImageClassification, dict(use_swiglu_ffn=True)),
    "registers": (
        hf.Dinov2WithRegistersConfig,
        hf.Dinov2WithRegistersForImageClassification,
        dict(num_register_tokens=3),
    ),
}


@pytest.mark.parametrize(("config", "build", "options"), DINOV2.values(), ids=DINOV2)
def test_dinov2_classifier_agrees_both_ways(config, build, options, tmp_path):
    """Its head reads the class token beside the mean of the patches, registers left out."""
    theirs = randomise(build(config(**SMALL, image_size=32, num_labels=5, **options)))
    source = saved(theirs, tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    assert ours.config.head.pooling == "class_mean"
    for size in ((32, 32), (40, 56), (16, 24)):  # its positions follow any size
        images = torch.randn(2, 3, *size)
        with torch.inference_mode():
            torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-5, rtol=0)
    returns_identical(ours, source, tmp_path / "back")


@pytest.mark.parametrize("registers", [False, True])
def test_dinov2_features_agree(registers, tmp_path):
    if registers:
        theirs = hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**SMALL, image_size=40))
    else:
        theirs = hf.Dinov2Model(hf.Dinov2Config(**SMALL, image_size=40))
    source = saved(randomise(theirs), tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    images = torch.randn(2, 3, 32, 48)
    with torch.inference_mode():
        out = theirs(images)
        torch.testing.assert_close(ours.forward_features(images), out.last_hidden_state, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours(images), out.pooler_output, atol=1e-5, rtol=0)
    returns_identical(ours, source, tmp_path / "back")


def test_mae_encoder_agrees(tmp_path):
    """Without masking, transformers' encoder shuffles the patches; back in order they are ours."""
    theirs = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SMALL, image_size=32, intermediate_size=96, mask_ratio=0.0))
    saved(randomise(theirs), tmp_path)
    model = vitlab.load(tmp_path).encoder
    images, noise = torch.randn(2, 3, 32, 32), torch.arange(16.0).expand(2, 16)
    with torch.inference_mode():
        out = theirs.vit(images, noise=noise)
        torch.testing.assert_close(model.forward_features(images), out.last_hidden_state, atol=1e-5, rtol=0)


def test_labels_and_preprocess_travel(tmp_path):
    names = {0: "猫", 1: "dog", 2: "[bird]"}
    config = hf.ViTConfig(**SMALL, image_size=32, intermediate_size=96, id2label=names)
    theirs = randomise(hf.ViTForImageClassification(config))
    saved(theirs, tmp_path)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": 32, "width": 32},
        "resample": 3,
        "image_mean": [0.1, 0.2, 0.3],
        "image_std": [0.4, 0.5, 0.6],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
    model = vitlab.load(tmp_path)
    assert model.labels == ["猫", "dog", "[bird]"]
    assert model.preprocess.mean == (0.1, 0.2, 0.3)
    assert model.preprocess.interpolation == "bicubic"
    vitlab.save(model, tmp_path / "native")
    again = vitlab.load(tmp_path / "native")
    assert (again.labels, again.preprocess, again.config) == (model.labels, model.preprocess, model.config)


def test_what_transformers_cannot_express_is_refused(tmp_path):
    model = vitlab.create("vit_digits", positions="rotary", channels=3, norm="post")
    with pytest.raises(ValueError, match="positions=rotary, norm=post"):
        convert.write(model, tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()
