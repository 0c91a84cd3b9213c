"""An index holds the vectors of the pictures that are there now, whatever happened to them or to the process."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.search import Index, SearchError, update
from vitlab.search.database import ImageDatabase

MODEL = {"checkpoint": "some/model", "fingerprint": "f00d", "reads_text": False}


@dataclass
class Seen:
    vector: np.ndarray | None
    error: str | None = None
    cached: bool = False


class Embed:
    """Averages of a picture's quarters as its vector; remembers what it was asked for, and dies when told to."""

    def __init__(self, kill_at: int | None = None):
        self.batches: list[list[Path]] = []
        self.kill_at = kill_at

    @property
    def seen(self) -> list[str]:
        return sorted(path.name for batch in self.batches for path in batch)

    def __call__(self, paths: list[Path]) -> list[Seen]:
        if len(self.batches) == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.batches.append(list(paths))
        return [self.look(path) for path in paths]

    @staticmethod
    def look(path: Path) -> Seen:
        try:
            pixels = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32)
        except OSError:
            return Seen(None, f"{path}: not a picture.")
        parts = [part.mean((0, 1)) for half in np.array_split(pixels, 2) for part in np.array_split(half, 2, axis=1)]
        vector = np.concatenate(parts) - 127.0
        return Seen((vector / np.linalg.norm(vector)).astype(np.float32))


def everything(folder: Path) -> dict[str, np.ndarray]:
    """By brute force: what an index of this folder must hold."""
    files = sorted(path for path in folder.rglob("*.png") if path.is_file())
    return {str(path): seen.vector for path in files if (seen := Embed.look(path)).vector is not None}


def held(index: Path) -> dict[str, np.ndarray]:
    with ImageDatabase(index / "pictures.sqlite") as database:
        numbers = database.numbers()
        paths = database.paths(numbers)
        vectors = {
            paths[n]: v for part, rows in database.vectors(numbers) for n, v in zip(part.tolist(), rows, strict=True)
        }
        return {str(Path(database.about["folder"]) / path): vector for path, vector in vectors.items()}


def assert_right(index: Path, folder: Path) -> None:
    """The database's vectors, and what searching finds for every one of them, are those of the folder."""
    truth, found = everything(folder), held(index)
    assert found.keys() == truth.keys()
    assert all(np.array_equal(found[path], truth[path]) for path in truth)
    with Index(index) as there:
        assert len(there) == len(truth)
        for vector in truth.values():
            hits = there.search(vector, top=5)
            cosines = {path: float(other @ vector) for path, other in truth.items()}
            best = sorted(cosines.values(), reverse=True)[:5]
            assert [hit.score for hit in hits] == pytest.approx(best, abs=1e-6)
            assert all(hit.score == pytest.approx(cosines[str(hit.path)], abs=1e-6) for hit in hits)


def test_holds_what_brute_force_finds(photos, tmp_path):
    counts = update(tmp_path / "ix", photos, MODEL, Embed(), batch_size=5)
    assert (counts.new, counts.embedded, counts.images, counts.unreadable) == (23, 23, 23, {})
    assert_right(tmp_path / "ix", photos)


def test_again_looks_at_nothing(photos, tmp_path):
    update(tmp_path / "ix", photos, MODEL, Embed())
    files = {path: path.read_bytes() for path in (tmp_path / "ix").iterdir()}
    embed = Embed()
    counts = update(tmp_path / "ix", photos, MODEL, embed)
    assert (counts.unchanged, counts.embedded, embed.seen) == (23, 0, [])
    assert {path: path.read_bytes() for path in (tmp_path / "ix").iterdir()} == files


def test_only_new_and_changed_pictures_are_embedded_and_deleted_ones_dropped(photos, tmp_path, draw):
    update(tmp_path / "ix", photos, MODEL, Embed())
    draw(photos / "new.png", 100)
    draw(photos / "b/c/01.png", 101)
    (photos / "a" / "00.png").unlink()
    shutil.rmtree(photos / "海边 d")
    embed = Embed()
    counts = update(tmp_path / "ix", photos, MODEL, embed)
    assert (counts.new, counts.changed, counts.removed) == (1, 1, 1 + 7)
    assert embed.seen == ["01.png", "new.png"]
    assert_right(tmp_path / "ix", photos)


def test_another_time_and_the_same_content_is_not_embedded(photos, tmp_path):
    update(tmp_path / "ix", photos, MODEL, Embed())
    for path in photos.rglob("*.png"):
        os.utime(path, ns=(1, 1))
    embed = Embed()
    counts = update(tmp_path / "ix", photos, MODEL, embed)
    assert (counts.unchanged, embed.seen) == (23, [])
    assert_right(tmp_path / "ix", photos)
    with ImageDatabase(tmp_path / "ix" / "pictures.sqlite") as database:  # the new time is stored
        assert {known.mtime for known in database.file_states().values()} == {1}


