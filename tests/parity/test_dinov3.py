"""DINOv3 against transformers, live with random weights; timm's stored tensors; Meta's files by their definition."""

import json
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import nn

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report

from .test_golden import same, unpack

SMALL = dict(hidden_size=48, num_hidden_layers=2, num_attention_heads=4, patch_size=8, image_size=32)
CONFIGS = {
    "S": dict(intermediate_size=100, num_register_tokens=4, layer_norm_eps=1e-3),
    "S+": dict(intermediate_size=64, num_register_tokens=3, use_gated_mlp=True, hidden_act="silu"),
    "7B: no bias of queries and values": dict(
        **dict(use_gated_mlp=True, hidden_act="silu", num_register_tokens=1),
        **dict(query_bias=False, value_bias=False, intermediate_size=96),
    ),
    "a gate of GELU, no registers, grey": dict(intermediate_size=96, use_gated_mlp=True, num_channels=1),
    "keys with a bias, nothing else with one": dict(
        **dict(key_bias=True, proj_bias=False, mlp_bias=False, rope_theta=37.0, image_size=(24, 40)),
        **dict(hidden_act="gelu_pytorch_tanh", num_register_tokens=2),
    ),
}


def randomise(model: nn.Module) -> nn.Module:
    """Every parameter far from its start value; patches small, so that eps shows."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(mean=float(norm or "lambda" in name), std=0.2)
            if "embeddings" in name:
                parameter.mul_(0.05)
    return model.eval()


def dinov3(name: str = "S", **options) -> nn.Module:
    return randomise(hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**{**SMALL, **CONFIGS[name], **options})))


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_agree_both_ways_at_any_size(name, tmp_path):
    theirs = dinov3(name)
    theirs.save_pretrained(tmp_path / "hf")
    ours = vitlab.load(tmp_path / "hf")
    for size in ((32, 32), (40, 24), (8, 72)):
        images = torch.randn(2, ours.config.channels, *size)
        with torch.inference_mode():
            out = theirs(images)
            torch.testing.assert_close(ours.forward_features(images), out.last_hidden_state, atol=1e-5, rtol=0)
            torch.testing.assert_close(ours(images), out.pooler_output, atol=1e-5, rtol=0)
    assert out.last_hidden_state.std() > 0.1
    convert.write(ours, tmp_path / "back", "hf")
    same(load_file(tmp_path / "hf" / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors"))
    back = hf.DINOv3ViTModel.from_pretrained(tmp_path / "back").eval()
    with torch.inference_mode():
        assert torch.equal(back(images).last_hidden_state, out.last_hidden_state)
    assert vitlab.load(tmp_path / "back").config == ours.config


def test_maps_of_a_backbone(tmp_path):
    config = hf.DINOv3ViTConfig(**SMALL, num_register_tokens=4, out_indices=[1, 2])
    theirs = randomise(hf.DINOv3ViTBackbone(config))
    theirs.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 24, 40)
    with torch.inference_mode():
        maps = vitlab.load(tmp_path).intermediate_features(images, [0, 1], maps=True)
        for a, b in zip(maps, theirs(images).feature_maps, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@pytest.mark.parametrize("moves", [dict(pos_embed_rescale=None), dict(pos_embed_shift=0.3, pos_embed_jitter=1.5)])
def test_positions_move_in_training_alone(moves, tmp_path):
    """By the same draws as theirs."""
    theirs = dinov3(**moves)
    theirs.save_pretrained(tmp_path / "hf")
    ours, images = vitlab.load(tmp_path / "hf"), torch.randn(2, 3, 32, 40)
    still = ours(images)
    passes = []
    for model in (ours.train(), theirs.train()):
        torch.manual_seed(3)
        passes.append(model(images))
    torch.testing.assert_close(passes[0], passes[1].pooler_output, atol=1e-5, rtol=0)
    assert torch.equal(passes[0], still) == (moves.get("pos_embed_rescale", 2.0) is None)
    convert.write(ours, tmp_path / "back", "hf")
    written = json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))
    assert {name: written[name] for name in moves} == moves


TIMM = {"timm_dinov3": "vit_small_patch16_dinov3", "timm_dinov3_plus": "vit_small_plus_patch16_dinov3"}


@pytest.mark.parametrize("name", TIMM)
def test_timm(name, tmp_path):
    """Bare, where heads are passed, and as a folder of its hub, which says all."""
    path, tensors = unpack(name, tmp_path)
    with pytest.warns(AssumedWarning, match="timm weights do not say eps=1e-05, pooling=mean"):
        bare = vitlab.load(path, heads=4, image_size=32)
    path.rename(tmp_path / "model.safetensors")
    cfg = {"input_size": [3, 256, 256], "mean": [0.4] * 3, "std": [0.2] * 3, "interpolation": "bicubic", "crop_pct": 1}
    args = {"embed_dim": 48, "depth": 2, "num_heads": 4, "img_size": 32, "patch_size": 8}
    config = {"architecture": TIMM[name], "model_args": args, "pretrained_cfg": cfg, "global_pool": "avg"}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    folder, report = load_with_report(tmp_path)
    assert not report.notes and folder.preprocess.size == (32, 32)
    for model in (bare, folder):
        with torch.inference_mode():
            tokens = model.forward_features(tensors["input.images"])
            torch.testing.assert_close(tokens, tensors["output.features"], atol=1e-5, rtol=0)
            torch.testing.assert_close(model.forward_head(tokens), tensors["output.logits"], atol=1e-5, rtol=0)
    for changed, message in (
        (dict(architecture="vit_base_patch16_lingbot"), "architecture 'vit_base_patch16_lingbot'"),
        (dict(model_args={**args, "rope_temperature": 10}), "rope_temperature=10 is not known"),
        (dict(model_args={**args, "use_rot_pos_emb": False}), "use_rot_pos_emb=False is not known"),
        (dict(global_pool="map"), "global_pool 'map'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
        with pytest.raises(vitlab.CheckpointError, match=message):
            vitlab.load(tmp_path)


def as_meta_saves(theirs: nn.Module, periods: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state dict of facebookresearch/dinov3's DinoVisionTransformer, written from that definition: storage_tokens,
    a bias whose keys are masked, and the periods of the rotary positions as a buffer. No file of Meta's was at hand.
    """
    names = {"attention.o_proj": "attn.proj", "layer_scale1.lambda1": "ls1.gamma", "layer_scale2.lambda1": "ls2.gamma"}
    gated = theirs.config.use_gated_mlp
    names |= {"mlp.down_proj": "mlp.w3" if gated else "mlp.fc2", "mlp.up_proj": "mlp.w2" if gated else "mlp.fc1"}
    names |= {"mlp.gate_proj": "mlp.w1", "embeddings.patch_embeddings": "patch_embed.proj", "model.layer": "blocks"}
    names |= {"embeddings.register_tokens": "storage_tokens", "embeddings.": ""}
    state: dict[str, torch.Tensor] = {}
    for key, value in theirs.state_dict().items():
        for old, new in names.items():
            key = key.replace(old, new)
        state[key] = value
    state["mask_token"] = state["mask_token"][0]  # (1, D)
    for block in range(theirs.config.num_hidden_layers):
        at, parts = f"blocks.{block}.attn.qkv.", "qkv"
        weights, biases = (
            [state.pop(f"blocks.{block}.attention.{part}_proj.{kind}", torch.full((48,), 7.0)) for part in parts]
            for kind in ("weight", "bias")
        )
        state[at + "weight"], state[at + "bias"] = torch.cat(weights), torch.cat(biases)  # 7: what the mask hides
        state[at + "bias_mask"] = torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(48)
    state |= {f"local_cls_norm.{kind}": torch.randn(48) for kind in ("weight", "bias")}  # in the 7B's file
    return state | {"rope_embed.periods": periods}


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize("name", ["S", "S+"])
def test_metas_own_file_by_its_definition(name, rounded, tmp_path):
    """Its periods are rounded to bfloat16, and used so."""
    theirs = dinov3(name, layer_norm_eps=1e-5)
    periods = 100 ** (torch.arange(3) / 3)
    if rounded:
        periods = periods.bfloat16().float()
        theirs.rope_embeddings.inv_freq.copy_(1 / periods)
    torch.save(as_meta_saves(theirs, periods), tmp_path / "dinov3.pth")
    with pytest.warns(AssumedWarning, match="facebook weights do not say eps=1e-05"):
        ours = vitlab.load(tmp_path / "dinov3.pth")
    assert ours.config.heads == 4 and ours.config.rotary_dtype == ("bfloat16" if rounded else "float32")
    images = torch.randn(2, 3, 40, 24)
    with torch.inference_mode():
        tokens = theirs(images).last_hidden_state
        torch.testing.assert_close(ours.forward_features(images), tokens, atol=1e-5, rtol=0)
    if rounded:
        with pytest.raises(vitlab.UsageError, match="rotary_dtype=bfloat16"):
            convert.write(ours, tmp_path / "hf", "hf")
        float32 = vitlab.load(tmp_path / "dinov3.pth", rotary_dtype="float32", eps=1e-5)
        assert (float32.forward_features(images) - tokens).abs().max() > 1e-4
        convert.write(float32, tmp_path / "hf", "hf")


