"""Features that are computed once: equal to a plain pass, found again by content, and never wrong after damage."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.images.copies import CopiedPhotos, CopyRule
from vitlab.images.datasets import open_data
from vitlab.images.sources.dataset import FileDataset
from vitlab.training import feature_cache
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import forward_all
from vitlab.training.feature_cache import FeatureCache
from vitlab.training.features import BATCH, dataset_features
from vitlab.training.processes import Processes


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "features"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(1)
    return vitlab.create("vit_digits", depth=1, classes=10).eval()


@pytest.fixture(scope="module")
def digits():
    return open_data("digits", per_class=9)  # 90: two whole parts and a shorter one


def plain(model, image_set):
    return forward_all(model, model.features, model.feature_width, image_set, batch_size=BATCH)[0]


def test_equal_to_a_pass_over_the_images(cache, model, digits):
    image_set, counted = ImageSet(digits.train, model.preprocess), []
    features = dataset_features(model, image_set, progress=counted.append)
    assert torch.equal(features.vectors, plain(model, image_set))
    assert torch.equal(features.labels, image_set.labels) and features.computed == sum(counted) == 90
    again = dataset_features(model, image_set, progress=counted.append)
    assert torch.equal(again.vectors, features.vectors) and again.computed == 0 and sum(counted) == 180


def test_an_image_is_known_by_its_content(cache, model, digits):
    image_set = ImageSet(digits.train, model.preprocess)
    dataset_features(model, image_set)
    other = open_data("digits", per_class=9).train
    other.images = other.images[::-1].copy()  # type: ignore[index]  # the same images in another order
    turned = dataset_features(model, ImageSet(other, model.preprocess))
    assert turned.computed == 0
    torch.testing.assert_close(turned.vectors, plain(model, image_set).flip(0))


def test_mirror_images_and_other_weights_are_others(cache, model, digits):
    image_set = ImageSet(digits.train, model.preprocess)
    features = dataset_features(model, image_set)
    mirrored = dataset_features(model, image_set, mirrored=True)
    assert mirrored.computed == 90
    flipped = ImageSet(digits.train, model.preprocess)
    flipped.in_memory = image_set.in_memory.flip(-1)
    torch.testing.assert_close(mirrored.vectors, plain(model, flipped))
    torch.manual_seed(2)
    other = vitlab.create("vit_digits", depth=1, classes=10).eval()
    assert dataset_features(other, image_set).computed == 90
    model.reset_classifier(3)  # a head changes no features
    assert torch.equal(dataset_features(model, image_set).vectors, features.vectors)
    assert [(e.images, e.mirrored) for e in feature_cache.encoders()] == [(90, False), (90, False), (90, True)]


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_killed_and_resumed_gives_the_same_bits(cache, model, digits, stop, monkeypatch):
    image_set = ImageSet(digits.train, model.preprocess)
    add, calls = FeatureCache.add, []

    def dies(self, digests, vectors):
        calls.append(len(digests))
        if len(calls) > stop:
            raise KeyboardInterrupt
        return add(self, digests, vectors)

    monkeypatch.setattr(FeatureCache, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        dataset_features(model, image_set)
    monkeypatch.setattr(FeatureCache, "add", add)
    resumed = dataset_features(model, image_set)
    assert resumed.computed == 90 - stop * BATCH
    assert torch.equal(resumed.vectors, plain(model, image_set))


def test_damage_is_computed_again(cache, model, digits):
    image_set = ImageSet(digits.train, model.preprocess)
    features = dataset_features(model, image_set).vectors.clone()
    (file,) = cache.glob("*.f32")
    data = bytearray(file.read_bytes())
    data[4 * model.feature_width * 40 + 3] ^= 0x40  # one bit of image 40
    file.write_bytes(bytes(data))
    mended = dataset_features(model, image_set)
    assert mended.computed == BATCH and torch.equal(mended.vectors, features)
    file.write_bytes(file.read_bytes()[: 4 * model.feature_width * 70])  # cut off
    assert torch.equal(dataset_features(model, image_set).vectors, features)
    (cache / "index.sqlite").write_bytes(b"no database at all" * 100)
    assert torch.equal(dataset_features(model, image_set).vectors, features)


def test_without_a_place_to_write_everything_is_computed(tmp_path, model, digits, monkeypatch):
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "file"))
    image_set = ImageSet(digits.train, model.preprocess)
    for _ in range(2):
        features = dataset_features(model, image_set)
        assert features.computed == 90 and torch.equal(features.vectors, plain(model, image_set))


def test_a_disk_that_is_full_stops_nothing(cache, model, digits, monkeypatch):
    def full(self, digests, vectors):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(FeatureCache, "add", full)
    image_set = ImageSet(digits.train, model.preprocess)
    assert torch.equal(dataset_features(model, image_set).vectors, plain(model, image_set))


def test_unreadable_images_are_left_out_and_named(cache, model, tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(4):
            pixels = np.random.default_rng(i).integers(0, 255, (9, 11, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{i}.png")
    bad = tmp_path / "data/ant/2.png"
    bad.write_bytes(bad.read_bytes()[:60])
    data = open_data(str(tmp_path / "data"), val_fraction=0.25)
    image_set = ImageSet(data.train, model.preprocess)
    place = [data.train.name_of(i) for i in range(len(data.train))].index(str(bad))
    first, again = (dataset_features(model, image_set) for _ in range(2))
    for features in (first, again):
        assert list(features.skipped) == [str(bad)] and "damaged" in features.skipped[str(bad)]
        assert features.indices.tolist() == [i for i in range(6) if i != place]
        assert features.labels.tolist() == [data.train.labels[i] for i in features.indices]
    assert first.computed == 5 and again.computed == 0


def test_two_processes_share_the_work(cache, model, digits, in_two_processes, tmp_path):
    image_set = ImageSet(digits.train, model.preprocess)

    def work(rank):
        from vitlab.training import processes

        who = processes.start("cpu")
        assert isinstance(who, Processes)
        features = dataset_features(model, image_set, processes=who)
        torch.save((features.vectors.clone(), features.computed), tmp_path / f"{rank}.pt")
        processes.stop()

    assert in_two_processes(work) == [0, 0]
    for rank in range(2):
        vectors, computed = torch.load(tmp_path / f"{rank}.pt")
        assert computed == 90 and torch.equal(vectors, plain(model, image_set))


def test_rows_that_stand_together_stay_on_disk(cache):
    with FeatureCache(cache, "a", 3) as opened:
        opened.add([b"1", b"2", b"3"], np.arange(9.0).reshape(3, 3))
        taken = opened.take([b"2", b"3"])
        assert isinstance(taken, np.memmap) and taken.tolist() == [[3, 4, 5], [6, 7, 8]]
        assert opened.take([b"3", b"1"]).tolist() == [[6, 7, 8], [0, 1, 2]]
        assert opened.find([b"3", b"4", b"1"]).tolist() == [2, -1, 0]
        with pytest.raises(FileNotFoundError, match="features are gone"):
            opened.take([b"1", b"4"])


def test_vitlab_cache_lists_and_removes(cache, model, digits, command):
    assert json.loads(command("cache", "--json").stdout)["features"] == []
    image_set = ImageSet(digits.train, model.preprocess)
    for mirrored in (False, True):
        dataset_features(model, image_set, mirrored=mirrored)
    listed = json.loads(command("cache", "--json").stdout)["features"]
    size = 4 * 90 * model.feature_width
    assert [(row["images"], row["bytes"], row["size"], row["mirrored"]) for row in listed] == [
        (90, size, [8, 8], True),
        (90, size, [8, 8], False),
    ]
    assert listed[0]["key"] in command("cache").stdout
    assert "nothing is kept under the key nothing" in command("cache", "--remove", "nothing", code=2).stderr
    assert "use one of them" in command("cache", "--clear", "--older-than", 3, code=2).stderr
    assert json.loads(command("cache", "--older-than", 1, "--json").stdout)["removed"] == []
    removed = json.loads(command("cache", "--remove", listed[0]["key"], "--json").stdout)["removed"]
    assert [row["mirrored"] for row in removed] == [True]
    assert dataset_features(model, image_set).computed == 0
    assert "90 features" in command("cache", "--clear").stderr
    assert not list(cache.glob("*.f32")) and dataset_features(model, image_set).computed == 90


def test_vitlab_cache_lists_and_removes_shrunken_photos(cache, command, tmp_path):
    Image.fromarray(np.zeros((50, 70, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    photos = CopiedPhotos(FileDataset([tmp_path / "a.png"], np.zeros(1), ["a"]), CopyRule(channels=3, side=20))
    with photos.reading() as photo:
        photo(0)
    (row,) = json.loads(command("cache", "--json").stdout)["copies"]
    assert (row["rule"], row["images"], row["bytes"]) == ("shorter side 20", 1, 20 * 28 * 3)
    assert "shrunken photos" in command("cache").stdout
    assert json.loads(command("cache", "--older-than", 1, "--json").stdout)["removed_copies"] == []
    assert "1 shrunken photos" in command("cache", "--remove", row["key"]).stderr
    assert json.loads(command("cache", "--json").stdout)["copies"] == []
    assert "nothing is kept" in command("cache", "--remove", row["key"], code=2).stderr