def test_another_content_of_the_same_size_is_seen_by_its_time(photos, tmp_path):
    """A bitmap without compression: only the pixels differ."""
    path = photos / "flat.png"
    Image.new("RGB", (8, 8), (200, 10, 10)).save(path, "BMP")
    update(tmp_path / "ix", photos, MODEL, Embed())
    before = path.stat()
    Image.new("RGB", (8, 8), (10, 200, 10)).save(path, "BMP")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert path.stat().st_size == before.st_size
    embed = Embed()
    assert update(tmp_path / "ix", photos, MODEL, embed).changed == 1
    assert embed.seen == ["flat.png"]
    assert_right(tmp_path / "ix", photos)


def test_moved_and_copied_pictures_are_recognised(photos, tmp_path):
    update(tmp_path / "ix", photos, MODEL, Embed())
    (photos / "a").rename(photos / "renamed")
    shutil.copy(photos / "b/c/01.png", photos / "copy.png")
    embed = Embed()
    counts = update(tmp_path / "ix", photos, MODEL, embed)
    assert (counts.moved, counts.removed, embed.seen) == (8 + 1, 8, [])
    assert_right(tmp_path / "ix", photos)


def test_unreadable_pictures_are_named_and_do_not_stop_the_others(photos, tmp_path, draw):
    (photos / "bad.png").write_bytes(b"nothing")
    (photos / "gone.png").symlink_to(photos / "nowhere.png")
    counts = update(tmp_path / "ix", photos, MODEL, Embed(), batch_size=4)
    assert counts.unreadable == {
        "bad.png": "not a picture.",
        "gone.png": "cannot be opened (No such file or directory).",
    }
    assert_right(tmp_path / "ix", photos)
    embed = Embed()
    counts = update(tmp_path / "ix", photos, MODEL, embed)  # they are not tried again, and still named
    assert (embed.seen, list(counts.unreadable)) == ([], ["bad.png", "gone.png"])
    draw(photos / "bad.png", 50)
    draw(photos / "nowhere.png", 51)
    counts = update(tmp_path / "ix", photos, MODEL, Embed())
    assert counts.unreadable == {} and counts.images == 26
    assert_right(tmp_path / "ix", photos)


def test_names_that_are_no_text(photos, tmp_path, draw):
    draw(Path(os.fsdecode(os.fsencode(photos) + b"/\xff\xfe.png")), 60)
    update(tmp_path / "ix", photos, MODEL, Embed())
    assert_right(tmp_path / "ix", photos)


def in_a_child(work) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("kill_at", [0, 1, 4])
def test_killed_and_started_again_it_repeats_one_batch_at_most(kill_at, photos, tmp_path):
    index = tmp_path / "ix"
    code = in_a_child(lambda: update(index, photos, MODEL, Embed(kill_at), batch_size=4))
    assert code == -signal.SIGKILL
    done = held(index)
    assert len(done) == 4 * kill_at  # every batch before the one it was killed in
    with Index(index) as there:  # what is there can be searched: no graph was made yet
        assert there.graph is None
        assert all(there.search(vector)[0].score == pytest.approx(1) for vector in done.values())
    embed = Embed()
    counts = update(index, photos, MODEL, embed, batch_size=4)
    assert (counts.unchanged, counts.embedded) == (4 * kill_at, 23 - 4 * kill_at)
    assert not {Path(path).name for path in done} & set(embed.seen)
    assert_right(index, photos)


def test_killed_within_a_commit_it_is_as_before(photos, tmp_path, monkeypatch, draw):
    """The transaction is open and rows are written when the process dies."""
    index = tmp_path / "ix"
    update(index, photos, MODEL, Embed())
    for number in range(5):
        draw(photos / "a" / f"more{number}.png", 200 + number)

    def die():
        class Dying(sqlite3.Connection):
            def execute(self, sql, *args):
                if sql == "COMMIT" and self.total_changes >= 5:
                    os.kill(os.getpid(), signal.SIGKILL)
                return super().execute(sql, *args)

        connect = sqlite3.connect
        monkeypatch.setattr(sqlite3, "connect", lambda *a, **o: connect(*a, **o, factory=Dying))
        update(index, photos, MODEL, Embed())

    before = held(index)
    assert in_a_child(die) == -signal.SIGKILL
    assert held(index).keys() == before.keys()
    assert update(index, photos, MODEL, Embed()).new == 5
    assert_right(index, photos)


def test_killed_while_the_graph_is_written_the_old_one_stays(photos, tmp_path, monkeypatch, draw):
    index = tmp_path / "ix"
    update(index, photos, MODEL, Embed())
    graph = (index / "vectors.usearch").read_bytes()
    draw(photos / "new.png", 70)
    (photos / "a" / "03.png").unlink()

    def die():
        monkeypatch.setattr("os.fsync", lambda number: os.kill(os.getpid(), signal.SIGKILL))
        update(index, photos, MODEL, Embed())

    assert in_a_child(die) == -signal.SIGKILL
    assert (index / "vectors.usearch").read_bytes() == graph
    assert_right(index, photos)  # the new one is compared by itself, the deleted one is not found
    embed = Embed()
    update(index, photos, MODEL, embed)
    assert embed.seen == [] and (index / "vectors.usearch").read_bytes() != graph
    assert_right(index, photos)


