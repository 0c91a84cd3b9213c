"""Searching finds what a comparison with every vector finds: nearly all of it by the graph, all of it without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from vitlab.errors import UsageError
from vitlab.search import Index, SearchError, graph
from vitlab.search.database import ImageDatabase, ImageRecord

GROUPS, EACH, WIDTH = 20, 75, 48
ABOUT = {"folder": "/photos", "made_by": {"checkpoint": "m", "fingerprint": "f00d", "reads_text": False}}


def grouped(seed: int, groups: range = range(GROUPS)) -> np.ndarray:
    """(groups * EACH, WIDTH): around centres, as pictures of one thing are; of length 1."""
    centres = np.random.default_rng(0).standard_normal((GROUPS, 1, WIDTH))
    noise = np.random.default_rng(seed).standard_normal((GROUPS, EACH, WIDTH))
    vectors = (centres + 0.7 * noise)[list(groups)].reshape(-1, WIDTH).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def write(place: Path, vectors: np.ndarray, names: range | None = None) -> None:
    if not place.exists():
        place.mkdir()
        ImageDatabase.create(place / "pictures.sqlite", ABOUT).rows.close()
    with ImageDatabase(place / "pictures.sqlite") as database:
        numbered = zip(names or range(len(vectors)), vectors, strict=True)
        database.put(ImageRecord(f"{n}.jpg", 1, 1, vector.tobytes(), vector) for n, vector in numbered)


def update_graph(place: Path) -> None:
    with ImageDatabase(place / "pictures.sqlite") as database:
        graph.update_graph(database, place / graph.FILE)


def recall(place: Path, known: dict[int, np.ndarray], queries: np.ndarray, top: int = 10) -> float:
    """Share of the truly nearest that are found. Every score is checked on the way."""
    names, matrix = np.array(list(known)), np.stack(list(known.values()))
    right = 0
    with Index(place) as index:
        for query in queries:
            cosines = dict(zip(names.tolist(), (matrix @ query).tolist(), strict=True))
            hits = {int(hit.path.stem): hit.score for hit in index.search(query, top)}
            assert len(hits) == top
            assert all(score == pytest.approx(cosines[name], abs=1e-5) for name, score in hits.items())
            assert list(hits.values()) == sorted(hits.values(), reverse=True)
            right += len(hits.keys() & set(sorted(cosines, key=lambda name: -cosines[name])[:top]))
    return right / (top * len(queries))


@pytest.fixture(params=["all compared", "by the graph"])
def least(request, monkeypatch) -> float:
    """The recall that is asked for."""
    if request.param == "all compared":
        return 1.0
    monkeypatch.setattr(graph, "EXACT", 0)
    return 0.95


def test_finds_what_brute_force_finds(least, tmp_path):
    vectors = grouped(1)
    write(tmp_path / "ix", vectors)
    update_graph(tmp_path / "ix")
    assert recall(tmp_path / "ix", dict(enumerate(vectors)), grouped(2)[::37]) >= least


def test_additions_changes_and_removals(least, tmp_path):
    """A third leaves, among them a whole group, a third changes, and others come; the graph follows step by step."""
    vectors = grouped(1)
    known = dict(enumerate(vectors))
    write(tmp_path / "ix", vectors)
    update_graph(tmp_path / "ix")
    gone = [*range(EACH), *range(EACH, len(vectors), 6)]
    changed = range(800, 1200)
    with ImageDatabase(tmp_path / "ix" / "pictures.sqlite") as database:
        database.drop(f"{n}.jpg" for n in gone)
    write(tmp_path / "ix", grouped(3)[:400], changed)
    write(tmp_path / "ix", grouped(4)[:200], range(5000, 5200))
    known = {n: vector for n, vector in known.items() if n not in gone}
    known |= dict(zip(changed, grouped(3)[:400], strict=True)) | dict(zip(range(5000, 5200), grouped(4), strict=False))
    queries = np.concatenate([vectors[:3], grouped(5)[::41]])  # the first are of the group that has gone
    assert recall(tmp_path / "ix", known, queries) >= least  # the graph still is of what was there before
    update_graph(tmp_path / "ix")
    assert recall(tmp_path / "ix", known, queries) >= least
    with Index(tmp_path / "ix") as index:
        assert index.graph is not None and len(index.graph) == len(index) == len(known)


def test_a_few_removals_leave_the_graph_and_many_make_it_anew(tmp_path, monkeypatch):
    made = []
    new = graph._new
    monkeypatch.setattr(graph, "_new", lambda width: made.append(width) or new(width))
    write(tmp_path / "ix", grouped(1)[:200])
    for drop, graphs in ((0, 1), (40, 1), (90, 2)):
        with ImageDatabase(tmp_path / "ix" / "pictures.sqlite") as database:
            database.drop(f"{n}.jpg" for n in range(drop))
        update_graph(tmp_path / "ix")
        assert made == [WIDTH] * graphs
    assert recall(tmp_path / "ix", {n: v for n, v in enumerate(grouped(1)[:200]) if n >= 90}, grouped(2)[:9]) == 1


def test_all_removed(tmp_path):
    write(tmp_path / "ix", grouped(1)[:20])
    update_graph(tmp_path / "ix")
    with ImageDatabase(tmp_path / "ix" / "pictures.sqlite") as database:
        database.drop(f"{n}.jpg" for n in range(20))
    for _ in range(2):
        with Index(tmp_path / "ix") as index:
            assert index.search(grouped(1)[0]) == [] and len(index) == 0
        update_graph(tmp_path / "ix")


def test_equal_pictures_come_by_name_and_top_may_be_more_than_all(tmp_path):
    vectors = grouped(1)[:12]
    vectors[5:9] = vectors[5]
    write(tmp_path / "ix", vectors)
    update_graph(tmp_path / "ix")
    with Index(tmp_path / "ix") as index:
        hits = index.search(3 * vectors[5], top=99)  # the length does not matter
    assert [hit.path.name for hit in hits[:4]] == ["5.jpg", "6.jpg", "7.jpg", "8.jpg"]
    assert hits[0].path == Path("/photos/5.jpg") and hits[0].score == pytest.approx(1)
    assert len(hits) == 12


def test_bad_questions(tmp_path):
    write(tmp_path / "ix", grouped(1)[:12])
    for _ in range(2):  # without the graph, and with it
        with Index(tmp_path / "ix") as index:
            with pytest.raises(ValueError, match="holds vectors of 48 numbers, not of 7"):
                index.search(np.ones(7))
            for wrong in (np.zeros(48), np.full(48, np.nan), np.ones((1, 48))):
                with pytest.raises(ValueError, match="expected one vector of finite numbers"):
                    index.search(wrong)
            with pytest.raises(ValueError, match="top=0"):
                index.search(np.ones(48), top=0)
        update_graph(tmp_path / "ix")
    with pytest.raises(SearchError, match=r"nothing: no such index\. Make one: vitlab index FOLDER -o"):
        Index(tmp_path / "nothing")
    with pytest.raises(SearchError, match="no index in it"):
        Index(tmp_path)


def test_a_damaged_graph_is_rebuilt(tmp_path):
    vectors = grouped(1)[:12]
    write(tmp_path / "ix", vectors)
    (tmp_path / "ix" / graph.FILE).write_bytes(b"nothing that usearch has written")
    with Index(tmp_path / "ix") as index:
        assert [hit.path.name for hit in index.search(vectors[5], 1)] == ["5.jpg"]
        assert len(index.notes) == 1 and "was rebuilt" in index.notes[0]


def test_a_format_of_another_version_is_named(tmp_path):
    write(tmp_path / "ix", grouped(1)[:2])
    with ImageDatabase(tmp_path / "ix" / "pictures.sqlite") as database:
        database.set_about("format", 99)
    with pytest.raises(SearchError, match="format 99 is not known"):
        Index(tmp_path / "ix")


def test_usearch_is_missing(tmp_path, monkeypatch):
    write(tmp_path / "ix", grouped(1)[:2])
    monkeypatch.setitem(__import__("sys").modules, "usearch", None)
    with pytest.raises(UsageError, match=r"pip install 'vitlab\[search\]'"):
        update_graph(tmp_path / "ix")