def test_what_meta_cannot_mean_is_refused(tmp_path):
    state = as_meta_saves(dinov3(), 10 ** (torch.arange(3) / 3))
    torch.save(state, tmp_path / "other.pth")
    with pytest.raises(vitlab.CheckpointError, match="known are those of base 100, up to"):
        vitlab.load(tmp_path / "other.pth")
    state["rope_embed.periods"] = 100 ** (torch.arange(3) / 3)
    state["blocks.1.attn.qkv.bias_mask"] = torch.ones(144)
    torch.save(state, tmp_path / "keys.pth")
    with pytest.raises(vitlab.CheckpointError, match=r"blocks.1.attn.qkv.bias_mask leaves the keys a bias"):
        vitlab.load(tmp_path / "keys.pth")


def test_a_config_is_honoured_or_refused(tmp_path):
    dinov3().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    for changed, message in {
        "model_type": ("vit", "model_type 'vit' beside the weights of a DINOv3"),
        "value_bias": (False, "query_bias true, key_bias false, value_bias false"),
        "patch_size": ([8, 16], "only square patches"),
        "use_gated_mlp": (True, "mlp=swiglu but the weights have mlp"),
        "intermediate_size": (96, "the config says mlp_ratio=2.0"),
        "num_register_tokens": (2, "registers=2 but the weights have 4"),
        "hidden_act": ("mish", "hidden_act 'mish'"),
        "pos_embed_jitter": (0.5, "position_jitter=0.5 must be a factor of 1"),
        "rope_theta": ("big", "rope_theta 'big'; expected a number above 0"),
    }.items():
        (tmp_path / "config.json").write_text(json.dumps(config | {changed: message[0]}), encoding="utf-8")
        with pytest.raises(vitlab.CheckpointError, match=re.escape(message[1])):
            vitlab.load(tmp_path)


