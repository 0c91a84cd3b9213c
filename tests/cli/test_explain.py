"""vitlab explain: every verb writes its picture, and beside it the numbers that the Python functions give."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
import vitlab.cli.main
from vitlab.explain.features import patch_tokens
from vitlab.images.preprocess import Preprocess
from vitlab.reduce import reducer_of

LABELS = ["蚂蚁", "bee", "cat", "dog"]


class Place(NamedTuple):
    model: Any
    folder: Any
    pictures: list[str]  # 100 x 60, 64 x 96 in EXIF's words, 80 x 80


@pytest.fixture
def run(command):
    return partial(command, "explain")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("explain")
    torch.manual_seed(0)
    shape = dict(image_size=(32, 48), patch_size=8, channels=3, classes=4, depth=3, width=32, heads=4)
    for name, options in {"model": {}, "other": {"image_size": 64, "registers": 2}}.items():
        model = vitlab.create("vit_digits", **(shape | options))
        for parameter in model.parameters():  # a fresh head says nothing
            torch.nn.init.normal_(parameter, std=0.2)
        model.labels = LABELS
        model.preprocess = Preprocess(model.config.image_size, how="crop" if name == "model" else "stretch")
        vitlab.save(model, folder / name)
    rng, pictures = np.random.default_rng(0), []
    exif = Image.Exif()
    exif[0x0112] = 6
    for i, (size, more) in enumerate([((60, 100), {}), ((64, 96), {"exif": exif}), ((80, 80), {})]):
        pictures.append(str(folder / f"图 {i}.png"))
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(pictures[-1], **more)
    return Place(vitlab.load(folder / "model"), folder, pictures)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def checkpoint(made: Place) -> str:
    return str(made.folder / "model")


def numbers(path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def test_help_needs_no_torch():
    code = "import sys; sys.argv = ['vitlab', 'explain', 'attention', '--help']\nfrom vitlab.cli.main import run\n"
    code += "try: run()\nexcept SystemExit: sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "--query" in done.stdout and "--heads" in done.stdout


def test_attention_of_one_picture(run, made, tmp_path):
    text = run("attention", checkpoint(made), made.pictures[0]).stdout
    top = vitlab.predict(made.model, made.pictures[0], top=1)[0].scores[0]
    assert text.splitlines()[0] == f"{made.pictures[0]}: {top[0]} · {100 * top[1]:.0f} %"
    assert "written: explain-attention.png" in text and "written: explain-attention.npz" in text
    found = numbers("explain-attention.npz")
    maps, before = vitlab.explain.attention_maps(made.model, made.pictures[0], prefix=True)
    np.testing.assert_allclose(found["maps"], maps, rtol=1e-6)
    np.testing.assert_allclose(found["prefix"], before, rtol=1e-6)
    assert found["layers"].tolist() == [0, 1, 2] and found["heads"].tolist() == [0, 1, 2, 3]
    assert found["image"].tolist() == [made.pictures[0]] and found["label"].tolist() == [top[0]]
    assert (found["original_size"].tolist(), found["view_size"].tolist()) == ([[60, 100]], [32, 48])
    with Image.open("explain-attention.png") as picture:
        assert picture.format == "PNG"


def test_attention_from_a_pixel_of_each_picture(run, made):
    """The same pixel lies in other patches of pictures of other shapes; a turned photo counts upright."""
    args = ("--query", "30,40", "--layers", "2,-3", "--heads", "1,-1", "--out", "a.svg", "--json")
    found = json.loads(run("attention", checkpoint(made), *made.pictures, *args).stdout)
    assert [i["image"] for i in found["images"]] == made.pictures
    assert found["files"] == ["a.svg", "a.npz"] and found["query"] == "the patch at 30, 40"
    data = numbers("a.npz")
    assert data["layers"].tolist() == [2, 0] and data["heads"].tolist() == [1, 3]
    assert data["original_size"].tolist() == [[60, 100], [96, 64], [80, 80]]
    for i, (height, width) in enumerate(data["original_size"].tolist()):
        geometry = made.model.preprocess.geometry((height, width))
        x = 30.5 * geometry.resized[1] / width - geometry.left
        y = 40.5 * geometry.resized[0] / height - geometry.top
        assert data["query_patch"][i] == int(y // 8) * 6 + int(x // 8)
        expected = vitlab.explain.attention_maps(made.model, made.pictures[i], [2, 0], [1, 3], (x, y))
        np.testing.assert_allclose(data["maps"][i], expected[0], rtol=1e-5)
    assert len(set(data["query_patch"].tolist())) > 1


def test_attention_of_tokens_and_mean_of_heads(run, made):
    for query, name in (("cls", "class"), ("mean", "mean")):
        run("attention", checkpoint(made), *made.pictures[:2], "--query", query, "--heads", "mean", "-o", "m.png")
        expected = vitlab.explain.attention_maps(made.model, made.pictures[:2], heads="mean", query=name)
        np.testing.assert_allclose(numbers("m.npz")["maps"], expected, rtol=1e-5)
    assert "heads" in numbers("m.npz") and numbers("m.npz")["heads"].tolist() == ["mean"]


def test_rollout(run, made):
    run("rollout", checkpoint(made), *made.pictures, "--discard", "0.5", "--batch-size", 2, "-o", "r.pdf", "--html")
    np.testing.assert_allclose(
        numbers("r.npz")["maps"], vitlab.explain.rollout(made.model, made.pictures, 0.5), rtol=1e-5
    )
    page = Path("r.html").read_text(encoding="utf-8")
    assert page.startswith("<!DOCTYPE html>") and "图 0.png" in page
    assert Path("r.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize("method", ["relevance", "grad_cam", "gradient_x_input"])
def test_relevance(run, made, method):
    done = run("relevance", checkpoint(made), *made.pictures[:2], "--method", method, "--target", "蚂蚁", "--json")
    expected = getattr(vitlab.explain, method)(made.model, made.pictures[:2], "蚂蚁")
    np.testing.assert_allclose(numbers("explain-relevance.npz")["maps"], expected, rtol=1e-4, atol=1e-7)
    assert json.loads(done.stdout)["explained"] == ["蚂蚁"] * 2


def test_relevance_of_a_number_and_of_what_each_picture_is_taken_for(run, made):
    told = json.loads(run("relevance", checkpoint(made), *made.pictures, "--target", "3", "--json").stdout)
    assert told["explained"] == ["dog"] * 3
    told = json.loads(run("relevance", checkpoint(made), *made.pictures, "--json").stdout)
    assert told["explained"] == [i["label"] for i in told["images"]]


def test_compare_methods_and_models(run, made):
    from scipy.stats import spearmanr

    done = run("compare", checkpoint(made), *made.pictures[:2], "--methods", "rollout,relevance", "--html", "--json")
    found, data = json.loads(done.stdout), numbers("explain-compare.npz")
    a, b = (getattr(vitlab.explain, m)(made.model, made.pictures[:2]).numpy() for m in ("rollout", "relevance"))
    np.testing.assert_allclose(data["rollout"], a, rtol=1e-5)
    np.testing.assert_allclose(data["relevance"], b, rtol=1e-4, atol=1e-7)
    expected = [spearmanr(x.ravel(), y.ravel()).statistic for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(found["agreement"][0]["agreement"], expected, atol=1e-6)

    other = made.folder / "other"
    text = run("compare", checkpoint(made), *made.pictures[:2], "--with", other, "--html", "-o", "two.png").stdout
    data = numbers("two.npz")
    np.testing.assert_allclose(data["rollout_a"], a, rtol=1e-5)
    expected = vitlab.explain.rollout(vitlab.load(other), made.pictures[:2])
    np.testing.assert_allclose(data["rollout_b"], expected, rtol=1e-5)
    assert data["rollout_b"].shape == (2, 8, 8) and "rank correlation" in text


def test_figure7_with_and_without_pictures(run, made):
    done = run("figure7", checkpoint(made), *made.pictures, "--json")
    found, data = json.loads(done.stdout), numbers("explain-figure7.npz")
    expected = vitlab.explain.attention_distance(made.model, made.pictures)
    np.testing.assert_allclose(data["distance"], expected, rtol=1e-5)
    np.testing.assert_allclose(found["distance"], expected, rtol=1e-5)
    np.testing.assert_allclose(data["entropy"], vitlab.explain.attention_entropy(made.model, made.pictures), rtol=1e-5)
    np.testing.assert_allclose(data["similarity"], vitlab.explain.position_similarity(made.model), rtol=1e-5)
    np.testing.assert_allclose(data["filters"], vitlab.explain.filters(made.model, 28), atol=1e-5)
    done = run("figure7", checkpoint(made), "-o", "w.png", "--html")
    assert "note: distance, entropy, norms: Give images" in done.stderr
    assert set(numbers("w.npz")) == {"filters", "similarity"}


def test_features(run, made):
    run("features", checkpoint(made), *made.pictures, "--at", "30,40", "--mask", "--html", "--each")
    data = numbers("explain-features.npz")
    mask = vitlab.explain.foreground_mask(made.model, made.pictures)
    np.testing.assert_array_equal(data["foreground"], mask)
    expected = vitlab.explain.pca_rgb(made.model, made.pictures, joint=False, foreground=mask)
    np.testing.assert_allclose(data["components"], expected, atol=1e-4)
    tokens = patch_tokens(made.model, made.pictures)
    geometry = made.model.preprocess.geometry((60, 100))
    x, y = 30.5 * geometry.resized[1] / 100 - geometry.left, 40.5 * geometry.resized[0] / 60 - geometry.top
    asked = tokens[0, int(y // 8), int(x // 8)]
    expected = torch.cosine_similarity(tokens, asked.expand_as(tokens), dim=-1)
    np.testing.assert_allclose(data["likeness"], expected, atol=1e-5)


def test_neighbours(run, made):
    done = run("features", checkpoint(made), *made.pictures[:2], "--neighbours", made.folder, "-k", 2, "--json")
    found = json.loads(done.stdout)["neighbours"]
    for row, own in zip(found, made.pictures, strict=False):
        assert row[0]["image"] == own and row[0]["similarity"] == pytest.approx(1, abs=1e-5) and len(row) == 2
    text = run("features", checkpoint(made), made.pictures[0], "--neighbours", made.folder).stdout
    assert f"{made.pictures[0]} 1.000 {made.pictures[0]}" in " ".join(text.split())
    assert numbers("explain-features.npz")["neighbours"].shape == (1, 3)


def test_faithfulness(run, made):
    args = ("--methods", "rollout,grad_cam", "--steps", 2, "--kinds", "deletion,insertion")
    done = run("faithfulness", checkpoint(made), *made.pictures, *args, "--json")
    rows = vitlab.explain.compare_methods(
        made.model, made.pictures, ["rollout", "grad_cam"], ["deletion", "insertion"], steps=2
    )
    data, found = numbers("explain-faithfulness.npz"), json.loads(done.stdout)["scores"]
    assert [(r["method"], r["kind"]) for r in found] == [(r.method, r.kind) for r in rows]
    for row, one in zip(rows, found, strict=True):
        np.testing.assert_allclose(data[f"{row.kind}_{row.method}"], row.curves, atol=1e-5)
        assert one["area"] == pytest.approx(row.to_dict()["area"], abs=1e-5)
    args = ("--methods", "rollout", "--steps", 2, "--kinds", "road")
    text = run("faithfulness", checkpoint(made), made.pictures[0], *args).stdout
    area = float(vitlab.explain.compare_methods(made.model, made.pictures[0], ["rollout"], ["road"], steps=2)[0].areas)
    assert f"rollout  {area:.3f}" in text and "One image is not a study: no verdict" in text
    assert "better" not in text.replace("better, insertion higher", "")
    alone = json.loads(run("faithfulness", checkpoint(made), made.pictures[0], *args, "--json").stdout)
    assert {row["wins"] for row in alone["scores"]} == {None}
    assert "better than random by" in run("faithfulness", checkpoint(made), *made.pictures[:2], *args).stdout


def test_pruned(run, made):
    found = json.loads(run("pruned", checkpoint(made), *made.pictures, "--reducer", "tome:r=6", "--json").stdout)
    assert found["tokens"] == [[19, 13, 7]] * 3  # of 25
    ours = vitlab.explain.pruned_patches(made.model, made.pictures, reducer_of("tome:r=6"))
    assert (numbers("explain-pruned.npz")["groups"] == ours.groups.numpy()).all()
    run("pruned", checkpoint(made), made.pictures[0])  # by default, too
    told = run("pruned", checkpoint(made), *made.pictures, "--reducer", "tom:r=6", code=2).stderr
    assert "Did you mean 'tome'" in told and "evit:keep=0.7" in told


def test_lens(run, made):
    found = json.loads(run("lens", checkpoint(made), *made.pictures[:2], "--target", "dog", "--json").stdout)
    expected, data = vitlab.explain.lens(made.model, made.pictures[:2], "dog"), numbers("explain-lens.npz")
    np.testing.assert_allclose(data["logits"], expected.logits, atol=1e-5)
    assert (data["patch_class"] == expected.patch_class.numpy()).all()
    np.testing.assert_allclose(found["explained_probability"], expected.probabilities[:, :, 3], atol=1e-5)
    text = run("lens", checkpoint(made), made.pictures[0]).stdout
    assert "written: explain-lens.png" in text and text.count(found["top"][0][-1]) >= 1


def test_attribution(run, made):
    found = json.loads(run("attribution", checkpoint(made), made.pictures[0], "--json").stdout)
    assert found["sum"] == pytest.approx(found["logit"], abs=1e-4)
    assert sum(found["shares"][0].values()) == pytest.approx(found["logit"][0], abs=1e-4)
    data, expected = numbers("explain-attribution.npz"), vitlab.explain.attribution(made.model, made.pictures[0])
    np.testing.assert_allclose(data["sources"], expected.sources, atol=1e-5)
    assert "attention 2" in run("attribution", checkpoint(made), *made.pictures).stdout


def test_ablate(run, made):
    args = ("--how", "mean", "--target", "cat")
    found = json.loads(run("ablate", checkpoint(made), *made.pictures[:2], *args, "--json").stdout)
    expected = vitlab.explain.ablate(made.model, made.pictures[:2], "cat", "mean")
    np.testing.assert_allclose(found["heads"], expected.heads, atol=1e-5)
    np.testing.assert_allclose(numbers("explain-ablate.npz")["mlps"], expected.mlps, atol=1e-5)
    assert "layer 3, head" in run("ablate", checkpoint(made), made.pictures[0]).stdout
    assert '"zero" or "mean"' in run("ablate", checkpoint(made), made.pictures[0], "--how", "none", code=2).stderr


def test_patch(run, made):
    found = json.loads(run("patch", checkpoint(made), *made.pictures[:2], "--by-patch", "--json").stdout)
    expected = vitlab.explain.patch(made.model, *made.pictures[:2], by_patch=True)
    assert found["explained"] == LABELS[expected.target]
    np.testing.assert_allclose(found["moved"]["prefix"], expected.moved(expected.groups["prefix"]), atol=1e-4)
    np.testing.assert_allclose(numbers("explain-patch.npz")["patches"], expected.moved(expected.patches), atol=1e-4)
    assert "Logit of" in run("patch", checkpoint(made), *made.pictures[1:3]).stdout
    assert "missing.png: no such file" in run("patch", checkpoint(made), made.pictures[0], "missing.png", code=2).stderr


def test_a_page_alone(run, made):
    done = run("attention", checkpoint(made), *made.pictures, "-o", "only.html", "--json")
    assert json.loads(done.stdout)["files"] == ["only.html", "only.npz"]


def test_samples_and_another_size(run, made):
    torch.manual_seed(0)
    vitlab.save(vitlab.create("vit_digits"), "digits")
    found = json.loads(run("rollout", "digits", "digits#3", "digits#5", "--image-size", 16, "--json").stdout)
    assert [i["image"] for i in found["images"]] == ["digits#3", "digits#5"]
    data = numbers("explain-rollout.npz")
    assert data["original_size"].tolist() == [[8, 8], [8, 8]] and data["view_size"].tolist() == [16, 16]
    done = run("rollout", "digits", "digits#3", "digits#99999", "--json", code=1)
    assert "digits#99999" in json.loads(done.stdout)["images"][1]["error"]


def test_an_explicit_size_sees_the_whole_image(run, made):
    """The model crops; at a size of one's own the patches cover each image from edge to edge, on all commands."""
    run("rollout", checkpoint(made), *made.pictures)
    data = numbers("explain-rollout.npz")
    assert (data["resized_size"] > data["view_size"]).any()
    for verb in ("rollout", "relevance", "features", "pruned"):
        run(verb, checkpoint(made), *made.pictures, "--image-size", "40x24")
        data = numbers(f"explain-{verb}.npz")
        assert data["view_size"].tolist() == [40, 24] and data["resized_size"].tolist() == [[40, 24]] * 3
        assert not data["view_corner"].any()
    assert vitlab.load(made.folder / "model", image_size=(40, 24)).preprocess.how == "crop"  # as predict and eval read


