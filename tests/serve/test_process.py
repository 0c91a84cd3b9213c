"""The server as people start it: a process of its own, on a free port, until SIGTERM."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import partial

import httpx
import pytest
from hypothesis import HealthCheck, given, strategies
from hypothesis import settings as with_settings

import vitlab
from vitlab.inference import fingerprint
from vitlab.search import update
from vitlab.serve.run import listen

from .conftest import picture as picture_of


class Server:
    def __init__(self, *args: str):
        command = [sys.executable, "-m", "vitlab", "serve", *args, "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, encoding="utf-8"
        )
        self.said = []
        for line in self.process.stderr:
            self.said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                return
        raise AssertionError("".join(self.said))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A classifier, a CLIP, and an index that the CLIP has made."""
    folder = tmp_path_factory.mktemp("server")
    for number in range(4):
        (folder / f"{number}.png").write_bytes(picture_of(number))
    clip = vitlab.load("bundled:clip")
    made_by = {"checkpoint": "bundled:clip", "fingerprint": fingerprint(clip), "reads_text": True}
    update(folder / "index", folder, made_by, partial(vitlab.embed, clip))
    found = Server("bundled:digits", "bundled:clip", "--index", str(folder / "index"))
    deadline = time.monotonic() + 120
    while httpx.get(f"{found.url}/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield found
    if found.process.poll() is None:
        found.process.kill()
        found.process.communicate()


def test_answers(server, picture):
    assert any(line.startswith("digits: predict, embed, explain") for line in server.said)
    (offline,) = vitlab.predict(vitlab.load("bundled:digits"), picture(1))
    with httpx.Client(base_url=server.url) as client:
        found = client.post("/predict", files={"image": ("x", picture(1))}).json()
    assert [s["label"] for s in found["scores"]] == [label for label, _ in offline.scores]
    assert [s["probability"] for s in found["scores"]] == pytest.approx([p for _, p in offline.scores], abs=1e-5)


def test_it_listens_at_this_machine_only_and_the_port_is_taken(server):
    with socket.socket() as elsewhere, pytest.raises(OSError):
        elsewhere.settimeout(5)
        elsewhere.connect(("127.0.0.2", server.port))
    with pytest.raises(ValueError, match=rf"cannot listen at 127\.0\.0\.1:{server.port} .*--port"):
        listen("127.0.0.1", server.port)


def test_what_is_no_http(server):
    for bytes_ in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET / HTTP/1.1\r\n\r\n",
        b"POST /predict\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(bytes_)
            assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_refused_upload_gets_its_answer(server):
    """The answer comes before the body was read; the client may send all of it first, and ask again."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = client.post("/predict", files={"image": ("x", bytes(21_000_000))})
        assert found.status_code == 413 and found.headers["connection"] == "close"
        assert client.get("/health").status_code == 200


def test_a_client_that_goes_away_leaves_its_place(server, picture):
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(request(picture(1)))
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request(picture(1))[:-50])
    deadline = time.monotonic() + 60
    while 'vitlab_queue_requests{model="digits"} 0.0' not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_schemathesis_finds_no_500(server):
    """Half of the requests are plain: an image, real or not, and default options, so that what follows is met too."""
    import schemathesis  # here: every worker imports every file
    from schemathesis.transport.serialization import Binary

    images = strategies.one_of(
        strategies.sampled_from([picture_of(n) for n in range(3)]), strategies.binary(min_size=1, max_size=100)
    ).map(Binary)
    schemathesis.openapi.format("binary", images)
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    answers = Counter()
    for operation in (result.ok() for result in schema.get_all_operations()):

        @with_settings(
            max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
        )
        @given(case=operation.as_strategy(), plain=strategies.booleans(), image=images)
        def ask(case, plain, image):
            if plain and case.method == "POST":
                labels = {"labels": ["cat", "dog"]} if case.path == "/zeroshot" else {}
                case.query, case.body = {}, {"image": image, **labels}
            answer = case.call()
            assert answer.status_code < 500, (case, answer.text)
            answers[case.operation.label, answer.status_code] += 1

        ask()
    for path in ("/predict", "/embed", "/zeroshot", "/explain", "/search"):
        assert answers[f"POST {path}", 200] and answers[f"POST {path}", 415], path


def request(image: bytes, path: str = "/predict?model=digits") -> bytes:
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + image + b"\r\n--x--\r\n"
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(form) + form


def test_sigterm_loses_nothing(server, picture):
    """Forty requests that were sent before the signal, and one whose second half comes after it."""
    images = [picture(n) for n in range(40)]
    half = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    half.sendall(request(images[0])[:-300])
    assert httpx.get(f"{server.url}/health").status_code == 200  # it came later, so the beginning has been read
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in images]
    for connection, image in zip(connections, images, strict=True):
        connection.sendall(request(image))
    server.process.send_signal(signal.SIGTERM)
    half.sendall(request(images[0])[-300:])
    model = vitlab.load("bundled:digits")
    expected = vitlab.predict(model, [*images, images[0]])
    for connection, offline in zip([*connections, half], expected, strict=True):
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        connection.close()
        head, _, body = b"".join(parts).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        scores = json.loads(body)["scores"]
        assert [s["label"] for s in scores] == [label for label, _ in offline.scores]
    code, said = server.end()
    assert code == 0 and "all accepted requests are answered" in said and "Traceback" not in said
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
