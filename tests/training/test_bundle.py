"""benchmarks/bundle.py: what a run without labels leaves in the package is small, says what it is, and is of use."""

import json
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitlab
import vitlab.checkpoints.bundled
from vitlab.checkpoints.load import AssumedWarning, load_with_report
from vitlab.images.datasets import open_data
from vitlab.text.templates import LISTS
from vitlab.training.batches import ImageSet
from vitlab.training.loop import fit
from vitlab.training.presets import find_recipe
from vitlab.training.recipe import read_recipe, with_settings

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bundle.py"
TINY = ["model.width=32", "model.depth=2", "run.epochs=1", "data.per_class=20", "data.batch_size=32"]


WORDS = ["model.image.width=32", "model.image.depth=1", "model.text.width=32", "model.text.depth=1"]
WORDS += ["model.embed_dim=16", *TINY[2:]]


@pytest.fixture(scope="module")
def into(tmp_path_factory) -> Path:
    """A folder like the package's, with the models of tiny runs."""
    place = tmp_path_factory.mktemp("bundle")
    for method in ("mae", "dino", "clip"):
        settings = WORDS if method == "clip" else TINY
        fit(with_settings(find_recipe(f"{method}_digits")[1], settings), place / "runs" / method)
        bundle(place / "runs" / method, method, place / "into")
    return place / "into"


def bundle(run: Path, name: str, into: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["bundle.py", str(run), name, "--into", str(into)])
        runpy.run_path(str(SCRIPT), run_name="bundle")["main"]()


def slow_knn(encoder, data) -> float:
    """Section 4.1 of DINO, one picture after another."""
    found = {}
    for split in ("train", "test"):
        images, _ = ImageSet(getattr(data, split), encoder.preprocess).normalised(np.arange(len(getattr(data, split))))
        with torch.no_grad():
            found[split] = encoder(images).double().numpy()  # (N, D)
    bank, right = found["train"] / np.linalg.norm(found["train"], axis=1)[:, None], 0
    for feature, truth in zip(found["test"], data.test.labels, strict=True):
        cosines = bank @ (feature / np.linalg.norm(feature))
        votes = np.zeros(10)
        for i in np.argsort(-cosines)[:20]:
            votes[data.train.labels[i]] += np.exp(cosines[i] / 0.07)
        right += votes.argmax() == truth
    return right / len(data.test)


