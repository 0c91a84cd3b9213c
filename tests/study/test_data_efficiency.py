"""`vitlab study data-efficiency`: equal steps, nested pictures, a teacher of the same ones; a stopped study goes on."""

from __future__ import annotations

import csv
import json
from statistics import fmean

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitlab.checkpoints.load import load
from vitlab.checkpoints.native import on_meta
from vitlab.cli.main import app
from vitlab.factory import create
from vitlab.images.datasets import open_data
from vitlab.study.data_efficiency import study_data_efficiency
from vitlab.study.families import resolve_model
from vitlab.training.job import data_of
from vitlab.training.loop import Silent, Stopped
from vitlab.training.recipe import DataRecipe, read_recipe

SETTINGS = ["run.epochs=1", "data.batch_size=64", "run.save_every=100", "vit:model.depth=1", "deit:model.depth=1"]
OF_RESNET = ["resnet:optim.lr=0.05", "resnet:model.depths=[1,1]", "resnet:model.widths=[16,32]"]
SHARES = [0.1, 1.0]
DIGITS = DataRecipe("digits")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    asked = dict(seeds=2, settings=[*SETTINGS, *OF_RESNET], folder=tmp_path_factory.mktemp("study") / "s")
    return study_data_efficiency(DIGITS, "vit,deit,resnet", SHARES, **asked), asked


def runs(study):
    return {folder.parent.name: folder.parent for folder in sorted(study.folder.glob("*/result.json"))}


def test_every_run_takes_the_same_steps_and_judges_the_last_model(study):
    whole = len(open_data("digits").train)
    assert len(runs(study[0])) == 3 * 2 * 2
    for folder in runs(study[0]).values():
        result, recipe = (
            json.loads((folder / "result.json").read_text(encoding="utf-8")),
            read_recipe(folder / "recipe.toml"),
        )
        assert result["steps"] == whole // 64
        assert result["best_epoch"] == recipe.run.epochs == recipe.run.eval_every
        assert recipe.optim.warmup_steps == round(0.1 * result["steps"])


def test_pictures_are_the_same_for_all_models_and_nested(study):
    recipes = {name: read_recipe(folder / "recipe.toml") for name, folder in runs(study[0]).items()}

    def pictures(name):
        train = data_of(recipes[name]).train
        return {train.read(i).tobytes() for i in range(len(train))}

    few, whole, other = (pictures(f"vit,fraction={f},seed={s}") for f, s in ((0.1, 0), (1, 0), (0.1, 1)))
    assert few < whole and few != other
    assert {row["pictures"] for row in study[0].rows} == {len(few), len(whole)}
    for name, recipe in recipes.items():
        assert recipe.augment == recipes["vit,fraction=1,seed=0"].augment
        assert recipe.data == recipes[f"vit,{name.partition(',')[2]}"].data


def test_a_student_learns_from_the_teacher_of_its_own_pictures(study):
    for name, folder in runs(study[0]).items():
        recipe, config = read_recipe(folder / "recipe.toml"), load(folder / "best").config
        if name.startswith("deit"):
            teacher = study[0].folder / name.replace("deit", "resnet") / "best"
            assert (recipe.objective.name, recipe.objective.options["teacher"]) == ("distill", str(teacher))
            assert config.tokens.distill_token
        else:
            assert recipe.objective.name == "supervised" and "teacher" not in recipe.objective.options
    optim = {
        name.partition(",")[0]: read_recipe(folder / "recipe.toml").optim for name, folder in runs(study[0]).items()
    }
    assert (optim["resnet"].name, optim["resnet"].lr) == ("sgd", 0.05)  # as set for it alone
    assert optim["vit"] == optim["deit"] and optim["vit"].name == "adamw"


def test_the_table_is_what_the_runs_say(study):
    found = study[0]
    assert [(row["model"], row["fraction"]) for row in found.rows] == [
        (m, f) for m in ("vit", "deit", "resnet") for f in SHARES
    ]
    for row in found.rows:
        cells = [found.folder / f"{row['model']},fraction={row['fraction']:g},seed={seed}" for seed in (0, 1)]
        tops = [json.loads((cell / "result.json").read_text(encoding="utf-8"))["top1"] for cell in cells]
        assert (row["top1"], row["top1_min"], row["top1_max"]) == (fmean(tops), min(tops), max(tops))
    lines = list(csv.DictReader((found.folder / "results.csv").read_text(encoding="utf-8").splitlines()))
    assert len(lines) == 12 and {line["seed"] for line in lines} == {"0", "1"}
    table = (found.folder / "table.md").read_text(encoding="utf-8")
    assert "same number of steps" in table and "by resnet, which learned from the same images" in table
    assert np.asarray(Image.open(found.folder / "plot.png").convert("L")).std() > 5  # something is drawn


