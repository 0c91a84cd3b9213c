"""Optimisers: Muon against torch's own and against singular values, groups, rates, and their state through a file."""

import copy
import math
import sys

import pytest
import torch

import vitlab
from vitlab.training.optim import Muon, Optimisers, layers_of, lr_factor, newton_schulz, parameter_groups, warmup_steps
from vitlab.training.recipe import OptimRecipe


def small(**options):
    return vitlab.create("vit_digits", depth=3, registers=2, distill_token=True, **options)


def test_muon_takes_torchs_steps():
    """torch's own works in bfloat16: its rounding is the tolerance; the direction must be the same."""
    shapes = [(48, 16), (16, 48), (32, 32), (48, 16)]
    ours = [torch.nn.Parameter(torch.randn(s)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, lr=0.02, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)
    start = [p.detach().clone() for p in ours]
    for step in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, s in zip(ours, theirs, start, strict=True):
        moved, expected = (p - s).flatten(), (q - s).flatten()
        assert torch.cosine_similarity(moved, expected, dim=0) > 0.9995
        assert (moved.norm() / expected.norm()).item() == pytest.approx(1, abs=0.01)


def test_newton_schulz_matches_its_polynomial_on_singular_values():
    """Each singular value s goes through a s + b s^3 + c s^5, five times; vectors stay."""
    x = torch.randn(3, 20, 12, dtype=torch.float64)
    a, b, c = 3.4445, -4.7750, 2.0315
    for matrix, found in zip(x, newton_schulz(x), strict=True):
        u, s, v = torch.linalg.svd(matrix / matrix.norm(), full_matrices=False)
        for _ in range(5):
            s = a * s + b * s**3 + c * s**5
        torch.testing.assert_close(found, u @ torch.diag(s) @ v, atol=1e-8, rtol=0)


def test_norms_biases_positions_and_tokens_do_not_decay():
    groups = parameter_groups(small(), weight_decay=0.1)
    decays = {name: group["weight_decay"] for group in groups for name in group["names"]}
    assert decays.keys() == dict(small().named_parameters()).keys()
    for name, decay in decays.items():
        matrix = name.endswith("weight") and "norm" not in name
        assert decay == (0.1 if matrix else 0.0), name


def test_layer_decay_slows_early_layers():
    groups = parameter_groups(small(), weight_decay=0.1, layer_decay=0.5)
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    assert scales["head.weight"] == scales["norm.weight"] == 1
    assert scales["blocks.2.mlp.fc1.weight"] == 0.5
    assert scales["blocks.0.norm1.weight"] == 0.125
    assert scales["patch_embed.proj.weight"] == scales["positions.table"] == scales["class_token"] == 0.0625


def test_layer_decay_counts_the_blocks_of_all_stages():
    model = vitlab.create("resnet_cifar", depths=[1, 2, 1], widths=[8, 8, 8], stem_width=8)
    groups = parameter_groups(model, weight_decay=0.1, layer_decay=0.5)
    scales = {name: group["lr_scale"] for group in groups for name in group["names"]}
    order = ["stem.conv", "stages.0.0.convs.0.conv", "stages.1.0.convs.0.conv", "stages.1.1.convs.1.conv"]
    order += ["stages.2.0.shortcut.conv", "head"]
    assert [scales[f"{name}.weight"] for name in order] == [0.5**n for n in (5, 4, 3, 2, 1, 0)]


def test_what_joins_two_stages_learns_like_the_block_after_it():
    names = ["embeds.0.proj.weight", "stages.0.0.qkv.weight", "stages.0.1.qkv.weight", "embeds.1.reduction.weight"]
    names += ["stages.1.0.qkv.weight", "norm.weight"]
    assert list(layers_of(names).values()) == [0, 1, 2, 3, 3, 4]


def test_an_encoder_inside_another_network_has_its_layers_too():
    layers = layers_of([name for name, _ in vitlab.create("dino_digits", depth=2).student.named_parameters()])
    inside = layers_of([f"student.{name}" for name in layers])
    assert inside == {f"student.{name}": layer for name, layer in layers.items()}
    assert inside["student.patch_embed.proj.weight"] == 0 and inside["student.norm.weight"] == 3


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "muon"])
def test_state_goes_through_tensors_to_the_bit(name):
    recipe = OptimRecipe(name=name, lr=1e-2, momentum=0.9)
    models = [small(), small()]
    models[1].load_state_dict(models[0].state_dict())
    optimisers = [Optimisers(model, recipe) for model in models]

    def step(which, seed):
        torch.manual_seed(seed)
        optimisers[which].zero_grad()
        models[which](torch.randn(4, 1, 8, 8)).square().sum().backward()
        optimisers[which].set_factor(0.5)
        for part in optimisers[which].parts:
            part.step()

    for seed in range(3):
        step(0, seed)
    models[1].load_state_dict(models[0].state_dict())
    optimisers[1].load(optimisers[0].tensors())
    for seed in (3, 4):
        step(0, seed)
        step(1, seed)
    for (key, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("sgd", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05)),
        ("adam", lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.9, 0.999), weight_decay=0.05, fused=True)),
        ("adamw", lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.999), weight_decay=0.05, fused=True)),
    ],
)
def test_steps_are_torchs_to_the_bit_and_import_no_compiler(name, theirs, monkeypatch):
    ours, copy = torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(5, 3, bias=False)
    copy.load_state_dict(ours.state_dict())
    optimiser = theirs(copy.parameters())
    inputs = torch.randn(3, 7, 5)

    def steps(model, optimiser):
        for x in inputs:
            optimiser.zero_grad()
            model(x).square().sum().backward()
            optimiser.step()

    steps(copy, optimiser)
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # its import fails
    recipe = OptimRecipe(name=name, lr=0.1, weight_decay=0.05, betas=(0.9, 0.999), momentum=0.9)
    (part,) = Optimisers(ours, recipe).parts
    steps(ours, part)
    assert torch.equal(ours.weight, copy.weight)
    with pytest.raises(ImportError):
        optimiser.step()


