"""The photos that ship with the package: small, in the public domain on record, and what they are said to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

import vitlab
from vitlab import explain
from vitlab.checkpoints.bundled import DEFAULT
from vitlab.errors import DataError
from vitlab.images import photos
from vitlab.images.photos import FIRST, PHOTOS, find_photo
from vitlab.images.samples import open_sample

FOLDER = Path(photos.__file__).parent


def test_each_file_is_small_and_its_licence_on_record():
    rows = re.findall(r"^\| `([\w-]+)\.jpg` \|(.*)", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in rows] == list(PHOTOS) == sorted(path.stem for path in FOLDER.glob("*.jpg"))
    for name, row in rows:
        path = PHOTOS[name].path
        assert path.stat().st_size <= 60_000 and max(Image.open(path).size) <= 360
        assert "CC0 1.0" in row or "public domain" in row
        assert f"CIFAR-10: {PHOTOS[name].label}" in row


def test_the_cat_is_first_and_the_default_model_gets_all_of_them_right():
    assert find_photo(FIRST) is next(iter(PHOTOS.values())) and PHOTOS["cat"].label == "cat"
    names = [f"sample:{name}" for name in PHOTOS]
    said = vitlab.predict(DEFAULT, names, top=1)
    assert [prediction.label for prediction in said] == [photo.label for photo in PHOTOS.values()]


def test_a_sample_is_the_file_of_its_name():
    by_name, by_path = (vitlab.predict(DEFAULT, source)[0].scores for source in ("sample:cat", PHOTOS["cat"].path))
    assert by_name == by_path
    assert explain.open_subject(DEFAULT, "sample:moose").views[0].name == "sample:moose"
    assert open_sample("sample:moose").label == "deer"


def test_an_unknown_one_names_the_others(command):
    with pytest.raises(DataError, match=r"sample:dog.*sample:cat, sample:grey-cat, sample:moose"):
        open_sample("sample:dog")
    assert "there are sample:cat" in command("explain", "rollout", DEFAULT, "sample:dog", code=1).stderr