def test_the_scale_changes_the_picture_and_not_the_numbers(run, made):
    pictures, maps = [], []
    for scale in ("percentile", "log", "minmax"):
        told = json.loads(run("rollout", checkpoint(made), *made.pictures, "--scale", scale, "--json").stdout)
        assert told["scale"] == scale and len(told["outliers"]) == 3
        pictures.append(Path("explain-rollout.png").read_bytes())
        maps.append(numbers("explain-rollout.npz")["maps"])
    assert len(set(pictures)) == 3 and (maps[0] == maps[1]).all() and (maps[0] == maps[2]).all()
    assert "no scale 'linear'" in run("rollout", checkpoint(made), *made.pictures, "--scale", "linear", code=2).stderr
    told = run("faithfulness", checkpoint(made), *made.pictures, "--scale", "log", code=2).stderr
    assert "--scale" in told  # it draws no heat map


def test_an_unsure_foreground_is_said(run, made):
    done = run("features", checkpoint(made), *made.pictures, "--mask", "--json")
    told = json.loads(done.stdout)["foreground"]
    data = numbers("explain-features.npz")
    np.testing.assert_allclose([image["separation"] for image in told], data["separation"])
    for name, image in zip(made.pictures, told, strict=True):
        assert image["unsure"] == (image["separation"] < 0.75 or image["margin"] < 0.25)
        assert (f"{name}: the foreground is unsure (" in done.stderr) == image["unsure"]


