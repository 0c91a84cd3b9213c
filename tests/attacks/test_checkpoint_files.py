"""Damaged native checkpoints: what is loaded is what was saved, or it is refused in words."""

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.checkpoints.digests import DamagedError
from vitlab.errors import CheckpointError
from vitlab.text.tokenizer import Tokenizer

FILES = ("weights.safetensors", "model.json", "tokenizer.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    tokenizer = Tokenizer.train(["a red square", "a blue circle"], vocab=520, context=8)
    model = vitlab.create("clip_nano", **tokenizer.options)
    model.tokenizer = tokenizer
    return vitlab.save(model, tmp_path_factory.mktemp("saved") / "clip")


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "clip"))


def flip_bit(place: float):
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[int(len(data) * place)] ^= 1
        path.write_bytes(data)

    return flip


DAMAGES = {
    "truncate": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path: path.write_bytes(b""),
    "delete": lambda path: path.unlink(),
    "zeros from the middle": lambda path: path.write_bytes(
        path.read_bytes()[: path.stat().st_size // 2] + bytes(path.stat().st_size - path.stat().st_size // 2)
    ),
    **{f"flip a bit at {place}": flip_bit(place) for place in (0.1, 0.5, 0.9)},
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_in_words(folder, name, damage):
    damage(folder / name)
    with pytest.raises(CheckpointError) as error:
        vitlab.load(folder)
    assert name in str(error.value) and len(str(error.value)) < 600


def test_every_byte_of_model_json_counts(folder):
    """A flipped bit in any of its bytes loads the very same network, or is refused: nothing in between."""
    text = (folder / "model.json").read_bytes()
    reference = vitlab.load(folder)
    for place in range(0, len(text), 7):
        data = bytearray(text)
        data[place] ^= 2
        (folder / "model.json").write_bytes(data)
        try:
            model = vitlab.load(folder)
        except CheckpointError:
            continue
        assert model.config == reference.config and model.preprocess == reference.preprocess, place


def test_digests_are_what_sha256sum_prints(folder):
    card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    expected = {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES if name != "model.json"
    }
    assert card["digests"] == expected


def test_a_checkpoint_without_digests_loads(folder):
    reference = vitlab.load(folder)
    card = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    del card["digests"], card["seal"]
    (folder / "model.json").write_text(json.dumps(card), encoding="utf-8")
    model = vitlab.load(folder)
    assert all(torch.equal(value, reference.state_dict()[key]) for key, value in model.state_dict().items())


def test_an_owner_who_edits_it_is_told_what_to_delete(folder):
    path = folder / "model.json"
    text = path.read_text(encoding="utf-8").replace('"licence": null', '"licence": "MIT"')
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DamagedError, match='set "seal" in it to null'):
        vitlab.load(folder)
    path.write_text(re.sub('"seal": "[0-9a-f]+"', '"seal": null', text), encoding="utf-8")
    assert vitlab.load(folder).card.licence == "MIT"


def test_another_layout_of_the_same_values_is_the_same(folder):
    path = folder / "model.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(dict(reversed(card.items())), indent=8), encoding="utf-8")
    vitlab.load(folder)


@pytest.mark.parametrize("name", ["../model.json", "no-such-file", "/etc/hostname", "."])
def test_digests_of_other_places_are_refused(folder, name):
    path = folder / "model.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    del card["seal"]
    path.write_text(json.dumps({**card, "digests": {name: "0" * 64}}), encoding="utf-8")
    with pytest.raises(DamagedError, match="is missing"):
        vitlab.load(folder)


@pytest.mark.skipif(os.name != "posix", reason="limits on a file's size are POSIX")
def test_a_full_disk_leaves_the_checkpoint_of_before(folder):
    """A limit on the size of files stands for the disk."""
    import resource

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model = vitlab.load(folder)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
            vitlab.save(model, folder)
        except OSError as error:
            code = 0 if "cannot be written" in str(error) or error.strerror else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
