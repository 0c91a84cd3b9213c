"""Pictures with captions from every source: which belong together, one drawn by its coordinates, and clear errors."""

from __future__ import annotations

import csv
import io
import json
import pickle
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import DataError, UsageError
from vitlab.images.datasets import Captioned, Captions, open_data, subset

WRITTEN = {  # picture -> its split and captions; commas, quotes and Chinese included
    "a.png": ("train", ['a dog, brown, "good"', "the dog"]),
    "b.png": ("train", ["一只猫"]),
    "c.png": ("val", ["a cat", "cats; two", "a third"]),
    "d.png": ("test", ["nothing"]),
}
COLOURS = {name: (40 * i, 10, 200 - 30 * i) for i, name in enumerate(WRITTEN, 1)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


def picture(name: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (7, 5), COLOURS.get(name, (1, 2, 3))).save(file, "PNG")
    return file.getvalue()


def as_csv(delimiter: str = ",", names: tuple[str, ...] = ("image", "split", "caption")) -> bytes:
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter)
    writer.writerow(names)
    writer.writerows([name, split, text] for name, (split, texts) in WRITTEN.items() for text in texts)
    return file.getvalue().encode()


def as_jsonl() -> bytes:
    rows = [{"image": name, "split": split, "captions": texts} for name, (split, texts) in WRITTEN.items()]
    return "\n".join(json.dumps(row) for row in rows).encode()


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def tar(path: Path, files: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as out:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            out.addfile(info, io.BytesIO(data))
    return path


def pictures(folder: str = "") -> dict[str, bytes]:
    return {folder + name: picture(name) for name in WRITTEN}


def texts() -> dict[str, bytes]:
    """photos/train/a.png with a.txt beside it."""
    files = {}
    for name, (split, written) in WRITTEN.items():
        files |= {f"{split}/{name}": picture(name)}
        files |= {f"{split}/{Path(name).stem}.txt": ("\n\n".join(written) + "\n").encode()}
    return files


def sharded(ending: str) -> dict[str, dict[str, bytes]]:
    """Shards by split: 0001.png + 0001.txt or .json."""
    shards: dict[str, dict[str, bytes]] = {}
    for name, (split, written) in WRITTEN.items():
        key, files = Path(name).stem, shards.setdefault(f"{split}-0000.tar", {})
        files[f"{key}.png"] = picture(name)
        one = {"caption": written[0]} if len(written) == 1 else {"captions": written}
        files[f"{key}.{ending}"] = json.dumps(one).encode() if ending == "json" else "\n".join(written).encode()
    return shards


def make(kind: str, folder: Path) -> str:
    if kind == "csv":
        put(folder, {"captions.csv": as_csv(), **pictures("images/")})
    elif kind == "tsv":
        put(folder, {"captions.tsv": as_csv("\t", ("file_name", "split", "text")), **pictures()})
    elif kind == "jsonl":
        put(folder, {"captions.jsonl": as_jsonl(), **pictures()})
    elif kind == "a table of another name":
        return str(put(folder, {"mine.csv": b"\xef\xbb\xbf" + as_csv(";"), **pictures()}) / "mine.csv")
    elif kind == "texts":
        put(folder, texts())
    elif kind == "one tar":
        return str(tar(folder / "all.tar", {"./set/captions.csv": as_csv(), **pictures("./set/images/")}))
    else:
        for name, files in sharded(kind.split()[-1]).items():
            tar(folder / name, files)
    return str(folder)


KINDS = ["csv", "tsv", "jsonl", "a table of another name", "texts", "one tar", "shards of txt", "shards of json"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_gives_the_same_pictures_and_captions(kind, tmp_path):
    data = open_data(make(kind, tmp_path / "photos"), captions=True)
    assert data.captioned and data.classes == []
    for split in ("train", "val", "test"):
        part = getattr(data, split)
        expected = {name: texts for name, (where, texts) in WRITTEN.items() if where == split}
        assert isinstance(part, Captioned) and len(part) == len(part.captions) == len(expected)
        for i in range(len(part)):
            name = Path(part.name_of(i)).name
            assert part.captions[i] == expected[name]
            assert part.read(i).shape == (5, 7, 3) and tuple(part.read(i)[0, 0]) == COLOURS[name]
        copy = pickle.loads(pickle.dumps(part))  # as workers get it
        assert copy.captions[0] == part.captions[0] and np.array_equal(copy.read(0), part.read(0))


def test_without_a_val_split_part_of_train_is_kept_by_the_seed(tmp_path):
    files = {f"{i:03d}.png": picture("") for i in range(40)}
    put(tmp_path, {**files, **{f"{i:03d}.txt": f"number {i}".encode() for i in range(40)}})
    parts = [open_data(str(tmp_path), seed=seed, val_fraction=0.25) for seed in (0, 0, 1)]
    names = [[d.val.captions[i][0] for i in range(len(d.val))] for d in parts]
    assert len(names[0]) == 10 and names[0] == names[1] != names[2] and parts[0].test is None
    assert not set(names[0]) & set(parts[0].train.captions.everything())
    few = open_data(str(tmp_path), val_fraction=0.25, fraction=0.5).train
    assert len(few) == 15 and set(few.captions.everything()) < set(parts[0].train.captions.everything())
    with pytest.raises(UsageError, match="no classes"):
        open_data(str(tmp_path), per_class=3)


def test_one_caption_is_drawn_by_seed_epoch_and_index():
    written = Captions([["a"], [f"b{i}" for i in range(5)], ["c0", "c1"]])
    indices = np.array([2, 1, 0, 1])
    drawn = written.draw(indices, seed=3, epoch=7)
    assert drawn == written.draw(indices, seed=3, epoch=7) and drawn[1] == drawn[3] and drawn[2] == "a"
    assert drawn[:2] == [written.draw(np.array([i]), seed=3, epoch=7)[0] for i in (2, 1)]  # whatever else is in a batch
    over = Counter(written.draw(np.array([1]), seed=0, epoch=e)[0] for e in range(5000))
    assert len(over) == 5 and all(abs(n - 1000) < 150 for n in over.values())  # 5 standard deviations
    other = [written.draw(np.array([1]), seed=1, epoch=e)[0] for e in range(50)]
    assert other != [written.draw(np.array([1]), seed=0, epoch=e)[0] for e in range(50)]


def test_parts_keep_their_captions(tmp_path):
    train = open_data(make("one tar", tmp_path / "photos")).train
    part = subset(train, [1, 0, 1])
    assert [part.captions[i] for i in range(3)] == [train.captions[i] for i in (1, 0, 1)]
    assert part.name_of(0) == train.name_of(1) and np.array_equal(part.read(2), train.read(1))


def test_class_shards_stay_classes_when_captions_are_asked_for(tmp_path):
    files = {}
    for i in range(6):
        files |= {f"{i}.png": picture(""), f"{i}.cls": str(i % 2).encode(), f"{i}.txt": b"some words"}
    data = open_data(str(tar(tmp_path / "train-0.tar", files)), captions=True, val_fraction=0.4)
    assert not data.captioned and data.classes == ["0", "1"]


def test_a_table_of_classes_and_captions_is_read_as_asked(tmp_path):
    rows = "".join(f"{i}.png,{'ab'[i % 2]},text {i}\n" for i in range(8))
    put(tmp_path, {f"{i}.png": picture("") for i in range(8)})
    put(tmp_path, {"both.csv": ("image,label,caption\n" + rows).encode()})
    assert open_data(str(tmp_path / "both.csv"), captions=True).captioned
    assert open_data(str(tmp_path / "both.csv")).classes == ["a", "b"]


WRONG = {  # name of the file, its text, what the message says
    "wrong columns": ("captions.csv", "picture,words\na.png,a dog\n", ["no column image", "found picture, words"]),
    "no captions": ("captions.csv", "image,split\na.png,train\n", ["no column caption", "image,split,caption"]),
    "empty": ("captions.csv", "", ["the file is empty"]),
    "no lines": ("captions.csv", "image,caption\n", ["has no lines"]),
    "missing picture": ("captions.csv", "image,caption\na.png,x\nz.png,y\n", ["1 of its 2", "line 3: z.png", "images"]),
    "empty caption": ("captions.csv", "image,caption\na.png,x\na.png,  \n", ["line 3", "caption is empty"]),
    "empty image": ("captions.csv", "image,caption\n,x\n", ["line 2", "image is empty"]),
    "unknown split": (
        "captions.csv",
        "image,split,caption\na.png,dev2,x\n",
        ["line 2", "'dev2'", "train, val"],
    ),
    "two splits": ("captions.csv", "image,split,caption\na.png,train,x\na.png,val,y\n", ["line 3", "line 2"]),
    "no train": ("captions.csv", "image,split,caption\na.png,test,x\n", ["never says train"]),
    "no json": ("captions.jsonl", '{"image": "a.png", "caption": "x"}\nnot json\n', ["line 2", "'not json'"]),
    "no key": ("captions.jsonl", '{"image": "a.png", "words": "x"}\n', ["line 1", "'caption'", "words"]),
    "no list": ("captions.jsonl", '{"image": "a.png", "captions": []}\n', ["line 1", "caption is empty"]),
    "numbers": ("captions.jsonl", '{"image": "a.png", "caption": [1]}\n', ["line 1", "must be texts"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_table_that_cannot_be_used_says_why_and_where(case, tmp_path):
    name, text, says = WRONG[case]
    put(tmp_path, {name: text.encode(), "a.png": picture("")})
    with pytest.raises(DataError) as error:
        open_data(str(tmp_path))
    assert all(words in str(error.value) for words in (name, *says)), error.value
    if case == "missing picture":
        path = tar(tmp_path / "all.tar", {name: text.encode(), "a.png": picture("")})
        with pytest.raises(DataError, match=r"(?s)all\.tar/captions\.csv.*line 3: z\.png"):
            open_data(str(path))


def test_texts_and_shards_that_lack_a_caption_say_which(tmp_path):
    put(tmp_path / "a", {"1.png": picture(""), "1.txt": b"x", "2.png": picture("")})
    with pytest.raises(DataError, match=r"1 of 2 images have no text.*2\.png"):
        open_data(str(tmp_path / "a"))
    put(tmp_path / "b", {"1.png": picture(""), "1.txt": b" \n"})
    with pytest.raises(DataError, match=r"1\.txt: is empty"):
        open_data(str(tmp_path / "b"))
    for name, files, says in (
        ("c", {"1.png": b"", "1.txt": b"\n"}, "caption of 1.png is empty"),
        ("d", {"1.png": b"", "1.txt": b"x", "2.png": b""}, "2.png has no caption"),
        ("e", {"1.png": b"", "1.json": b'{"caption": 7}'}, "must be texts, found 7"),
        ("f", {"1.png": b"", "1.txt": b"x", "2.png": b"", "2.json": b"{"}, "2.json cannot be read"),
    ):
        with pytest.raises(DataError, match=says):
            open_data(str(tar(tmp_path / f"{name}.tar", files)), captions=True)
