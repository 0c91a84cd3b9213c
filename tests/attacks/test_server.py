"""Attacks on `vitlab serve`: slow and endless clients, forged Hosts, damaged run logs. All traffic is to 127.0.0.1."""

from __future__ import annotations

import io
import json
import os
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import h11
import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from vitlab.images.samples import open_sample
from vitlab.serve.app import create_app
from vitlab.serve.connections import SPARE_FILES, Stage, connection_limit
from vitlab.serve.model_pool import open_models
from vitlab.serve.run import create_server, listen
from vitlab.serve.settings import Settings, host_name

SLACK = 10  # seconds that a busy machine may add to a deadline; the lower bounds prove that there is one
LARGE = 30_000_000  # bytes of GET /large
SHORT = {"header_seconds": 0.4, "timeout": 0.6, "linger_seconds": 0.4, "write_seconds": 0.4, "drain": 0.0}
HEAD = b"Host: 127.0.0.1\r\n"
FORM = b"Content-Type: multipart/form-data; boundary=x\r\n"
PART = b'--x\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HEAD + b"\r\n"


@contextmanager
def serving(models=None, **settings):
    """The port of a server in a thread, and its connections."""
    app = create_app(open_models(["bundled:digits"]) if models is None else models, Settings(**{**SHORT, **settings}))
    app.router.add_route("/large", lambda request: Response(bytes(LARGE)))
    server = create_server(app)
    with listen("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1], server.config.http.args[0]  # type: ignore[union-attr]
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def port():
    """With short deadlines."""
    with serving(max_upload=50_000) as (found, _):
        yield found


@pytest.fixture(scope="module")
def patient():
    """The port of a server with the usual deadlines, for tests that measure no time."""
    usual = {name: getattr(Settings(), name) for name in SHORT}
    with serving(max_upload=50_000, **usual) as (found, _):
        yield found


def connect(port: int, sent: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(sent)
    return connection


def responses(connection: socket.socket, count: int = 1) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of the next responses, read by h11 as any client would."""
    parser, found = h11.Connection(h11.CLIENT), []
    status, headers, body = 0, {}, b""
    while len(found) < count:
        if parser.our_state is h11.IDLE:
            parser.send(h11.Request(method="GET", target="/", headers=[("Host", "x")]))
            parser.send(h11.EndOfMessage())
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(connection.recv(65536))
        elif isinstance(event, h11.Response):
            status, headers, body = event.status_code, {k.decode(): v.decode() for k, v in event.headers}, b""
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            found.append((status, headers, body))
            if len(found) < count:
                parser.start_next_cycle()
        else:
            raise AssertionError(f"{event} after {found}")
    return found


def ask(port: int, sent: bytes) -> tuple[int, dict[str, str], bytes]:
    with connect(port, sent) as connection:
        return responses(connection)[0]


def healthy(port: int) -> float:
    """Seconds until /health has answered."""
    began = time.monotonic()
    assert ask(port, HEALTH)[0] == 200
    return time.monotonic() - began


def wait_until(condition, seconds: float = 10) -> float:
    """Seconds until it is true."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds
        time.sleep(0.01)
    return time.monotonic() - began


def count_in(pool, stage: Stage) -> int:
    return sum(connection.stage is stage for connection in list(pool.connections))


def seconds_until_cut(connection: socket.socket, sent: bytes, pause: float, began: float | None = None) -> float:
    """Since then or now. Sends again and again until the server ends the connection; 20 s at most."""
    began = time.monotonic() if began is None else began
    while time.monotonic() - began < 20:
        try:
            connection.sendall(sent)
        except OSError:
            return time.monotonic() - began
        time.sleep(pause)
    raise AssertionError("not cut within 20 s")


def test_half_open_connections_are_cut_and_lock_nobody_out():
    with serving(max_connections=50, header_seconds=1.0) as (port, pool):
        held = [connect(port, b"" if n % 2 else b"GET /health HTTP/1.1\r\n" + HEAD) for n in range(200)]
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            assert healthy(port) < SLACK
            assert len(pool.connections) <= 50 + 1
        wait_until(lambda: len(pool.connections) == 0, SLACK)
        for number, connection in enumerate(held[-40:]):  # the others were dropped by those that came later
            if number % 2 == 0:
                status, headers, _ = responses(connection)[0]
                assert status == 408 and headers["connection"] == "close"
            assert connection.recv(10) == b""
        for connection in held:
            connection.close()


def test_requests_under_way_are_never_dropped():
    """Uploads stay while half-open connections come; where there is nothing to drop, the newcomer is refused."""
    upload = b"POST /predict HTTP/1.1\r\n" + HEAD + FORM + CHUNKED + b"%x\r\n%b\r\n" % (len(PART), PART)
    with serving(max_connections=3, header_seconds=60, timeout=20) as (port, pool), ExitStack() as open_ones:

        def connect_and_wait(sent: bytes, stage: Stage, count: int) -> socket.socket:
            connection = open_ones.enter_context(connect(port, sent))
            wait_until(lambda: count_in(pool, stage) == count)
            return connection

        uploads = [connect_and_wait(upload, Stage.REQUEST, count) for count in (1, 2)]
        for _ in range(20):
            connect_and_wait(b"", Stage.HEADERS, 1)
        assert healthy(port) < SLACK
        wait_until(lambda: len(pool.connections) == 2)  # it took the place of the last half-open one, and has gone
        uploads.append(connect_and_wait(upload, Stage.REQUEST, 3))
        for _ in range(6):  # those that were refused before are still connected
            status, headers, body = responses(open_ones.enter_context(connect(port, HEALTH)))[0]
            assert (status, headers.get("retry-after"), headers["connection"]) == (503, "1", "close")
            assert set(json.loads(body)) == {"error", "remedy"}
            assert len(pool.connections) <= 3 + 1
        for connection in uploads:
            connection.sendall(b"0\r\n\r\n")
            assert responses(connection)[0][0] == 400  # it was no form, but it was read to its end


def test_a_client_that_leaves_within_its_body_is_forgotten():
    upload = b"POST /predict HTTP/1.1\r\n" + HEAD + FORM + CHUNKED + b"%x\r\n%b\r\n" % (len(PART), PART)
    with serving(timeout=20) as (port, pool):
        for _ in range(3):
            with connect(port, upload):
                wait_until(lambda: count_in(pool, Stage.REQUEST) == 1)
            wait_until(lambda: count_in(pool, Stage.REQUEST) == 0)
        wait_until(lambda: len(pool.connections) == 0)


@pytest.mark.parametrize("first", [b"", HEALTH], ids=["first request", "second request"])
def test_dripped_headers_are_cut_by_a_deadline_that_no_byte_moves(port, first):
    began = time.monotonic()  # before the server can begin to count, however late this thread goes on
    with connect(port, first) as connection:
        if first:
            assert responses(connection)[0][0] == 200
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        assert 0.2 < seconds_until_cut(connection, b"x", 0.05, began) < 0.4 + SLACK


def test_a_dripped_body_is_cut(port):
    head = b"POST /predict HTTP/1.1\r\n" + HEAD + FORM + b"Content-Length: 1000\r\n\r\n"
    began = time.monotonic()
    with connect(port, head + PART) as connection, connect(port, head) as other:
        assert 0.5 < seconds_until_cut(connection, b"x", 0.05, began) < 0.6 + 0.4 + SLACK
        status, headers, _ = responses(other)[0]
        assert status == 408 and headers["connection"] == "close"


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /predict HTTP/1.1", 413),
        (b"POST /predict?model=none HTTP/1.1", 404),
        (b"POST /nothing HTTP/1.1", 404),
        (b"POST /health HTTP/1.1", 405),
        (b"GET /health HTTP/1.1", 200),
        (b"POST /predict HTTP/1.1\r\nOrigin: http://evil.example", 403),
    ],
)
def test_an_endless_body_after_the_answer_is_cut(port, request_line, status):
    with connect(port, request_line + b"\r\n" + HEAD + FORM + CHUNKED) as connection:
        chunk = b"2000\r\n" + b"--x\r\n" + bytes(0x2000 - 5) + b"\r\n"
        if status == 413:
            connection.sendall(8 * chunk)
        found, headers, body = responses(connection)[0]
        assert found == status and headers["connection"] == "close", body
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert seconds_until_cut(connection, chunk, 0.01) < 0.4 + SLACK
    assert healthy(port) < SLACK


