"""A CLIP from the command line: weights that come without words get them, and questions without sense are told."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import vitlab
import vitlab.cli.main
from vitlab.text.tokenizer import Tokenizer


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*args: object, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        found = capsys.readouterr()
        assert (stopped.value.code or 0) == code, found
        return found

    return call


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    """Untrained, with words of its own and OpenAI's padding."""
    torch.manual_seed(0)
    words = Tokenizer.train(["a photo of a three", "a photo of an eight"] * 2, vocab=540, context=16, pad_id=0)
    model = vitlab.create("clip_digits", **words.options)
    model.tokenizer = words
    folder = tmp_path_factory.mktemp("clip")
    vitlab.save(model, folder / "whole")
    return folder / "whole"


def test_bare_weights_get_their_tokenizer_once_and_for_all(clip, run, tmp_path):
    """As from OpenAI: a state dict, and a vocabulary in a file of its own, which says nothing of length and padding."""
    run("convert", clip, tmp_path / "theirs", "--to", "open_clip")
    torch.save(load_file(tmp_path / "theirs" / "open_clip_model.safetensors"), tmp_path / "bare.pt")
    for name, text in vitlab.load(clip).tokenizer.to_two_files().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    told = ("--activation", "gelu", "--heads", 4, "--text-heads", 4)
    assert "--tokenizer FILE adds one" in run("convert", tmp_path / "bare.pt", tmp_path / "mute", *told).out
    asked = ("digits#3", "--labels", "three,eight,一只狗", "--json")
    said = run("zeroshot", tmp_path / "mute", *asked, code=2).err
    assert "vitlab convert CHECKPOINT FOLDER --tokenizer" in said
    run("convert", tmp_path / "bare.pt", tmp_path / "ours", *told, "--tokenizer", tmp_path / "vocab.json")
    found, expected = (json.loads(run("zeroshot", folder, *asked).out) for folder in (tmp_path / "ours", clip))
    assert found == expected
    wrong = ("convert", "bundled:digits", tmp_path / "vit", "--tokenizer", tmp_path / "vocab.json")
    assert "--tokenizer is for a CLIP" in run(*wrong, code=2).err
    wrong = ("convert", tmp_path / "bare.pt", tmp_path / "x", *told, "--tokenizer", tmp_path / "none.json")
    assert "there is no such file" in run(*wrong, code=2).err


def test_labels_and_templates_that_say_nothing(clip, run):
    assert "no such file" in run("zeroshot", clip, "digits#3", "--labels", "words.txt", code=2).err
    assert "always has the probability 1" in run("zeroshot", clip, "digits#3", "--labels", "three").err
    assert "of --zeroshot" in run("eval", clip, "digits", "--templates", "held_out", code=2).err
    said = run("eval", clip, "digits", "--zeroshot", "--templates", "a {}").out
    assert "1 template: 'a {}'" in said and "..." not in said.splitlines()[1]  # it is not known what was learned


def test_an_empty_question(clip, run, tmp_path):
    vitlab.images.samples.open_sample("digits#3").image.save(tmp_path / "3.png")
    run("index", tmp_path, "-o", tmp_path / "index", "--model", clip)
    assert "the text is empty" in run("search", tmp_path / "index", " ", code=2).err
    assert "3.png" in run("search", tmp_path / "index", "a three").out
