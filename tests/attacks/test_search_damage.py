"""An index whose files are damaged: the graph is rebuilt, a database is refused, and no hit is ever another."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from vitlab.checkpoints.native import write_whole
from vitlab.search import Index, SearchError, database, graph
from vitlab.search.database import ImageDatabase, ImageRecord

COUNT, WIDTH = 40, 16
ABOUT = {"folder": "/photos", "made_by": {"checkpoint": "m", "fingerprint": "f00d", "reads_text": False}}
VECTORS = np.random.default_rng(0).standard_normal((COUNT, WIDTH)).astype(np.float32)
VECTORS /= np.linalg.norm(VECTORS, axis=1, keepdims=True)
QUERY = VECTORS[:8].sum(axis=0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("index") / "ix"
    place.mkdir()
    ImageDatabase.create(place / database.FILE, ABOUT).rows.close()
    with ImageDatabase(place / database.FILE) as rows:
        rows.put(ImageRecord(f"{n}.jpg", 1, 1, vector.tobytes(), vector) for n, vector in enumerate(VECTORS))
        graph.update_graph(rows, place / graph.FILE)
    return place


@pytest.fixture
def place(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "ix"))


def hits(place: Path) -> list[tuple[str, float]]:
    with Index(place) as index:
        return [(str(hit.path), hit.score) for hit in index.search(QUERY, 10)]


@pytest.fixture(scope="module")
def right(whole) -> list[tuple[str, float]]:
    """By numpy: the ten nearest of all vectors."""
    cosines = VECTORS @ (QUERY / np.linalg.norm(QUERY))
    expected = [(f"/photos/{n}.jpg", float(cosines[n])) for n in np.argsort(-cosines)[:10]]
    found = hits(whole)
    assert [path for path, _ in found] == [path for path, _ in expected]
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-6)
    return found


def flip(file: Path, bit: int) -> None:
    held = bytearray(file.read_bytes())
    held[bit // 8] ^= 1 << bit % 8
    file.write_bytes(held)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "noise": lambda file: file.write_bytes(b"nothing that anyone has written" * 100),
    "missing": lambda file: file.unlink(),
    "first bit": lambda file: flip(file, 0),
    "a bit inside": lambda file: flip(file, 8 * (file.stat().st_size * 2 // 3) + 5),
    "last bit": lambda file: flip(file, 8 * file.stat().st_size - 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_graph_is_rebuilt_once(damage, place, right):
    DAMAGE[damage](place / graph.FILE)
    with Index(place) as index:
        (note,) = index.notes
        assert "vectors.usearch" in note and "was rebuilt" in note
    assert hits(place) == right
    with Index(place) as index:
        assert index.notes == [] and index.graph is not None and len(index.graph) == COUNT


def test_a_graph_that_cannot_be_rebuilt_here_is_not_needed(place, right, monkeypatch):
    flip(place / graph.FILE, 4000)

    def refuse(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("vitlab.checkpoints.native.write_whole", refuse)
    with Index(place) as index:
        assert index.graph is None and "All vectors are compared" in index.notes[0]
        assert [str(hit.path) for hit in index.search(QUERY, 10)] == [path for path, _ in right]


def test_a_graph_in_a_folder_that_cannot_be_written_is_not_rebuilt(place, right, monkeypatch):
    (place / graph.FILE).unlink()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("vitlab.search.query.update_graph", lambda *args: pytest.fail("rebuilt"))
    with Index(place) as index:
        assert index.graph is None and "Every vector is compared" in index.notes[0]
        assert [str(hit.path) for hit in index.search(QUERY, 10)] == [path for path, _ in right]


@pytest.mark.parametrize(("code", "message"), [(14, "unable to open database file"), (10, "disk I/O error")])
def test_a_ledger_that_cannot_be_read_is_not_called_damaged(code, message, place, monkeypatch, command):
    def refuse(*args: object, **options: object) -> None:
        error = sqlite3.OperationalError(message)
        error.sqlite_errorcode = code
        raise error

    monkeypatch.setattr(sqlite3, "connect", refuse)
    with pytest.raises(SearchError, match=rf"pictures\.sqlite: cannot be read \({message}\)\. Try again\."):
        hits(place)
    told = command("index", place, "-o", place, code=2).stderr
    assert "cannot be read" in told and told.count("\n") == 1


def test_a_damaged_part_of_a_killed_process_costs_only_that_part(place):
    part = place / "part-1.sqlite"
    part.write_bytes(b"nothing that anyone has written" * 100)
    with ImageDatabase(place / database.FILE) as rows, pytest.raises(SearchError) as told:
        rows.absorb(part)
    assert "part-1.sqlite: is damaged" in str(told.value) and "Delete" not in str(told.value)
    assert "Remove this file: its images are embedded again." in str(told.value)


def test_the_graph_of_an_index_of_before_is_rebuilt_too(place, right):
    rows = sqlite3.connect(place / database.FILE)
    rows.executescript("DROP TABLE checks; DELETE FROM about WHERE key IN ('digest', 'graph')")
    rows.close()
    (place / graph.FILE).unlink()
    with Index(place) as index:
        assert "was rebuilt" in index.notes[0] and index.graph is not None
    assert hits(place) == right


def test_threads_that_write_one_file_do_not_share_a_temporary_one(tmp_path):
    both = threading.Barrier(2, timeout=10)

    def write(path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        both.wait()

    texts = ("a" * 1000, "b" * 1000)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda text: write_whole(tmp_path / "x", lambda path: write(path, text)), texts))
    assert (tmp_path / "x").read_text(encoding="utf-8") in texts and len(list(tmp_path.iterdir())) == 1


def test_an_index_in_the_making_has_no_graph_and_no_note(place, right):
    with ImageDatabase(place / database.FILE) as rows:
        rows.set_about("graph", None)
    (place / graph.FILE).unlink()
    with Index(place) as index:
        assert index.graph is None and not index.notes
    assert [path for path, _ in hits(place)] == [path for path, _ in right]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_is_an_error_in_words(damage, place, right, command):
    DAMAGE[damage](place / database.FILE)
    try:
        found = hits(place)
    except SearchError as error:
        assert re.search(r"pictures\.sqlite: the index is damaged .*index again: vitlab index", str(error))
    else:  # a bit that nothing is stored in
        assert damage in ("a bit inside", "last bit") and found == right
        return
    told = command("search", place, "--image", "digits#3", code=2).stderr
    assert told.startswith("vitlab: error: ") and told.count("\n") == 1


def test_no_flipped_bit_of_the_ledger_gives_other_hits(place, right):
    file = place / database.FILE
    usual, caught = file.read_bytes(), 0
    for bit in np.random.default_rng(1).choice(8 * len(usual), 300, replace=False):
        file.write_bytes(usual)
        flip(file, int(bit))
        try:
            assert hits(place) == right
        except SearchError as error:
            assert str(error).isprintable()
            caught += 1
    assert caught > 10


@pytest.mark.parametrize(
    "command",
    [
        "DROP TABLE vectors",
        "DROP TABLE about",
        "DROP TABLE checks",
        "DELETE FROM about WHERE key = 'made_by'",
        "UPDATE about SET value = 'x' WHERE key = 'made_by'",
        "UPDATE about SET value = '\"/etc\"' WHERE key = 'folder'",
        "UPDATE about SET value = '" + "[" * 100 + "]" * 100 + "' WHERE key = 'made_by'",
        "UPDATE pictures SET path = CAST('/etc/passwd' AS BLOB) WHERE id = 3",
        "UPDATE pictures SET path = 7 WHERE id = 3",
        "UPDATE vectors SET vector = zeroblob(64) WHERE id = 3",
        "UPDATE vectors SET vector = zeroblob(7) WHERE id = 3",
        "UPDATE vectors SET vector = 'text' WHERE id = 3",
        "DELETE FROM checks WHERE id = 3",
    ],
)
def test_hostile_values_in_a_ledger_are_an_error_in_words(command, place):
    rows = sqlite3.connect(place / database.FILE)
    rows.execute(command)
    rows.commit()
    rows.close()
    with pytest.raises(SearchError, match=r"pictures\.sqlite: the index is damaged"):
        hits(place)


def test_an_index_of_before_has_no_digests_and_gets_them(place, right):
    rows = sqlite3.connect(place / database.FILE)
    rows.executescript("DROP TABLE checks; DELETE FROM about WHERE key IN ('digest', 'graph')")
    rows.close()
    assert hits(place) == right
    with ImageDatabase(place / database.FILE) as held:
        held.add_checks()
        assert not graph.update_graph(held, place / graph.FILE)
    assert hits(place) == right
    flip(place / graph.FILE, 4000)
    with Index(place) as index:
        assert "was rebuilt" in index.notes[0]