def test_a_client_that_sends_all_before_it_reads_gets_the_refusal(patient):
    """4 MB do not fit into the buffers between the two: without a server that reads on, sending them would fail."""
    head = b"POST /predict HTTP/1.1\r\n" + HEAD + FORM + b"Content-Length: 4000000\r\n\r\n"
    status, headers, body = ask(patient, head + bytes(4_000_000))
    assert status == 413 and headers["connection"] == "close" and "50,000 bytes" in json.loads(body)["error"]


def test_a_refused_body_that_has_come_keeps_the_connection(patient):
    small = b"POST /nothing HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\n\r\nabc"
    with connect(patient, small + HEALTH + HEALTH) as connection:  # pipelined
        found = responses(connection, 3)
    assert [status for status, _, _ in found] == [404, 200, 200]


def not_reading(port: int) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(2 * (b"GET /large HTTP/1.1\r\n" + HEAD + b"\r\n"))
    return connection


def test_a_client_that_does_not_read_is_cut():
    with serving(write_seconds=1.0) as (port, pool):
        began = time.monotonic()
        with not_reading(port):
            wait_until(lambda: count_in(pool, Stage.BLOCKED) == 1)
            wait_until(lambda: len(pool.connections) == 0)
            assert time.monotonic() - began > 0.9


