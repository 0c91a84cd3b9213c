"""`vitlab study tokens`: what is judged is what evaluation says, what is timed is counted, and a table comes of it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import vitlab
from vitlab.cli.main import app
from vitlab.export.timing import TimingOptions
from vitlab.images.datasets import open_data
from vitlab.study.tokens import ALL, default_ways, study_tokens
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_classifier
from vitlab.training.recipe import DataRecipe

WAYS = ["tome:r=3", "evit:keep=0.5"]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    ways = ["tome:r=0", *WAYS, *(f"random:like={way}" for way in WAYS)]
    return study_tokens(
        "bundled:digits",
        DataRecipe("digits"),
        ways=ways,
        timing=TimingOptions(batch=4, rounds=3),
        folder=folder / "study",
    )


def test_accuracy_is_that_of_evaluation(study):
    model = vitlab.load("bundled:digits")
    whole, keeping_all, merged, *_ = study.ways
    assert whole.name == ALL
    assert whole.top1 == evaluate_classifier(model, ImageSet(open_data("digits").test, model.preprocess)).top(1)
    assert (keeping_all.top1, keeping_all.agreement, keeping_all.tokens) == (whole.top1, 1.0, whole.tokens)
    assert merged.tokens == whole.tokens - 3 * len(model.blocks)
    assert 0.9 < merged.agreement < 1


@pytest.mark.parametrize("way", WAYS)
def test_choosing_beats_chance_with_as_many_tokens(study, way):
    by_name = {way.name: way for way in study.ways}
    chosen, random = by_name[way], by_name[f"random:like={way}"]
    assert chosen.tokens == random.tokens
    assert chosen.top1 > random.top1


def test_every_way_is_timed_as_often(study):
    assert {len(way.seconds) for way in study.ways} == {3}
    assert study.ways[0].speedup == 1.0
    assert all(way.speedup > 0 for way in study.ways)


def test_what_is_written(study):
    assert {path.name for path in study.folder.iterdir()} == {"study.json", "results.csv", "table.md", "plot.png"}
    table = (study.folder / "table.md").read_text(encoding="utf-8")
    assert table.count("\n") == 2 + 6
    assert "evit:keep=0.5" in table


def test_the_usual_ways_fit_the_model():
    ways = default_ways(vitlab.create("vit_base"))
    assert "tome:r=12,schedule=decreasing" in ways
    assert "evit:keep=0.7" in ways
    assert "random:like=tome:r=12,schedule=decreasing" in ways
    assert "random:like=evit:keep=0.7" in ways
    plain = vitlab.create("vit_digits", class_token=False, pooling="mean")
    assert not any("evit" in way for way in default_ways(plain))


def test_on_the_command_line(tmp_path):
    asked = ["study", "tokens", "bundled:digits", "digits", "--way", "tome:r=2", "--rounds", "2", "--images", "50"]
    found = CliRunner().invoke(app, [*asked, "--dir", str(tmp_path / "s"), "--json"], catch_exceptions=False)
    rows = json.loads(found.stdout)
    assert [row["way"] for row in rows] == [ALL, "tome:r=2"]
    assert rows[1]["n"] == 2


@pytest.mark.parametrize(
    ("checkpoint", "source", "ways", "words"),
    [
        ("bundled:digits", "digits", ["tomme:r=1"], "Did you mean 'tome'"),
        ("bundled:cifar10", "digits", None, "was not trained on the classes of digits"),
    ],
)
def test_bad_input(checkpoint, source, ways, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        study_tokens(checkpoint, DataRecipe(source), ways=ways, folder=tmp_path / "s")
    assert not (tmp_path / "s").exists()
