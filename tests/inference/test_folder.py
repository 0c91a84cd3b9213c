"""Predictions of a folder: CSV that parses back, copies in class folders that lose nothing, unreadable files named."""

import csv
import hashlib
import io
import json
import sys

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vitlab
import vitlab.cli.main
from vitlab.errors import DataError, UsageError
from vitlab.images.sorting import LISTING, SortedFolder
from vitlab.inference import find_images, write_predictions


@pytest.fixture
def photos(tmp_path):
    """Five digits in two folders, two of them with the same name, one file that is no image, and a text."""
    folder = tmp_path / "photos"
    (folder / "deep" / "er").mkdir(parents=True)
    digits = load_digits().images
    for number, name in enumerate(("a.png", "b.png", "deep/a.png", "deep/=cmd(1).png", "deep/er/ü 字.png")):
        Image.fromarray((digits[number] * 15.9).astype(np.uint8)).save(folder / name)
    (folder / "broken.jpg").write_bytes(b"no image at all")
    (folder / "notes.txt").write_text("not an image", encoding="utf-8")
    return folder


@pytest.fixture
def run(capsys, monkeypatch):
    def call(*words: object, code: int = 0):
        monkeypatch.setattr(sys, "argv", ["vitlab", "predict", *map(str, words)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        printed = capsys.readouterr()
        assert (stopped.value.code or 0) == code, printed
        return printed

    return call


def contents(folder):
    return {p.relative_to(folder).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob("*.*")}


def test_a_folder_is_the_list_of_its_images(photos):
    names = sorted(str(path) for path in photos.rglob("*") if path.suffix in (".png", ".jpg"))
    assert sorted(map(str, find_images([photos]))) == names and len(names) == 6
    whole = {p.name: p.scores for p in vitlab.predict("bundled:digits", photos)}
    alone = {p.name: p.scores for p in vitlab.predict("bundled:digits", names)}
    assert whole == alone and whole[str(photos / "broken.jpg")] == []
    (photos / "empty").mkdir()
    with pytest.raises(DataError, match="no images in it"):
        vitlab.predict("bundled:digits", photos / "empty")


def test_csv_parses_back_to_the_predictions(photos, tmp_path, run):
    out = tmp_path / "new" / "predictions.csv"
    said = run("bundled:digits", photos, "--out", out, "--top", 2, "--json", code=1)
    printed = {entry["image"]: entry for entry in json.loads(said.out)}
    with out.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["image", "label", "probability", "label_2", "probability_2", "error"]
    assert len(rows) == 6
    for row in rows:
        entry = printed[row["image"]]
        if "error" in entry:
            assert row["error"] == entry["error"] and row["label"] == "" and row["image"].endswith("broken.jpg")
            continue
        scores = [(row["label"], float(row["probability"])), (row["label_2"], float(row["probability_2"]))]
        assert scores == [(score["label"], score["probability"]) for score in entry["scores"]]
    assert "broken.jpg" in said.err and "1 of 6 images" in said.err
    run("bundled:digits", photos, "--csv", tmp_path / "x.parquet", code=2)
    hostile = vitlab.inference.Prediction("=HYPERLINK(1).png", [("a", 1.0)])
    write_predictions([hostile], tmp_path / "hostile.csv")
    assert "\n'=HYPERLINK(1).png,a,1.0,\n" in (tmp_path / "hostile.csv").read_text(encoding="utf-8")


@pytest.mark.parametrize("table", ["list.txt", "list.csv", "piped"])
def test_a_list_of_files_is_its_images(photos, run, monkeypatch, table):
    """In its order, from its own folder; labels are not read, and what is not there is reported."""
    names = ["deep/a.png", "a.png", "gone.png"]
    lines = [f"{name},{number}" for number, name in enumerate(names)]
    text = "\n".join(["path,label", *lines] if table.endswith("csv") else names)
    if table == "piped":
        monkeypatch.chdir(photos)
        monkeypatch.setattr(sys, "stdin", io.StringIO(f"{text}\n\n"))
    else:
        (photos / table).write_text(text, encoding="utf-8")
    printed = run("bundled:digits", "-" if table == "piped" else photos / table, "--json", code=1)
    listed = json.loads(printed.out)
    expected = names if table == "piped" else [str(photos / name) for name in names]
    assert [one["image"] for one in listed] == expected and "no such file" in listed[2]["error"]
    by_name = {p.name: p.label for p in vitlab.predict("bundled:digits", [photos / "deep" / "a.png", photos / "a.png"])}
    assert [one["scores"][0]["label"] for one in listed[:2]] == list(by_name.values())
    assert "notes.txt: not an image" in run("bundled:digits", photos / "notes.txt", code=1).err


def test_sorted_copies_lose_nothing_and_never_collide(photos, tmp_path, run):
    before, target = contents(photos), tmp_path / "sorted"
    run("bundled:digits", photos, "--sort", target, code=1)
    assert contents(photos) == before  # copies
    labels = {p.name: p.label for p in vitlab.predict("bundled:digits", photos) if p.label is not None}
    copies = json.loads((target / LISTING).read_text(encoding="utf-8"))["copies"]
    assert {name: target / copy for name, copy in copies.items()} == {
        name: target / label / (target / copies[name]).name for name, label in labels.items()
    }
    readable = sorted(digest for name, digest in before.items() if name.endswith(".png"))
    assert sorted(d for name, d in contents(target).items() if name != LISTING) == readable
    first = contents(target)
    run("bundled:digits", photos, "--sort", target, code=1)  # its own: again, and the same
    assert contents(target) == first


def test_equal_names_get_numbers_and_a_new_class_moves_only_the_copy(tmp_path):
    images = [tmp_path / name / "1.jpg" for name in ("x", "y")]
    for number, image in enumerate(images):
        image.parent.mkdir()
        image.write_bytes(bytes([number]))
    folder = SortedFolder(tmp_path / "out", images)
    assert [folder.add(image, "a/b").relative_to(folder.folder).as_posix() for image in images] == [
        "a_b/1.jpg",
        "a_b/1-2.jpg",
    ]
    assert folder.add(images[0], "a_b").parent.name == "a_b-2"  # another class: another folder
    folder.save()
    again = SortedFolder(tmp_path / "out", images)
    assert again.add(images[1], "..").relative_to(again.folder).as_posix() == "_/1.jpg"
    assert not (again.folder / "a_b" / "1-2.jpg").exists() and all(image.exists() for image in images)
    images[1].write_bytes(b"new")
    assert again.add(images[1], "..").name == "1-2.jpg"  # the old copy may be all that is left of the old image
    assert (again.folder / "_" / "1.jpg").read_bytes() == b"\x01"


def test_a_folder_of_others_is_refused_before_anything_is_computed(photos, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine", encoding="utf-8")
    for target, message in (
        (other, "is not empty"),
        (other / "mine.txt", "is a file"),
        (photos, "among the images"),
        (photos / "sorted", "among the images"),
        (photos.parent, "among the images"),
    ):
        with pytest.raises(UsageError, match=message):
            SortedFolder(target, [photos, photos / "a.png"])
    with pytest.raises(UsageError, match="copies image files"):
        SortedFolder(tmp_path / "new", ["digits#3"])
    (other / "mine.txt").unlink()
    (other / LISTING).write_text('{"copies": {"x": "../../etc/passwd"}}', encoding="utf-8")
    assert SortedFolder(other, []).copies == {}  # nothing outside is ever touched
    (other / LISTING).write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="damaged"):
        SortedFolder(other, [])