def test_a_client_that_reads_slowly_but_steadily_gets_everything():
    with serving(write_seconds=0.8) as (port, _), connect(port) as connection:
        connection.sendall(b"GET /large HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n")
        began, received = time.monotonic(), 0
        while data := connection.recv(65536):
            received += len(data)
            time.sleep(max(0, began + received / 10_000_000 - time.monotonic()))
        assert received > LARGE and time.monotonic() - began > 2 * 0.8


def test_clients_that_do_not_read_lock_nobody_out():
    with serving(max_connections=3, write_seconds=60, header_seconds=10) as (port, pool), ExitStack() as open_ones:
        for _ in range(5):
            open_ones.enter_context(not_reading(port))
        wait_until(lambda: count_in(pool, Stage.BLOCKED) == 3)
        assert healthy(port) < SLACK
        with connect(port, HEALTH[:20]) as slow:  # a newcomer stays where an older one can go
            open_ones.enter_context(not_reading(port))
            wait_until(lambda: count_in(pool, Stage.BLOCKED) == 2)
            slow.sendall(HEALTH[20:])
            assert responses(slow)[0][0] == 200


def test_a_broken_body_of_a_head_request_ends_without_a_traceback(patient, caplog):
    with connect(
        patient, b"HEAD /predict HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nno length\r\n"
    ) as client:
        received = b""
        while data := client.recv(65536):
            received += data
    assert received.startswith(b"HTTP/1.1 4") and received.endswith(b"\r\n\r\n")
    assert not caplog.records


def test_a_broken_body_ends_the_request(patient):
    with connect(patient, b"POST /predict HTTP/1.1\r\n" + HEAD + FORM + CHUNKED + b"3\r\n--x\r\n") as connection:
        time.sleep(0.1)
        connection.sendall(b"no length of a chunk\r\n")
        status, headers, body = responses(connection)[0]
        assert (status, headers["connection"], set(json.loads(body))) == (400, "close", {"error", "remedy"})
        assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("soft", "hard", "cap"),
    [
        (1024, 2**20, 1000),
        (1024, 1024, 1024 - 256 - SPARE_FILES),
        (10_000, 10_000, 1000),
        (256, 256, 64),
        (-1, -1, 1000),
    ],
)
def test_the_cap_is_below_the_limit_on_open_files(monkeypatch, soft, hard, cap):
    resource = pytest.importorskip("resource")
    set_to = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: set_to[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: set_to.append(limits))
    assert connection_limit(Settings()) == cap
    assert set_to[-1][1] == hard and (set_to[-1][0] == -1 or cap < set_to[-1][0] <= hard)


HOSTS = {
    "127.0.0.1": True,
    "127.0.0.1:8080": True,
    "localhost": True,
    "LocalHost.:1": True,
    "[::1]": True,
    "[0:0:0:0:0:0:0:1]:65535": True,
    "[::1]evil.com": False,
    "[::1].evil.com": False,
    "[::1]:80:80": False,
    "[::1": False,
    "[::1%25lo]": False,
    "[127.0.0.1]": False,
    "[localhost]": False,
    "::1": False,
    "127.0.0.1:8080@evil.com": False,
    "evil.com@127.0.0.1": False,
    "127.0.0.1:80:80": False,
    "127.0.0.1:99999": False,
    "127.0.0.1:0": False,
    "127.0.0.1:": False,
    "127.0.0.1:-1": False,
    "127.0.0.1:8o": False,
    "127.0.0.1/": False,
    "127.0.0.1#": False,
    "127.0.0.1?x": False,
    "127.0.0.1\\.evil.com": False,
    "127.0.0.1.evil.com": False,
    "127.1": False,
    "0177.0.0.1": False,
    "2130706433": False,
    "localhost.evil.com": False,
    "localhost..": False,
    "localhost,evil.com": False,
    "localhost evil.com": False,
    "localhost\tevil.com": False,
    "local%68ost": False,
    "localhost%00": False,
    "l\u00f6calhost": False,
    "\u00b927.0.0.1": False,
    "evil.com": False,
    "http://127.0.0.1": False,
    "": False,
}


