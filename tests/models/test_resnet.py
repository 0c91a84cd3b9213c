"""ResNet beside the ViTs: its published sizes, what it can show, and that batch-norm statistics travel wherever the
weights do. Its numbers are compared with transformers in tests/parity/test_resnet.py."""

import copy
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vitlab
from vitlab.explain.diff import diff
from vitlab.explain.gradients import gradients
from vitlab.explain.sizes import size_of
from vitlab.layers.trace import Trace
from vitlab.models.resnet import MODELS, ResNetConfig
from vitlab.training.doctor import first_bad_layer
from vitlab.training.optim import Optimisers, parameter_groups
from vitlab.training.recipe import OptimRecipe
from vitlab.training.state import Progress, load_last, save_last

PUBLISHED = {  # parameters as torchvision and timm count them; MACs as torchvision's tables give them, in 10^9
    "resnet18": (11_689_512, 1.81),
    "resnet34": (21_797_672, 3.66),
    "resnet50": (25_557_032, 4.09),
}
SMALL = dict(stem_width=8, widths=(8, 12, 16), image_size=(32, 48), classes=5)


def small(**options) -> nn.Module:
    torch.manual_seed(0)
    return vitlab.create("resnet_cifar", **{**SMALL, **options})


def some_steps(model: nn.Module, steps: int = 2, first: int = 0, optimisers=None) -> Optimisers:
    """A few steps, which move the weights and the statistics."""
    optimisers = optimisers or Optimisers(model.train(), OptimRecipe(name="sgd", lr=0.1))
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(4, 3, 32, 48, generator=generator) * 2 + 1
        F.cross_entropy(model(images), torch.tensor([0, 1, 2, 3])).backward()
        for part in optimisers.parts:
            part.step()
        optimisers.zero_grad()
    return optimisers


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in model.state_dict().items() if "running" in k or "tracked" in k}


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(("name", "row"), PUBLISHED.items(), ids=PUBLISHED)
def test_sizes_are_the_published_ones(name, row):
    parameters, macs = size_of(name)
    assert parameters == row[0]
    assert macs / 1e9 == pytest.approx(row[1], abs=0.006)


def test_the_small_one_is_small():
    parameters, macs = size_of("resnet_cifar")
    assert 300_000 < parameters < 700_000 and macs < 100e6


