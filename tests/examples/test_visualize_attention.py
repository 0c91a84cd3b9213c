"""The example as a user runs it; its numbers are those of vitlab.explain, its heat lies where the crop was."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.images.preprocess import Preprocess
from vitlab.images.samples import open_sample

SCRIPT = Path(__file__).parents[2] / "examples" / "visualize_attention.py"


def small(**options):
    torch.manual_seed(3)
    shape = dict(image_size=(32, 48), patch_size=8, channels=3, classes=4, depth=3, width=32, heads=4)
    return vitlab.create("vit_digits", **(shape | options)).eval()


@pytest.mark.parametrize("options", [{}, {"registers": 2}, {"class_token": False, "pooling": "mean"}], ids=str)
def test_its_numbers_are_those_of_explain(options):
    model = small(**options)
    image = torch.randn(1, 3, 32, 48)
    example = runpy.run_path(str(SCRIPT), run_name="example")
    logits, maps, rollout = example["look"](model, image)
    with torch.inference_mode():
        torch.testing.assert_close(logits, model(image), rtol=0, atol=0)
    torch.testing.assert_close(maps, vitlab.explain.attention_maps(model, image)[0])
    torch.testing.assert_close(rollout, vitlab.explain.rollout(model, image)[0])


def test_it_runs_and_says_what_it_does(tmp_path, monkeypatch, capsys):
    model = small()
    model.labels = ["ant", "bee", "cat", "dog"]
    model.preprocess = Preprocess(size=(32, 48), how="crop")
    vitlab.save(model, tmp_path / "model")
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(0, 256, (90, 60, 3), dtype=np.uint8)).save(tmp_path / "p.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), str(tmp_path / "model"), str(tmp_path / "p.png"), "--out", "seen.png"]
    )
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    top = vitlab.predict(vitlab.load(tmp_path / "model"), tmp_path / "p.png", top=1)[0].scores[0]
    assert lines[0].endswith("60 x 90 pixels, seen as 25 = 1 class token + 4 x 6 patches by 3 layers")
    assert lines[1] == f"it is taken for: {top[0]} {top[1]:.0%}"
    heat = vitlab.explain.rollout(model, tmp_path / "p.png")[0]
    row, column = divmod(int(heat.argmax()), 6)
    assert f"rollout: most of row {row}, column {column}" in lines[-2] and lines[-1] == "drawn: seen.png"
    with Image.open(tmp_path / "seen.png") as drawn:
        assert drawn.format == "PNG" and min(drawn.size) > 400


def test_without_arguments_it_shows_a_digit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    label = vitlab.predict(vitlab.load("bundled:digits"), open_sample("digits#3").image)[0].label
    assert f"it is taken for: {label} " in capsys.readouterr().out and (tmp_path / "attention.png").is_file()


def test_heat_is_drawn_over_the_crop_only():
    model = small()
    model.preprocess = Preprocess(size=(32, 48), how="crop")
    example = runpy.run_path(str(SCRIPT), run_name="example")
    figure = example["draw"](Image.new("RGB", (60, 90)), model, torch.rand(3, 4, 4, 6), torch.rand(4, 6), "t")
    for axes in figure.axes[1:]:
        heat = axes.images[1]
        left, right, bottom, top = heat.get_extent()
        # 60 x 90 shrinks to 48 x 72, of which rows 20 to 52 are seen: 25 to 65 of the 90
        np.testing.assert_allclose((left, right, top, bottom), (0, 60, 25, 65))
        assert axes.get_ylim() == (89.5, -0.5)