def test_the_convolutional_variants_are_refused_in_words(tmp_path):
    config = hf.DINOv3ConvNextConfig(hidden_sizes=[8, 8, 8, 8], depths=[1, 1, 1, 1])
    hf.DINOv3ConvNextModel(config).save_pretrained(tmp_path)
    with pytest.raises(vitlab.CheckpointError, match="model_type 'dinov3_convnext', a convolutional network"):
        vitlab.load(tmp_path)
    with pytest.raises(vitlab.CheckpointError, match="a ConvNeXt, as DINOv3's convolutional variants"):
        vitlab.load(tmp_path / "model.safetensors")


def test_images_are_read_as_its_processor_does(tmp_path):
    dinov3().save_pretrained(tmp_path)
    assert vitlab.load(tmp_path).preprocess.how == "stretch"
    (tmp_path / "preprocessor_config.json").write_text(
        '{"image_processor_type": "DINOv3ViTImageProcessorFast"}', encoding="utf-8"
    )
    model, report = load_with_report(tmp_path)
    assert model.preprocess.interpolation == "bilinear" and model.preprocess.mean == (0.485, 0.456, 0.406)
    assert model.preprocess.size == (224, 224) and not report.notes
    convert.write(model, tmp_path / "back", "hf")
    written = json.loads((tmp_path / "back" / "preprocessor_config.json").read_text(encoding="utf-8"))
    assert written["image_processor_type"] == "DINOv3ViTImageProcessorFast" and written["resample"] == 2


def test_a_classifier_has_no_place_in_transformers(tmp_path):
    with pytest.raises(vitlab.UsageError, match=r"classes=10 \(it has no classifier"):
        convert.write(vitlab.create("dinov3_digits"), tmp_path / "out", "hf")
