"""Downloads, from a server of our own: what they say as they go, and what a broken one leaves behind: nothing."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import vitlab.cli.main
from vitlab.cli import progress
from vitlab.errors import DataError
from vitlab.images.datasets import open_data
from vitlab.images.sources import download, idx
from vitlab.images.sources.download import Remote, fetch, watching

WHOLE = np.random.default_rng(0).integers(0, 256, 1_500_000, dtype=np.uint8).tobytes()


class Server(http.server.ThreadingHTTPServer):
    """.files by name; those in .halting wait in the middle until .go is set; .sizes: whether it states them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {"cifar-10-binary.tar.gz": WHOLE}
        self.halting: set[str] = set()
        self.go, self.sizes = threading.Event(), True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        name = self.path.lstrip("/")
        data = self.server.files[name]
        self.send_response(200)
        if self.server.sizes:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        half = len(data) // 2
        try:
            self.wfile.write(data[:half])
            self.wfile.flush()
            if name in self.server.halting:
                self.server.go.wait(20)
            self.wfile.write(data[half:])
        except OSError:  # the other side is gone
            pass

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    httpd = Server()
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setenv("VITLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITLAB_DATA", raising=False)
    monkeypatch.setattr(idx, "DEBIAN", {})
    name = "cifar-10-binary.tar.gz"
    monkeypatch.setitem(download.REMOTES, "cifar10", Remote((httpd.url,), {name: hashlib.md5(WHOLE).hexdigest()}))
    yield httpd
    httpd.go.set()
    httpd.shutdown()
    httpd.server_close()


def get() -> Path:
    return fetch("cifar10", "cifar-10-binary.tar.gz")


def left(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache/cifar10").iterdir())


@pytest.mark.parametrize("sizes", [True, False])
def test_a_download_says_how_far_it_is(server, tmp_path, sizes):
    server.sizes = sizes
    told: list[tuple[str, int, int | None]] = []
    with watching(lambda *news: told.append(news)):
        assert get().read_bytes() == WHOLE
    urls, done, totals = zip(*told, strict=True)
    assert set(urls) == {server.url + "cifar-10-binary.tar.gz"} and set(totals) == {len(WHOLE) if sizes else None}
    assert done[0] == 0 and done[-1] == len(WHOLE) and list(done) == sorted(set(done)) and len(done) > 3
    told.clear()
    get()
    assert not told  # outside of `watching`, nobody is told


def test_a_download_is_seen_before_it_is_complete(server, tmp_path):
    """Half of it has come, and the rest is held back until that was told."""
    server.halting.add("cifar-10-binary.tar.gz")
    half = len(WHOLE) // 2

    def watch(url: str, done: int, total: int | None) -> None:
        if done == half:
            assert not (tmp_path / "cache/cifar10/cifar-10-binary.tar.gz").exists()
            server.go.set()

    with watching(watch):
        assert get().read_bytes() == WHOLE
    assert server.go.is_set()


def test_ctrl_c_leaves_nothing_and_the_next_one_is_whole(server, tmp_path):
    def watch(url: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with watching(watch), pytest.raises(KeyboardInterrupt):
        get()
    assert left(tmp_path) == []
    assert get().read_bytes() == WHOLE


def test_a_killed_download_starts_again_and_its_rest_is_removed(server, tmp_path):
    server.halting.add("cifar-10-binary.tar.gz")
    child = os.fork()
    if child == 0:
        try:
            get()
        finally:
            os._exit(7)
    folder = tmp_path / "cache/cifar10"
    for _ in range(500):
        parts = list(folder.glob(".*.part"))
        if parts and parts[0].stat().st_size:
            break
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    (rest,) = left(tmp_path)
    assert rest.endswith(".part")  # never under the file's own name
    server.go.set()
    (folder / ".cifar-10-binary.tar.gz.another.part").write_bytes(b"somebody is at work on this one")
    os.utime(folder / rest, (0, time.time() - 2 * download.STALE))
    assert get().read_bytes() == WHOLE
    assert left(tmp_path) == [".cifar-10-binary.tar.gz.another.part", "cifar-10-binary.tar.gz"]


def test_a_wrong_checksum_names_both(server, tmp_path):
    server.files["cifar-10-binary.tar.gz"] = WHOLE[:-1] + b"?"
    with pytest.raises(DataError) as error:
        get()
    found = hashlib.md5(server.files["cifar-10-binary.tar.gz"]).hexdigest()
    assert f"wrong checksum: MD5 is {found}, expected {hashlib.md5(WHOLE).hexdigest()}" in str(error.value)
    assert server.url in str(error.value) and "data.path" in str(error.value) and left(tmp_path) == []


# As the command line shows it


def test_lines_where_nobody_watches(capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))  # four seconds between any two looks at the clock
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress.Meter("bytes", terminal=False) as meter:
        for done in range(0, 101, 10):
            meter.update("https://x.org/a/data.tar", done * 10**6, 100 * 10**6)
        meter.update("https://x.org/b.tar", 0, None)
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0] == "downloading https://x.org/a/data.tar (100.0 MB)" and lines[-1] == "downloading https://x.org/b.tar"
    )
    assert 2 <= len(lines[1:-1]) <= 5  # about one in three updates
    for line in lines[1:-1]:
        done, share, speed, rest = re.fullmatch(  # type: ignore[union-attr]
            r"data\.tar: ([\d.]+) of 100\.0 MB \((\d+)%\), ([\d.]+) MB/s, (\d+) s left", line
        ).groups()
        assert float(done) == float(share) and float(rest) == pytest.approx((100 - float(done)) / float(speed), rel=0.1)


