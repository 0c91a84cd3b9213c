"""model.reducer: every forward pass of a run has fewer tokens, in training and in judging; or it is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import vitlab
from vitlab.images.datasets import open_data
from vitlab.images.samples import open_sample
from vitlab.models.deit import hard_loss
from vitlab.models.two_towers import same_captions
from vitlab.reduce import reducer_of
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier
from vitlab.training.job import prepare
from vitlab.training.loop import Silent, fit
from vitlab.training.objectives.base import MicroStep
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import Recipe, read_recipe, with_settings

SHORT = ["data.per_class=6", "data.batch_size=20", "model.depth=2", "model.width=32", "run.epochs=1"]
SGD = ["optim.name=sgd", "optim.momentum=0", "optim.lr=0.5", "optim.weight_decay=0", "optim.schedule=constant"]


def recipe(*settings: str) -> Recipe:
    return with_settings(Recipe(), [*SHORT, *settings])


def by_hand(asked: Recipe, folder: Path, text: str | None) -> dict[str, torch.Tensor]:
    """The same first weights and batches, one plain step after another."""
    job = prepare(asked, folder)
    optimiser = torch.optim.SGD(job.model.parameters(), lr=0.5)
    for step in range(job.plan.total):
        batch = job.steps[step, 0]
        logits = job.model(batch.images, reducer=None if text is None else reducer_of(text))
        optimiser.zero_grad()
        F.cross_entropy(logits, batch.labels).backward()
        optimiser.step()
    return job.model.state_dict()


@pytest.mark.parametrize("text", ["tome:r=3", "evit:keep=0.5"])
def test_a_run_is_a_plain_loop_with_the_reducer(text, tmp_path):
    asked = recipe(*SGD, f"model.reducer={text}")
    result = fit(asked, tmp_path / "run")
    found = load_file(tmp_path / "run/last/weights.safetensors")
    expected, otherwise = (by_hand(asked, tmp_path / "again", reducer) for reducer in (text, None))
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-5, msg=key)
    assert any((value - otherwise[key]).abs().max() > 1e-3 for key, value in found.items())
    best, test = vitlab.load(tmp_path / "run/best"), open_data("digits").test
    images, _ = ImageSet(test, best.preprocess).normalised(np.arange(len(test)))
    with torch.no_grad():
        answers = best(images, reducer=reducer_of(text)).argmax(1).numpy()
    assert result["top1"] == pytest.approx((answers == test.labels).mean())
    assert best.card.source == f"vitlab train, digits, with {text}"
    assert read_recipe(tmp_path / "run/recipe.toml").model.reducer == text


class BreakAt(Silent):
    def step(self, done, numbers):
        if done == 3:
            raise KeyboardInterrupt


def test_random_drop_resumes_to_the_bit(tmp_path):
    """With blocks that run twice, the running average and half precision beside it."""
    more = ["model.reducer=random:keep=0.6", "model.gradient_checkpointing=true", "model.dropout=0.1"]
    asked = recipe(*more, "run.epochs=2", "run.save_every=2", "optim.ema=0.9", "run.amp=bf16")
    fit(asked, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(asked, tmp_path / "broken", show=BreakAt())
    fit(asked, tmp_path / "broken", resume=True)
    for name in ("weights", "ema", "optimizer"):
        one, other = (load_file(tmp_path / run / f"last/{name}.safetensors") for run in ("whole", "broken"))
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.mark.parametrize("two_heads", ["true", "false"])
def test_a_student_learns_with_fewer_tokens_and_its_teacher_looks_at_all(two_heads, tmp_path):
    taught = ["objective.name=distill", "objective.teacher=bundled:digits", f"model.distill_token={two_heads}"]
    job = prepare(recipe(*taught, "model.reducer=tome:r=3"), tmp_path)
    inputs = job.objective.inputs(job.steps[0, 0], MicroStep(0, 0))
    loss, _ = job.objective.loss(job.forward, inputs)
    m, images = job.model, inputs["images"]
    heads = (m(images, reducer=reducer_of("tome:r=3")),) * 2
    if two_heads == "true":
        heads = m.forward_heads(m.forward_features(images, reducer=reducer_of("tome:r=3")))
    answers = vitlab.load("bundled:digits")(images)
    torch.testing.assert_close(loss, hard_loss(heads, inputs["targets"], answers))


def test_a_clip_learns_and_is_judged_with_fewer_tokens(tmp_path):
    small = ["data.per_class=6", "data.batch_size=20", "model.reducer=tome:r=3"]
    job = prepare(with_settings(find_recipe("clip_digits")[1], small), tmp_path)
    inputs = job.objective.inputs(job.steps[0, 0], MicroStep(0, 0))
    job.objective.begin_step(0, job.optimisers)
    loss, _ = job.objective.loss(job.forward, inputs)
    seen = job.model.encode_image(inputs["images"], reducer=reducer_of("tome:r=3"))
    read = job.model.encode_text(inputs["ids"])
    torch.testing.assert_close(loss, job.model.loss(seen, read, same_captions(inputs["kinds"])))
    few = ImageSet(job.data.val, job.model.preprocess)
    with_fewer = job.objective.evaluate(job.model, few).logits
    job.objective.reducer = None
    assert not torch.allclose(with_fewer, job.objective.evaluate(job.model, few).logits)


REFUSED = {
    "resnet_cifar10 data.source=digits": "a resnet needs all patches",
    "resnet_cifar10 data.source=digits model.name=swin_cifar": "a swin needs all patches",
    "digits model.positions=rotary": "belong to a full grid",
    "mae_digits": "objective.name=mae decides itself",
    "dino_digits": "objective.name=dino decides itself",
    "digits model.reducer=evit:keep=0.5 model.class_token=false model.pooling=mean": "needs 'class_attention'",
    "digits model.reducer=evit:keep=0.5,layers=1/99": "layer 99 does not exist",
}


@pytest.mark.parametrize(("what", "why"), REFUSED.items())
def test_what_cannot_do_with_fewer_tokens_says_so(what, why, tmp_path):
    name, *settings = what.split()
    asked = with_settings(find_recipe(name)[1], ["model.reducer=tome:r=1", *settings])
    with pytest.raises(ValueError, match=rf"model\.reducer=.* is not possible: .*{why}"):
        fit(asked, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_wrong_words_are_told_before_the_data_are_opened():
    with pytest.raises(ValueError, match=r"^model\.reducer: .*Did you mean 'tome'"):
        recipe("data.source=nowhere", "model.reducer=tomme:r=3")
    with pytest.raises(ValueError, match=r"model\.reducer=8 is not valid"):
        recipe("model.reducer=8")
    assert recipe("model.reducer=tome:r=3", "model.reducer=none").model.reducer is None


def test_eval_and_predict_with_fewer_tokens(command):
    model, val = vitlab.load("bundled:digits"), open_data("digits").val
    asked = ["eval", "bundled:digits", "digits", "--split", "val", "--knn", "--json"]
    plain, fewer = (json.loads(command(*asked, *more).stdout) for more in ([], ["--reducer", "tome:r=7"]))
    right = evaluate_classifier(model, ImageSet(val, model.preprocess), reducer=reducer_of("tome:r=7"))
    assert fewer["loss"] == pytest.approx(right.loss(), rel=1e-5) != pytest.approx(plain["loss"], rel=1e-3)
    assert fewer["knn"] != plain["knn"]
    assert (plain["reducer"], fewer["reducer"]) == (None, "tome:r=7")
    found = json.loads(command("predict", "bundled:digits", "digits#3", "--reducer", "tome:r=7", "--json").stdout)
    image = model.preprocess(open_sample("digits#3").image)
    expected = model.eval()(image[None], reducer=reducer_of("tome:r=7"))[0].softmax(-1)
    assert found[0]["scores"][0]["probability"] == pytest.approx(expected.max().item(), rel=1e-4)
    assert "Did you mean 'tome'" in command("predict", "bundled:digits", "digits#3", "--reducer", "tom", code=2).stderr


def test_an_exported_file_has_its_tokens_inside(command, tmp_path):
    (shipped := tmp_path / "model.onnx").touch()
    for verb, what in (("predict", "digits#3"), ("eval", "digits")):
        said = command(verb, shipped, what, "--reducer", "tome:r=2", code=2).stderr
        assert "give --reducer to vitlab export" in " ".join(said.split())


def test_eval_says_how_a_run_was_trained(tmp_path, command):
    fit(recipe("model.reducer=tome:r=3"), tmp_path / "run")
    said = command("eval", tmp_path / "run/best", "digits", "--split", "val", "--json").stderr
    assert "To evaluate it so: --reducer tome:r=3" in " ".join(said.split())
