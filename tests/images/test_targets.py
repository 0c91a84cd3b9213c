"""Tables of several labels, of numbers and of classes: what is recognised, what is refused and in which words."""

import json

import numpy as np
import pytest
from PIL import Image

from vitlab.errors import DataError, UsageError
from vitlab.images.datasets import FileOptions, TargetColumns, kind_of, label_text, open_data
from vitlab.images.sources.splits import strata

ROWS = [
    ("a", "cat;dog"),
    ("b", "cat"),
    ("c", ""),
    ("d", "dog"),
    ("e", "cat; dog"),
    ("f", "dog"),
    ("g", "cat"),
    ("h", ""),
]
EXPECTED = [[1, 1], [1, 0], [0, 0], [0, 1], [1, 1], [0, 1], [1, 0], [0, 0]]  # cat, dog


@pytest.fixture
def folder(tmp_path):
    for name in "abcdefgh":
        Image.new("RGB", (5, 4), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


def table(folder, lines, name="table.csv"):
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(folder / name)


def error(source, **columns):
    with pytest.raises((DataError, UsageError)) as caught:
        open_data(source, columns=TargetColumns(**columns))
    return str(caught.value)


def by_name(data):
    """Labels of every image of train and val, by the image's letter."""
    found = {}
    for split in (data.train, data.val):
        found |= {split.name_of(i)[-5]: split.labels[i] for i in range(len(split))}
    return found


@pytest.mark.parametrize("form", ["semicolon", "pipe", "comma", "columns", "json", "jsonl", "tsv"])
def test_several_labels_in_every_form(folder, form):
    lists = [[part.strip() for part in text.split(";") if part.strip()] for _, text in ROWS]
    if form == "columns":
        lines = ["image,cat,dog", *(f"{n}.png,{c},{d}" for (n, _), (c, d) in zip(ROWS, EXPECTED, strict=True))]
        source = table(folder, lines)
    elif form in ("json", "jsonl"):
        entries = [{"image": f"{n}.png", "labels": labels} for (n, _), labels in zip(ROWS, lists, strict=True)]
        text = [json.dumps(entries)] if form == "json" else [json.dumps(entry) for entry in entries]
        source = table(folder, text, f"table.{form}")
    else:
        mark = {"semicolon": ";", "pipe": "|", "comma": ",", "tsv": ";"}[form]
        between = "\t" if form == "tsv" else ","
        lines = [f"Image{between}Labels", *(f'{n}.png{between}"{text.replace(";", mark)}"' for n, text in ROWS)]
        source = table(folder, lines, "table.tsv" if form == "tsv" else "table.csv")
    data = open_data(source, val_fraction=0.25)
    assert data.kind == "labels" and data.classes == ["cat", "dog"]
    assert kind_of(source, TargetColumns()) == "labels"
    found = by_name(data)
    assert [found[n].astype(int).tolist() for n, _ in ROWS] == EXPECTED
    assert len(data.val) and data.val.labels.dtype == bool


def test_numbers_and_splits(folder):
    values = [1.5, -2, 3e2, 0.25, 7, 8.125, 9, 10]
    splits = ["train"] * 5 + ["validation"] * 2 + ["test"]
    lines = ["file;price;split", *(f"{n}.png;{v!r};{s}" for n, v, s in zip("abcdefgh", values, splits, strict=True))]
    data = open_data(table(folder, lines), columns=TargetColumns(target="Price"))
    assert data.kind == "number" and data.classes == ["price"]
    assert data.train.labels.tolist() == values[:5] and data.val.labels.tolist() == values[5:7]
    assert label_text(data.test, 0) == "10"


def test_a_named_column_of_classes(folder):
    lines = ["image,species,note", *(f"{n}.png,{'ox' if n < 'e' else 'yak'},x" for n in "abcdefgh")]
    data = open_data(table(folder, lines), columns=TargetColumns(label="species"), val_fraction=0.25)
    assert data.kind == "class" and data.classes == ["ox", "yak"]


@pytest.mark.parametrize(
    ("lines", "columns", "says"),
    [
        (["image,labels", "a.png,cat/dog", "b.png,cat"], {}, "looks like labels with '/' between them"),
        (["image,labels", "a.png,cat dog", "b.png,dog"], {}, "Write ; between labels"),
        (["image,labels", 'a.png,"cat;dog"', "b.png,cat|dog"], {}, "Use one of them everywhere"),
        (["image,labels", "a.png,cat,dog", "b.png,cat"], {}, "line 2: has 3 cells, but the header has 2"),
        (
            ["image,price", "a.png,1.5", "b.png,nan"],
            {"target": "price"},
            "line 3: price is nan, which cannot be learned",
        ),
        (["image,price", "a.png,1.5", "b.png,"], {"target": "price"}, "line 3: price is empty"),
        (["image,price", "a.png,1.5", "b.png,inf"], {"target": "price"}, "line 3: price is inf"),
        (
            ["image,price", "a.png,1.5", "b.png,cheap"],
            {"target": "price"},
            "line 3: price is 'cheap', which is no number",
        ),
        (["image;price", "a.png;1.5", "b.png;2,5"], {"target": "price"}, "write a point and no comma, 2.5"),
        (["image,price", "a.png,3", "b.png,3"], {"target": "price"}, "3 for every training image"),
        (
            ["image,price", "a.png,1.5", "b.png,2"],
            {"target": "prize"},
            "a column that is not there. Columns: image, price",
        ),
        (["image,price", "a.png,1.5", "b.png,2"], {}, "data.target=price (a number)."),
        (["image,digit", "a.png,7", "b.png,2"], {}, "data.target=digit (a number), data.label=digit (a class)."),
        (["image,kind", "a.png,ox", "b.png,yak"], {}, "data.label=kind (one class an image)"),
        (["image,flag", "a.png,0", "b.png,1"], {}, "data.labels=flag"),
        (
            ["image,label", "a.png,1.5", "b.png,2.25"],
            {},
            "data.target=label; to take each for the name of a class: data.l",
        ),
        (["image,label", "a.png,cat;dog", "b.png,cat"], {}, "Several: data.labels=label; one: data.label=label"),
        (["image,label,labels", "a.png,x,y", "b.png,y,x"], {}, "data.label=label (one class an image) or data.labels"),
        (
            ["image,cat,dog", "a.png,0,1", "b.png,1,2"],
            {"labels": "cat,dog"},
            "line 3: dog is '2'; a column for one label",
        ),
        (["image,cat,dog", "a.png,0,1", "b.png,0,0"], {}, "no training image has the label 'cat'"),
        (["image,cat,dog", "a.png,1,1", "b.png,1,0"], {}, "leave it out: data.labels=dog"),
        (
            ["image,labels,split", "a.png,cat,train", "b.png,,train", "c.png,ox,val"],
            {},
            "no training image has the label 'ox'",
        ),
        (["image,labels", "z.png,cat", "b.png,"], {}, "1 of its files do not exist"),
        (["image,cat,cat", "a.png,0,1"], {}, "two columns are called 'cat'"),
    ],
)
def test_wrong_tables(folder, lines, columns, says):
    assert says in error(table(folder, lines), **columns)


def test_wrong_requests(folder):
    assert "exclude each other" in error("digits", label="a", target="b")
    assert "names a column of a table" in error("digits", target="price")
    source = table(folder, ["image,labels", "a.png,x", "b.png,", "c.png,x", "d.png,"])
    with pytest.raises(UsageError, match="several labels an image and no classes"):
        open_data(source, per_class=1)
    bad = table(folder, ['{"image": "a.png", "labels": ["x"]}'], "table.json")
    assert "expected a list of objects" in error(bad)
    lines = table(folder, ["[1, NaN]"], "table.json")
    assert "is not valid JSON" in error(lines)


def test_the_path_may_be_called_as_hub_datasets_call_it(folder):
    lines = [f"{n}.png,{'ox' if n < 'e' else 'yak'}" for n in "abcdefgh"]
    data = open_data(table(folder, ["file_name,label", *lines]), val_fraction=0.25)
    assert data.classes == ["ox", "yak"] and len(data.train) == 6


@pytest.mark.parametrize("empty", ['""', "null", '"  "'])
def test_an_image_without_a_group_is_refused(folder, empty):
    """Otherwise all images without one would be one group."""
    entries = [f'{{"image": "{n}.png", "labels": ["{n}", "x"], "patient": "{n}"}}' for n in "abc"]
    last = f'{{"image": "d.png", "labels": [], "patient": {empty}}}'
    source = table(folder, [f"[{', '.join([*entries, last])}]"], "table.json")
    with pytest.raises(DataError, match="entry 4: the patient is empty"):
        open_data(source, files=FileOptions(group="patient"))


@pytest.mark.parametrize(
    ("lines", "columns", "label", "what"),
    [
        (
            ["image,labels,split", "a.png,x,train", "b.png,,train", "c.png,x,val", "d.png,,val"],
            {},
            "x",
            "several labels",
        ),
        (["image,price,split", "a.png,1,train", "b.png,2,train", "c.png,3,val"], {"target": "price"}, "1", "a number"),
    ],
)
def test_labels_and_numbers_are_dropped_and_not_relabelled(folder, lines, columns, label, what):
    def corrected(action):
        line = f"a.png,train,{label},2,{action}"
        changes = table(folder, ["path,split,label,suggested_label,action", line], "c.csv")
        return open_data(table(folder, lines), columns=TargetColumns(**columns), apply=changes)

    assert [corrected("drop").train.name_of(i) for i in range(1)] == [str(folder / "b.png")]
    with pytest.raises(DataError, match=f"images of one class each, and the data have {what}"):
        corrected("relabel")


def test_strata_are_the_rarest_label_and_tenths_of_numbers():
    labels = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1], [1, 1, 0]], dtype=bool)
    assert strata(labels).tolist() == [1, 0, 3, 2, 1]
    values = np.random.default_rng(0).normal(size=230)
    groups = strata(values)
    assert np.bincount(groups).tolist() == [23] * 10
    assert all(values[groups == g].max() < values[groups == g + 1].min() for g in range(9))