def test_what_cannot_be_read_is_reported_and_the_rest_goes_on(run, made, tmp_path):
    (tmp_path / "no.png").write_text("not a picture", encoding="utf-8")
    done = run("rollout", checkpoint(made), "missing.png", made.pictures[0], "no.png", "--json", code=1)
    first, second, third = json.loads(done.stdout)["images"]
    assert "no such file" in first["error"] and second["label"] in LABELS and "not an image" in third["error"]
    assert "2 of 3 images could not be read" in done.stderr and "missing.png: no such file" in done.stderr
    assert len(numbers("explain-rollout.npz")["maps"]) == 1
    (tmp_path / "explain-rollout.png").unlink()
    done = run("rollout", checkpoint(made), "missing.png", code=1)
    assert "1 of 1 images" in done.stderr and not (tmp_path / "explain-rollout.png").exists()


WRONG = {
    "unknown layer": (["attention", "--layers", "0,7"], "layer 7 does not exist: this model has layers 0 to 2"),
    "layers in words": (["attention", "--layers", "last"], "write 0,3,-1, or all"),
    "head out of range": (["attention", "--heads", "4"], "head 4 does not exist: this layer has heads 0 to 3"),
    "query outside": (["attention", "--query", "100,10"], "100 x 60 pixels: x is 0 to 99, y is 0 to 59"),
    "query cut off": (["attention", "--query", "1,10"], "it sees x from 4 to 93 and y from 0 to 59"),
    "query in words": (["attention", "--query", "left"], "write X,Y in its pixels, e.g. 100,60"),
    "no such token": (["attention", "--query", "distillation"], "Ask for 'class', 'mean' ("),
    "discard too much": (["rollout", "--discard", "1"], "at least 0 and below 1"),
    "unknown class": (["relevance", "--target", "dogs"], "Did you mean 'dog'"),
    "class out of range": (["relevance", "--target", "4"], "this model has classes 0 to 3"),
    "unknown method": (["relevance", "--method", "lime"], "There are: relevance, grad_cam, gradient_x_input"),
    "methods unknown": (["compare", "--methods", "rollout,lime"], "there is no method 'lime'"),
    "one method": (["compare", "--methods", "rollout"], "compare needs two methods"),
    "unknown test": (["faithfulness", "--kinds", "deleting"], "must be one of deletion, insertion, road"),
    "feature layer": (["features", "--layer", "5"], "layers 0 to 2"),
    "neighbours nowhere": (["features", "--neighbours", "nowhere"], "is no folder"),
    "unknown kind of file": (["rollout", "--out", "x.gif"], "cannot draw .gif"),
    "a folder": (["rollout", "--out", "."], "is a folder"),
    "not to be written": (["rollout", "--out", "/dev/null/x.png"], "/dev/null is no folder"),
}


