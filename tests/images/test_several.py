"""Several folders as one dataset, and lists of files that another tool has written."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import DataError, UsageError
from vitlab.images.datasets import FileOptions, open_data
from vitlab.training.presets import find_recipe, join_sources, split_arguments
from vitlab.training.train import run_name


def photos(root, names):
    """Every image has its own colour, so that it can be told from the others."""
    for number, name in enumerate(names):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 4), (number, len(name), 7)).save(root / name)
    return str(root)


def contents(dataset):
    return {dataset.name_of(i): dataset.classes[dataset.labels[i]] for i in range(len(dataset))}


def test_folders_are_joined_by_the_names_of_their_classes(tmp_path):
    a = photos(tmp_path / "a", [f"{c}/{i}.png" for c in ("cat", "dog") for i in range(5)])
    b = photos(tmp_path / "b", [f"{c}/{i}.png" for c in ("ant", "dog") for i in range(4)])
    data = open_data(f"{a},{b}", val_fraction=0.25)
    assert data.classes == ["ant", "cat", "dog"]
    seen = {**contents(data.train), **contents(data.val)}
    assert len(seen) == len(data.train) + len(data.val) == 18
    for path, label in seen.items():
        assert Path(path).parent.name == label
    first = data.train.name_of(0)
    np.testing.assert_array_equal(data.train.read(0), np.asarray(Image.open(first)))
    assert any(a in note and "has no class ant" in note for note in data.notes)
    assert contents(data.val) == contents(open_data(f"{a},{b}", val_fraction=0.25).val)


def test_splits_of_each_folder_are_joined(tmp_path):
    sources = [
        photos(tmp_path / name, [f"{split}/{c}/{i}.png" for split in ("train", "val") for c in "xy" for i in range(n)])
        for name, n in (("a", 2), ("b", 3))
    ]
    photos(tmp_path / "b", ["test/x/1.png", "test/y/1.png"])
    data = open_data(",".join(sources))
    assert len(data.train) == len(data.val) == 10 and len(data.test) == 2
    assert all("/val/" in path for path in contents(data.val))
    third = photos(tmp_path / "c", [f"{c}/{i}.png" for c in "xy" for i in range(3)])
    with pytest.raises(DataError, match=r"a has a val split of its own, and .*c has none"):
        open_data(",".join([*sources, third]))


def test_tables_and_folders_and_numbers(tmp_path):
    folder = photos(tmp_path / "f", [f"{c}/{i}.png" for c in ("2", "10") for i in range(3)])
    photos(tmp_path / "t", [f"{i}.png" for i in range(6)])
    (tmp_path / "t" / "list.csv").write_text(
        "path,label\n" + "\n".join(f"{i}.png,{i % 3}" for i in range(6)), encoding="utf-8"
    )
    data = open_data(f"{folder},{tmp_path / 't' / 'list.csv'}", val_fraction=0.3)
    assert data.classes == ["0", "1", "2", "10"]
    assert len(data.train) + len(data.val) == 12


def test_folders_that_cannot_be_joined(tmp_path):
    a = photos(tmp_path / "a", [f"{c}/{d}/{i}.png" for c in "xy" for d in "pq" for i in range(2)])
    for second, says in ((a, "is named twice"), (f"{a}/x", "lies in"), ("digits", "digits: cannot be joined")):
        with pytest.raises(DataError, match=says):
            open_data(f"{a},{second}")
    with pytest.raises(DataError, match="no such file or folder"):
        open_data(f"{a},{tmp_path / 'nothing'}")
    with pytest.raises(UsageError, match="a path belongs to"):
        open_data(f"{a},{a}", path=a)


def test_groups_reach_over_folders(tmp_path):
    names = [f"{c}/p{p}_{i}.png" for c in "xy" for p in range(6) for i in range(2)]
    a, b = (photos(tmp_path / name, names) for name in "ab")
    data = open_data(f"{a},{b}", val_fraction=0.3, files=FileOptions(group=r"re:(p\d)_"))
    train, val = ({path.split("/")[-1][:2] for path in contents(d)} for d in (data.train, data.val))
    assert not train & val and {path.split("/")[-3] for path in contents(data.val)} == {"a", "b"}


def test_as_it_is_typed(tmp_path):
    a = photos(tmp_path / "a", ["x/1.png"])
    b = photos(tmp_path / "b", ["x/1.png"])
    assert split_arguments(a, [b, "run.epochs=1"]) == (f"{a},{b}", ["run.epochs=1"])
    assert split_arguments(a, ["run.epochs=1"]) == (a, ["run.epochs=1"])
    assert split_arguments(a, ["nothing"]) == (a, ["nothing"])  # refused as no setting
    name, recipe = find_recipe(f"{a},{b}")
    assert name == "a-b" == run_name(f"{a},{b}") and recipe.data.source == f"{a},{b}"
    with pytest.raises(UsageError, match="a comma in its name"):
        join_sources([a, "x,y"])
    odd = photos(tmp_path / "x,y", [f"{c}/{i}.png" for c in "pq" for i in range(3)])
    assert open_data(odd).classes == ["p", "q"]


# ------------------------------------------------------------------------------------------------- lists of files

LISTS = {  # name of the list, lines, classes, labels of all, images of val
    "path": ("l.txt", "cat/1.png\ncat/2.png\n\ndog/1.png\n# not this\ndog/2.png\n", None),
    "path,label": ("l.txt", "cat/1.png,cat\ncat/2.png, cat\ndog/1.png,dog\ndog/2.png,dog\n", None),
    "path,label,split": (
        "l.csv",
        "cat/1.png,cat,train\ncat/2.png,cat,valid\ndog/1.png,dog,train\ndog/2.png,dog,val\n",
        {"cat/2.png", "dog/2.png"},
    ),
    "path,split": (
        "l.txt",
        "cat/1.png,train\ncat/2.png,val\ndog/1.png,train\ndog/2.png,val\n",
        {"cat/2.png", "dog/2.png"},
    ),
    "header": ("l.txt", "filename;class\ncat/1.png;cat\ncat/2.png;cat\ndog/1.png;dog\ndog/2.png;dog\n", None),
    "header without labels": ("l.csv", "path\ncat/1.png\ncat/2.png\ndog/1.png\ndog/2.png\n", None),
    "Windows, marked": ("l.csv", "\ufeffcat/1.png,cat\r\ncat/2.png,cat\r\ndog/1.png,dog\r\ndog/2.png,dog\r\n", None),
}


@pytest.mark.parametrize("kind", LISTS)
def test_lists(tmp_path, kind):
    photos(tmp_path, [f"{c}/{i}.png" for c in ("cat", "dog") for i in (1, 2)])
    name, text, val = LISTS[kind]
    (tmp_path / name).write_bytes(text.encode())
    data = open_data(str(tmp_path / name), val_fraction=0.5)
    assert data.classes == ["cat", "dog"]
    seen = {
        os.path.relpath(path, tmp_path): label for d in (data.train, data.val) for path, label in contents(d).items()
    }
    assert seen == {f"{c}/{i}.png": c for c in ("cat", "dog") for i in (1, 2)}
    if val is not None:
        assert {os.path.relpath(path, tmp_path) for path in contents(data.val)} == val


def test_class_numbers_behind_a_space(tmp_path):
    photos(tmp_path, ["my photos/a 1.png", "my photos/b.png", "c.png", "d.png"])
    (tmp_path / "val.txt").write_text("my photos/a 1.png 0\nmy photos/b.png 1\nc.png\t0\nd.png 1\n", encoding="utf-8")
    data = open_data(str(tmp_path / "val.txt"), val_fraction=0.5)
    seen = {**contents(data.train), **contents(data.val)}
    assert {os.path.relpath(path, tmp_path): label for path, label in seen.items()} == {
        "my photos/a 1.png": "0",
        "my photos/b.png": "1",
        "c.png": "0",
        "d.png": "1",
    }


def test_missing_files_are_counted_and_named(tmp_path):
    photos(tmp_path, ["a/1.png", "b/1.png"])
    lines = ["a/1.png,a", "b/1.png,b", *(f"a/{i}.png,a" for i in range(2, 9))]
    (tmp_path / "l.txt").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError, match=r"7 of its files do not exist:\n  line 3: .*2\.png\n  line 4: .*\n  line 5: "):
        open_data(str(tmp_path / "l.txt"))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("l.txt", "", "no kind of data known"),
        ("l.txt", "a/1.png,a\nb/1.png\n", "line 2: has 1 columns, and the first line 2"),
        ("l.txt", "a/1.png,a,train,7\n", "line 1: has 4 columns"),
        ("l.txt", "a/1.png,a\nb/1.png,\n", "line 2: the label is empty"),
        ("l.txt", "a/1.png,a,train\nb/1.png,b,later\n", "line 2: split is 'later'"),
        ("l.csv", "path,species\na/1.png,lion\n", "no column label or class"),
        ("l.csv", "a/9.png,a\nb/1.png,b\n", "no column path"),
        ("l.txt", "../x.png,a\nb/1.png,b\n", "lie outside its folder"),
    ],
)
def test_lists_that_cannot_be_used(tmp_path, name, text, says):
    photos(tmp_path / "in", ["a/1.png", "b/1.png", "../x.png"])
    (tmp_path / "in" / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=says):
        open_data(str(tmp_path / "in" / name))
