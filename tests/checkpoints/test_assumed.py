"""What a file does not say about reading images is assumed aloud: once per load, on every road, and only there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

import vitlab
from vitlab.checkpoints import convert
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.images.preprocess import Preprocess
from vitlab.training.finetune import build_model
from vitlab.training.recipe import ModelRecipe, Recipe

SMALL = dict(image_size=16, patch_size=8, width=192, depth=1, heads=3, mlp_ratio=1.0, classes=10)
SAID = "timm weights do not say eps=1e-06, activation=gelu, heads=3, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), "


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A state dict under timm's names, as torch.save leaves it: of three heads, because of its width."""
    folder = tmp_path_factory.mktemp("bare")
    convert.write(vitlab.create("vit_base", **SMALL), folder / "weights.safetensors", "timm")
    return folder / "weights.safetensors"


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    return Path(vitlab.save(vitlab.create("vit_base", **SMALL), tmp_path_factory.mktemp("native") / "model"))


@pytest.fixture(scope="module")
def photo(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("photo") / "photo.png"
    Image.new("RGB", (20, 24), "teal").save(place)
    return place


ROADS = {
    "predict": lambda model, photo, out: ["predict", model, photo],
    "eval": lambda model, photo, out: ["eval", model, "digits", "--knn", "--json"],
    "explain": lambda model, photo, out: ["explain", "attention", model, photo, "-o", out / "maps.png"],
    "inspect": lambda model, photo, out: ["inspect", model],
    "index": lambda model, photo, out: ["index", photo.parent, "-o", out / "index", "--model", model],
}


@pytest.mark.parametrize("road", ROADS)
def test_every_command_says_it_once(road, bare, native, photo, tmp_path, command):
    done = command(*ROADS[road](bare, photo, tmp_path))
    assert done.stderr.count(SAID) == 1, done.stderr
    done = command(*ROADS[road](native, photo, tmp_path / "other"))
    assert "do not say" not in done.stderr + done.stdout


def test_training_says_it(bare, native):
    classes = [str(number) for number in range(10)]
    for source, expected in ((bare, 1), (native, 0)):
        _, notes = build_model(Recipe(model=ModelRecipe(init_from=str(source))), classes, 3)
        assert sum(SAID in note for note in notes) == expected


def test_convert_says_it_and_takes_the_answer(bare, tmp_path, command):
    done = command("convert", bare, tmp_path / "assumed")
    assert f"note: {SAID}" in done.stdout
    told = ["--mean", "0.49,0.48,0.45", "--std", "0.2,0.3,0.25", "--json"]
    done = command("convert", bare, tmp_path / "told", *told)
    (note,) = json.loads(done.stdout)["notes"]
    assert "mean" not in note
    assert vitlab.load(tmp_path / "told").preprocess.mean == (0.49, 0.48, 0.45)


@pytest.mark.parametrize(
    "given, said",
    [
        (["--mean", "0.5,0.5,0.5"], "--mean needs its counterpart"),
        (["--mean", "a,b,c", "--std", "1,1,1"], "one for each channel"),
        (["--mean", "1,2", "--std", "1,1"], "must hold 1 or 3 numbers"),
        (["--mean", "0,0,0", "--std", "0,1,1"], "std above 0"),
    ],
)
def test_convert_refuses_other_numbers(given, said, bare, tmp_path, command):
    assert said in command("convert", bare, tmp_path / "out", *given, code=2).stderr


def test_in_python_it_is_a_warning_until_it_is_told(bare):
    with pytest.warns(AssumedWarning, match=r"do not say eps=1e-06, .*mean=\(0\.5"):
        vitlab.load(bare)
    colours = dict(mean=(0, 0, 0), std=(1, 1, 1), interpolation="bicubic", how="crop")
    _, report = load_with_report(bare, preprocess=colours, eps=1e-6, activation="gelu", heads=3)
    assert report.notes == []
    _, report = load_with_report(bare, eps=1e-6, activation="gelu", heads=3)
    assert report.notes[0].startswith("timm weights do not say mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), interp")


def test_a_transformers_folder_without_a_processor_says_so(tmp_path):
    model = vitlab.create("vit_base", **SMALL)
    convert.write(model, tmp_path / "hf", "hf")
    assert load_with_report(tmp_path / "hf")[1].notes == []
    (tmp_path / "hf" / "preprocessor_config.json").unlink()
    (note,) = load_with_report(tmp_path / "hf")[1].notes
    assert note.startswith("hf weights do not say mean=(0.5, 0.5, 0.5)")


def test_colours_for_another_number_of_channels_are_not_dropped_quietly(tmp_path):
    model = vitlab.create("vit_base", **{**SMALL, "channels": 1})
    model.preprocess = Preprocess((16, 16), mean=(0.1,), std=(0.3,))
    convert.write(model, tmp_path / "hf", "hf")
    file = tmp_path / "hf" / "preprocessor_config.json"
    file.write_text(
        json.dumps(
            {**json.loads(file.read_text(encoding="utf-8")), "image_mean": [0.1, 0.2, 0.3], "image_std": [0.3] * 3}
        ),
        encoding="utf-8",
    )
    (note,) = load_with_report(tmp_path / "hf")[1].notes
    assert note.startswith("hf weights do not say mean=(0.5,), std=(0.3,)")


def test_an_npz_says_what_is_assumed():
    golden = Path(__file__).parent.parent / "data" / "golden" / "jax_vit.npz"
    (note,) = load_with_report(golden)[1].notes
    assert "mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)" in note
    assert torch.isfinite(load_with_report(golden)[0](torch.zeros(1, 3, 32, 32))).all()
