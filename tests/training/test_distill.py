"""A student and its teacher, through the loop: the loss is the paper's, and a cache changes nothing it should not."""

import json

import pytest
import torch
import torch.nn.functional as F

from vitlab.checkpoints.load import load
from vitlab.training.job import prepare
from vitlab.training.loop import fit
from vitlab.training.objectives.base import MicroStep
from vitlab.training.recipe import Recipe, with_settings

SETTINGS = [
    *("data.source=digits", "data.per_class=20", "data.batch_size=50", "model.depth=2", "model.distill_token=true"),
    *("objective.name=distill", "objective.teacher=bundled:digits", "run.epochs=2"),
]


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_the_loss_is_that_of_two_heads_and_a_teacher(kind, tmp_path):
    settings = [f"objective.distillation={kind}", "objective.teacher_share=0.3", "objective.temperature=2"]
    job = prepare(with_settings(Recipe(), [*SETTINGS, *settings, "augment.crop=padded", "augment.padding=1"]), tmp_path)
    inputs = job.objective.inputs(job.steps[0, 0], MicroStep(0, 0))
    loss, told = job.objective.loss(job.forward, inputs)
    teacher = load("bundled:digits")(inputs["images"]).double()
    by_labels, by_teacher = (h.double() for h in job.model.forward_heads(job.model.forward_features(inputs["images"])))
    labels = -(inputs["targets"].double() * by_labels.log_softmax(1)).sum(1).mean()
    if kind == "hard":
        answers = -by_teacher.log_softmax(1)[torch.arange(50), teacher.argmax(1)].mean()
    else:
        p, q = (teacher / 2).softmax(1), (by_teacher / 2).softmax(1)
        answers = 4 * (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(loss.double(), 0.7 * labels + 0.3 * answers, atol=1e-5, rtol=0)
    assert told["agreed"] == pytest.approx(float((by_teacher.argmax(1) == teacher.argmax(1)).double().mean()))


def test_both_heads_learn_and_the_teacher_does_not(tmp_path):
    job = prepare(with_settings(Recipe(), SETTINGS), tmp_path)
    before = {k: v.clone() for k, v in job.objective.teacher.model.state_dict().items()}  # type: ignore[attr-defined]
    loss, _ = job.objective.loss(job.forward, job.objective.inputs(job.steps[0, 0], MicroStep(0, 0)))
    loss.backward()
    for head in (job.model.head, job.model.head_distill):
        assert head.weight.grad.abs().sum() > 0
    after = job.objective.teacher.model  # type: ignore[attr-defined]
    assert all(p.grad is None for p in after.parameters()) and all(
        torch.equal(v, before[k]) for k, v in after.state_dict().items()
    )


def test_kept_answers_are_those_of_the_plain_pictures(tmp_path):
    """Without augmentation the cache changes nothing but the rounding to float16."""
    plain, kept = (
        prepare(with_settings(Recipe(), [*SETTINGS, *more]), tmp_path) for more in ([], ["objective.cache=true"])
    )
    a, b = (job.objective.inputs(job.steps[3, 0], MicroStep(0, 3))["teacher"] for job in (plain, kept))
    torch.testing.assert_close(a, b, atol=2e-2, rtol=1e-3)
    assert (tmp_path / "teacher" / "answers.json").is_file() and F.cross_entropy(a, b.argmax(1)) < 1


def test_a_distilled_run_ends_like_any_other(tmp_path, command):
    result = fit(with_settings(Recipe(), SETTINGS), tmp_path / "run")
    assert (
        result["objective"] == "distill"
        and json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["top1"] > 0.1
    )


def test_a_teacher_of_other_classes_is_refused(command):
    text = command("train", "digits", "objective.name=distill", "objective.teacher=bundled:cifar10", code=2).stderr
    assert "other classes" in text and "objective.teacher=" in text
