"""`vitlab study scaling`: exponents of known laws, counts against the papers' formulas, memory to the byte."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from vitlab.cli.main import app
from vitlab.study.memory import forward_bytes, peak_bytes
from vitlab.study.model_spec import parse_models, parse_numbers
from vitlab.study.scaling import Point, exponent, growth_of, study_scaling
from vitlab.training.loop import Silent

SMALL = "vit_cifar:depth=1:width=32:heads=2"
MODELS = f"{SMALL},{SMALL}:attention=explicit"
SIZES = [32, 64, 128]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling") / "study"
    return study_scaling(MODELS, SIZES, rounds=2, folder=folder)


def test_the_exponent_of_a_law_is_that_law():
    assert exponent([1, 10, 100], [3.0, 3.0 * 10**1.5, 3.0 * 10**3]) == pytest.approx(1.5)
    points = [Point("m", n, 1, n**2, n**4, [1e-6 * n**3 * noise for noise in (1, 5, 2)], n**2) for n in (32, 64, 96)]
    growth = growth_of(points)
    assert (growth.time, growth.time_end, growth.time_low, growth.time_high) == pytest.approx((1.5,) * 4)
    assert (growth.memory, growth.macs, growth.attention) == pytest.approx((1, 1, 2))


def test_a_line_through_points_beside_it_is_the_least_squares_one():
    pixels, costs = [100, 400, 900, 2500], [3.0, 10.0, 31.0, 70.0]
    x, y = np.log(pixels) - np.log(pixels).mean(), np.log(costs) - np.log(costs).mean()
    assert exponent(pixels, costs) == pytest.approx((x * y).sum() / (x * x).sum())


def test_attention_is_counted_as_the_papers_write_it(study):
    for point in study.models[SMALL]:
        N, D = (point.size // 4) ** 2 + 1, 32
        assert point.attention_macs == 2 * N**2 * D  # q k^T and the weights times v, one layer
        dense = N * D * (3 * D + D + 2 * 2 * D)  # queries, keys, values; heads mixed; MLP of ratio 2
        assert point.macs == point.attention_macs + dense + (N - 1) * 3 * 16 * D + D * 10


def test_memory_is_what_is_alive_at_once():
    megabyte = 2**20

    def hold(tensors):
        kept = [torch.empty(megabyte, dtype=torch.uint8) for _ in range(tensors)]
        del kept
        torch.empty(megabyte // 2, dtype=torch.uint8)

    assert [peak_bytes(lambda n=n: hold(n)) for n in (1, 3)] == [megabyte, 3 * megabyte]


def test_stored_weights_cost_memory_and_fused_ones_do_not(study):
    fused, explicit = study.models.values()
    for one, other in zip(fused, explicit, strict=True):
        weights = 4 * 2 * ((one.size // 4) ** 2 + 1) ** 2  # bytes of one layer's: h N^2
        assert other.peak >= weights and one.macs == other.macs
    assert fused[-1].peak < weights / 4
    assert study.growth[1].memory_end > 1.7 and study.growth[0].memory_end < 1.2


def test_what_is_written(study):
    rows = list(csv.DictReader((study.folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    assert [(row["model"], int(row["size"])) for row in rows] == [(m, s) for m in study.models for s in SIZES]
    assert int(rows[0]["peak_bytes"]) == study.points[0].peak
    table = (study.folder / "table.md").read_text(encoding="utf-8")
    assert "k of time" in table and "torch's profiler" in table and f"{study.threads} thread" in table
    assert np.asarray(Image.open(study.folder / "plot.png").convert("L")).std() > 5  # something is drawn


def test_it_goes_on_and_grows(study, monkeypatch):
    def in_this_process(models, batch):
        return {label: forward_bytes(*spec, size, batch) for label, (spec, size) in models.items()}

    monkeypatch.setattr("vitlab.study.scaling.peak_memory", in_this_process)
    before = {point.name: (list(point.seconds), point.peak) for point in study.points}
    show = Silent()
    again = study_scaling(MODELS, [*SIZES, 48], rounds=3, folder=study.folder, show=show)
    for point in again.points:
        seconds, peak = before.get(point.name, ([], point.peak))
        assert point.seconds[: len(seconds)] == seconds and len(point.seconds) == 3 and point.peak == peak
    assert f"memory of {', '.join(f'{model}@48' for model in study.models)}" in show.notes
    with pytest.raises(ValueError, match="was measured with batch=1, now it is 2"):
        study_scaling(MODELS, SIZES, batch=2, folder=study.folder)


def test_on_the_command_line(study):
    asked = ["study", "scaling", "--models", MODELS, "--sizes", "128,32,64", "--rounds", "2", "--json"]
    found = CliRunner().invoke(app, [*asked, "--dir", str(study.folder)], catch_exceptions=False)
    values = json.loads(found.stdout)
    assert [growth["model"] for growth in values["growth"]] == MODELS.split(",")
    assert [row["size"] for row in values["measured"]] == SIZES * 2
    assert math.isclose(values["growth"][0]["macs"], study.growth[0].macs)


@pytest.mark.parametrize(
    ("models", "sizes", "words"),
    [
        ("vit_tinny", [64, 96], "Did you mean 'vit_tiny"),
        ("vit_tiny", [64, 100], "vit_tiny at 100 px: "),
        ("vit_tiny:dept=3", [64, 96], "Did you mean 'depth'"),
        ("mae_tiny", [64, 96], "name the encoder"),
        ("vit_tiny", [64], "at least two sizes"),
        ("vit_tiny,,", [64, 96], "has an empty name"),
        ("vit_tiny,vit_tiny", [64, 96], "twice"),
    ],
)
def test_bad_input(models, sizes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        study_scaling(models, sizes, folder=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_names_and_numbers_as_typed():
    assert parse_models("a:depths=[2,2],b") == {"a:depths=[2,2]": ("a", {"depths": [2, 2]}), "b": ("b", {})}
    assert parse_numbers("--fractions", "1,0.1,0.1", float) == [0.1, 1.0]
    with pytest.raises(ValueError, match="--sizes 'big' is not a list of numbers"):
        parse_numbers("--sizes", "big")