@pytest.mark.parametrize(
    "name", ["example.org:8000", "*.example.org", "https://example.org", "example.org/", "[::1]", "::1%lo", "", "a b"]
)
def test_names_that_no_host_can_match_are_refused(name):
    with pytest.raises(ValueError, match=r"must be a name or an address, such as vit\.example\.org"):
        Settings(hosts=(name,))


@pytest.mark.parametrize(("name", "host"), [("vit.Example.org", "vit.example.org:8000"), ("fe80::1", "[fe80:0::1]:80")])
def test_names_that_a_host_can_match(name, host):
    found = host_name(host)
    assert found is not None and Settings(hosts=(name,)).answers_to(found)


@pytest.mark.parametrize("host", HOSTS)
def test_hosts(patient, host):
    sent = b"GET /health HTTP/1.1\r\nHost: " + host.encode("latin-1") + b"\r\n\r\n"
    status, headers, _ = ask(patient, sent)
    assert status == (200 if HOSTS[host] else 400)
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: evil.com\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET http://evil.com/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET http://127.0.0.1/health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET %2fhealth HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"CONNECT evil.com:443 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : 127.0.0.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n evil.com\r\n\r\n",
    ],
)
def test_targets_and_headers_that_name_another_host(patient, sent):
    status, headers, body = ask(patient, sent)
    assert status == 400 and set(json.loads(body)) == {"error", "remedy"}
    assert headers["cross-origin-resource-policy"] == "same-origin" and headers["x-content-type-options"] == "nosniff"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    runs = tmp_path_factory.mktemp("runs")
    settings = Settings(runs=str(runs), origins=("https://pages.example.org",))
    app = create_app(open_models(["bundled:digits"]), settings)

    @app.get("/fails")
    async def fails() -> None:
        raise RuntimeError

    with TestClient(app, "http://127.0.0.1:8000", raise_server_exceptions=False, follow_redirects=False) as found:
        found.runs = runs  # type: ignore[attr-defined]
        yield found