@pytest.mark.parametrize("method", ["mae", "dino"])
def test_the_card_tells_what_was_measured_of_the_rounded_model(method, into):
    model, _ = load_with_report(into / method)
    weights = load_file(into / method / "weights.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float16}
    metrics, recipe = model.card.metrics, read_recipe(into / method / "recipe.toml")
    assert recipe.run.dir == "" and recipe.data.path is None and recipe.run.seed == metrics["seed"]
    assert model.card.licence == "Apache-2.0" and "digits" in model.card.source
    encoder, data = load_with_report(into / method, encoder=True)[0], open_data("digits", per_class=20)
    assert metrics["test_knn_top1"] == pytest.approx(slow_knn(encoder, data), abs=0.003)
    assert metrics.keys() - {"test_knn_top1", "seed"} == ({"test_reconstruction"} if method == "mae" else set())


def test_mae_is_whole_and_paints_as_its_card_says(into):
    model = vitlab.load(into / "mae")
    pictures, _ = ImageSet(open_data("digits").test, model.preprocess).normalised(np.arange(357))
    error = vitlab.explain.reconstruct(model, pictures, seed=3, batch_size=357).error.mean()  # other patches are hidden
    assert model.card.metrics["test_reconstruction"] == pytest.approx(float(error), rel=0.1)


def test_dino_is_its_teacher_alone_and_says_so(into):
    with pytest.warns(AssumedWarning, match=r"holds the encoder of dino_digits and nothing else: .* encoder=True"):
        model = vitlab.load(into / "dino")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asked = vitlab.load(into / "dino", encoder=True, classes=10)
    assert model.family == "vit" and asked.config.classes == 10
    run = load_file(into.parent / "runs" / "dino" / "best" / "weights.safetensors")
    for key, value in model.state_dict().items():
        assert torch.equal(value, run[f"teacher.{key}"].half().float()), key


def test_an_encoder_alone_is_judged_explained_and_fine_tuned(into, tmp_path, command):
    dino = into / "dino"
    found = json.loads(command("eval", dino, "digits", "--knn", "--json").stdout)
    assert 0 <= found["knn"] <= 1
    for verb, *more in (["attention", "--layers", "-1"], ["features"]):
        done = command("explain", verb, dino, "digits#0", *more, "--out", tmp_path / f"{verb}.png")
        assert (tmp_path / f"{verb}.png").is_file() and "holds the encoder" not in done.stderr
    masks = vitlab.explain.attention_masks(vitlab.load(dino, encoder=True), torch.randn(2, 1, 8, 8))
    assert masks.shape == (2, 4, 4, 4)
    settings = [f"model.init_from={dino}", "run.epochs=1", "data.per_class=3", f"run.dir={tmp_path / 'tuned'}"]
    command("train", "digits", *settings)
    assert vitlab.load(tmp_path / "tuned" / "best").config.classes == 10
    assert "without a decoder" in command("explain", "reconstruct", dino, "digits#0", code=2).stderr


# ---- CLIP


def test_clip_reads_words_from_what_lies_in_its_folder(into, command, tmp_path, monkeypatch):
    """As `vitlab zeroshot bundled:clip`, once it stands in the package."""
    monkeypatch.setattr(vitlab.checkpoints.bundled, "FOLDER", into)
    assert {path.name for path in (into / "clip").iterdir()} == {
        *("model.json", "recipe.toml", "tokenizer.json", "weights.safetensors")
    }
    digit = open_data("digits").test.read(5)[:, :, 0]
    Image.fromarray(digit).resize((40, 40)).save(tmp_path / "photo.png")
    asked = ("zeroshot", "bundled:clip", tmp_path / "photo.png", "--labels", "three,eight,seven")
    (row,) = json.loads(command(*asked, "--json").stdout)
    assert sum(one["probability"] for one in row["scores"]) == pytest.approx(1)
    run = vitlab.load(into.parent / "runs" / "clip" / "best")
    (expected,) = vitlab.zero_shot(run, tmp_path / "photo.png", ["three", "eight", "seven"], templates="train")
    found = {one["label"]: one["probability"] for one in row["scores"]}
    assert found == pytest.approx(dict(expected.scores), abs=0.01)  # rounded to float16
    told = command("eval", "bundled:clip", "digits", "--zeroshot").stdout
    assert "7 templates of held_out, none of them learned from" in told  # its recipe lies with it
    drawn = tmp_path / "a.png"
    command("explain", "relevance", "bundled:clip", tmp_path / "photo.png", "--text", "a three", "-o", drawn)
    assert drawn.is_file()


def test_the_card_of_clip_tells_its_zero_shot_accuracy(into):
    model = vitlab.load(into / "clip")
    assert {value.dtype for value in load_file(into / "clip" / "weights.safetensors").values()} == {torch.float16}
    metrics, recipe = model.card.metrics, read_recipe(into / "clip" / "recipe.toml")
    assert metrics.keys() == {"seed", "test_zeroshot_top1"} and recipe.run.dir == ""
    data = open_data("digits", per_class=20)
    images, _ = ImageSet(data.test, model.preprocess).normalised(np.arange(len(data.test)))
    with torch.no_grad():
        sentences = [[template.replace("{}", name) for template in LISTS["held_out"]] for name in data.classes]
        classes = torch.stack([model.encode_text(model.tokenizer(each)).mean(0) for each in sentences])
        answers = (model.encode_image(images) @ torch.nn.functional.normalize(classes, dim=1).T).argmax(1)
    assert metrics["test_zeroshot_top1"] == pytest.approx(np.mean(answers.numpy() == data.test.labels), abs=1e-6)


def test_of_captions_the_card_tells_recall_and_no_path(tmp_path):
    for i in range(12):
        Image.new("RGB", (9, 9), (20 * i, 0, 0)).save(tmp_path / f"{i:02d}.png")
        (tmp_path / f"{i:02d}.txt").write_text(f"shade {i}", encoding="utf-8")
    recipe = find_recipe("clip_folder")[1]
    recipe = with_settings(recipe, [*WORDS[:5], f"data.source={tmp_path}", "data.workers=0", "data.batch_size=4"])
    recipe = with_settings(
        recipe, ["model.image_size=16", "model.patch_size=8", "run.epochs=1", "data.val_fraction=0.3"]
    )
    fit(recipe, tmp_path / "run")
    bundle(tmp_path / "run", "words", tmp_path / "into")
    metrics = vitlab.load(tmp_path / "into" / "words").card.metrics
    assert {f"val_{way}_recall{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)} < metrics.keys()
    assert metrics["val_text_to_image_chance1"] == pytest.approx(1 / 4)
    for file in ("recipe.toml", "model.json"):
        assert str(tmp_path.parent) not in (tmp_path / "into" / "words" / file).read_text(encoding="utf-8")
    assert read_recipe(tmp_path / "into" / "words" / "recipe.toml").data.source == tmp_path.name
