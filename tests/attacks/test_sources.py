"""Data that reaches where it should not: tables that name files elsewhere, and FIFOs and devices in place of files.

A FIFO that nobody writes to makes whoever opens it wait for ever: each test has a limit of seconds.
"""

import os
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.checkpoints.load import load
from vitlab.errors import DataError, ImageError
from vitlab.images.datasets import open_data
from vitlab.images.digest import file_digest
from vitlab.images.listing import open_items
from vitlab.images.read import read_image
from vitlab.special_files import special_kind
from vitlab.text.tokenizer import Tokenizer
from vitlab.training.recipe import read_recipe
from vitlab.training.runlog import RunLog

pytestmark = pytest.mark.timeout(60)


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 9, 3), dtype=np.uint8)).save(path)
    return path


# ---- tables


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder for the table, and a picture outside of it."""
    for i in range(4):
        picture(tmp_path / "set" / "inside" / f"{i}.png")
    picture(tmp_path / "secret" / "1.png")
    (tmp_path / "set" / "linked").symlink_to(tmp_path / "secret")
    (tmp_path / "set" / "link.png").symlink_to(tmp_path / "secret" / "1.png")
    (tmp_path / "set" / "near.png").symlink_to("inside/0.png")
    (tmp_path / "set2").mkdir()  # its name begins as the folder's does
    picture(tmp_path / "set2" / "1.png")
    return tmp_path / "set"


OUTSIDE = {
    "absolute": "{parent}/secret/1.png",
    "up": "../secret/1.png",
    "down and up": "inside/../../secret/1.png",
    "linked folder": "linked/1.png",
    "linked file": "link.png",
    "beside": "../set2/1.png",
}
INSIDE = {
    "plain": "inside/1.png",
    "absolute": "{parent}/set/inside/1.png",
    "up and back": "../set/inside/1.png",
    "link inside": "near.png",
}
TABLES = {
    "labels.csv": "path,label\ninside/0.png,a\n{0},b\ninside/2.png,a\ninside/3.png,b\n",
    "captions.csv": "image,caption\ninside/0.png,a\n{0},b\ninside/2.png,c\n",
    "captions.jsonl": '{{"image": "inside/0.png", "caption": "a"}}\n{{"image": "{0}", "caption": "b"}}\n'
    '{{"image": "inside/2.png", "caption": "c"}}\n',
}


def write_table(place: Path, name: str, path: str) -> str:
    (place / name).write_text(TABLES[name].format(path.format(parent=place.parent)), encoding="utf-8")
    return str(place / name)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("case", OUTSIDE)
def test_a_table_may_not_leave_its_folder_unless_asked(place, name, case):
    source = write_table(place, name, OUTSIDE[case])
    with pytest.raises(DataError) as caught:
        open_data(source)
    said = str(caught.value)
    line = 2 if name.endswith("jsonl") else 3
    assert "1 of its files lie outside its folder" in said and f"line {line}: " in said
    assert "data.allow_outside=true" in said
    data = open_data(source, allow_outside=True)
    assert len(data.train) + len(data.val) == TABLES[name].count("\n") - (name != "captions.jsonl")
    with pytest.raises(DataError, match="outside"):
        open_items(source)
    assert len(open_items(source, allow_outside=True)) == len(data.train) + len(data.val)


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("case", INSIDE)
def test_a_table_may_name_what_lies_in_its_folder(place, name, case):
    source = write_table(place, name, INSIDE[case])
    assert open_data(source).train
    elsewhere = place.parent / "elsewhere"
    elsewhere.symlink_to(place)  # the folder itself may be a link
    if case != "absolute":
        assert open_data(f"{elsewhere}/{name}").train


def test_the_command_says_what_to_type(place, command):
    source = write_table(place, "labels.csv", "../secret/1.png")
    for road, option in (
        (("data", source), "data.allow_outside=true"),
        (("eval", "bundled:digits", source, "--knn"), "--allow-outside"),
    ):
        assert option in command(*road, code=2).stderr
        command(*road, option)


# ---- FIFOs, devices, sockets


@pytest.fixture
def fifo(tmp_path):
    def make(name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        return path

    return make


def test_kinds_of_files(tmp_path, fifo):
    (tmp_path / "link").symlink_to(fifo("pipe"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        found = {name: special_kind(tmp_path / name) for name in ("pipe", "link", "socket", "nothing", ".")}
    assert found == {
        "pipe": "a FIFO (named pipe)", "link": "a FIFO (named pipe)", "socket": "a socket", "nothing": None, ".": None,
    }  # fmt: skip
    assert special_kind("/dev/null") == "a device" and special_kind(__file__) is None


READERS = {
    "picture.png": (read_image, ImageError),
    "labels.csv": (open_data, DataError),
    "captions.jsonl": (open_data, DataError),
    "shard.tar": (open_data, DataError),
    "shard.tar.gz": (open_data, DataError),
    "weights.safetensors": (load, ValueError),
    "weights.pth": (load, ValueError),
    "weights.npz": (load, ValueError),
    "recipe.toml": (lambda path: read_recipe(Path(path)), ValueError),
    "tokenizer.json": (Tokenizer.read, ValueError),
    "pairs.txt.gz": (Tokenizer.read, ValueError),
    "log.jsonl": (lambda path: RunLog(Path(path).parent), ValueError),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_what_is_no_regular_file_is_refused_by_name(tmp_path, fifo, name, kind):
    read, error = READERS[name]
    if kind == "fifo":
        fifo(name)
    else:
        (tmp_path / name).symlink_to("/dev/zero" if kind == "device" else fifo("pipe"))
    with pytest.raises(error, match=r"is a (FIFO|device)") as caught:
        read(str(tmp_path / name))
    assert name in str(caught.value)


@pytest.mark.parametrize("pattern", ["*.tar", "{0..1}.tar", "."])
def test_a_fifo_among_shards(tmp_path, fifo, pattern):
    fifo("0.tar"), fifo("1.tar")
    with pytest.raises(DataError, match=r"0\.tar: is a FIFO"):
        open_data(f"{tmp_path}/{pattern}")


def test_a_fifo_among_pictures_fails_by_its_name(tmp_path, fifo, command):
    for label in ("a", "b"):
        for i in range(4):
            picture(tmp_path / "photos" / label / f"{i}.png")
    pipe = fifo("photos/a/9.png")
    data = open_data(str(tmp_path / "photos"))
    datasets = [(dataset, i) for dataset in (data.train, data.val) for i in range(len(dataset))]
    ((dataset, at),) = [(d, i) for d, i in datasets if d.name_of(i) == str(pipe)]
    with pytest.raises(ImageError, match=r"9\.png: is a FIFO"):
        dataset.read(at)
    with pytest.raises(OSError, match="it is a FIFO"):
        file_digest(pipe)
    assert "9.png: is a FIFO" in command("predict", "bundled:digits", pipe, code=1).stderr


@pytest.mark.parametrize("name", ["classes.txt", "captions.csv"])
def test_a_fifo_beside_the_data_is_not_passed_over(tmp_path, fifo, name):
    """It would change the classes, or turn captions into classes."""
    for label in ("a", "b"):
        for i in range(4):
            picture(tmp_path / label / f"{i}.png")
    (tmp_path / "labels.csv").write_text("path,label\na/1.png,0\na/2.png,0\nb/1.png,1\nb/2.png,1\n", encoding="utf-8")
    fifo(name)
    with pytest.raises(DataError, match=f"{name}: is a FIFO"):
        open_data(str(tmp_path / "labels.csv" if name == "classes.txt" else tmp_path))


def test_a_fifo_in_a_table(tmp_path, fifo):
    picture(tmp_path / "1.png")
    fifo("2.png")
    (tmp_path / "labels.csv").write_text("path,label\n1.png,a\n2.png,b\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"line 3: .*2\.png is a FIFO"):
        open_data(str(tmp_path / "labels.csv"))


def test_commands_end_in_one_line(fifo, command):
    for name, args in {
        "x.toml": ("train",),
        "x.csv": ("train",),
        "x.tar": ("data",),
        "x.safetensors": ("inspect",),
    }.items():
        said = command(*args, fifo(name), code=2).stderr
        assert "is a FIFO" in said and "Traceback" not in said and len(said.strip().splitlines()) == 1, said
