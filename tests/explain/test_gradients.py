"""gradients: what it says of a model is not left to chance, and the model stays as it was."""

from __future__ import annotations

import pytest
import torch

import vitlab
from vitlab.explain.gradients import gradients
from vitlab.layers.attention import kernel_name

SMALL = dict(image_size=(32, 48), patch_size=8, width=48, depth=3, heads=4, classes=7)


def small(**options):
    return vitlab.create("vit_base", **{**SMALL, **options})


@pytest.mark.parametrize("seed", range(3))
def test_random_rates_make_nothing_look_dead(seed):
    rates = dict(stochastic_depth=0.95, dropout=0.5, attention_dropout=0.5, patch_dropout=0.9)
    torch.manual_seed(seed)
    plain = small()
    random = small(**rates)
    random.load_state_dict(plain.state_dict())
    found = gradients(random, seed=seed)
    assert {g.verdict for g in found} == {""}
    assert [g.norm for g in found] == pytest.approx([g.norm for g in gradients(plain, seed=seed)])


def test_frozen_parameters_are_frozen_not_dead():
    model = small()
    model.blocks.requires_grad_(False)
    found = gradients(model)
    assert {g.verdict for g in found if g.name.startswith("blocks.")} == {"frozen"}
    assert {g.verdict for g in found if not g.name.startswith("blocks.")} == {""}
    assert {g.verdict for g in gradients(model.requires_grad_(False))} == {"frozen"}


def test_the_model_stays_as_it_was():
    model = small().train()
    model.blocks[1].eval()
    model(torch.randn(2, 3, 32, 48)).sum().backward()
    modes = [m.training for m in model.modules()]
    before = [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    gradients(model)
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        assert {g.verdict for g in gradients(model)} == {""}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_model_is_run_in_its_own_dtype(dtype):
    model = small()
    exact = [g.norm for g in gradients(model)]
    assert [g.norm for g in gradients(model.to(dtype))] == pytest.approx(exact, rel=0.2, abs=1e-3)


def test_a_name_or_a_checkpoint_will_do(tmp_path):
    model = small()
    vitlab.save(model, tmp_path / "m")
    assert gradients(tmp_path / "m") == gradients(model)
    assert len(gradients("vit_base", **SMALL)) == len(list(model.parameters()))


def on_meta():
    with torch.device("meta"):
        return small()


REFUSED = {
    "batch=0 must be": lambda: gradients(small(), batch=0),
    "batch='2' must be": lambda: gradients(small(), batch="2"),  # type: ignore[arg-type]
    "image_size='32' must be": lambda: gradients(small(), image_size="32"),  # type: ignore[arg-type]
    "meta device": lambda: gradients(on_meta()),
    "cannot take heads": lambda: gradients(small(), heads=2),
    "found a Linear": lambda: gradients(torch.nn.Linear(2, 2)),
}


@pytest.mark.parametrize(("says", "call"), REFUSED.items())
def test_what_cannot_run_is_refused_in_words(says, call):
    with pytest.raises(ValueError, match=says):
        call()


def test_the_kernel_is_named_for_inference_where_training_takes_another(monkeypatch):
    assert not kernel_name(small()).endswith("for inference")
    for options in (dict(positions="relative"), dict(attention_dropout=0.1)):
        assert kernel_name(small(**options)).endswith(" kernel on cpu for inference")
    monkeypatch.delattr(torch, "_fused_sdp_choice")
    assert kernel_name(small()) == "fused: scaled_dot_product_attention, torch chooses the kernel on cpu"