def test_muon_gets_the_matrices_of_the_blocks_and_adamw_the_rest():
    optimisers = Optimisers(small(), OptimRecipe(name="muon"))
    muon, adamw = optimisers.parts
    names = {n for g in muon.param_groups for n in g["names"]}
    assert names == {
        f"blocks.{i}.{part}.weight"
        for i in range(3)
        for part in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
    }
    assert "patch_embed.proj.weight" in {n for g in adamw.param_groups for n in g["names"]}


def test_muon_is_refused_where_it_would_move_nothing():
    frozen = small().requires_grad_(False)
    frozen.head.requires_grad_(True)
    for model in (vitlab.create("resnet_cifar"), frozen):
        with pytest.raises(ValueError, match=r"muon .* optim.name=sgd or optim.name=adamw"):
            Optimisers(model, OptimRecipe(name="muon"))


def test_nothing_left_to_learn_is_refused():
    model = small().requires_grad_(False)
    with pytest.raises(ValueError, match="freeze"):
        Optimisers(model, OptimRecipe())


def test_schedule_rises_to_1_and_falls_as_a_cosine():
    factors = [lr_factor(s, 100, warmup=10, schedule="cosine", final=0.1) for s in range(100)]
    assert factors[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    for s in range(10, 100):
        assert factors[s] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * (s - 10) / 90)) / 2)
    assert [lr_factor(s, 4, warmup=0, schedule="linear", final=0) for s in range(4)] == [1, 0.75, 0.5, 0.25]
    assert lr_factor(7, 9, warmup=2, schedule="constant", final=0) == 1


def test_a_short_run_is_not_all_warm_up():
    """The rate reaches its full value after a quarter of the run at the latest; longer runs keep what was asked for."""
    five_epochs = OptimRecipe(warmup_epochs=5)
    assert warmup_steps(five_epochs, 10, 1000) == (50, 50)
    assert warmup_steps(five_epochs, 10, 30) == (50, 7)
    factors = [lr_factor(s, 30, warmup=7, schedule="cosine", final=0) for s in range(30)]
    assert factors.index(1.0) == 6 and factors[-1] < 0.01
    assert warmup_steps(OptimRecipe(warmup_steps=100), 10, 4) == (100, 1)


@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_one_kernel_for_a_parameter_moves_it_as_torchs_loop_does(name):
    """And a save in between changes no bit."""
    ours = vitlab.create("vit_digits", depth=1)
    theirs, resumed = copy.deepcopy(ours), copy.deepcopy(ours)
    recipe = OptimRecipe(name=name, lr=0.03, weight_decay=0.1, betas=(0.8, 0.95))
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    options = {"betas": (0.8, 0.95)}
    a, b = Optimisers(ours, recipe), kind(parameter_groups(theirs, 0.1), lr=0.03, foreach=False, **options)
    assert all(group["fused"] for group in a.parts[0].param_groups)
    steps = [a.parts[0], b]
    for step in range(4):
        if step == 2:
            resumed.load_state_dict(ours.state_dict())
            c = Optimisers(resumed, recipe)
            c.load({key: value.clone() for key, value in a.tensors().items()})
            steps.append(c.parts[0])
        gradients = [torch.randn_like(p) for p in ours.parameters()]
        for model in (ours, theirs, resumed):
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.grad = gradient.clone()
        for optimiser in steps:
            optimiser.step()
    for p, q, r in zip(ours.parameters(), theirs.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(p, r)
