"""Control characters in labels, names of tensors, files and runs: none reaches a terminal, and none fakes a line."""

from __future__ import annotations

import io
import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vitlab
from vitlab.cli.console import console, print_json, say
from vitlab.printable import one_line, printable, printable_json

EVIL = "cat\x1b[2J\x1b]0;owned\x07\r\x08\x7f\x9b31m\u202egpj.\u2066\u200f[red]x[/red][/]\nvitlab: all is well\t|"
RAW = set("\x00\x07\x08\r\x1b\x7f\x85\x9b\u202a\u202e\u2066\u200e\u200f\u2028")


def assert_clean(text: str) -> None:
    assert not RAW & set(text), repr(text)
    assert not any(line.startswith("vitlab: all is well") for line in text.splitlines()), repr(text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    torch.manual_seed(0)
    model = vitlab.create("vit_digits", depth=1, width=16, heads=2, channels=3, classes=2)
    model.labels = [EVIL, "[/bold] :dog:"]
    model.card.source = model.card.licence = EVIL
    return vitlab.save(model, tmp_path_factory.mktemp("model") / "model")


@pytest.fixture
def picture(tmp_path) -> Path:
    path = tmp_path / "a\x1b[31m\u202e[red]\n.png"
    Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8)).save(path)
    return path


def test_escapes_are_those_that_python_and_json_read_back():
    for text in (EVIL, "plain 中文 é", "a\ttab", "\ud800"):
        assert json.loads(printable_json(json.dumps(text, ensure_ascii=False))) == text
        assert printable(text) == text or "\\" in printable(text)
    assert one_line("a\nb\tc") == "a\\nb\\tc" and printable("a\nb\tc") == "a\nb\tc"
    assert printable("plain 中文 é 😀") == "plain 中文 é 😀"


def test_no_control_character_passes_the_console(capsys):
    for code in [*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)]:
        say(f"x{chr(code)}x")
        console().print(f"x{chr(code)}x")
        print_json({"x": chr(code)})
    found = "".join(capsys.readouterr())
    assert {c for c in found if not c.isprintable()} <= {"\n", "\t"}


def test_colours_of_our_own_still_reach_a_terminal():
    out = console(markup=True)
    out.file, out._force_terminal = io.StringIO(), True
    out._color_system = import_module("rich.console").ColorSystem.STANDARD
    out.print("[bold]ours[/bold]", "\x1b[31mtheirs", sep="")
    assert out.file.getvalue().startswith("\x1b[1mours\x1b[0m") and "\\x1b[31mtheirs" in out.file.getvalue()


def test_labels_and_file_names_of_predict(folder, picture, command):
    done = command("predict", folder, picture, "--top", 2)
    assert_clean(done.stdout + done.stderr)
    assert "cat\\x1b[2J" in done.stdout and "[red]x[/red][/]" in done.stdout and "[/bold] :dog:" in done.stdout
    piped = command("predict", folder, picture, "--top", 2, "--json").stdout
    assert_clean(piped)
    assert {score["label"] for score in json.loads(piped)[0]["scores"]} == {EVIL, "[/bold] :dog:"}


def test_names_of_pictures_that_cannot_be_read(folder, picture, tmp_path, command):
    broken = tmp_path / "b\x1b[31m\nvitlab: all is well.png"
    broken.write_bytes(b"no picture")
    told = command("predict", folder, broken, picture, code=1)
    assert_clean(told.stdout + told.stderr)
    assert "b\\x1b[31m\\nvitlab: all is well.png" in told.stderr and told.stderr.count("\n") == 2
    for verb in (["attention"], ["features", "--neighbours", tmp_path]):
        told = command("explain", verb[0], folder, broken, picture, *verb[1:], "-o", tmp_path / "x.png", code=1)
        assert_clean(told.stdout + told.stderr)
        assert "b\\x1b[31m\\nvitlab: all is well.png" in told.stderr


@pytest.mark.parametrize("verb", [["inspect"], ["inspect", "--json"], ["convert"], ["convert", "--to", "hf", "--json"]])
def test_other_verbs(verb, folder, tmp_path, command):
    place = Path(shutil.copytree(folder, tmp_path / "m\x1b[31m\u202e"))
    more = [tmp_path / "n\x9b"] if verb[0] == "convert" else []
    done = command(verb[0], place, *more, *verb[1:])
    assert_clean(done.stdout + done.stderr)


@pytest.mark.parametrize("change", ["renamed", "added", "alone"])
def test_names_of_tensors_in_errors(change, folder, tmp_path, command):
    place = Path(shutil.copytree(folder, tmp_path / "m"))
    state = load_file(place / "weights.safetensors")
    held: dict[str, Any] = {
        "renamed": {(EVIL if key == "norm.weight" else key): value for key, value in state.items()},
        "added": {**state, EVIL: torch.zeros(1)},
        "alone": {EVIL: torch.zeros(1)},
    }[change]
    save_file(held, place / "weights.safetensors")
    for verb in (["predict", place, "digits#3"], ["inspect", place], ["convert", place, tmp_path / "n"]):
        told = command(*verb, code=2)
        assert_clean(told.stdout + told.stderr)
        assert told.stderr.startswith("vitlab: error: ") and told.stderr.count("\n") == 1
    bare = tmp_path / "bare.safetensors"
    save_file(held, bare)
    told = command("inspect", bare, code=2).stderr
    assert_clean(told)
    assert told.count("\n") == 1


def test_a_folder_that_is_not_there(command, tmp_path):
    for verb in (["predict", tmp_path / "no\x1b[31m", "digits#3"], ["inspect", "no\x1b]0;x\x07"]):
        told = command(*verb, code=2).stderr
        assert_clean(told)
