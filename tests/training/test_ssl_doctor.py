"""The doctor of runs without labels: planted failures, each found by its name, and a healthy run that has none."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import vitlab
from vitlab.layers.patches import patchify, unpatchify
from vitlab.models import mae
from vitlab.training.objectives import dino as dino_objective
from vitlab.training.objectives import mae as mae_objective

K = 256
LN_K = math.log(K)


def dino_lines(count: int = 12, **changed) -> list[dict]:
    """A run that is well, as `dino_digits` looks after its start; changed by name: a value, or f(share done)."""
    lines = []
    for i in range(count):
        t = i / (count - 1)
        line = dict(step=10 * i, loss=5.0 - t, lr=1e-3, grad_norm=1.5, teacher_entropy=4.6 - t, kl=0.4, rank=15.0)
        line |= dict(student_std=0.45, teacher_std=0.4, centre_norm=1.3, max_probability=0.15, used_outputs=12)
        line |= {key: value(t) if callable(value) else value for key, value in changed.items()}
        lines.append({**line, "loss": line["loss"] + 1e-4 * (-1) ** i})  # no two batches have the same
    return lines


def mae_lines(count: int = 12, **changed) -> list[dict]:
    lines = []
    for i in range(count):
        t = i / (count - 1)
        line = dict(step=10 * i, loss=0.9 - 0.5 * t, lr=1e-3, grad_norm=1.0, hidden_error=0.9 - 0.5 * t)
        line |= dict(visible_error=0.8, baseline=0.95, hidden_share=0.75)
        line |= {key: value(t) if callable(value) else value for key, value in changed.items()}
        lines.append({**line, "loss": line["loss"] + 1e-4 * (-1) ** i})  # no two batches have the same
    return lines


def names(findings) -> list[str]:
    for finding in findings:
        assert finding.message.endswith(".") and len(finding.remedy) > 10
    return [finding.name for finding in findings]


def dino(lines, **facts) -> list[str]:
    return names(dino_objective.findings(lines, **{"outputs": K, "batch": 64, **facts}))


def masked(lines, **facts) -> list[str]:
    return names(mae_objective.findings(lines, **{"mask_ratio": 0.75, **facts}))


# ---- DINO


def test_a_healthy_run_has_nothing():
    assert dino(dino_lines()) == []
    sure = dino_lines(teacher_entropy=0.05, loss=0.4, max_probability=0.97, used_outputs=10)
    assert dino(sure) == []  # sure of its answers, but they differ


def test_uniform_output():
    lines = dino_lines(loss=LN_K - 0.01, teacher_entropy=LN_K - 0.02, kl=0.01)
    assert dino(lines) == ["uniform output"]
    (finding,) = dino_objective.findings(lines, outputs=K, batch=64)
    assert "ln K is 5.55" in finding.message and "objective.teacher_temperature" in finding.remedy
    without = [{key: line[key] for key in ("step", "loss", "lr")} for line in lines]
    assert dino(without) == ["uniform output"]  # a log that tells the loss alone
    assert dino(lines, outputs=65536) == []  # 5.5 is far from ln 65536
    student_only = dino_lines(loss=LN_K, teacher_entropy=3.0)  # the teacher has something to say: still to be learned
    assert dino(student_only) == []


def test_a_loss_near_ln_k_is_normal_at_the_start():
    lines = dino_lines(loss=lambda t: LN_K - 3 * max(t - 0.4, 0), teacher_entropy=lambda t: LN_K - 3 * max(t - 0.4, 0))
    assert dino(lines[:5]) == ["uniform output"] and dino(lines[:5], settled=50) == []
    assert dino(lines, settled=50) == []


def test_collapse_to_one_output():
    lines = dino_lines(loss=0.01, teacher_entropy=0.004, max_probability=0.999, used_outputs=1)
    (finding,) = dino_objective.findings(lines, outputs=K, batch=64)
    assert finding.name == "one output" and "model.centring=true" in finding.remedy
    begun = dino_lines(loss=0.55, teacher_entropy=0.38, max_probability=0.82, used_outputs=2)  # as was seen
    assert dino(begun) == ["one output"]
    few = dino_lines(loss=0.01, teacher_entropy=0.004, used_outputs=1)
    assert dino(few, batch=4) == ["small batch", "one output"]
    for line in lines:
        del line["used_outputs"]
    assert dino(lines) == ["one output"] and dino([{**line, "teacher_entropy": 0.4} for line in lines]) == []


@pytest.mark.parametrize("changed", [dict(teacher_std=0.005), dict(rank=1.02)])
def test_features_that_are_all_the_same(changed):
    assert dino(dino_lines(**changed)) == ["same features"]


def test_a_centre_that_grows():
    assert dino(dino_lines(centre_norm=lambda t: 2.0 * 100**t)) == ["centre grows"]
    assert dino(dino_lines(centre_norm=lambda t: 0.1 * 50**t)) == []  # it starts at 0 and settles


def test_a_small_batch():
    (finding,) = dino_objective.findings(dino_lines(), outputs=K, batch=8)
    assert finding.name == "small batch" and "optim.accumulate=16" in finding.remedy


# ---- in any run


@pytest.mark.parametrize(("examine", "lines"), [(dino, dino_lines), (masked, mae_lines)])
def test_what_breaks_any_run(examine, lines):
    assert examine(lines(lr=0.0)) == ["learning rate 0"]
    assert examine(lines(grad_norm=0.0)) == ["no gradient"]
    assert examine([{**line, "loss": 0.5} for line in lines()]) == ["loss stands still"]
    assert examine(lines(lr=lambda t: 1e-3 * t)) == []  # a warm-up begins at 0
    for name, value in (("loss", math.nan), ("loss", math.inf), ("grad_norm", math.nan)):
        broken = lines()
        broken[7] = {**broken[7], name: value, "lr": 3e-3}
        broken[8:] = [{**line, "loss": math.nan, "teacher_entropy": math.nan} for line in broken[8:]]
        assert examine(broken) == ["not finite"]
    (finding,) = dino_objective.findings(broken, outputs=K, batch=64)
    assert "step 70: grad_norm is nan" in finding.message and "optim.lr=1.0e-03" in finding.remedy


@pytest.mark.parametrize("count", [0, 1, 2])
def test_few_lines_are_not_judged(count):
    assert dino(dino_lines(12, lr=0.0, loss=LN_K)[:count]) == [] and masked(mae_lines(12, loss=2.0)[:count]) == []


# ---- MAE


def test_a_healthy_mae_has_nothing():
    assert masked(mae_lines()) == []
    assert masked(mae_lines(visible_error=0.2)) == []  # visible patches may be painted better


def test_no_better_than_the_mean_pixel():
    lines = mae_lines(loss=lambda t: 0.99 - 0.02 * t, hidden_error=0.98)
    assert masked(lines) == ["no better than the mean"]
    assert masked(lines, settled=500) == []


def test_a_swapped_mask():
    """The loss falls, because visible patches are easy; the hidden ones stay as bad as they were."""
    lines = mae_lines(hidden_error=0.9, visible_error=0.02, loss=lambda t: 0.9 * 0.02**t)
    assert masked(lines) == ["copies what it sees"]
    (finding,) = mae_objective.findings(mae_lines(hidden_share=0.25), mask_ratio=0.75)
    assert finding.name == "wrong mask" and "wrong way round" in finding.message
    (finding,) = mae_objective.findings(mae_lines(hidden_share=0.5), mask_ratio=0.75)
    assert "50% of the patches" in finding.message and "wrong way" not in finding.message
    assert masked(mae_lines(hidden_share=0.746)) == []


def test_mae_numbers_by_loops():
    g = torch.Generator().manual_seed(0)
    prediction, target = torch.randn(3, 5, 4, generator=g), torch.randn(3, 5, 4, generator=g)
    mask = (torch.rand(3, 5, generator=g) < 0.6).float()
    mean = target.numpy().mean(axis=(0, 1))
    errors: dict[str, list[float]] = {"hidden_error": [], "visible_error": [], "baseline": []}
    for b, n in np.ndindex(3, 5):
        error = float(((prediction[b, n] - target[b, n]) ** 2).mean())
        errors["hidden_error" if mask[b, n] else "visible_error"].append(error)
        if mask[b, n]:
            errors["baseline"].append(float(((target[b, n].numpy() - mean) ** 2).mean()))
    found = mae_objective.reconstruction_numbers(prediction, target, mask)
    for name, values in errors.items():
        assert found[name] == pytest.approx(np.mean(values), rel=1e-5)
    assert found["hidden_share"] == pytest.approx(float(mask.mean()))


def test_hidden_pixels_have_no_part_in_the_painting(monkeypatch):
    torch.manual_seed(0)
    model = vitlab.create("mae_digits", image_size=(8, 12), dropout=0.5).eval()
    images, noise = torch.randn(2, 1, 8, 12), torch.rand(2, 24)

    def leak() -> float:
        """How much the prediction changes with the pixels that the mask calls hidden."""
        size, grid = model.config.patch_size, model.encoder.layout(8, 12).grid
        with torch.no_grad():
            first = model(images, noise)
            patches = patchify(images, size)  # (B, N, C*P*P)
            patches = torch.where(first.mask[..., None].bool(), 1 - patches, patches)
            return float((model(unpatchify(patches, size, grid), noise).prediction - first.prediction).abs().max())

    assert leak() <= 1e-5
    right = mae.choose_visible

    def swapped(*args):
        keep, mask = right(*args)
        return keep, 1 - mask

    monkeypatch.setattr(mae, "choose_visible", swapped)
    assert leak() > 1e-5