def test_the_same_command_again_trains_nothing(study):
    found, asked = study
    before = {path: path.stat().st_mtime_ns for path in found.folder.rglob("weights.safetensors")}
    typed = [
        "study",
        "data-efficiency",
        "digits",
        *asked["settings"],
        "--models",
        "vit,deit,resnet",
        "--fractions",
        "0.1,1",
    ]
    done = CliRunner().invoke(
        app, [*typed, "--seeds", "2", "--dir", str(asked["folder"]), "--json"], catch_exceptions=False
    )
    assert json.loads(done.stdout) == json.loads(json.dumps(found.rows))
    assert before == {path: path.stat().st_mtime_ns for path in found.folder.rglob("weights.safetensors")}


def test_a_stopped_study_goes_on(study, tmp_path):
    class Impatient(Silent):
        def step(self, done, numbers):
            if done == 10:
                raise Stopped("as Ctrl-C does")

    asked = {**study[1], "folder": tmp_path / "s", "seeds": 1, "settings": SETTINGS[:4]}
    with pytest.raises(Stopped):
        study_data_efficiency(DIGITS, "vit", SHARES, **asked, show=Impatient())
    study_data_efficiency(DIGITS, "vit", SHARES, **asked)
    for share in ("0.1", "1"):
        ours, theirs = (s / f"vit,fraction={share},seed=0" / "best" for s in (tmp_path / "s", study[0].folder))
        assert (ours / "weights.safetensors").read_bytes() == (theirs / "weights.safetensors").read_bytes()


def test_words_mean_networks_that_fit_the_pictures():
    def names(side):
        return [resolve_model(word, (word, {}), side).name for word in ("vit", "deit", "swin", "resnet")]

    assert names(8) == ["vit_digits", "vit_digits", "swin_cifar", "resnet_cifar"]
    assert names(32) == ["vit_cifar", "vit_cifar", "swin_cifar", "resnet_cifar"]
    assert names(500) == ["vit_small_patch16", "deit_small_distilled_patch16", "swin_tiny", "resnet50"]
    for side in (8, 28, 32, 500):
        sizes = []
        for word in ("vit", "deit", "swin", "resnet"):
            network = resolve_model(word, (word, {}), side)
            model = on_meta(lambda n=network: create(n.name, classes=10, **n.options))
            assert network.distilled == (word == "deit") and network.is_cnn == (word == "resnet")
            assert model.config.image_size == ((side, side) if side < 65 else (224, 224))
            sizes.append(sum(parameter.numel() for parameter in model.parameters()))
        assert side == 8 or max(sizes) < 1.6 * min(sizes)  # of like size
    assert resolve_model("vit_tiny:depth=4", ("vit_tiny", {"depth": 4}), 32).options == {
        "depth": 4
    }  # a name means itself


@pytest.mark.parametrize(
    ("models", "settings", "words"),
    [
        ("vitt", [], "Did you mean 'vit'"),
        ("mae_cifar", [], "learns without labels"),
        ("vit:dept=3", [], "Did you mean 'depth'"),
        ("vit", ["run.seed=3"], "use --seeds"),
        ("vit", ["vit:data.fraction=0.5"], "use --fractions"),
        ("vit", ["run.minutes=3"], "fewer steps"),
        ("vit", ["swin:optim.lr=1"], "is for swin, which is not compared"),
        ("vit", ["optim.rl=1"], "Did you mean optim.lr=1"),
    ],
)
def test_bad_input(models, settings, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        study_data_efficiency(DIGITS, models, [0.5, 1.0], settings=settings, folder=tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_a_student_without_a_teacher_gets_one(tmp_path, monkeypatch):
    monkeypatch.setattr("vitlab.study.runner.run_cells", lambda cells, folder, show: iter(()))
    found = study_data_efficiency(DIGITS, "deit", [1.0], folder=tmp_path / "s")
    assert any("resnet is trained, too" in note for note in found.notes)
    assert json.loads((tmp_path / "s" / "study.json").read_text(encoding="utf-8"))["models"] == ["deit", "resnet"]
