"""Every registered name: its size as published, and that it trains, saves, loads and exports."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import vitlab
from vitlab.explain.sizes import size_of
from vitlab.models.registry import MODELS, build, build_config

VITS = [name for name, entry in MODELS.items() if entry.family == "vit"]  # the others are in tests of their own
PARAMETERS = {  # at 1000 classes, 224 px: timm and the DeiT paper
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "H/14": 632_045_800,
    "deit_tiny_distilled_patch16_224": 5_910_800,
    "deit_small_distilled_patch16_224": 22_436_432,
    "deit_base_distilled_patch16_224": 87_338_192,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameter_counts_are_the_published_ones(name, count):
    entry, config = build_config(name)
    with torch.device("meta"):
        model = build(entry.family, config)
    assert sum(p.numel() for p in model.parameters()) == count
    assert size_of(name)[0] == count


def test_macs_of_b16():
    assert size_of("ViT-B/16")[1] == pytest.approx(17.56e9, rel=0.005)


def by_formula(c) -> tuple[int, int]:
    """Parameters and MACs of a ViT, written from the paper and not from the code."""
    D, P, hidden = c.width, c.patch_size, c.mlp_hidden
    patches = (c.image_size[0] // P) * (c.image_size[1] // P)
    prefix = 1 + c.tokens.distill_token + c.tokens.registers
    N = patches + prefix
    up = 2 * hidden if c.mlp.kind == "swiglu" else hidden
    block = (D * 3 * D + 3 * D) + (D * D + D) + (D * up + up) + (hidden * D + D) + 4 * D
    block += 2 * D if c.residual.layer_scale else 0
    heads = (1 + c.tokens.distill_token) * c.classes
    positions = patches + 1 + c.tokens.distill_token
    parameters = c.channels * P * P * D + D + prefix * D + positions * D + c.depth * block + 2 * D + heads * (D + 1)
    macs = patches * c.channels * P * P * D + heads * D
    macs += c.depth * (N * D * 3 * D + 2 * N * N * D + N * D * D + N * D * up + N * hidden * D)
    return parameters, macs


@pytest.mark.parametrize("name", VITS)
def test_every_name_has_the_size_its_paper_gives(name):
    assert size_of(name) == by_formula(MODELS[name].config)


@pytest.mark.parametrize("name", VITS)
def test_every_name_builds_at_full_size_on_the_meta_device(name):
    with torch.device("meta"):
        model = build(MODELS[name].family, MODELS[name].config)
        out = model(torch.empty(2, model.config.channels, *model.config.image_size))
    assert sum(p.numel() for p in model.parameters()) == by_formula(model.config)[0]
    assert out.shape == (2, model.config.classes or model.config.width)


EXPORTED = set()  # configs: names that differ in size alone are one network once they are cut, to the bit


def cut(name: str):
    """The same architecture, small enough to run: depth 2, width 64, few patches."""
    patch = MODELS[name].config.patch_size
    size = (2 * patch, 3 * patch)
    return vitlab.create(name, depth=2, width=64, heads=4, image_size=size)


@pytest.mark.parametrize("name", VITS)
def test_every_name_trains_saves_loads_and_exports(name, tmp_path):
    model = cut(name)
    images = torch.randn(2, model.config.channels, *model.config.image_size)
    out = model(images)
    loss = F.cross_entropy(out, torch.tensor([0, 1])) if model.config.classes else out.square().sum()
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, key

    model.eval()
    vitlab.save(model, tmp_path)
    again = vitlab.load(tmp_path)
    assert again.config == model.config
    assert again.preprocess == model.preprocess
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert load_file(tmp_path / "weights.safetensors").keys() == model.state_dict().keys()
    with torch.no_grad():
        expected = model(images)
        assert torch.equal(again(images), expected)
        if model.config not in EXPORTED:
            program = torch.export.export(model, (images,))
            torch.testing.assert_close(program.module()(images), expected, atol=1e-6, rtol=1e-6)
            EXPORTED.add(model.config)


def test_names_from_elsewhere():
    assert vitlab.create("vit_base_patch16_384", depth=1).config.image_size == (384, 384)
    assert vitlab.create("vit_tiny_patch16_224.augreg_in21k_ft_in1k", depth=1).config.width == 192
    assert vitlab.create("ViT-S/32", depth=1).config.patch_size == 32
    assert vitlab.create("vit_huge", depth=1).config.patch_size == 14
    assert vitlab.create("vit_small_patch14_reg4_dinov2", depth=1).config.tokens.registers == 4
    assert vitlab.create("vit_small_plus_patch16_dinov3_qkvb", depth=1).config.mlp == "swiglu"
    plain = vitlab.create("deit_small_patch16_224", depth=1)
    assert plain.preprocess.mean[0] == 0.485 and not plain.config.tokens.distill_token
    assert vitlab.create("deit_tiny_distilled_patch16_224", depth=1).config.tokens.distill_token


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("vit_bse", "vit_base"), ("vit_base_patch61", "vit_base_patch16"), ("dino_v2_small", "dinov2_small")],
)
def test_a_near_miss_is_told_the_name(wrong, near):
    with pytest.raises(ValueError, match=near):
        vitlab.create(wrong)


def test_list_models():
    assert vitlab.list_models() == list(MODELS)
    vits = [f"vit_base_patch{p}" for p in (8, 14, 16, 32)]
    assert vitlab.list_models("vit_base_patch*") == vits
    assert vitlab.list_models("vit_base_patch") == [*vits, "clip_vit_base_patch32", "clip_vit_base_patch16"]
    assert vitlab.list_models("dinov2_*_registers") == [
        f"dinov2_{s}_registers" for s in ("small", "base", "large", "giant")
    ]


def test_list_models_by_alias():
    assert vitlab.list_models("ViT-B/*") == [f"vit_base_patch{p}" for p in (8, 14, 16, 32)]
    assert {"vit_base_patch32", "clip_vit_base_patch32"} <= set(vitlab.list_models("-b/32"))  # and other families' B
    assert vitlab.list_models("vit_base_patch16_384") == ["vit_base_patch16"]
    assert vitlab.list_models("resnext") == []


def test_the_five_functions_are_the_registered_models():
    from vitlab.models import vit

    for size in ("tiny", "small", "base", "large", "huge"):
        with torch.device("meta"):
            model = getattr(vit, f"vit_{size}")()
        assert model.config == build_config(f"vit_{size}")[1]
    assert vit.vit_tiny(32, classes=7, depth=1, pooling="mean").config.head.pooling == "mean"


@pytest.mark.parametrize("name", ["vit_base_{}", "swin_base_patch4_window{}_224", "mae_vit_base_patch{}"])
def test_a_number_of_thousands_of_digits_is_no_name(name):
    with pytest.raises(vitlab.UsageError, match="there is no model named"):
        vitlab.create(name.format("9" * 5000))