@pytest.mark.parametrize("name", ["ResNet-50", "resnet50.a1_in1k", "resnet50_160"])
def test_names_from_elsewhere(name):
    with torch.device("meta"):
        model = vitlab.create(name, classes=7)
    assert model.config.depths == (3, 4, 6, 3) and model.config.classes == 7
    side = 160 if name.endswith("160") else 224
    p = model.preprocess
    assert (p.size, p.how, p.resize, p.interpolation) == ((side, side), "crop", round(256 * side / 224), "bilinear")
    assert p.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(widths=(8, 16)), "equally many"),
        (dict(block="bottleneck", widths=(8, 10, 16)), "Use 12"),
        (dict(depths=(1, 0, 1)), r"depths=\(1, 0, 1\) must be at least 1"),
        (dict(depths=("a", 1, 1)), "expected a list of whole numbers"),
        (dict(hidden_sizes=(8, 8, 8)), "Did you mean 'widths'"),
        (dict(stem="tiny"), "expected imagenet | small"),
        (dict(heads=3), "has no option 'heads'"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        vitlab.create("resnet_cifar", **options)


def test_a_config_comes_back_from_json():
    for config in MODELS.values():
        assert ResNetConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# ---------------------------------------------------------------- what it shows


def test_a_trace_gets_the_stages_and_changes_no_bit():
    model = small(stem="imagenet", block="bottleneck", depths=(2, 1, 3)).eval()
    images = torch.randn(2, 3, 45, 70)
    ends = model.config.stage_ends
    assert ends == (1, 2, 5)
    assert [model.config.place(n) for n in range(6)] == [
        f"stages.{at}" for at in ("0.0", "0.1", "1.0", "2.0", "2.1", "2.2")
    ]
    trace = Trace("stem", "block", "pool", "head", layers=ends)
    with torch.no_grad():
        plain, seen = model(images), model(images, trace=trace)
        maps = model.forward_features(images)
    assert torch.equal(plain, seen)
    assert trace["stem"].shape == (2, 8, 12, 18)  # 45 -> 23 -> 12, 70 -> 35 -> 18
    assert [trace["block", end].shape[1:] for end in ends] == [(8, 12, 18), (12, 6, 9), (16, 3, 5)]
    assert model.config.grid(45, 70) == (3, 5)
    assert torch.equal(trace["block", -1], maps)
    torch.testing.assert_close(trace["pool"], maps.flatten(2).mean(dim=2))
    assert torch.equal(trace["head"], plain)
    assert torch.equal(model.forward_head(maps, pre_logits=True), trace["pool"])


def test_what_it_cannot_give_is_said():
    model = small()
    with pytest.raises(ValueError, match=r"cannot give 'attention'\. It can give: stem, conv1, conv2, shortcut, block"):
        model(torch.randn(1, 3, 32, 48), trace=Trace("attention"))
    with pytest.raises(ValueError, match="layer 4 does not exist"):
        model(torch.randn(1, 3, 32, 48), trace=Trace("block", layers=[4]))
    with pytest.raises(ValueError, match="no tokens to reduce"):
        model(torch.randn(1, 3, 32, 48), reducer=object())
    with pytest.raises(
        ValueError, match=r"neither tokens nor attention to explain\. By vitlab\.Trace it can give: stem"
    ):
        vitlab.explain.attention_maps(model, torch.randn(1, 3, 32, 48))
    with pytest.raises(ValueError, match="A is a ResNet"):
        diff(model, model)
    with pytest.raises(ValueError, match="channels=1"):
        model(torch.randn(1, 1, 32, 48))


def test_a_residual_block_is_its_equation():
    """Eq. 2 with torch's own layers, in training mode."""
    model = small().train()
    block, x = model.stages[1][0], torch.randn(3, 8, 9, 11).relu()
    y = F.conv2d(x, block.convs[0].conv.weight, stride=2, padding=1)
    y = F.batch_norm(y, None, None, training=True).relu()
    y = F.batch_norm(F.conv2d(y, block.convs[1].conv.weight, padding=1), None, None, training=True)
    s = F.batch_norm(F.conv2d(x, block.shortcut.conv.weight, stride=2), None, None, training=True)
    torch.testing.assert_close(block(x), (s + y).relu())


def test_inspect_shows_stages_blocks_and_steps():
    found = vitlab.inspect("resnet50")
    assert (found.parameters, found.unused) == (25_557_032, [])
    assert all(step.meaning for step in found.steps)
    stages = {step.name: step for step in found.at_depth(2)}
    assert list(stages) == ["stem", *(f"stages.{n}" for n in range(4)), "pool", "head"]
    shapes = [(1, 256, 56, 56), (1, 512, 28, 28), (1, 1024, 14, 14), (1, 2048, 7, 7)]
    assert [stages[f"stages.{n}"].shape for n in range(4)] == shapes
    one = found.at_depth(4)[1]  # 64 channels at 56 x 56 become 64 by a 1x1, with a norm
    assert (one.name, one.parameters, one.macs) == ("stages.0.0.conv1", 64 * 64 + 2 * 64, 64 * 64 * 56 * 56)
    assert found.macs == sum(step.macs for step in found.at_depth(3)) and found.memory > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_name_can_be_inspected(name):
    assert vitlab.inspect(name, image_size=(64, 96)).parameters == size_of(name)[0]


def test_every_parameter_gets_a_gradient():
    assert {g.verdict for g in gradients(small())} == {""}


def test_the_doctor_finds_the_block_that_breaks():
    model = small().eval()
    with torch.no_grad():
        model.stages[1][0].convs[1].norm.running_var.fill_(float("nan"))
    assert "block 1, conv2" in first_bad_layer(model, torch.randn(2, 3, 32, 48))


# ---------------------------------------------------------------- statistics travel


def test_statistics_are_saved_and_loaded(tmp_path):
    model = small()
    some_steps(model, steps=3)
    kept = statistics(model)
    assert {int(v) for k, v in kept.items() if "tracked" in k} == {3}
    images = torch.randn(2, 3, 32, 48)
    vitlab.save(model, tmp_path)
    again = vitlab.load(tmp_path)
    assert again.config == model.config and again.preprocess == model.preprocess
    assert load_file(tmp_path / "weights.safetensors").keys() == model.state_dict().keys()
    for key, value in kept.items():
        assert torch.equal(value, again.state_dict()[key]), key
        assert value.dtype == again.state_dict()[key].dtype
    with torch.no_grad():
        assert torch.equal(again(images), model.eval()(images))


def test_a_resumed_model_goes_on_to_the_bit(tmp_path):
    model = small()
    optimisers = some_steps(model, steps=2)
    save_last(tmp_path, model, optimisers.tensors(), None, Progress(step=2))
    some_steps(model, steps=2, first=2, optimisers=optimisers)
    saved, again = load_last(tmp_path), small()
    again.load_state_dict(saved.weights)
    other = Optimisers(again.train(), OptimRecipe(name="sgd", lr=0.1))
    other.load(saved.optimizer)
    some_steps(again, steps=2, first=2, optimisers=other)
    for key, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key


def test_a_running_average_has_statistics():
    model = small()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    some_steps(model)
    ema.update_parameters(model)
    for key, value in statistics(model).items():
        assert torch.equal(value, ema.module.state_dict()[key]), key


def test_frozen_norms_keep_their_statistics():
    """A frozen encoder in training mode would otherwise go on following its batches."""
    model = small()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    before = statistics(model)
    some_steps(model)
    for key, value in statistics(model).items():
        assert torch.equal(value, before[key]), key
    assert model.training and model.head.training and not model.stem.norm.training


def test_training_moves_the_statistics():
    model = small()
    before = statistics(model)
    some_steps(model, steps=1)
    assert all(not torch.equal(value, before[key]) for key, value in statistics(model).items())


# ---------------------------------------------------------------- training


def test_norms_and_biases_do_not_decay():
    groups = {g["weight_decay"]: set(g["names"]) for g in parameter_groups(small(), weight_decay=0.1)}
    kernels = {n for n, p in small().named_parameters() if p.ndim == 4} | {"head.weight"}
    assert groups[0.1] == kernels
    assert all(n.endswith(("norm.weight", "norm.bias")) or n == "head.bias" for n in groups[0.0])


@pytest.mark.parametrize("name", ["sgd", "adamw", "adam"])
def test_it_learns_a_batch_by_heart(name):
    model, images = small(), torch.randn(8, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(8) % 5
    rate = 0.1 if name == "sgd" else 1e-2
    optimisers = Optimisers(model.train(), OptimRecipe(name=name, lr=rate, weight_decay=0.0))
    for _ in range(20):
        optimisers.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        for part in optimisers.parts:
            part.step()
    assert (model(images).argmax(dim=1) == labels).all()


# ---------------------------------------------------------------- new heads, other sizes


def test_a_new_head_leaves_the_rest(tmp_path):
    model = small()
    some_steps(model)
    model.labels = list("abcde")
    vitlab.save(model, tmp_path)
    again = vitlab.load(tmp_path, classes=7)
    assert again.head.weight.shape == (7, 16) and again.labels is None
    images = torch.randn(2, 3, 40, 24)
    with torch.no_grad():
        assert torch.equal(again.forward_features(images), model.eval().forward_features(images))
    features = vitlab.load(tmp_path, classes=0)
    assert features(images).shape == (2, features.feature_width) == (2, 16)
    vitlab.save(features, tmp_path / "features")
    assert vitlab.load(tmp_path / "features", classes=3).config.classes == 3
    copied = copy.deepcopy(model)
    copied.reset_classifier(2)
    assert copied(images).shape == (2, 2) and copied.config.classes == 2 and copied.labels is None


def test_weights_belong_to_one_network(tmp_path):
    vitlab.save(small(), tmp_path)
    with pytest.raises(ValueError, match=r"the weights have depths=\(1, 1, 2\), so they cannot be loaded with depths"):
        vitlab.load(tmp_path, depths=(2, 2, 2))
    larger = vitlab.load(tmp_path, image_size=(64, 64))
    assert larger.preprocess.size == larger.config.image_size == (64, 64)


def test_it_exports():
    model, images = small().eval(), torch.randn(2, 3, 32, 48)
    program = torch.export.export(model, (images,))
    with torch.no_grad():
        torch.testing.assert_close(program.module()(images), model(images), atol=1e-6, rtol=1e-6)


def test_it_predicts():
    model = small()
    model.labels = list("abcde")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8))
    (found,) = vitlab.predict(model, picture, top=5)
    assert sorted(label for label, _ in found.scores) == list("abcde")
    with torch.no_grad():
        expected = model.eval()(model.preprocess(picture)[None]).softmax(dim=1).max()
    assert found.scores[0][1] == pytest.approx(float(expected))
