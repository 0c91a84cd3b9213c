"""vitlab diff as people type it: table, verdict, JSON, exit codes; and the remedy it prints, typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
import vitlab.cli.main


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    made = vitlab.create("vit_digits", image_size=(16, 24), patch_size=8, channels=3, classes=4, depth=4)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            small = any(part in name for part in ("patch_embed", "token", "positions"))
            parameter.normal_(std=0.002 if small else 0.3)
    return made


@pytest.fixture
def a(model, tmp_path) -> Path:
    return vitlab.save(model, tmp_path / "a copy")


@pytest.fixture
def with_eps(a, tmp_path) -> Path:
    return vitlab.save(vitlab.load(a, eps=1e-12), tmp_path / "b")


def test_equal_checkpoints(command, a):
    text = command("diff", a, a).stdout
    assert f"A: {a}\n" in text
    assert "A and B agree in all" in text
    assert "blocks.0 to 3, at most in blocks." in text


def test_the_printed_remedy_makes_them_equal(command, a, with_eps, tmp_path):
    text = command("diff", a, with_eps, code=1).stdout
    assert re.search(r"blocks\.0\.norm1 +7 x 64 +.*<- first difference", text)
    assert "first difference: blocks.0.norm1" in text
    assert (
        "Likely cause: LayerNorm eps: 1e-06 in A, 1e-12 in B. With A made as B in this, blocks.0.norm1 agrees" in text
    )
    remedy = re.search(r"To make A as B: vitlab (convert .*)", text)
    assert remedy is not None
    fixed = tmp_path / "fixed"
    command(*(fixed if word == "DST" else word for word in shlex.split(remedy[1])))
    command("diff", fixed, with_eps)


def test_later_blocks_are_folded_unless_asked(command, a, with_eps):
    short = command("diff", a, with_eps, code=1).stdout.splitlines()
    whole = command("diff", a, with_eps, "--all-blocks", code=1).stdout.splitlines()
    assert sum(line.startswith("blocks.0.") for line in short) == 9
    assert [line.split()[0] for line in short if line.startswith("blocks.2")] == ["blocks.2.tokens"]
    assert sum(line.startswith("blocks.") for line in whole) == 36


def test_json(command, a, with_eps):
    found = json.loads(command("diff", a, with_eps, "--json", code=1).stdout)
    assert (found["equal"], found["first"], found["tolerance"]) == (False, "blocks.0.norm1", 1e-5)
    assert found["causes"][0]["kind"] == "eps" and found["causes"][0]["after"] < 1e-5
    assert len(found["rows"]) == 4 + 36 + 3
    assert json.loads(command("diff", a, a, "--json").stdout)["equal"] is True


def test_a_wide_tolerance_calls_them_equal(command, a, with_eps):
    command("diff", a, with_eps, "--tolerance", "0.9")


@pytest.mark.parametrize("style", ["option", "argument", "repeated"])
def test_pictures(command, a, model, tmp_path, style):
    b = vitlab.save(vitlab.load(a, preprocess=dict(mean=(0.3, 0.3, 0.3))), tmp_path / "b")
    paths = [tmp_path / "1.png", tmp_path / "2.png"]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 256, (30, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
    args = {
        "option": ["--images", *paths],
        "argument": paths,
        "repeated": ["--images", paths[0], "--images", paths[1]],
    }[style]
    text = command("diff", a, b, *args, code=1).stdout
    assert "on 2 images, 16 x 24" in text
    assert "first difference: preprocess" in text
    assert "mean (0.5, 0.5, 0.5) in A, (0.3, 0.3, 0.3) in B" in text
    assert re.search(r"each with its own preprocess: head differs by .*; the same class in \d of 2", text)


def test_a_sample_of_the_digits(command, tmp_path):
    path = vitlab.save(vitlab.create("vit_digits"), tmp_path / "digits")
    text = command("diff", path, path, "digits#3").stdout
    assert "on 1 image, " in text and "A and B agree" in text


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nowhere", "nowhere"), "nowhere: no such file or folder"),
        (("transformers:nowhere", "nowhere"), "no transformers folder"),
        (("{a}", "{a}", "--tolerance", "0"), "tolerance=0.0 must be a number above 0"),
        (("{a}", "{a}", "--image-size", "big"), "--image-size 'big' is not a size"),
        (("{a}", "{a}", "--image-size", "²"), "--image-size '²' is not a size"),
        (("{a}", "{a}", "--image-size", "9" * 5000), "is not a size: write 384"),
        (("{a}", "{a}", "--images", "no.png"), "no.png"),
        (("{a}", "{digits}"), "are different networks: patch_size 8 in A, 2 in B; channels 3 in A, 1 in B"),
    ],
)
def test_bad_input_ends_with_2(command, a, args, message, tmp_path):
    digits = vitlab.save(vitlab.create("vit_digits"), tmp_path / "digits")
    done = command("diff", *(arg.format(a=a, digits=digits) for arg in args), code=2)
    assert done.stdout == "" and done.stderr.startswith("vitlab: error: ") and message in done.stderr
