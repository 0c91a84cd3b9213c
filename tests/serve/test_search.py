"""POST /search answers what the library finds in the same index; pictures are shown by the numbers of rows alone."""

from __future__ import annotations

import io
import os
import sqlite3
from functools import partial

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import vitlab
from vitlab.inference import encoder_of, fingerprint, reads_text
from vitlab.search import Index, SearchError, graph, update
from vitlab.search.database import FILE, ImageDatabase, row_digest
from vitlab.serve.app import create_app
from vitlab.serve.search_index import open_index
from vitlab.serve.settings import Settings

from .conftest import URL, ask, picture, served, small_model
from .test_limits import check

NAMES = ("plain.png", "海边/狗.png", "a b/<img src=x>.png", os.fsdecode(b"broken \xff.png"))


def made_by(model, checkpoint: str = "nowhere") -> dict:
    model = encoder_of(model)
    return {"checkpoint": checkpoint, "fingerprint": fingerprint(model), "reads_text": reads_text(model)}


@pytest.fixture
def photos(tmp_path):
    """Sixteen pictures, some with names that are hard to show."""
    for number in range(16):
        path = tmp_path / "photos" / (NAMES[number] if number < len(NAMES) else f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(picture(number, 11, 17))
    return tmp_path / "photos"


@pytest.fixture
def searching(models, photos, tmp_path):
    """An index by one of the models, and a client of a server that searches it."""
    opened = []

    def start(name: str, **settings) -> TestClient:
        model = models[name]
        update(tmp_path / "ix", photos, made_by(model), partial(vitlab.embed, encoder_of(model)))
        known = served(**models)
        app = create_app(known, Settings(**settings), open_index(tmp_path / "ix", known))
        opened.append(TestClient(app, URL, raise_server_exceptions=False))
        return opened[-1].__enter__()

    yield start
    for one in opened:
        one.__exit__()


def vector_of(model, image: bytes) -> np.ndarray:
    (found,) = vitlab.embed(model, image)
    assert found.vector is not None
    return found.vector


def assert_same(found: dict, hits: list, photos) -> None:
    names = [hit.path.relative_to(photos).as_posix() for hit in hits]
    shown = [name.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name in names]
    assert [hit["name"] for hit in found["hits"]] == shown
    assert [hit["number"] for hit in found["hits"]] == [hit.number for hit in hits]
    np.testing.assert_allclose([hit["score"] for hit in found["hits"]], [hit.score for hit in hits], atol=1e-6)


def test_words_and_pictures_find_what_the_library_finds(searching, models, photos, tmp_path):
    client, clip = searching("clip"), models["clip"]
    assert client.get("/page/index").json() == {"name": "photos", "model": "clip", "words": True, "pictures": 16}
    with Index(tmp_path / "ix") as index:
        words = index.search(vitlab.embed_text(clip, "a dog on a beach")[0], 16)
        alike = index.search(vector_of(clip, picture(99)), 3)
    found = client.post("/search?top=16", files={"text": (None, " a dog on a beach ")}).json()
    assert_same(found, words, photos)
    assert (found["model"], found["pictures"]) == ("clip", 16)
    assert_same(ask(client, "/search?top=3", picture(99)).json(), alike, photos)


def test_an_index_of_a_model_without_words_takes_pictures_only(searching, models, photos, tmp_path):
    client, encoder = searching("mae"), encoder_of(models["mae"])
    assert client.get("/page/index").json()["words"] is False
    with Index(tmp_path / "ix") as index:
        alike = index.search(vector_of(encoder, picture(4, 11, 17)), 5)
    found = ask(client, "/search?top=5", picture(4, 11, 17)).json()
    assert_same(found, alike, photos)
    assert found["hits"][0]["name"] == "4.png" and found["hits"][0]["score"] == pytest.approx(1, abs=1e-5)
    check(client.post("/search", files={"text": (None, "a dog")}), 422, "mae, a model that reads no text")


def test_each_row_has_its_picture_small_and_no_request_names_a_file(searching, photos, tmp_path):
    wide = np.random.default_rng(0).integers(0, 256, (300, 900, 3), dtype=np.uint8)
    Image.fromarray(wide).save(photos / "wide.png")
    (tmp_path / "secret.png").write_bytes(picture(1))
    client = searching("clip")
    hits = {hit["name"]: hit["number"] for hit in ask(client, "/search?top=100", picture(1)).json()["hits"]}
    assert len(hits) == 17
    for name, size in (("plain.png", (17, 11)), ("a b/<img src=x>.png", (17, 11)), ("wide.png", (256, 85))):
        answer = client.get(f"/search/pictures/{hits[name]}")
        assert answer.headers["content-type"] == "image/png" and answer.headers["x-content-type-options"] == "nosniff"
        assert Image.open(io.BytesIO(answer.content)).size == size
    for wrong in ("../secret.png", "..%2Fsecret.png", "%2e%2e/secret.png", "1/../../secret.png", "plain.png"):
        assert client.get(f"/search/pictures/{wrong}").status_code in (404, 422)
    for wrong in ("0", "-1", "1e3", "1.5", str(2**63), "９９x", "1;2"):
        check(client.get(f"/search/pictures/{wrong}"), 422, "number")
    check(client.get("/search/pictures/9999"), 404, "has no image 9999")
    with ImageDatabase(tmp_path / "ix" / FILE) as database:
        for path, name in ((b"../secret.png", "plain.png"), (os.fsencode(tmp_path / "secret.png"), "wide.png")):
            number = hits[name]
            database.rows.execute("UPDATE pictures SET path = ? WHERE id = ?", (path, number))
            found = check(client.get(f"/search/pictures/{number}"), 503, "cannot be searched")  # its digest is another
            assert str(tmp_path) not in str(found)
            query = "SELECT hash, vector FROM pictures JOIN vectors USING (id) WHERE id = ?"
            digest = row_digest(number, path, *database.rows.execute(query, (number,)).fetchone())
            database.rows.execute("UPDATE checks SET digest = ? WHERE id = ?", (digest, number))
            check(client.get(f"/search/pictures/{number}"), 404, "has no image")


def test_a_picture_that_is_gone_damaged_or_too_large_is_told_without_its_path(searching, photos):
    client = searching("clip", max_pixels=200)  # each has 187
    hits = {hit["name"]: hit["number"] for hit in ask(client, "/search?top=100", picture(1, 9, 9)).json()["hits"]}
    (photos / "5.png").unlink()
    (photos / "6.png").write_bytes(picture(6, 20, 20))
    (photos / "7.png").write_text("no picture any more", encoding="utf-8")
    for name, word in (("5.png", "no such file"), ("6.png", "limit of 200"), ("7.png", "not an image")):
        found = check(client.get(f"/search/pictures/{hits[name]}"), 404, word, "vitlab index")
        assert str(photos) not in str(found)


def test_a_damaged_index_is_503_without_its_path_and_one_line_in_the_log(searching, tmp_path, caplog):
    client = searching("small")
    file = tmp_path / "ix" / FILE
    rows = sqlite3.connect(file)
    (vector,) = rows.execute("SELECT vector FROM vectors WHERE id = 3").fetchone()
    rows.close()
    held = bytearray(file.read_bytes())
    held[held.index(vector) + 2] ^= 1
    file.write_bytes(held)
    for answer in (ask(client, "/search", picture(1)), client.get("/search/pictures/3")):
        found = check(answer, 503, "cannot be searched", "log")
        assert str(tmp_path) not in str(found)
    assert [record.exc_info for record in caplog.records] == [None, None]
    assert all("the row of image 3 has changed" in record.message for record in caplog.records)


def test_requests_never_rebuild_a_graph(searching, models, photos, tmp_path, monkeypatch):
    client = searching("small")
    usual = ask(client, "/search?top=16", picture(1)).json()["hits"]
    (tmp_path / "ix" / graph.FILE).unlink()
    with monkeypatch.context() as patched:
        patched.setattr("vitlab.search.query.update_graph", lambda *args: pytest.fail("rebuilt in a request"))
        hits = ask(client, "/search?top=16", picture(1)).json()["hits"]
        (note,) = open_index(tmp_path / "ix", served(**models)).notes
    assert [hit["number"] for hit in hits] == [hit["number"] for hit in usual]
    assert "Every vector is compared" in note and f"vitlab index {photos} -o" in note
    assert not (tmp_path / "ix" / graph.FILE).exists()


def test_ways_to_ask_wrongly(searching, client):
    there = searching("clip")
    for form in ({"text": (None, " ")}, {"text": (None, "a dog"), "image": ("x.png", picture(1))}):
        check(there.post("/search", files=form), 422, "either a text or an image")
    check(there.post("/search", files=[("text", (None, "a")), ("text", (None, "b"))]), 422, "either a text or an image")
    check(there.post("/search", files={"text": (None, "x" * 301)}), 422, "longer than 300")
    check(there.post("/search", files={"path": (None, "/etc/passwd")}), 422, "field 'path'")
    check(there.post("/search", data={"text": "a dog"}), 415, "multipart/form-data")
    check(ask(there, "/search", b"no picture"), 415, "not an image")
    check(ask(there, "/search?top=101", picture(1)), 422, "top='101'")
    for answer in (ask(client, "/search", picture(1)), client.get("/search/pictures/1")):
        check(answer, 404, "no index", "vitlab serve --index INDEX")
    assert client.get("/page/index").json() is None


def test_a_token_is_asked_for(searching):
    client = searching("clip", token="s3cret")
    for answer in (ask(client, "/search", picture(1)), client.get("/search/pictures/1"), client.get("/page/index")):
        check(answer, 401)


def test_what_was_added_to_the_index_is_found_without_a_new_start(searching, models, photos, tmp_path):
    client = searching("small")
    (photos / "new.png").write_bytes(picture(77))
    assert "new.png" not in [hit["name"] for hit in ask(client, "/search", picture(77)).json()["hits"]]
    update(tmp_path / "ix", photos, made_by(models["small"]), partial(vitlab.embed, models["small"]))
    assert ask(client, "/search?top=1", picture(77)).json()["hits"][0]["name"] == "new.png"


def test_the_model_of_an_index_is_found_or_loaded_or_asked_for(models, photos, tmp_path):
    vitlab.save(models["small"], tmp_path / "clip")  # a name that is taken
    update(
        tmp_path / "ix", photos, made_by(models["small"], str(tmp_path / "clip")), partial(vitlab.embed, small_model())
    )
    known = served(clip=models["clip"], mine=models["small"])
    assert open_index(tmp_path / "ix", known).model == "mine" and len(known) == 2
    known = served(clip=models["clip"])
    assert open_index(tmp_path / "ix", known).model == "clip-2"
    assert [one.name for one in known] == ["clip", "clip-2"]
    other = small_model()
    other.head.weight.data.add_(1)
    vitlab.save(other, tmp_path / "clip")
    with pytest.raises(SearchError, match=r"clip, which is none of the models here \(mae\) and has changed since"):
        open_index(tmp_path / "ix", served(mae=models["mae"]))
    (tmp_path / "clip").rename(tmp_path / "elsewhere")
    with pytest.raises(SearchError, match=r"cannot be loaded.*vitlab serve CHECKPOINT --index .*vitlab index"):
        open_index(tmp_path / "ix", served(mae=models["mae"]))


@pytest.mark.parametrize("wrong", ["nothing", "empty", "file", "damaged"])
def test_what_is_no_index_is_refused_before_the_server_starts(command, tmp_path, wrong):
    place = tmp_path / wrong
    if wrong == "file":
        place.write_text("x", encoding="utf-8")
    elif wrong != "nothing":
        place.mkdir()
        if wrong == "damaged":
            (place / FILE).write_text("no database", encoding="utf-8")
    answer = command("serve", "bundled:digits", "--index", place, code=2)
    assert str(place) in answer.stderr and "index" in answer.stderr and "Traceback" not in answer.stderr
