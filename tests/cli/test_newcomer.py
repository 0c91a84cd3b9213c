"""A newcomer's first hour: own pictures, train, look inside, predict, export, serve, ask.

The server runs as a process, as a user starts it; the other commands run in this one.

What comes before cannot be part of a test and is tried by hand: a fresh clone, and `make run` in it.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image, ImageDraw

VITLAB = Path(sys.executable).parent / "vitlab"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
QUICK = ["model.name=vit_cifar", "model.depth=1", "data.batch_size=12", "data.workers=0"]
QUICK += ["run.epochs=4", "optim.warmup_epochs=1", "optim.lr=2e-3", "augment.mix_probability=0", "run.dir=runs/shapes"]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    """photos/{circle,cross,square}/*.png, and a circle that is in none of them."""
    folder = tmp_path_factory.mktemp("newcomer")
    random = np.random.default_rng(0)
    for name in ("circle", "cross", "square"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(12):
            draw_one(name, random).save(folder / "photos" / name / f"{number}.png")
    draw_one("circle", random).save(folder / "new.png")
    return folder


def draw_one(name: str, random: np.random.Generator) -> Image.Image:
    picture = Image.new("RGB", (52, 40), tuple(random.integers(0, 90, 3).tolist()))
    draw, colour = ImageDraw.Draw(picture), tuple(random.integers(150, 256, 3).tolist())
    x, y = random.integers(8, 20), random.integers(4, 12)
    box = (int(x), int(y), int(x) + 22, int(y) + 22)
    if name == "circle":
        draw.ellipse(box, fill=colour)
    elif name == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.line((box[0], box[1], box[2], box[3]), fill=colour, width=5)
        draw.line((box[0], box[3], box[2], box[1]), fill=colour, width=5)
    return picture


@pytest.mark.timeout(900)
def test_from_own_pictures_to_an_answer_over_http(home, command, monkeypatch):
    monkeypatch.chdir(home)
    said = command("train", "photos", *QUICK).stdout
    assert "model:  runs/shapes/best" in said and (home / "runs" / "shapes" / "report.html").is_file()

    said = command("explain", "attention", "runs/shapes/best", "new.png", "-o", "attention.png").stdout
    assert "written: attention.png" in said
    with Image.open(home / "attention.png") as drawing:
        assert min(drawing.size) > 100

    (offline,) = json.loads(command("predict", "runs/shapes/best", "new.png", "--json").stdout)
    labels = [score["label"] for score in offline["scores"]]
    assert sorted(labels) == ["circle", "cross", "square"]

    said = command("export", "runs/shapes/best", "-o", "model.onnx").stdout
    assert "written: model.onnx" in said and "same answer" in said

    online, page = served(home, "model.onnx", "new.png")
    assert "<html" in page and "vitlab" in page
    assert [score["label"] for score in online["scores"]] == labels
    chances = [[score["probability"] for score in answer["scores"]] for answer in (online, offline)]
    assert chances[0] == pytest.approx(chances[1], abs=1e-4)


def served(home: Path, model: str, picture: str) -> tuple[dict, str]:
    """Start the server, open its page, ask it, and end it as a system does."""
    command = [VITLAB, "serve", model, "--port", "0", "--threads", "1"]
    with subprocess.Popen(
        command, cwd=home, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as server:
        try:
            assert server.stderr is not None
            lines = []
            for line in server.stderr:
                lines.append(line)
                if "in a browser" in line:
                    break
            found = re.search(r"http://127\.0\.0\.1:\d+/", "".join(lines))
            assert found, lines
            with httpx.Client(base_url=found[0], timeout=60) as client:
                page = client.get("/").raise_for_status().text
                answer = client.post("/predict", files={"image": (home / picture).read_bytes()}).raise_for_status()
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()
    return answer.json(), page
