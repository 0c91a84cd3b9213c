"""vitlab embed: the vectors of vitlab.embed in a Parquet table, whole or killed and resumed, by one process or two."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

import vitlab
from vitlab.images.listing import open_items
from vitlab.inference import fingerprint
from vitlab.search import SearchError
from vitlab.search.table import write_table


def read(out: Path) -> list[dict]:
    return sorted(pq.read_table(out).to_pylist(), key=lambda row: row["number"])


def check_against_embed(rows: list[dict], model, folder: Path) -> None:
    for row in rows:
        (offline,) = vitlab.embed(model, folder / row["path"])
        if offline.vector is None:
            assert row["embedding"] is None and row["error"] and str(folder) not in row["error"]
        else:
            assert row["error"] is None
            np.testing.assert_allclose(row["embedding"], offline.vector, atol=1e-6)


def test_a_folder(command, checkpoint, photos, tmp_path):
    (photos / "b/c/bad.png").write_bytes(b"nothing")
    (photos / "a").rename(photos / "train")
    said = command("embed", photos, "-o", tmp_path / "out.parquet", "--model", checkpoint)
    assert "out.parquet: 24 images, 64 numbers each; 24 of them made now" in said.stdout.replace(str(tmp_path), "")
    assert said.stderr.startswith("vitlab: b/c/bad.png: not an image")
    rows = read(tmp_path / "out.parquet")
    assert [row["path"] for row in rows] == sorted(p.relative_to(photos).as_posix() for p in photos.rglob("*.png"))
    assert {(row["split"], row["label"]) for row in rows} == {(None, "b"), ("train", None), (None, "海边 d")}
    check_against_embed(rows, vitlab.load(checkpoint), photos)
    assert not list(tmp_path.glob("*.parts"))
    again = json.loads(command("embed", photos, "-o", tmp_path / "out.parquet", "--model", checkpoint, "--json").stdout)
    assert (again["pictures"], again["embedded"], list(again["unreadable"])) == (24, 0, ["b/c/bad.png"])


def test_a_data_source(command, tmp_path):
    said = command("embed", "digits", "-o", tmp_path / "out.parquet", "--model", "bundled:digits", "--json")
    assert json.loads(said.stdout)["pictures"] == 1797
    rows = read(tmp_path / "out.parquet")
    items = open_items("digits")
    assert [(row["path"], row["split"], row["label"]) for row in rows] == list(items)
    model = vitlab.load("bundled:digits")
    for number in (0, 777, 1796):
        (offline,) = vitlab.embed(model, items.source(number))
        np.testing.assert_allclose(rows[number]["embedding"], offline.vector, atol=1e-6)


def test_what_is_of_another_kind_is_left_alone(command, checkpoint, photos, tmp_path, draw):
    out = tmp_path / "out.parquet"
    command("embed", photos, "-o", out, "--model", checkpoint)
    before = out.read_bytes()
    assert "another model" in command("embed", photos, "-o", out, "--model", "bundled:digits", code=2).stderr
    assert "is of" in command("embed", photos / "a", "-o", out, "--model", checkpoint, code=2).stderr
    draw(photos / "new.png", 99)
    assert "have changed since" in command("embed", photos, "-o", out, "--model", checkpoint, code=2).stderr
    assert out.read_bytes() == before
    (tmp_path / "mine.parquet").write_text("my own notes", encoding="utf-8")
    said = command("embed", photos, "-o", tmp_path / "mine.parquet", "--model", checkpoint, code=2).stderr
    assert (
        "not a table of vitlab embed" in said
        and (tmp_path / "mine.parquet").read_text(encoding="utf-8") == "my own notes"
    )
    (tmp_path / "empty").mkdir()
    command("embed", tmp_path / "empty", "-o", tmp_path / "x.parquet", "--model", checkpoint, code=2)


class Killed(BaseException):
    """As if the process ended here."""


@pytest.mark.parametrize("after", [1, 4])
def test_killed_and_resumed(checkpoint, photos, tmp_path, after):
    """At the n-th call of the model; the chunks before are kept, and made once."""
    model = vitlab.load(checkpoint)
    made_by = {"checkpoint": str(checkpoint), "fingerprint": fingerprint(model)}
    items, calls = open_items(str(photos)), []

    def dying(sources):
        calls.append(len(sources))
        if len(calls) > after:
            raise Killed
        return vitlab.embed(model, sources)

    options = dict(batch_size=4, chunk=8)
    with pytest.raises(Killed):
        write_table(tmp_path / "out.parquet", items, made_by, dying, **options)
    assert not (tmp_path / "out.parquet").exists()
    kept = len(list((tmp_path / "out.parquet.parts").glob("chunk-*")))
    assert kept == (after - 1) // 2  # one call is a grey picture, and two make a chunk
    found = write_table(tmp_path / "out.parquet", items, made_by, partial(vitlab.embed, model), **options)
    assert found.embedded == 23 - 8 * kept and found.images == 23
    check_against_embed(read(tmp_path / "out.parquet"), model, photos)
    with pytest.raises(SearchError, match="chunks of 8, not of 9"):
        write_table(tmp_path / "out.parquet", items, made_by, partial(vitlab.embed, model), chunk=9)


def test_sigkill(checkpoint, photos, tmp_path):
    """A process of its own, killed while it is at the third chunk."""
    model = vitlab.load(checkpoint)
    made_by = {"checkpoint": str(checkpoint), "fingerprint": fingerprint(model)}
    items, calls = open_items(str(photos)), []

    def slow(sources):
        calls.append(len(sources))
        if len(calls) > 3:  # a grey picture and two chunks
            time.sleep(600)
        return vitlab.embed(model, sources)

    child = os.fork()
    if child == 0:
        write_table(tmp_path / "out.parquet", items, made_by, slow, chunk=8)
        os._exit(1)
    deadline = time.monotonic() + 120
    while not (tmp_path / "out.parquet.parts" / "chunk-00000001.parquet").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    found = write_table(tmp_path / "out.parquet", items, made_by, partial(vitlab.embed, model), chunk=8)
    assert found.embedded == 23 - 16 and found.images == 23
    check_against_embed(read(tmp_path / "out.parquet"), model, photos)


def test_killed_while_it_joins(checkpoint, photos, tmp_path, monkeypatch):
    from vitlab.search import table

    model = vitlab.load(checkpoint)
    made_by = {"checkpoint": str(checkpoint), "fingerprint": fingerprint(model)}
    args = (tmp_path / "out.parquet", open_items(str(photos)), made_by, partial(vitlab.embed, model))

    def dying(*_):
        (tmp_path / "out.parquet.parts" / "joined" / "part-00000-of-00003.parquet").write_bytes(b"half")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(table, "_join", dying)
        write_table(*args, chunk=8)
    found = write_table(*args, chunk=8)
    assert found.embedded == 0 and found.images == 23
    check_against_embed(read(tmp_path / "out.parquet"), model, photos)


def test_two_processes(command_in_two, command, checkpoint, photos, tmp_path):
    """Each writes a shard; what one process had begun is taken over."""
    for number in range(4):
        for file in sorted(photos.rglob("*.png"))[:23]:
            shutil.copy(file, photos / f"copy{number}-{file.name}")
    command("embed", photos, "-o", tmp_path / "one.parquet", "--model", checkpoint)
    args = ["embed", photos, "-o", tmp_path / "two.parquet", "--model", checkpoint, "--device", "cpu"]
    from vitlab.search import table

    chunk, table.write_table.__kwdefaults__["chunk"] = table.CHUNK, 16  # forks inherit it
    try:
        assert command_in_two(args) == [0, 0]
        shards = sorted((tmp_path / "two.parquet").iterdir())
        assert [shard.name for shard in shards] == ["part-00000-of-00002.parquet", "part-00001-of-00002.parquet"]
        assert min(pq.read_metadata(shard).num_rows for shard in shards) > 20
        one, two = read(tmp_path / "one.parquet"), read(tmp_path / "two.parquet")
        assert [row["path"] for row in one] == [row["path"] for row in two] and len(one) == 115
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a["embedding"], b["embedding"], atol=1e-6)
        assert command_in_two(args) == [0, 0]  # nothing to do
    finally:
        table.write_table.__kwdefaults__["chunk"] = chunk