def test_a_bar_on_a_terminal():
    code = (
        "from vitlab.cli.progress import Meter, counting\n"
        "with Meter('bytes') as meter:\n"
        "    for done in range(0, 5): meter.update('https://x.org/some[b]data.tar', done * 10**6, 4 * 10**6)\n"
        "with counting('val', 30) as add:\n"
        "    for _ in range(3): add(10)\n"
        "print('result')\n"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    try:
        while part := os.read(master, 1 << 16):
            shown += part
    except OSError:  # Linux tells the end in this way
        pass
    os.close(master)
    assert done.returncode == 0 and done.stdout == b"result\n"  # what is piped stays clean
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    assert "some[b]data.tar" in text and "4.0/4.0 MB" in text and "30/30" in text


def test_train_and_eval_tell_of_a_download(server, tmp_path, monkeypatch, capsys):
    rng = np.random.default_rng(1)
    for stem, count in (("train", 40), ("t10k", 20)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        images = rng.integers(0, 256, (count, 8, 8), dtype=np.uint8)
        for name, array in ((f"{stem}-images-idx3-ubyte.gz", images), (f"{stem}-labels-idx1-ubyte.gz", labels)):
            head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            server.files[name] = gzip.compress(head + array.tobytes())
    sums = {name: hashlib.md5(data).hexdigest() for name, data in server.files.items() if "idx" in name}
    monkeypatch.setitem(download.REMOTES, "mnist", Remote((server.url,), sums))

    def command(*args: object) -> str:
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            vitlab.cli.main.run()
        assert not stopped.value.code, capsys.readouterr()
        return capsys.readouterr().err

    settings = ["data.source=mnist", "model.depth=1", "run.epochs=1", "run.eval_every=1", f"run.dir={tmp_path / 'run'}"]
    expected = [f"downloading {server.url}{name} ({len(server.files[name]) / 1e6:.1f} MB)" for name in sums]
    assert sorted(command("train", "digits", *settings).splitlines()) == sorted(expected)
    for file in (tmp_path / "cache/mnist").iterdir():
        file.unlink()
    assert sorted(command("eval", tmp_path / "run/best", "mnist").splitlines()) == sorted(expected)
    assert command("eval", tmp_path / "run/best", "mnist") == ""
    assert len(open_data("mnist", download=False).train) == 30
