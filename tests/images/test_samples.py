"""SOURCE#N: folders are sources too, and a source is opened once for all its samples."""

import numpy as np
import pytest
from PIL import Image

import vitlab
from vitlab.errors import DataError
from vitlab.images import samples
from vitlab.images.datasets import open_data


def test_a_folder_is_a_source(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for i in range(12):
            Image.new("RGB", (9, 7), (20 * i, 200 * (name == "dog"), 0)).save(tmp_path / name / f"{i}.png")
    data = open_data(str(tmp_path))
    for number in range(len(data.val)):
        sample = samples.open_sample(f"{tmp_path}#{number}")
        np.testing.assert_array_equal(np.asarray(sample.image), data.val.read(number))
        assert sample.label == ("dog" if sample.image.getpixel((0, 0))[1] else "cat")
    with pytest.raises(DataError, match=f"images to choose from, .*#0 to #{len(data.val) - 1}"):
        samples.open_sample(f"{tmp_path}#{len(data.val)}")


def test_a_source_is_opened_once(monkeypatch):
    opened = []
    monkeypatch.setattr(samples, "open_data", lambda source: opened.append(source) or open_data(source))
    samples._opened.cache_clear()
    for number in range(5):
        samples.open_sample(f"digits#{number}")
    assert opened == ["digits"]


def test_an_image_with_captions_has_its_first_as_a_label(tmp_path):
    for i in range(4):
        Image.new("RGB", (9, 7), (20 * i, 0, 0)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"number {i}\nanother caption\n", encoding="utf-8")
    sample = samples.open_sample(f"{tmp_path}#0")
    assert sample.label == f"number {sample.image.getpixel((0, 0))[0] // 20}"


def test_functions_take_a_sample_by_its_name():
    sample = samples.open_sample("digits#3")
    by_name, by_image = (vitlab.predict("bundled:digits", image)[0] for image in ("digits#3", sample.image))
    assert by_name.name == "digits#3" and by_name.scores == by_image.scores
    maps = [vitlab.explain.rollout("bundled:digits", image) for image in ("digits#3", sample.image)]
    assert maps[0].equal(maps[1])
    with pytest.raises(DataError, match="digits#99999: digits has"):
        vitlab.embed("bundled:digits", ["digits#99999"])