@dataclass
class OneOf:
    """A process of several that run one after the other here: nobody waits."""

    rank: int
    world: int

    def wait(self) -> None: ...

    def gather(self, value):
        return [value]


def test_parts_that_a_killed_run_left_are_taken_over(photos, tmp_path, draw):
    """The second of three processes is done and the third half done when the first is killed."""
    index = tmp_path / "ix"
    update(index, photos, MODEL, Embed())
    for number in range(12):
        draw(photos / f"more{number}.png", 300 + number)
    (photos / "a" / "00.png").unlink()
    second, third = Embed(), Embed(kill_at=1)
    update(index, photos, MODEL, second, together=OneOf(1, 3))
    code = in_a_child(lambda: update(index, photos, MODEL, third, together=OneOf(2, 3), batch_size=2))
    assert code == -signal.SIGKILL
    assert sorted(path.name for path in index.glob("part-*")) == ["part-1.sqlite", "part-2.sqlite"]
    embed = Embed()
    counts = update(index, photos, MODEL, embed)
    assert len(second.seen) + 2 + len(embed.seen) == 12 and len(second.seen) > 0
    assert (counts.removed, counts.images) == (1, 22 + 12)
    assert not list(index.glob("part-*"))
    assert_right(index, photos)


def test_another_model_is_refused_and_nothing_is_changed(photos, tmp_path):
    update(tmp_path / "ix", photos, MODEL, Embed())
    other = {**MODEL, "checkpoint": "other/model", "fingerprint": "beef"}
    with pytest.raises(SearchError, match=r"with some/model, which is another model than other/model.*vitlab index"):
        update(tmp_path / "ix", photos, other, Embed())
    with pytest.raises(SearchError, match="some/model as it was then"):
        update(tmp_path / "ix", photos, {**MODEL, "fingerprint": "beef"}, Embed())
    assert_right(tmp_path / "ix", photos)


def test_another_folder_is_refused_unless_the_pictures_have_moved(photos, tmp_path):
    update(tmp_path / "ix", photos, MODEL, Embed())
    new = photos.rename(tmp_path / "new place")
    with pytest.raises(SearchError, match=f"images in {photos}, not in {new}.*--moved"):
        update(tmp_path / "ix", new, MODEL, Embed())
    embed = Embed()
    assert update(tmp_path / "ix", new, MODEL, embed, moved=True).unchanged == 23
    assert embed.seen == []
    assert_right(tmp_path / "ix", new)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda here: (here / "ix").write_text("x", encoding="utf-8"), "is a file. An index is a folder"),
        (lambda here: shutil.copytree(here / "photos", here / "ix"), "not empty and not an index"),
        (
            lambda here: (
                (here / "ix").mkdir() or (here / "ix" / "pictures.sqlite").write_text("x" * 999, encoding="utf-8")
            ),
            "not a database",
        ),
        (lambda here: shutil.rmtree(here / "photos"), "photos: no such folder"),
        (lambda here: shutil.rmtree(here / "photos") or (here / "photos").mkdir(), "no images in it"),
        (
            lambda here: shutil.rmtree(here / "photos") or (here / "photos").write_text("x", encoding="utf-8"),
            "is a file",
        ),
    ],
)
def test_places_that_will_not_do(make, words, photos, tmp_path):
    make(tmp_path)
    with pytest.raises(SearchError, match=words):
        update(tmp_path / "ix", photos, MODEL, Embed())


def test_an_emptied_folder_does_not_empty_the_index(photos, tmp_path):
    """A disk that is not mounted looks like this."""
    update(tmp_path / "ix", photos, MODEL, Embed())
    before = held(tmp_path / "ix")
    shutil.rmtree(photos)
    photos.mkdir()
    with pytest.raises(SearchError, match="no images in it; nothing was changed"):
        update(tmp_path / "ix", photos, MODEL, Embed())
    assert held(tmp_path / "ix").keys() == before.keys()


def test_a_creation_that_was_cut_off_is_made_again(photos, tmp_path):
    (tmp_path / "ix").mkdir()
    (tmp_path / "ix" / "pictures.sqlite").touch()
    update(tmp_path / "ix", photos, MODEL, Embed())
    assert_right(tmp_path / "ix", photos)


def test_a_folder_that_cannot_be_read_drops_nothing(photos, tmp_path, monkeypatch):
    update(tmp_path / "ix", photos, MODEL, Embed())
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "c":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match="c: the folder cannot be read"):
        update(tmp_path / "ix", photos, MODEL, Embed())
    monkeypatch.undo()
    assert_right(tmp_path / "ix", photos)


def test_progress_counts_to_the_end(photos, tmp_path):
    said = []
    update(tmp_path / "ix", photos, MODEL, Embed(), batch_size=10, progress=lambda *far: said.append(far))
    assert said == [("images", 10, 23), ("images", 20, 23), ("images", 23, 23), ("graph", 23, 23)]
