"""inspect: shapes, counts and memory against a real run and against sums done by hand."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import vitlab
from vitlab.explain.gradients import gradients
from vitlab.layers.trace import TokenLayout, Trace, mark
from vitlab.models import registry
from vitlab.models.base import Network
from vitlab.models.config import Config
from vitlab.models.registry import MODELS

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)
CASES = [
    {},
    dict(registers=2, positions="rotary", pooling="mean_norm", layer_scale=0.1, mlp="swiglu", qk_norm=True),
    dict(distill_token=True, norm_pre=True, positions="sincos"),
    dict(norm="post", positions="relative", pooling="attention", head_hidden=10),
    dict(stem="conv", classes=0, pooling="class_mean"),
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_shapes_and_totals_are_those_of_a_real_run(options):
    model = vitlab.create("vit_base", **{**SMALL, **options}).eval()
    found = vitlab.inspect(model, batch=2)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.unused == []
    trace = Trace(*model.traceable)
    model(torch.randn(2, 3, 32, 48), trace=trace)
    shapes = {step.name: step.shape for step in found.steps}
    for kind in ("patch_embed", "norm", "pool", "head"):
        if kind in model.traceable:
            assert shapes[kind] == trace[kind].shape
    for layer in range(3):
        assert shapes[f"blocks.{layer}.attention.qkv"] == trace["qkv", layer].shape
        assert shapes[f"blocks.{layer}.mlp.fc1"] == trace["fc1", layer].shape
        assert shapes[f"blocks.{layer}.tokens"] == trace["tokens", layer].shape


def test_parameters_are_charged_to_the_step_that_reads_them():
    found = {s.name: s for s in vitlab.inspect(vitlab.create("vit_base", **SMALL)).steps}
    by_hand = {
        "patch_embed": 3 * 64 * 48 + 48,
        "prefix": 48,
        "positions": 25 * 48,
        "blocks.1.norm1": 96,
        "blocks.1.attention.qkv": 48 * 144 + 144,
        "blocks.1.attention.heads": 0,
        "blocks.1.attention.proj": 48 * 48 + 48,
        "blocks.1.mlp.fc1": 48 * 192 + 192,
        "norm": 96,
        "head": 48 * 7 + 7,
    }
    assert {name: found[name].parameters for name in by_hand} == by_hand


def test_macs_by_hand_for_a_batch_of_two_at_another_size():
    """Attention counts: two products of N x N x 48 in each block."""
    steps = vitlab.inspect(vitlab.create("vit_base", **SMALL), image_size=(64, 40), batch=2).steps
    assert steps[2].meaning == "+ learned positions, resized from 4 x 6 (eq. 1)"
    found = {s.name: s.macs for s in steps}
    N = 1 + 8 * 5
    assert found["patch_embed"] == 2 * 40 * 3 * 64 * 48
    assert found["blocks.0.attention.qkv"] == 2 * N * 48 * 144
    assert found["blocks.0.attention.heads"] == 2 * 2 * N * N * 48
    assert found["blocks.2.mlp.fc2"] == 2 * N * 192 * 48
    assert found["head"] == 2 * 48 * 7


@pytest.mark.parametrize("path", ["fused", "explicit"])
def test_memory_is_what_a_real_backward_keeps(path):
    model = vitlab.create("vit_base", **SMALL, attention=path).train()
    found = vitlab.inspect(model, batch=2)
    kept: dict[int, tuple[int, torch.Tensor]] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes up twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(2, 3, 32, 48))
    assert out.requires_grad
    assert found.memory == pytest.approx(sum(size for size, _ in kept.values()), rel=0.02)


@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.family in ("vit", "mae", "dino")])
def test_every_registered_transformer_can_be_inspected(name):
    """Cut to two blocks for time; the full sizes are counted in tests/models."""
    found = vitlab.inspect(name, depth=2)
    assert found.unused == []
    assert len(found.steps) >= 3 + 2 * 9
    assert found.macs > 0 and found.memory > 0
    assert all(step.meaning for step in found.steps)


def test_meaning_and_backend_in_words():
    found = vitlab.inspect("vit_base_patch16_224")
    assert found.tokens == "197 = 1 class token + 14 x 14 patches"
    assert found.steps[1].meaning == found.tokens
    assert found.backend.startswith("fused: scaled_dot_product_attention")
    assert vitlab.inspect("vit_tiny", attention="explicit", depth=1).backend.startswith("explicit")
    assert (
        vitlab.inspect("dinov2_small_registers").tokens == "1374 = 1 class token + 4 register tokens + 37 x 37 patches"
    )


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_depths_sum_to_the_same_total(depth):
    found = vitlab.inspect("vit_tiny")
    rows = found.at_depth(depth)
    assert len(rows) == {1: 7, 2: 18, 3: 78, 4: 114}[depth]
    assert sum(r.parameters for r in rows) == found.parameters == 5_717_416
    assert sum(r.macs for r in rows) == found.macs


def test_gradients_name_what_is_dead_or_explodes():
    model = vitlab.create("vit_base", **SMALL)
    assert [g.verdict for g in gradients(model)] == [""] * len(list(model.parameters()))
    with torch.no_grad():
        model.blocks[1].mlp.fc2.weight.zero_()
        model.blocks[0].attention.proj.weight.mul_(1e6)
    verdicts = {g.name: g.verdict for g in gradients(model)}
    assert verdicts["blocks.1.mlp.fc1.weight"] == "dead"
    assert verdicts["blocks.1.mlp.fc2.weight"] == ""
    with torch.no_grad():
        model.head.weight.mul_(1e9)
    assert {g.name: g.verdict for g in gradients(model)}["head.bias"] == ""
    assert "exploding" in {g.verdict for g in gradients(model)}


def test_gradients_match_autograd():
    model = vitlab.create("vit_base", **SMALL)
    norms = {g.name: g.norm for g in gradients(model, batch=3, seed=4)}
    generator = torch.Generator().manual_seed(4)
    images = torch.randn(3, 3, 32, 48, generator=generator)
    labels = torch.randint(7, (3,), generator=generator)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    for (name, _), grad in zip(model.named_parameters(), torch.autograd.grad(loss, model.parameters()), strict=True):
        assert norms[name] == pytest.approx(float(grad.norm()), rel=1e-4)


@dataclass(frozen=True)
class MeanConfig(Config):
    image_size: tuple[int, int] = (8, 8)
    channels: int = 3
    classes: int = 5


class MeanColours(Network):
    """A family that inspect has never heard of."""

    family, meanings = "mean", {"pool": "the mean colour"}
    traceable = ("pool", "head")

    def __init__(self, config: MeanConfig):
        super().__init__()
        self.config, self.head = config, nn.Linear(config.channels, config.classes)

    def forward(self, images, *, trace=None):
        trace.begin(depth=0, offers=self.traceable, layout=TokenLayout((), (1, 1)))
        return mark(trace, "head", self.head(mark(trace, "pool", images.mean(dim=(2, 3)))))


def test_a_family_says_itself_what_its_steps_do(monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "mean", (MeanConfig, MeanColours))
    pool, head = vitlab.inspect(MeanColours(MeanConfig()), batch=2).steps
    assert (pool.meaning, pool.shape, pool.parameters) == ("the mean colour", (2, 3), 0)
    assert (head.meaning, head.shape, head.parameters, head.macs) == ("", (2, 5), 20, 30)


def test_a_size_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="use 224"):
        vitlab.inspect("vit_base", image_size=222)