@pytest.mark.parametrize(("args", "says"), WRONG.values(), ids=WRONG)
def test_wrong_input_gets_a_clear_error_and_no_file(run, made, tmp_path, args, says):
    verb, *options = args
    found = run(verb, checkpoint(made), made.pictures[0], *options, code=2)
    assert says in " ".join(found.stderr.split()) and found.stdout == ""
    assert not list(tmp_path.iterdir())


def test_nothing_that_is_read_is_written_over(run, made, tmp_path):
    Image.new("RGB", (20, 20)).save("photo.png")
    before = (tmp_path / "photo.png").read_bytes()
    assert (
        "would write over photo.png" in run("rollout", checkpoint(made), "photo.png", "-o", "photo.png", code=2).stderr
    )
    (tmp_path / "w.npz").write_bytes(b"weights")
    assert "would write over w.npz" in run("rollout", "w.npz", "photo.png", "-o", "w.png", code=2).stderr
    assert (tmp_path / "photo.png").read_bytes() == before and (tmp_path / "w.npz").read_bytes() == b"weights"


def test_a_model_without_classes_shows_what_needs_none(run, made, tmp_path):
    model = vitlab.load(checkpoint(made), classes=0)
    vitlab.save(model, tmp_path / "bare")
    found = json.loads(run("rollout", "bare", made.pictures[0], "--json").stdout)
    assert found["images"][0]["label"] is None
    assert "no classes" in run("relevance", "bare", made.pictures[0], code=2).stderr
    assert "no classes" in run("faithfulness", "bare", made.pictures[0], code=2).stderr
    done = run("compare", "bare", made.pictures[0], "--json")  # what can be compared
    found = json.loads(done.stdout)
    assert [(row["first"], row["second"]) for row in found["agreement"]] == [("attention", "rollout")]
    assert found["left_out"] == dict.fromkeys(("relevance", "grad_cam"), "bare has no classes")
    assert "Grad-CAM is left out: bare has no classes" in done.stderr
    told = run("compare", "bare", made.pictures[0], "--methods", "rollout,relevance", code=2).stderr
    assert "compare needs two methods" in told and "Relevance is left out: bare has no classes." in told
