"""Every network of stages: sizes, pyramid, what it shows, and that it trains, saves, loads and exports like the ViTs.
Their numbers are compared with other libraries in tests/parity."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import vitlab
from vitlab.explain.diff import diff
from vitlab.explain.gradients import gradients
from vitlab.explain.sizes import count, count_stages, size_of
from vitlab.layers.trace import Trace
from vitlab.models.hierarchy import StagedConfig
from vitlab.models.registry import FAMILIES, MODELS, build, build_config
from vitlab.training.doctor import first_bad_layer
from vitlab.training.optim import Optimisers, parameter_groups
from vitlab.training.recipe import OptimRecipe

NAMES = [name for name, entry in MODELS.items() if isinstance(entry.config, StagedConfig)]
PUBLISHED = {  # parameters as timm and the papers' code count them; MACs as the papers give them, in 10^9
    "swin_tiny": (28_288_354, 4.5),
    "swin_small": (49_606_258, 8.7),
    "swin_base": (87_768_224, 15.4),
    "swin_large": (196_532_476, 34.5),
    "swin_base_384": (87_903_584, 47.1),
    "swin_large_384": (196_735_516, 103.9),
    "pvt_tiny": (13_229_288, 1.9),
    "pvt_small": (24_485_864, 3.8),
    "pvt_medium": (44_208_104, 6.7),
    "pvt_large": (61_369_320, 9.8),
    "pvt_v2_b0": (3_666_760, 0.6),
    "pvt_v2_b1": (14_009_000, 2.1),
    "pvt_v2_b2": (25_362_856, 4.0),
    "pvt_v2_b2_li": (22_553_512, 3.9),
    "pvt_v2_b3": (45_238_696, 6.9),
    "pvt_v2_b4": (62_556_072, 10.1),
    "pvt_v2_b5": (81_956_008, 11.8),
    "twins_pcpvt_small": (24_106_216, 3.8),
    "twins_pcpvt_base": (43_828_456, 6.7),
    "twins_pcpvt_large": (60_989_672, 9.8),
    "twins_svt_small": (24_060_776, 2.9),
    "twins_svt_base": (56_070_952, 8.6),
    "twins_svt_large": (99_271_400, 15.1),
}
TWO = dict(widths=(12, 24), depths=(3, 2), heads=(2, 3), mlp_ratios=(2, 3))
SMALL = {  # every family, cut small; odd depths, so that both kinds of block are there
    "swin": ("swin_tiny", dict(width=12, depths=(3, 2), heads=(2, 3), window=3)),
    "swinv2": ("swinv2_tiny", dict(width=12, depths=(3, 2), heads=(2, 3), window=3)),
    "pvt": ("pvt_tiny", dict(**TWO, reductions=(3, 1))),
    "pvt_v2": ("pvt_v2_b0", dict(**TWO, reductions=(3, 2))),
    "pvt_v2 linear": ("pvt_v2_b2_li", dict(**TWO, reductions=(1, 1))),
    "twins": ("twins_svt_small", dict(**TWO, reductions=(3, 2), window=3)),
    "twins without windows": ("twins_pcpvt_small", dict(**TWO, reductions=(3, 2))),
}
SIZE = (50, 71)


def small(family: str, **options) -> nn.Module:
    torch.manual_seed(0)
    name, cut = SMALL[family]
    return vitlab.create(name, **{**cut, "classes": 5, "image_size": (32, 48), **options})


@pytest.fixture(params=SMALL)
def family(request) -> str:
    return request.param


def test_all_families_are_tested():
    assert {name.split()[0] for name in SMALL} == {
        family for family, (config, _) in FAMILIES.items() if issubclass(config, StagedConfig)
    }


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(("name", "row"), PUBLISHED.items(), ids=PUBLISHED)
def test_sizes_are_the_published_ones(name, row):
    entry, config = build_config(name)
    with torch.device("meta"):
        model = build(entry.family, config)
    assert sum(p.numel() for p in model.parameters()) == row[0]
    parameters, macs = size_of(name)
    assert parameters == row[0] and macs / 1e9 == pytest.approx(row[1], abs=0.09)


def test_a_size_is_that_of_all_blocks(family):
    """Two blocks of a stage are counted, and multiplied."""
    name, cut = SMALL[family]
    family = family.split()[0]
    config = MODELS[name].config.with_options(**{**cut, "depths": (5, 1)}, image_size=(64, 64))
    assert count_stages(family, config) == count(family, config)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_cifar")])
def test_the_small_ones_are_small(name):
    parameters, macs = size_of(name)
    assert 300_000 < parameters < 1_500_000 and macs < 100e6


@pytest.mark.parametrize("name", NAMES)
def test_every_name_builds_on_the_meta_device_and_states_its_pyramid(name):
    config = MODELS[name].config
    with torch.device("meta"):
        model = build(MODELS[name].family, config.with_options(depths=(1,) * len(config.depths)))
        maps = model.forward_pyramid(torch.empty(2, config.channels, 64, 96))
    strides = [4, 8, 16, 32] if config.image_size[0] >= 224 else [level.stride for level in model.pyramid]
    assert [level.stride for level in model.pyramid] == strides
    expected = [(2, level.channels, 64 // level.stride, 96 // level.stride) for level in model.pyramid]
    assert [tuple(m.shape) for m in maps] == expected


def test_a_config_comes_back_from_json():
    for name in NAMES:
        config = MODELS[name].config
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


# ---------------------------------------------------------------- what it shows


def test_a_trace_shows_every_step_and_changes_no_bit(family):
    model, images = small(family).eval(), torch.randn(2, 3, *SIZE)
    trace = Trace(*model.traceable)
    with torch.no_grad():
        plain, seen = model(images), model(images, trace=trace)
        features, maps = model.forward_features(images), model.forward_pyramid(images)
    assert torch.equal(plain, seen) and torch.equal(trace["head"], plain)
    grids = model.config.grids(*SIZE)
    assert [m.shape[2:] for m in maps] == list(grids)
    assert len(trace.places) == len(model.blocks) and trace.places == model.places(*SIZE)
    assert [at.grid for at in trace.places] == [grids[model.config.stage_of(n)] for n in range(len(model.blocks))]
    torch.testing.assert_close(trace["pool"], model.forward_head(features, pre_logits=True))
    for layer in range(len(model.blocks)):
        weights = trace["attention", layer]
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
        assert weights.shape[:2] == (2, model.config.heads[model.config.stage_of(layer)])


def test_training_with_a_trace_changes_no_bit_either(family):
    model, images = small(family).train(), torch.randn(2, 3, *SIZE)
    assert torch.equal(model(images), model(images, trace=Trace("attention", "tokens")))


def test_intermediate_features(family):
    model, images = small(family).eval(), torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        first, last = model.intermediate_features(images, [0, -1], maps=True)
        maps, features = model.forward_pyramid(images), model.forward_features(images)
        (raw,) = model.intermediate_features(images, [model.config.stage_ends[0]], norm=False)
    grids = model.config.grids(*SIZE)
    assert first.shape[2:] == grids[0] and last.shape[2:] == grids[-1]
    rows = features[:, -grids[-1][0] * grids[-1][1] :]
    torch.testing.assert_close(last.flatten(2).transpose(1, 2), rows)
    if model.family != "pvt_v2":  # which norms each stage
        torch.testing.assert_close(raw.transpose(1, 2).unflatten(2, grids[0]), maps[0])


def test_what_it_cannot_give_is_said(family):
    model, images = small(family), torch.randn(1, 3, 32, 48)
    with pytest.raises(ValueError, match=r"cannot give 'class_attention'"):
        model(images, trace=Trace("class_attention"))
    with pytest.raises(ValueError, match="whole grid"):
        model(images, reducer=object())
    with pytest.raises(ValueError, match=rf"A is a {type(model).__name__}"):
        diff(model, model)
    with pytest.raises(ValueError, match="channels=1"):
        model(torch.randn(1, 1, 32, 48))
    with pytest.raises(ValueError, match="has no option 'depth'"):
        small(family, depth=3)
    with pytest.raises(ValueError, match="equally many"):
        small(family, heads=(2, 2, 2))


def test_inspect_shows_stages_blocks_and_steps(family):
    model = small(family)
    found = vitlab.inspect(model, image_size=SIZE, batch=2)
    assert found.parameters == sum(p.numel() for p in model.parameters()) and found.unused == []
    assert all(step.meaning and "{" not in step.meaning for step in found.steps)
    alone = count(model.family, model.config.with_options(image_size=SIZE))[1]
    if family == "swinv2":  # its biases are computed once for a batch
        assert alone == vitlab.inspect(model, image_size=SIZE).macs and alone < found.macs < 2 * alone
    else:
        assert found.macs == alone * 2
    assert list(dict.fromkeys(step.name for step in found.at_depth(2)))[1:3] == ["stages.0", "stages.1"]
    trace = Trace(*model.traceable)
    model.eval()(torch.randn(2, 3, *SIZE), trace=trace)
    shapes = {step.name: step.shape for step in found.steps}
    assert shapes["stages.1.0.merge"] == trace["merge", model.config.depths[0]].shape
    assert shapes["stages.0.1.heads"] == trace["heads", 1].shape
    rows, columns = model.config.grids(*SIZE)[1]
    assert found.tokens.endswith(f"then {rows} x {columns}")


def test_the_doctor_finds_the_block_that_breaks(family):
    model = small(family).eval()
    with torch.no_grad():
        model.blocks[3].mlp.fc1.bias.fill_(1e3)
        model.blocks[3].mlp.fc2.weight.fill_(1e38)
    assert "block 3, fc2" in first_bad_layer(model, torch.randn(2, 3, 32, 48))


# ---------------------------------------------------------------- training


def test_every_parameter_gets_a_gradient(family):
    assert {g.verdict for g in gradients(small(family))} == {""}


def test_checkpointing_gives_the_same_gradients(family):
    images, found = torch.randn(2, 3, *SIZE), []
    for again in (False, True):
        model = small(family, gradient_checkpointing=again).train()
        model(images).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


def test_it_learns_a_batch_by_heart(family):
    model, images = small(family), torch.randn(8, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(8) % 5
    optimisers = Optimisers(model.train(), OptimRecipe(name="adamw", lr=5e-3, weight_decay=0.0))
    for _ in range(40):
        found = model(images)
        if (found.argmax(dim=1) == labels).all():
            return
        optimisers.zero_grad()
        F.cross_entropy(found, labels).backward()
        for part in optimisers.parts:
            part.step()
    pytest.fail(f"after 40 steps it says {found.argmax(dim=1).tolist()}")


def test_what_does_not_decay_and_how_fast_stages_learn(family):
    model = small(family)
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    assert all(decay == 0.0 for name, decay in decays.items() if name.endswith(("bias", "table", "class_token")))
    assert all("norm" in n or n.endswith(("bias", "table", "class_token")) for n, decay in decays.items() if not decay)
    first, second = model.config.depths
    assert scales["head.weight"] == 1.0 and scales["embeds.0.proj.weight"] == 0.5 ** (first + second + 1)
    assert scales["stages.1.0.mlp.fc1.weight"] == 0.5**second


def test_stochastic_depth_grows_from_nothing(family):
    rates = [block.depth_drop.rate for block in small(family, stochastic_depth=0.4).blocks]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])


# ---------------------------------------------------------------- files


def test_it_is_saved_loaded_and_given_another_head(family, tmp_path):
    model, images = small(family).eval(), torch.randn(2, 3, 32, 48)
    model.labels = list("abcde")
    vitlab.save(model, tmp_path / "a")
    again = vitlab.load(tmp_path / "a")
    assert again.config == model.config and again.preprocess == model.preprocess and again.labels == model.labels
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
        other = vitlab.load(tmp_path / "a", classes=7)
        assert other.head.weight.shape == (7, model.feature_width) and other.labels is None
        assert torch.equal(other.forward_features(images), model.forward_features(images))
        features = vitlab.load(tmp_path / "a", classes=0)
        assert torch.equal(features(images), model.forward_head(model.forward_features(images), pre_logits=True))
    with pytest.raises(ValueError, match=r"the weights have depths=\(3, 2\), so they cannot be loaded with depths"):
        vitlab.load(tmp_path / "a", depths=(2, 2))
    model.reset_classifier(2)
    assert model(images).shape == (2, 2) and model.config.classes == 2 and model.labels is None


def test_it_exports(family):
    model, images = small(family, depths=(2, 1)).eval(), torch.randn(2, 3, *SIZE)  # both kinds of block
    with torch.no_grad():
        expected = model(images)
        program = torch.export.export(model, (images,))
        torch.testing.assert_close(program.module()(images), expected, atol=1e-6, rtol=1e-6)
    if family.startswith("swin"):  # whose windows are made in Python, once
        whole = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(images), model(images))


def test_half_precision(family):
    model, images = small(family).eval(), torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        expected = model(images)
        found = model.bfloat16()(images.bfloat16())
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, atol=0.05, rtol=0.05)


def test_it_predicts(family):
    model = small(family)
    model.labels = list("abcde")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    (found,) = vitlab.predict(model, picture, top=5)
    assert sorted(label for label, _ in found.scores) == list("abcde")


def test_images_that_are_too_small_are_refused(family):
    if family in ("swin", "swinv2", "pvt_v2 linear"):  # which fill up, or pool to as many keys as ever
        assert small(family).eval()(torch.randn(1, 3, 3, 5)).shape == (1, 5)
        return
    least = {"pvt": 12, "pvt_v2": 9, "twins": 16, "twins without windows": 16}[family]  # pixels of one whole key
    model = small(family).eval()
    assert model(torch.randn(1, 3, 32, least)).shape == (1, 5)
    with pytest.raises(ValueError, match=f"each side must have at least {least}"):
        model(torch.randn(1, 3, 32, least - 1))
