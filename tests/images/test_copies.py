"""Shrunken copies change no bit, wherever they come from: stored, made again, damaged, deleted, or on a full disk."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.images import copies as module
from vitlab.images.copies import CopiedPhotos, CopyRule, folder, stored_copies
from vitlab.images.preprocess import Preprocess
from vitlab.images.scaled import Cut, open_scaled, whole
from vitlab.images.sources.dataset import FileDataset

RULE = CopyRule(channels=3, side=32)
BICUBIC = Image.Resampling.BICUBIC


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> FileDataset:
    """Four photos, the last two of one content; the second is small."""
    rng, at = np.random.default_rng(0), tmp_path_factory.mktemp("photos")
    for number, (height, width) in enumerate([(300, 401), (20, 27), (143, 90)]):
        blobs = Image.fromarray(rng.integers(0, 256, (9, 13, 3), dtype=np.uint8))
        blobs.resize((width, height), BICUBIC).save(at / f"{number}.jpg", quality=95)
    (at / "3.jpg").write_bytes((at / "2.jpg").read_bytes())
    return FileDataset([at / f"{number}.jpg" for number in range(4)], np.zeros(4), ["a"])


def read(photos: CopiedPhotos, numbers: tuple[int, ...] = (0, 1, 2, 3)) -> list[np.ndarray]:
    with photos.reading() as photo:
        return [photo(number).pixels.copy() for number in numbers]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.fixture
def shrinks(monkeypatch) -> Iterator[list[str]]:
    """Names of the photos that were decoded."""
    names, original = [], CopiedPhotos._shrink

    def counted(self: CopiedPhotos, content: bytes, name: str):
        names.append(Path(name).stem)
        return original(self, content, name)

    monkeypatch.setattr(CopiedPhotos, "_shrink", counted)
    yield names


def test_a_copy_is_the_photo_resized_by_pillow(photos):
    for copy, name in zip(read(CopiedPhotos(photos, RULE)), photos.paths, strict=True):
        image = Image.open(name)
        shrink = max(1, min(image.size) / 32)
        exact = np.asarray(image.resize([round(side / shrink) for side in image.size], BICUBIC)).astype(float)
        assert copy.shape == exact.shape and np.abs(copy - exact).mean() < 1.5 and np.abs(copy - exact).max() < 12


def test_photos_are_decoded_once_and_later_runs_read_the_disk(photos, shrinks):
    first = CopiedPhotos(photos, RULE)
    fresh = read(first)
    assert shrinks == ["0", "1", "2", "3"]
    later = CopiedPhotos(photos, RULE)
    for again in (first, later, later, pickle.loads(pickle.dumps(later))):
        assert equal(read(again), fresh)
    assert len(shrinks) == 4
    assert stored_copies()[0].images == 3  # two have one content


def test_another_process_may_store_meanwhile(photos, shrinks, in_two_processes):
    """Workers share what they find: each stores half, and both read all of it."""
    fresh = [open_and_shrink(photos, number) for number in range(4)]
    copied = CopiedPhotos(photos, RULE)

    def work(rank: int) -> None:
        for numbers in ((0, 1), (2, 3)) if rank else ((2, 3), (1, 0)):
            assert equal(read(copied, numbers), [fresh[number] for number in numbers])

    assert in_two_processes(work) == [0, 0]
    assert equal(read(copied), fresh) and not shrinks  # the parent shares its children's table


def open_and_shrink(photos: FileDataset, number: int) -> np.ndarray:
    with open_scaled(photos.name_of(number)) as photo:
        (pixels,) = photo.views([Cut(whole(photo.size), RULE.size_of(photo.size))], BICUBIC, 3)
    return pixels.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("wrong", ["a damaged byte", "cut off", "deleted", "the index is rubbish"])
def test_what_is_wrong_on_the_disk_is_made_again(photos, shrinks, wrong):
    copied = CopiedPhotos(photos, RULE)
    fresh = read(copied)
    file = folder() / f"{RULE.key}.u8"
    if wrong == "deleted":
        module.remove_copies(stored_copies())
        assert not file.exists() and stored_copies() == []
    elif wrong == "the index is rubbish":
        (folder() / "index.sqlite").write_bytes(b"rubbish" * 1000)
    else:
        pixels = bytearray(file.read_bytes())
        pixels[70] ^= 1
        file.write_bytes(pixels if wrong == "a damaged byte" else pixels[:100])
    for _ in range(2):  # the run that goes on, and a new one
        assert equal(read(copied), fresh)
        copied = CopiedPhotos(photos, RULE)
    assert equal(read(copied), fresh)
    assert len(shrinks) in (5, 8)  # of four photos one was damaged, or all were gone; never all of them twice


def test_a_full_disk_changes_nothing(photos, shrinks, monkeypatch):
    fresh = [open_and_shrink(photos, number) for number in range(4)]
    monkeypatch.setattr(module, "SPARE", 2**62)
    copied = CopiedPhotos(photos, RULE)
    for _ in range(2):
        assert equal(read(copied), fresh)
    assert len(shrinks) == 8 and stored_copies()[0].images == 0


def test_a_cache_that_cannot_be_written_changes_nothing(photos, tmp_path, monkeypatch):
    fresh = read(CopiedPhotos(photos, RULE))
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "file"))
    copied = CopiedPhotos(photos, RULE)
    assert equal(read(copied), fresh) and equal(read(copied), fresh)


def test_a_crop_of_a_copy_is_the_crop_of_the_photo(photos):
    """To half a pixel of the copy, as on a grid of its own."""
    with CopiedPhotos(photos, RULE).reading() as photo:
        copy = photo(0)
        assert copy.size == (300, 401)
        box = (93, 47, 93 + 187, 47 + 131)  # 20 x 14 pixels of the copy, which is 43 x 32
        (view,) = copy.views([Cut(box, (14, 20))], BICUBIC, 3)
    left, top, right, bottom = (
        round(side * 43 / 401) if i % 2 == 0 else round(side * 32 / 300) for i, side in enumerate(box)
    )
    expected = torch.from_numpy(copy.pixels[top:bottom, left:right].copy()).permute(2, 0, 1)
    assert torch.equal(view, expected)
    exact = np.asarray(Image.open(photos.paths[0]).crop(box).resize((20, 14), BICUBIC)).astype(float)
    moved = np.asarray(
        Image.open(photos.paths[0]).crop((box[0] + 12, box[1] + 12, box[2] + 12, box[3] + 12)).resize((20, 14), BICUBIC)
    )
    error = np.abs(view.permute(1, 2, 0).numpy() - exact).mean()
    assert error < 0.6 * np.abs(moved - exact).mean()  # 12 pixels are 1.3 of the copy


def test_rules_by_crops_and_views():
    assert CopyRule.for_crops(3, [(224, (0.08, 1.0))]).side == 320  # 224 / sqrt(0.54) = 304.8
    assert CopyRule.for_crops(3, [(224, (0.4, 1.0)), (96, (0.05, 0.4))]).side == 288  # 267.7, and 202.4
    assert RULE.size_of((300, 401)) == (32, 43) and RULE.size_of((20, 900)) == (20, 900)
    view = CopyRule(3, None, Preprocess((24, 24), "crop", 30))
    assert view.size_of((300, 400)) == (30, 40) and view.bytes_for(10) == 10 * 30 * 40 * 3
    others = [RULE, view, CopyRule(1, 32), CopyRule(3, 64), CopyRule(3, None, Preprocess((24, 24)))]
    assert len({rule.key for rule in others}) == len(others)
