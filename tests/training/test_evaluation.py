"""vitlab.evaluate: the function behind `vitlab eval`, for names and for models."""

from __future__ import annotations

import json

import pytest

import vitlab
from vitlab.errors import UsageError
from vitlab.evaluation import evaluate
from vitlab.images.datasets import open_data


def without_time(values: dict) -> dict:
    return {key: value for key, value in values.items() if key not in ("seconds", "images_per_second", "checkpoint")}


def test_a_name_a_model_and_the_command_agree(command):
    by_name = evaluate("bundled:digits", "digits", knn=True, probe=True, few_shot=2, draws=3)
    by_model = evaluate(vitlab.load("bundled:digits"), open_data("digits"), knn=True, probe=True, few_shot=2, draws=3)
    options = ["--knn", "--probe", "--few-shot", 2, "--draws", 3]
    printed = json.loads(command("eval", "bundled:digits", "digits", *options, "--json").stdout)
    assert without_time(by_name.to_dict()) == without_time(by_model.to_dict()) == without_time(printed)
    assert list(by_name.to_dict()) == list(printed)
    assert by_name.scores is not None and by_name.scores.top(1) == printed["top1"]
    assert by_name.knn == printed["knn"] and by_name.few_shot is not None and len(by_name.few_shot.draws) == 3


def test_progress_counts_every_image_once():
    seen: list[tuple[str, int, int]] = []
    evaluate("bundled:digits", "digits", knn=True, progress=lambda *done: seen.append(done))
    last = {what: (done, total) for what, done, total in seen}
    sizes = open_data("digits")
    assert sizes.test is not None
    assert last == {
        "digits, test": (len(sizes.test), len(sizes.test)),
        "features": (len(sizes.train) + len(sizes.test),) * 2,
    }


def test_a_clip_as_a_model_is_scored_by_its_encoder_or_by_text():
    clip = vitlab.load("bundled:clip")
    assert evaluate(clip, "digits").knn is not None
    result = evaluate(clip, "digits", templates="a {}")
    assert result.scores is not None and result.templates is not None
    assert result.templates.sentences == ["a {}"] and result.templates.learned_from is None


def test_wrong_arguments_are_refused():
    with pytest.raises(UsageError, match="no split 'extra'"):
        evaluate("bundled:digits", "digits", split="extra")
    with pytest.raises(UsageError, match="draws=1 must be at least 2"):
        evaluate("bundled:digits", "digits", few_shot=1, draws=1)
    with pytest.raises(UsageError, match="learn from train"):
        evaluate("bundled:digits", "digits", split="train", knn=True)
    with pytest.raises(UsageError, match="a CLIP or SigLIP, but bundled:digits is of the family vit"):
        evaluate("bundled:digits", "digits", templates="held_out")
