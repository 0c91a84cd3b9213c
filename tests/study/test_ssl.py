"""`vitlab study ssl`: every step once, the same network twice, a table and a picture; a stopped study goes on."""

import csv
import json

import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from vitlab.checkpoints.load import load
from vitlab.checkpoints.native import on_meta, save
from vitlab.factory import create
from vitlab.images.datasets import open_data
from vitlab.study.encoders import recipe_encoder
from vitlab.study.ssl import study_ssl
from vitlab.training.loop import Silent, Stopped
from vitlab.training.recipe import DataRecipe, ModelRecipe, read_recipe

PRETRAIN = ["run.epochs=2", "run.eval_every=2", "model.width=32", "model.depth=2"]
FEW = ["run.epochs=2"]
DIGITS = DataRecipe("digits", per_class=10)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study") / "ssl"
    asked = dict(pretrain=[*PRETRAIN], few=FEW, folder=folder)
    return study_ssl(DIGITS, ["mae", "dino"], **asked), asked


def test_each_method_is_judged_frozen_tuned_and_from_scratch(study):
    found, _ = study
    assert [method.name for method in found.methods] == ["pixels", "mae", "dino"] and found.labels == 100
    for method in found.methods[1:]:
        assert all(0 < v < 1 for v in (method.knn, method.probe, method.fine_tuned, method.from_scratch))
        assert method.gain == pytest.approx(method.fine_tuned - method.from_scratch) and not method.note
    rows = list(csv.DictReader((found.folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    assert [row["method"] for row in rows] == ["pixels", "mae", "dino"]
    assert float(rows[1]["fine_tuned"]) == pytest.approx(found.methods[1].fine_tuned)
    assert np.asarray(Image.open(found.folder / "plot.png").convert("L")).std() > 5  # something is drawn


@pytest.mark.parametrize("method", ["mae", "dino"])
def test_tuned_and_from_scratch_differ_in_their_first_weights_alone(method, study):
    folder = study[0].folder
    tuned, scratch = (load(folder / f"{method}-{step}" / "best").config for step in ("fine-tuned", "from-scratch"))
    assert tuned == scratch
    recipes = [read_recipe(folder / f"{method}-{step}" / "recipe.toml") for step in ("fine-tuned", "from-scratch")]
    for part in ("data", "augment", "optim", "run", "objective"):
        assert getattr(recipes[0], part) == getattr(recipes[1], part)


def test_pixels_are_judged_as_scikit_learn_does(study):
    data = open_data("digits", seed=0, per_class=10)
    known, asked = (
        [getattr(data, split).read(i).ravel() / 127.5 - 1 for i in range(len(getattr(data, split)))]
        for split in ("train", "test")
    )
    theirs = KNeighborsClassifier(20, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07)).fit(
        known, data.train.labels
    )
    assert study[0].methods[0].knn == pytest.approx(theirs.score(asked, data.test.labels), abs=0.01)


def test_the_same_command_again_trains_nothing(study):
    found, asked = study
    before = {path: path.stat().st_mtime_ns for path in found.folder.rglob("weights.safetensors")}
    show = Silent()
    again = study_ssl(DIGITS, ["mae", "dino"], **asked, show=show)
    assert again.rows == found.rows and "dino-pretrained: finished already." in show.notes
    assert before == {path: path.stat().st_mtime_ns for path in found.folder.rglob("weights.safetensors")}


def test_a_stopped_study_goes_on(study, tmp_path):
    class Impatient(Silent):
        def step(self, done, numbers):
            if done == 20:
                raise Stopped("as Ctrl-C does")

    asked = {**study[1], "folder": tmp_path / "ssl"}
    show = Impatient()
    with pytest.raises(Stopped):
        study_ssl(DIGITS, ["mae"], **asked, show=show)
    assert "run 1 of 3: mae-pretrained" in show.notes and not (tmp_path / "ssl" / "mae-fine-tuned").exists()
    again = study_ssl(DIGITS, ["mae"], **asked)
    rows = [{**row, "pretraining_seconds": None} for row in (again.rows[1], study[0].rows[1])]
    assert rows[0] == rows[1]  # to the bit


def test_what_cannot_work_is_refused_before_anything_is_trained(tmp_path, study):
    with pytest.raises(ValueError, match=r"no method\. Did you mean 'dino'"):
        study_ssl(DataRecipe("digits"), ["dinno"], folder=tmp_path / "a")
    with pytest.raises(ValueError, match="give one of them"):
        study_ssl(DataRecipe("digits", per_class=3, fraction=0.1), folder=tmp_path / "b")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(ValueError, match="holds no study"):
        study_ssl(DataRecipe("digits"), folder=tmp_path / "c")
    with pytest.raises(ValueError, match="another recipe"):
        study_ssl(DIGITS, ["mae"], **{**study[1], "pretrain": [*PRETRAIN, "optim.lr=0.1"]})
    assert json.loads((study[0].folder / "study.json").read_text(encoding="utf-8"))["study"] == "ssl"


@pytest.fixture(scope="module")
def judged(study, tmp_path_factory):
    """The encoders of the first study, taken as they are; of DINO the encoder alone, as a folder may hold it."""
    folder = tmp_path_factory.mktemp("judged")
    whole = study[0].folder / "dino-pretrained" / "best"
    save(load(whole, encoder=True), folder / "encoder")
    there = [f"mae={study[0].folder / 'mae-pretrained' / 'best'}", f"dino={folder / 'encoder'}"]
    asked = dict(few=FEW, pretrained=there, folder=folder / "ssl")
    return study_ssl(DIGITS, ["mae", "dino"], **asked), asked


def test_an_encoder_that_is_there_is_judged_as_the_one_that_was_trained_here(study, judged):
    found, asked = judged
    for ours, theirs, setting in zip(found.rows[1:], study[0].rows[1:], asked["pretrained"], strict=True):
        assert ours["encoder"] == setting.partition("=")[2] and theirs["encoder"] == "pre-trained here"
        apart = ("encoder", "pretraining_seconds")
        assert {k: ours[k] for k in ours if k not in apart} == {k: theirs[k] for k in theirs if k not in apart}
        assert ours["pretraining_seconds"] is None
    assert not list(found.folder.glob("*-pretrained"))
    table = (found.folder / "table.md").read_text(encoding="utf-8")
    assert f"mae: the encoder is {asked['pretrained'][0].removeprefix('mae=')}" in table


def test_judging_again_trains_nothing(judged):
    found, asked = judged
    before = {path: path.stat().st_mtime_ns for path in found.folder.rglob("weights.safetensors")}
    assert study_ssl(DIGITS, ["mae", "dino"], **asked).rows == found.rows
    assert before == {path: path.stat().st_mtime_ns for path in found.folder.rglob("weights.safetensors")}


def test_an_encoder_of_another_method_is_refused(tmp_path, study, judged):
    def refuse(words, methods, *pretrained, folder=tmp_path / "s", **more):
        with pytest.raises(ValueError, match=words):
            study_ssl(DIGITS, methods, pretrained=list(pretrained), folder=folder, few=FEW, **more)

    refuse("bundled:mae was trained by mae, not by dino", ["mae", "dino"], "dino=bundled:mae")
    refuse("bundled:dino was trained by dino, not by mae", ["mae"], "mae=bundled:dino")
    refuse(r"trained by labels \(10 classes\), not by mae", ["mae"], "mae=bundled:digits")
    refuse("dino is not compared here.*--methods mae,dino", ["mae"], "dino=bundled:dino")
    refuse("METHOD=CHECKPOINT", ["mae"], "bundled:mae")
    refuse("names mae twice", ["mae"], "mae=bundled:mae", "mae=bundled:mae")
    refuse("--pretrain changes nothing", ["mae"], "mae=bundled:mae", pretrain=["run.epochs=1"])
    assert not (tmp_path / "s").exists()
    refuse("has another encoder", ["mae"], "mae=bundled:mae", folder=study[0].folder)
    refuse("has another encoder", ["dino"], folder=judged[0].folder)


@pytest.mark.parametrize("name", ["mae_tiny", "dino_small_patch16", "mae_cifar"])
def test_the_network_of_an_encoder_is_that_encoder(name):
    """Of the models for folders, too, which read pictures otherwise than the ViT of their name."""
    asked = ModelRecipe(name=name, options={"image_size": [64, 48]})
    same = recipe_encoder(asked).network({})
    ours, theirs = on_meta(lambda: (create(same.name, classes=0, **same.options), create(name, **asked.options)))
    assert ours.config == theirs.config.encoder and ours.preprocess == theirs.preprocess
