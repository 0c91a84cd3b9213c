"""An index whose files are damaged: the graph is rebuilt, a database is refused, and no hit is ever another."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

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
    if damage in ("a bit inside", "last bit"):  # it may be one that nothing is stored in
        try:
            assert hits(place) == right
        except SearchError:
            return
    with pytest.raises(SearchError, match=r"pictures\.sqlite: the index is damaged .*index again: vitlab index"):
        hits(place)
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