@pytest.mark.parametrize(
    ("method", "path", "status", "headers"),
    [
        ("GET", "/", 200, {}),
        ("HEAD", "/", 405, {}),
        ("OPTIONS", "/predict", 405, {}),
        ("OPTIONS", "/predict", 200, {"origin": "https://pages.example.org", "access-control-request-method": "POST"}),
        ("OPTIONS", "/predict", 400, {"origin": "http://evil.example", "access-control-request-method": "POST"}),
        ("GET", "/page/files/app.js", 200, {}),
        ("GET", "/page/samples/cat", 200, {}),
        ("GET", "/docs", 200, {}),
        ("GET", "/openapi.json", 200, {}),
        ("GET", "/metrics", 200, {}),
        ("GET", "/docs/", 307, {}),
        ("GET", "/nothing", 404, {}),
        ("GET", "/predict", 405, {}),
        ("POST", "/predict", 415, {}),
        ("GET", "/page/runs/x?after=x", 422, {}),
        ("GET", "/fails", 500, {}),
        ("GET", "/health", 403, {"origin": "http://evil.example"}),
        ("GET", "/health", 403, {"origin": ""}),
        ("GET", "/health", 403, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}),
        ("GET", "/", 403, {"sec-fetch-site": "same-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}),
        ("GET", "/", 200, {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}),
        ("GET", "/health", 200, {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}),
        ("GET", "/health", 400, {"host": "evil.example"}),
    ],
)
def test_no_answer_may_be_used_by_other_sites(client, method, path, status, headers):
    found = client.request(method, path, headers=headers)
    assert found.status_code == status
    assert found.headers.get_list("cross-origin-resource-policy") == ["same-origin"]
    assert found.headers.get_list("x-content-type-options") == ["nosniff"]
    (policy,) = found.headers.get_list("content-security-policy")
    assert "frame-ancestors 'none'" in policy
    assert found.headers["cache-control"] in ("no-store", "no-cache")


LINES = {
    "NaN": b'{"kind": "train", "step": 1, "loss": NaN}',
    "infinity": b'{"kind": "train", "step": 1, "loss": -Infinity}',
    "overflow": b'{"kind": "train", "step": 1, "loss": 1e999}',
    "deep": b'{"kind": "train", "step": 1, "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "rather deep": b'{"kind": "train", "step": 1, "x": ' + b"[" * 900 + b"]" * 900 + b"}",
    "long number": b'{"kind": "train", "step": ' + b"9" * 5000 + b"}",
    "not UTF-8": b'{"kind": "note", "step": 1, "text": "\xff"}',
    "no table": b"[1]",
    "longer than an answer": b'{"kind": "note", "text": "' + b"x" * 2_000_001 + b'"}',
}


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_line_of_a_log_is_left_out(client, line):
    folder = client.runs / line
    folder.mkdir()
    fine = b'{"kind": "train", "step": 2, "loss": 0.5}'
    (folder / "log.jsonl").write_bytes(LINES[line] + b"\n" + fine + b"\n")
    steps, after, size = [], 0, (folder / "log.jsonl").stat().st_size
    for _ in range(3):
        found = client.get(f"/page/runs/{line}", params={"after": after})
        assert found.status_code == 200, found.text
        steps += [event["step"] for event in found.json()["lines"]]
        after = found.json()["after"]
    assert steps == [2] and after == size


def test_a_line_with_a_lone_surrogate_is_kept(client):
    """What a run writes when it names a file whose name is not UTF-8."""
    (client.runs / "surrogate").mkdir()
    (client.runs / "surrogate" / "log.jsonl").write_bytes(b'{"kind": "note", "step": 1, "text": "\\udcff.png"}\n')
    assert client.get("/page/runs/surrogate").json()["lines"][0]["text"] == "\udcff.png"


@pytest.mark.parametrize("after", [2**62, 2**62 - 1, 10**13, 2**63, 2**64, 10**400, -1, "nan", "1e5", "\0"])
def test_places_where_no_log_has_a_byte(client, after):
    (client.runs / "short").mkdir(exist_ok=True)
    (client.runs / "short" / "log.jsonl").write_bytes(b"{}\n")
    found = client.get("/page/runs/short", params={"after": after})
    if found.status_code != 422:  # a log that was rewritten is read from its start
        assert found.status_code == 200 and found.json() == {"lines": [{}], "after": 3, "ended": False}


def test_odd_files_in_the_folder_of_runs(client):
    odd = client.runs / os.fsdecode(b"\xff")
    odd.mkdir()
    (odd / "log.jsonl").write_bytes(b'{"kind": "note", "step": 7}\n')
    for name in ("folder", "pipe", "dangling", "loop"):
        (client.runs / name).mkdir()
    (client.runs / "folder" / "log.jsonl").mkdir()
    os.mkfifo(client.runs / "pipe" / "log.jsonl")
    (client.runs / "dangling" / "log.jsonl").symlink_to("nowhere")
    (client.runs / "loop" / "log.jsonl").symlink_to("log.jsonl")
    names = client.get("/page/runs").json()
    assert "\ufffd" in names and not {"folder", "pipe", "dangling", "loop"} & set(names)
    assert client.get("/page/runs/%EF%BF%BD").json()["lines"] == [{"kind": "note", "step": 7}]
    for name in ("folder", "pipe", "dangling", "loop", "..", "%00", "%2e%2e%2fetc"):
        assert client.get(f"/page/runs/{name}").status_code == 404


@pytest.mark.parametrize(("charset", "text"), [("utf-7", b"+2AA-"), ("unicode_escape", b"\\ud800"), ("idna", b"xn--a")])
def test_charsets_that_make_no_text(client, charset, text):
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\nx\r\n--x\r\n'
    form += b'Content-Disposition: form-data; name="text"\r\n\r\n' + text + b"\r\n--x--\r\n"
    kind = f"multipart/form-data; boundary=x; charset={charset}"
    found = client.post("/explain", content=form, headers={"content-type": kind})
    assert found.status_code == 400 and "charset" in found.json()["error"]


@pytest.mark.parametrize(
    "reducer",
    ["random:like=" * 1000 + "tome:r=1", "tome:schedule=decreasing,r=" + "9" * 400, "evit:keep=nan", "tome:r=1e400"],
)
def test_reducers_that_cannot_be(client, reducer):
    file = io.BytesIO()
    open_sample("digits#0").image.save(file, "PNG")
    look = client.post("/page/look", files={"image": ("x", file.getvalue())}).json()["look"]
    assert client.get(f"/page/look/{look}/fewer", params={"reducer": reducer}).status_code == 422
    assert client.get(f"/page/look/{look}/fewer", params={"reducer": "tome:r=1"}).status_code == 200
