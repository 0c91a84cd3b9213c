"""vitlab try: one command from a photo to the answer, the heat map and the page; as a process it ends with Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys

import httpx
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import vitlab
from vitlab.checkpoints.bundled import DEFAULT
from vitlab.errors import UsageError
from vitlab.explain.draw.page import packed
from vitlab.first_look import first_look
from vitlab.serve import browser
from vitlab.serve.app import create_app
from vitlab.serve.model_pool import open_models
from vitlab.serve.page_photo import open_photo


def test_json_has_the_answer_of_predict_and_the_files(command, tmp_path):
    path = tmp_path / "new" / "moose.png"
    said = json.loads(command("try", "sample:moose", "--json", "-o", path).stdout)
    assert said["files"] == [str(path), str(path.with_suffix(".html"))] and said["checkpoint"] == DEFAULT
    scores = [(score["label"], score["probability"]) for score in said["scores"]]
    assert scores == vitlab.predict(DEFAULT, "sample:moose", top=3)[0].scores
    with Image.open(path) as drawing:
        assert drawing.width > 400 and np.asarray(drawing.convert("L")).std() > 10
    page = path.with_suffix(".html").read_text(encoding="utf-8")
    assert "sample:moose" in page and "deer · " in page


def test_without_a_photo_it_is_the_cat_and_without_the_server_it_ends(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = command("try", "--no-serve", "--model", "bundled:dino")
    assert "cat.jpg" not in said.stdout and "written: try.png" in said.stdout  # a DINO knows no classes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["try.html", "try.png"]
    said = command("try", "--no-serve", "--image-size", "32x48")
    assert re.search(r"sample:cat +cat +\d", said.stdout) and "open " not in said.stderr


def test_mistakes_are_told_in_one_line(command, tmp_path):
    (tmp_path / "text.jpg").write_text("no image", encoding="utf-8")
    for args, words in (
        ([tmp_path / "text.jpg"], "not an image"),
        ([tmp_path / "none.jpg"], "none.jpg"),
        (["sample:dog"], "there are sample:cat"),
        (["--out", tmp_path / "a.html"], "a.png"),
        (["--model", "bundled:none"], "there is no such model"),
    ):
        said = command("try", "--no-serve", *args, code=2).stderr
        assert said.startswith("vitlab: error: ") and said.count("\n") == 1 and words in said, said
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(UsageError, match="exported network"):
        first_look(tmp_path / "model.onnx", "sample:cat")


def test_the_page_gets_the_very_file_so_its_numbers_are_those_of_the_command(tmp_path):
    photo = open_photo("sample:cat")
    with TestClient(create_app(open_models(["bundled:cifar10"]), photo=photo), "http://127.0.0.1:8000") as client:
        first = client.get("/page/samples").json()[0]
        name = first["name"] if isinstance(first, dict) else first
        assert name == "sample:cat"
        sent = client.get(f"/page/samples/{name}")
        assert sent.headers["content-type"] == "image/jpeg"
        look = client.post("/page/look?model=cifar10", files={"image": ("x", sent.content)}).json()["look"]
        scores = client.get(f"/page/look/{look}/predict").json()["scores"]
        assert client.get("/page/samples/nothing").status_code == 404
    ours = vitlab.predict("bundled:cifar10", "sample:cat", top=len(scores))[0].scores
    assert [score["label"] for score in scores] == [label for label, _ in ours]
    np.testing.assert_allclose([score["probability"] for score in scores], [p for _, p in ours], atol=1e-6)


def test_a_photo_that_browsers_cannot_show_becomes_a_png(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (31, 47, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a b.tiff")
    photo = open_photo(tmp_path / "a b.tiff")
    assert (photo.name, photo.media_type) == ("a b.tiff", "image/png")
    assert packed(np.asarray(Image.open(io.BytesIO(photo.content)))) == packed(pixels)
    assert open_photo("digits#3").media_type == "image/png"


def test_no_browser_is_opened_over_ssh_or_without_a_display(monkeypatch):
    opened = []
    monkeypatch.setattr(browser.webbrowser, "open", lambda url: opened.append(url) or True)
    for name in ("SSH_CONNECTION", "SSH_TTY", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(browser.sys, "platform", "linux")
    assert not browser.open_browser("http://a")
    monkeypatch.setenv("DISPLAY", ":0")
    assert browser.open_browser("http://b") and opened == ["http://b"]
    monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
    assert not browser.open_browser("http://c")


def test_as_a_process_it_serves_until_ctrl_c(tmp_path):
    Image.fromarray(np.full((8, 8), 200, np.uint8)).save(tmp_path / "my photo.png")
    args = ["try", "my photo.png", "--model", "bundled:digits", "--no-browser"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VITLAB_LANG": "en"}
    options = dict(cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-m", "vitlab", *args], **options) as process:
        line = process.stderr.readline()
        url = re.fullmatch(r"vitlab: open (http://127\.0\.0\.1:\d+/)#sample=my%20photo\.png in .*\n", line)[1]
        assert f"ssh -L {url.split(':')[2][:-1]}:127.0.0.1" in process.stderr.readline()
        assert "my photo.png" in httpx.get(f"{url}page/samples", timeout=60).text
        process.send_signal(signal.SIGINT)
        said, last = process.communicate(timeout=60)
    assert process.returncode == 0 and last == "vitlab: stopped.\n"
    assert "written: try.png" in said
