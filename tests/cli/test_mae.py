"""vitlab explain reconstruct, and the other verbs on a masked autoencoder and on its encoder alone."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
import vitlab.cli.main
from vitlab.checkpoints.load import AssumedWarning
from vitlab.images.preprocess import Preprocess


class Place(NamedTuple):
    model: Any
    checkpoint: str
    encoder: str
    pictures: list[str]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Place:
    folder = tmp_path_factory.mktemp("mae")
    torch.manual_seed(0)
    shape = dict(image_size=(32, 48), patch_size=8, width=32, depth=2, heads=4)
    model = vitlab.create("mae_cifar", **shape, decoder=dict(width=16, depth=1, heads=2))
    model.preprocess = Preprocess((32, 48), how="crop")
    vitlab.save(model, folder / "mae")
    vitlab.save(model.encoder, folder / "encoder")
    rng, pictures = np.random.default_rng(0), []
    for i, size in enumerate([(60, 100), (96, 64)]):
        pictures.append(str(folder / f"图 {i}.png"))
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(pictures[-1])
    return Place(vitlab.load(folder / "mae"), str(folder / "mae"), str(folder / "encoder"), pictures)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def numbers(path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def test_reconstruct_writes_the_picture_and_its_numbers(command, made):
    args = ("--mask-ratio", 0.5, "--seed", 7, "--batch-size", 1, "-o", "r.png", "--html")
    text = command("explain", "reconstruct", made.checkpoint, *made.pictures, *args).stdout
    found = vitlab.explain.reconstruct(made.model, made.pictures, mask_ratio=0.5, seed=7)
    for name, error in zip(made.pictures, found.error.tolist(), strict=True):
        assert f"{name} {error:.4f} 12" in " ".join(text.split())
    for file in ("r.png", "r.npz", "r.html"):
        assert f"written: {file}" in text
    data = numbers("r.npz")
    np.testing.assert_array_equal(data["mask"], found.mask)
    np.testing.assert_allclose(data["prediction"], found.prediction, atol=1e-5)
    np.testing.assert_allclose(data["reconstruction"], found.painted.permute(0, 2, 3, 1) * 0.5 + 0.5, atol=1e-5)
    seen = [np.asarray(made.model.preprocess.view(Image.open(name))) / 255 for name in made.pictures]
    np.testing.assert_allclose(data["picture"], np.stack(seen), atol=1e-6)
    assert (data["seed"], data["mask_ratio"], data["image"].tolist()) == (7, 0.5, made.pictures)
    with Image.open("r.png") as picture:
        assert picture.format == "PNG"


def test_reconstruct_as_json_at_another_size(command, made):
    found = json.loads(
        command("explain", "reconstruct", made.checkpoint, made.pictures[0], "--image-size", "64x48", "--json").stdout
    )
    assert found["files"] == ["explain-reconstruct.png", "explain-reconstruct.npz"]
    assert (found["hidden_patches"], found["mask_ratio"], found["seed"]) == (36, 0.75, 0)
    assert len(found["error"]) == 1 and numbers("explain-reconstruct.npz")["mask"].shape == (1, 8, 6)


def test_reconstruct_refuses_what_cannot_work(command, made, tmp_path):
    done = command("explain", "reconstruct", made.encoder, made.pictures[0], code=2)
    assert "without a decoder, so it cannot reconstruct images" in done.stderr
    assert "vitlab train mae_cifar10" in done.stderr and not list(tmp_path.iterdir())
    for share, error in (*((n, "is a share: above 0 and below 1") for n in ("0", "1", "-0.5")), ("nan", "finite")):
        done = command("explain", "reconstruct", made.checkpoint, made.pictures[0], "--mask-ratio", share, code=2)
        assert error in done.stderr
    done = command("explain", "reconstruct", made.checkpoint, made.pictures[0], "--mask-ratio", "0.99", code=2)
    assert "leaves none visible" in done.stderr


def test_a_picture_that_cannot_be_read_does_not_stop_the_others(command, made):
    done = command("explain", "reconstruct", made.checkpoint, "absent.png", made.pictures[1], "-o", "r.svg", code=1)
    assert "1 of 2 images could not be read" in done.stderr and "written: r.svg" in done.stdout
    assert numbers("r.npz")["image"].tolist() == [made.pictures[1]]


def test_other_verbs_explain_the_encoder(command, made):
    for checkpoint, out in ((made.checkpoint, "a.png"), (made.encoder, "b.png")):
        command("explain", "rollout", checkpoint, made.pictures[0], "-o", out)
    np.testing.assert_array_equal(numbers("a.npz")["maps"], numbers("b.npz")["maps"])


def test_predict_needs_classes(command, made):
    error = command("predict", made.checkpoint, made.pictures[0], code=2).stderr
    assert "(mae) knows no classes" in error and "vitlab train DATA model.init_from=" in error
    assert "has no classes (classes=0)" in command("predict", made.encoder, made.pictures[0], code=2).stderr


def test_convert_to_transformers_and_back(command, made):
    command("convert", made.checkpoint, "square", "--image-size", "32")
    text = command("convert", "square", "hf", "--to", "hf", "--check").stdout
    assert "hf in transformers: largest logit difference" in text
    command("convert", "hf", "back", "--check")
    a, b = (vitlab.load(name) for name in ("square", "back"))
    assert a.config == b.config and all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
    command("convert", "square", "encoder", "--encoder", "--to", "timm")
    images = torch.randn(2, 3, 32, 32)
    with pytest.warns(AssumedWarning, match="holds an encoder and no decoder"):
        again = vitlab.load("encoder")
    torch.testing.assert_close(again(images), a.encoder(images), atol=1e-5, rtol=0)
    done = command("convert", "square", "no", "--to", "timm", code=2)
    assert "--to hf or native, or its encoder alone, vitlab convert --encoder" in done.stderr


def test_models_and_inspect(command):
    names = [row["name"] for row in json.loads(command("models", "mae", "--json").stdout)]
    assert names == [f"mae_{size}" for size in ("tiny", "small", "base", "large", "huge", "cifar", "digits")]
    text = command("inspect", "mae_cifar").stdout
    assert "mae_cifar" in text and "17 x 192" in text  # 16 of 64 patches and the class token
    found = json.loads(command("inspect", "mae_cifar", "--json").stdout)
    steps = {step["name"]: step for step in found["steps"]}
    assert steps["blocks.8.tokens"]["shape"] == [1, 17, 192] and steps["visible"]["shape"] == [1, 17, 192]
    assert steps["decoder.blocks.1.tokens"]["shape"] == [1, 65, 96] and steps["decoder.pixels"]["shape"] == [1, 64, 48]
    with torch.device("meta"):
        model = vitlab.create("mae_cifar")
    assert found["total"]["parameters"] == sum(p.numel() for p in model.parameters()) and found["unused"] == []
    assert steps["decoder.masked"]["parameters"] == 96 and steps["decoder.embed"]["parameters"] == 192 * 96 + 96


def test_gradients_of_every_parameter(command):
    text = command("inspect", "mae_digits", "--grads").stdout
    assert "have a finite gradient that is not zero" in text and "decoder.mask_token" in text


def test_diff_compares_encoders(command, made):
    done = command("diff", made.checkpoint, made.encoder)
    assert "A and B agree" in done.stdout
