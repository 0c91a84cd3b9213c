"""JSON, TOML and log lines that nobody should have written: NaN, infinity, and brackets nested without end.

Each is refused as a ValueError that names the file; json.loads would take the first two and die of the third.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.images.datasets import open_data
from vitlab.text.tokenizer import Tokenizer
from vitlab.training import doctor
from vitlab.training.recipe import Recipe, parse_value, read_recipe, to_toml, with_settings
from vitlab.training.runlog import RunLog, read_log
from vitlab.training.runs import read_result, read_run

DEEP = 100_000
JSON = {
    "NaN": '"x": NaN',
    "infinity": '"x": -Infinity',
    "too large": '"x": 1e999',
    "lists": f'"x": {"[" * DEEP}{"]" * DEEP}',
    "never closed": f'"x": {"[" * DEEP}',
    "objects": '"x": ' + '{"a":' * DEEP + "1" + "}" * DEEP,
    "deep enough": f'"x": {"[" * 65}{"]" * 65}',
}
TOML = {
    "nan": "x = nan",
    "inf": "x = -inf",
    "too large": "x = 1e999",
    "lists": f"x = {'[' * DEEP}{']' * DEEP}",
    "tables": f"x = {'{a=' * 3000}1{'}' * 3000}",
    "dotted": f"x.{'a.' * 80}b = 1",
    "deep enough": f"x = {'[' * 65}{']' * 65}",
}


def png() -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def shard(folder: Path, text: str) -> str:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i in range(4):
            for name, data in ((f"{i}.png", png()), (f"{i}.json", text.encode())):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return str(folder / "a.tar")


def shard_of_labels(folder: Path, fields: str) -> None:
    open_data(shard(folder, '{"label": 1, ' + fields + "}"))


def shard_of_captions(folder: Path, fields: str) -> None:
    open_data(shard(folder, '{"caption": "a dog", ' + fields + "}"), captions=True)


def caption_table(folder: Path, fields: str) -> None:
    (folder / "1.png").write_bytes(png())
    (folder / "captions.jsonl").write_text('{"image": "1.png", "caption": "a", ' + fields + "}\n", encoding="utf-8")
    open_data(str(folder))


def tokenizer_config(folder: Path, fields: str) -> None:
    for name, text in Tokenizer.train(["a dog"], vocab=520).to_two_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 12, ' + fields + "}", encoding="utf-8")
    Tokenizer.read(folder)


def tokenizer(folder: Path, fields: str) -> None:
    text = Tokenizer.train(["a dog"], vocab=520).to_json()
    (folder / "tokenizer.json").write_text(text.rstrip().removesuffix("}") + ", " + fields + "}", encoding="utf-8")
    Tokenizer.read(folder / "tokenizer.json")


def result(folder: Path, fields: str) -> None:
    (folder / "result.json").write_text('{"top1": 0.5, ' + fields + "}", encoding="utf-8")
    read_result(folder)


def log_line(folder: Path, fields: str) -> None:
    lines = ['{"kind": "val", "step": 3, ' + fields + "}"] * 2
    (folder / "log.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    read_log(folder)


def last_log_line(folder: Path, fields: str) -> None:
    """A whole line, with its end, was not cut by a kill."""
    (folder / "log.jsonl").write_text(
        '{"kind": "val", "step": 3}\n{"kind": "val", "step": 3, ' + fields + "}\n", encoding="utf-8"
    )
    read_log(folder)


def replay(folder: Path, fields: str) -> None:
    (folder / "recipe.toml").write_text(to_toml(Recipe()), encoding="utf-8")
    (folder / "replay").mkdir()
    (folder / "replay" / "step.json").write_text(
        '{"step": 3, "loss": 1, "cause": "", "lr": 1, ' + fields + "}", encoding="utf-8"
    )
    doctor.check_run(folder)


READERS = {
    shard_of_labels: "a.tar: 0.json",
    shard_of_captions: "a.tar: 0.json",
    caption_table: "captions.jsonl, line 1",
    tokenizer_config: "tokenizer_config.json",
    tokenizer: "tokenizer.json",
    result: "result.json",
    log_line: "log.jsonl: line 1",
    last_log_line: "log.jsonl: line 2",
    replay: "step.json",
}


def cases() -> Iterator[Any]:
    for read in READERS:
        for case in JSON:
            if (read, case) != (tokenizer, "deep enough"):  # the tokenizers library reads to a depth of 128
                yield pytest.param(read, case, id=f"{read.__name__}, {case}")


@pytest.mark.parametrize(("read", "case"), list(cases()))
def test_json(tmp_path, monkeypatch, read, case):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError) as caught:
        read(tmp_path, JSON[case])
    assert READERS[read] in str(caught.value) and len(str(caught.value)) < 600


def test_the_same_files_are_read_without_it(tmp_path, monkeypatch):
    """What the test above refuses, it refuses for the one field that it adds."""
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    for number, read in enumerate(READERS):
        (tmp_path / str(number)).mkdir()
        if read is tokenizer:  # knows its fields
            continue
        try:
            read(tmp_path / str(number), '"x": 1.5')
        except ValueError as error:
            assert "only one class" in str(error) or "too few to keep" in str(error)  # of four, or one


@pytest.mark.parametrize("read", [shard_of_labels, shard_of_captions, caption_table], ids=lambda read: read.__name__)
def test_half_a_character_is_refused_before_it_is_trained_on(tmp_path, monkeypatch, read):
    """A label or caption that could not be written into a checkpoint. The later of two equal keys counts."""
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    key = "label" if read is shard_of_labels else "caption"
    with pytest.raises(ValueError, match="half a character"):
        read(tmp_path, f'"{key}": "a \\ud800 dog"')


@pytest.mark.parametrize("case", TOML)
def test_recipes(tmp_path, command, case):
    (tmp_path / "recipe.toml").write_text(f"[model]\n{TOML[case]}\n", encoding="utf-8")
    for read in (lambda: read_recipe(tmp_path / "recipe.toml"), lambda: read_run(tmp_path)):
        with pytest.raises(ValueError, match=r"recipe\.toml: .*(finite number|levels deep)"):
            read()
    said = command("train", tmp_path / "recipe.toml", code=2).stderr
    assert "recipe.toml" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "value", ["nan", "NaN", "+nan", "inf", "-Infinity", "1e999", "[1, nan]", "[" * DEEP, "[" * 70 + "]" * 70]
)
def test_settings(value):
    with pytest.raises(ValueError, match=r"^optim\.lr=.*(finite number|levels deep)") as caught:
        with_settings(Recipe(), [f"optim.lr={value}"])
    assert len(str(caught.value)) < 200
    with pytest.raises(ValueError, match=r"finite number|levels deep"):
        with_settings(Recipe(), [f"model.anything={value}"])  # which nobody checks before the model is built


def test_settings_that_look_like_it_are_read():
    assert parse_value("1.e-3") == 1e-3 and parse_value("nano") == "nano" and parse_value("info") == "info"
    assert parse_value('"nan"') == "nan" and parse_value("[0.5, 1]") == [0.5, 1]


def test_numbers_that_are_not_finite_come_back_from_a_log_as_they_were(tmp_path):
    """The log spells them as texts, which are JSON; so a strict reader loses nothing."""
    with RunLog(tmp_path) as log:
        log.write("train", 1, loss=float("nan"), lr=float("inf"))
    json.loads((tmp_path / "log.jsonl").read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name))
    (event,) = read_log(tmp_path)
    assert np.isnan(event["loss"]) and event["lr"] == float("inf")


def test_a_run_that_broke_is_told_of_by_doctor(tmp_path, command):
    """Its loss is NaN, and stands in step.json."""
    (tmp_path / "recipe.toml").write_text(to_toml(Recipe()), encoding="utf-8")
    model, images = vitlab.create("vit_digits", depth=1), torch.full((2, 1, 8, 8), torch.nan)
    numbers = {"step": 7, "epoch": 0, "loss": float("nan"), "lr": 0.03, "indices": [1, 2]}
    doctor.stop_run(tmp_path, model, {"images": images}, numbers)
    json.loads(
        (tmp_path / "replay" / "step.json").read_text(encoding="utf-8"), parse_constant=lambda name: pytest.fail(name)
    )
    said = command("doctor", tmp_path, code=1).stdout
    assert "the run broke at step 7: loss nan" in said and "optim.lr=1.0e-02" in said
