"""Attacks on a running `vitlab serve`: half-open and slow clients, endless bodies, overload, pages of other sites.

    python benchmarks/attacks/server.py [--quick]

Every attack is counted as tried and held. All traffic is to 127.0.0.1; the clients run on the server's machine.
"""

from __future__ import annotations

import argparse
import re
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

from vitlab.serve.settings import Settings

BENCHMARKS = Path(__file__).parents[1]
LIMITS = Settings()
CONNECTIONS = 1100
ANSWER = 2.0  # seconds within which /health must answer
SLACK = 1.0  # seconds that a busy machine may add to a deadline
HOST = b"Host: 127.0.0.1\r\n"
FORM = b"Content-Type: multipart/form-data; boundary=x\r\n"
PART = b'--x\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n'
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
SLOW_CLIENTS: dict[str, tuple[Callable[[int], bytes], float]] = {  # what each sends; how many come in a second
    "half-open connections": (lambda n: b"" if n % 2 else b"GET /health HTTP/1.1\r\n" + HOST, 1e9),
    "uploads that stop": (
        lambda n: b"POST /predict HTTP/1.1\r\n" + HOST + FORM + CHUNKED + b"%x\r\n" % len(PART) + PART,
        100,
    ),
    "clients that do not read": (lambda n: 400 * (b"GET /page/samples/grey-cat HTTP/1.1\r\n" + HOST + b"\r\n"), 50),
}
Result = tuple[str, int, int]  # attack, tried, held


def run(*, quick: bool = False) -> list[Result]:
    seconds = 6.0 if quick else 25.0
    rows = []
    for what in SLOW_CLIENTS:
        with serving() as port:
            rows.append(slow_clients(port, what, CONNECTIONS, seconds))
    with serving(files=1024) as port:
        name, tried, held = slow_clients(port, "half-open connections", CONNECTIONS, seconds)
        rows.append((f"{name}; the server may open 1,024 files", tried, held))
    with serving("--max-upload-mb", "0.1", "--token", "secret") as port:
        rows.append(endless_bodies(port))
    rows.append(overload(6.0 if quick else 20.0, "vit_digits" if quick else "vit_tiny"))
    with serving() as port:
        rows.append(forged_requests(port, None))
        rows += hostile_pages(port)
    with serving("--token", "secret") as port:
        rows.append(forged_requests(port, "secret"))
    return rows


@contextmanager
def serving(*options: str, files: int | None = None) -> Iterator[int]:
    """The port of a server with the bundled digits model; `files`: its limit on open files."""
    command = [sys.executable, "-m", "vitlab", "serve", "bundled:digits", "--port", "0", "--threads", "1", *options]
    limit = None if files is None else lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=limit, encoding="utf-8")
    assert server.stderr is not None
    try:
        port = next(int(found[1]) for line in server.stderr if (found := re.search(r"http://127\.0\.0\.1:(\d+)", line)))
        threading.Thread(target=server.stderr.read, daemon=True).start()  # so that it never waits for us
        until = time.monotonic() + 60
        while (answer := ask(port, "GET", "/ready"))[0] != 200:
            assert time.monotonic() < until, answer
            time.sleep(0.05)
        yield port
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def ask(
    port: int,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
    seconds: float = 10,
) -> tuple[int, dict[str, str], bytes]:
    """Status (0: no answer in time), headers and body."""
    connection = HTTPConnection("127.0.0.1", port, timeout=seconds)
    with closing(connection), suppress(OSError, HTTPException):
        connection.putrequest(method, path, skip_host=True)
        for name, value in {"Host": f"127.0.0.1:{port}", **(headers or {})}.items():
            connection.putheader(name, value.encode("latin-1"))
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    return 0, {}, b""


def slow_clients(port: int, what: str, count: int, seconds: float) -> Result:
    """/health is asked four times a second while `count` such clients come, and for `seconds` more; whoever is cut off
    comes again.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 2 * count)), hard))
    stop, ready = threading.Event(), threading.Event()
    attacker = threading.Thread(target=_hold, args=(port, *SLOW_CLIENTS[what], count, ready, stop))
    attacker.start()
    tried = held = 0
    began: float | None = None
    first = time.monotonic()
    while began is None or time.monotonic() - began < seconds:
        if began is None and (ready.is_set() or time.monotonic() - first > 60):
            began = time.monotonic()
        asked = time.monotonic()
        status, _, _ = ask(port, "GET", "/health", seconds=ANSWER)
        spent = time.monotonic() - asked
        tried, held = tried + 1, held + (status == 200 and spent <= ANSWER)
        time.sleep(max(0.0, 0.25 - spent))
    stop.set()
    attacker.join()
    assert ready.is_set(), f"fewer than {count} connections could be made"
    return f"/health within {ANSWER:g} s during {count:,} {what}, {seconds:g} s long", tried, held


def _hold(
    port: int,
    first_bytes: Callable[[int], bytes],
    per_second: float,
    count: int,
    ready: threading.Event,
    stop: threading.Event,
) -> None:
    """Keep so many connections open without reading from them; `ready` is set when all have been made once."""
    selector, made, began = selectors.DefaultSelector(), 0, time.monotonic()
    while not stop.is_set():
        due = (time.monotonic() - began) * per_second
        while len(selector.get_map()) < count and made < due and not stop.is_set():
            with suppress(OSError):
                connection = socket.socket()
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(2)
                connection.connect(("127.0.0.1", port))
                connection.sendall(first_bytes(made))
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ)
                made += 1
            if made % 50 == 0:
                _drop_closed(selector)
        if made >= count:
            ready.set()
        _drop_closed(selector)
        stop.wait(0.05)
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    selector.close()


def _drop_closed(selector: selectors.BaseSelector) -> None:
    for key, _ in selector.select(0):
        connection: Any = key.fileobj
        try:
            ended = connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            ended = True
        if ended or connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1:  # not ESTABLISHED
            selector.unregister(connection)
            connection.close()


def endless_bodies(port: int) -> Result:
    """Chunks without end after a refusal: the refusal arrives, and the connection is cut within the deadline."""
    known = b"Authorization: Bearer secret\r\n"
    attacks = {
        413: b"POST /predict HTTP/1.1\r\n" + known,
        404: b"POST /nothing HTTP/1.1\r\n" + known,
        405: b"POST /metrics HTTP/1.1\r\n" + known,
        401: b"POST /predict HTTP/1.1\r\n",
        403: b"POST /predict HTTP/1.1\r\nOrigin: http://evil.example\r\n" + known,
        400: b"POST /predict HTTP/1.1\r\nHost: evil.example\r\n" + known,
    }
    pauses = (0.0, 0.01, 0.5)  # seconds between chunks
    with ThreadPoolExecutor(len(attacks) * len(pauses)) as pool:
        cut = [pool.submit(_endless, port, head, status, pause) for status, head in attacks.items() for pause in pauses]
        held = sum(one.result() for one in cut)
    return f"endless body after a refusal, cut within {LIMITS.linger_seconds:g} s", len(cut), held


def _endless(port: int, head: bytes, status: int, pause: float) -> bool:
    host = b"" if b"Host:" in head else HOST
    chunk = b"4000\r\n" + PART + bytes(0x4000 - len(PART)) + b"\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(head + host + FORM + CHUNKED + (10 * chunk if status == 413 else chunk))
        response = HTTPResponse(connection)
        response.begin()
        refused = response.status == status and response.getheader("connection") == "close" and bool(response.read())
        began = time.monotonic()
        while time.monotonic() - began < LIMITS.linger_seconds + SLACK:
            try:
                connection.sendall(chunk)
            except OSError:
                return refused
            time.sleep(pause)
    return False


def overload(seconds: float, model: str) -> Result:
    """Four times what the server can do: every answer is right, or 503 with Retry-After."""
    benchmark = _module("server_benchmark", BENCHMARKS / "server.py")
    with tempfile.TemporaryDirectory() as folder:
        rows = benchmark.overload(benchmark.Bench(Path(folder), model, 2), seconds, 4.0, 3.0)
    right = sum(status in (200, 503) and wrong is None for _, _, _, status, wrong in rows)
    return "4 x overload: right, or refused with Retry-After", len(rows), right


def _module(name: str, path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    spec = util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forged_requests(port: int, token: str | None) -> Result:
    """What browsers send for pages of other sites, and requests with a forged Host or token: all are refused."""
    own = f"127.0.0.1:{port}"
    origins = ("http://evil.example", "null", "", f"http://127.0.0.1:{port + 1}", "http://127.0.0.1", f"{own}",
               f"http://{own}.evil.example", f"http://evil@{own}", f"http://{own}/", f"file://{own}")  # fmt: skip
    hosts = ("evil.example", f"evil.example:{port}", "[::1]evil.com", f"127.0.0.1:{port}@evil.com",
             "localhost.evil.com", "127.0.0.1.evil.com", "127.0.0.1:99999", f"{own}:80", "127.0.0.1:",
             "2130706433", "0.0.0.0", "10.0.0.1", "")  # fmt: skip
    fetches = ({"Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": kind} for mode, kind in
               (("no-cors", "image"), ("no-cors", "script"), ("no-cors", "empty"), ("navigate", "iframe")))  # fmt: skip
    attempts = [{"Origin": origin} for origin in origins] + [{"Host": host} for host in hosts]
    attempts += [{**fetch, "Sec-Fetch-Site": site} for fetch in fetches for site in ("cross-site", "same-site")]
    known = {"Authorization": f"Bearer {token}"} if token else {}
    secrets = (
        ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {token}", f"{token}", f"Bearer {token}x"] if token else []
    )
    wanted = ["/models", "/metrics", "/page/samples", "/docs", "/openapi.json", "/page/runs"]
    tried = held = 0
    for path in wanted:
        cases = [known | attempt for attempt in attempts] + [{"Authorization": secret} for secret in secrets]
        for headers in cases:
            status, found, _ = ask(port, "GET", path, headers)
            tried, held = tried + 1, held + _refused(status, found)
    forms = {
        "application/x-www-form-urlencoded": b"image=x",
        "text/plain": b"image=x",
        "multipart/form-data; boundary=x": PART + b"x\r\n--x--\r\n",
    }
    for path in ("/predict", "/embed", "/explain", "/page/look"):
        for kind, body in forms.items():
            for attempt in [known | attempt for attempt in attempts] + [{"Authorization": one} for one in secrets]:
                status, found, _ = ask(port, "POST", path, {"Content-Type": kind, **attempt}, body)
                tried, held = tried + 1, held + _refused(status, found)
    return f"forged requests{', to a server with a token' if token else ''}", tried, held


def _refused(status: int, headers: dict[str, str]) -> bool:
    closed = headers.get("cross-origin-resource-policy") == "same-origin"
    return status in (400, 401, 403) and closed and "access-control-allow-origin" not in headers


# Each resolves to true if the page has got something: a response that it can read, or an element that has loaded.
PAGE_ATTACKS = {
    "fetch": "fetch(u + 'models').then(() => true)",
    "fetch, opaque": "fetch(u + 'models', {mode: 'no-cors'}).then(() => true)",
    "fetch with a header": "fetch(u + 'models', {headers: {Authorization: 'Bearer x'}}).then(() => true)",
    "post": "fetch(u + 'page/look', {method: 'POST', body: new FormData()}).then(() => true)",
    "post, opaque": "fetch(u + 'page/look', {method: 'POST', mode: 'no-cors', body: form()}).then(() => true)",
    "xhr": "new Promise(r => {const x = new XMLHttpRequest(); x.open('GET', u + 'models'); x.onload = () => r(true);"
    " x.onerror = () => r(false); x.send()})",
    "beacon": "new Promise(r => {navigator.sendBeacon(u + 'page/look', form()); setTimeout(() => r(false), 300)})",
    "image": "element('img', {src: u + 'page/samples/cat'})",
    "script": "element('script', {src: u + 'page/files/app.js'})",
    "module": "element('script', {type: 'module', src: u + 'page/files/app.js'})",
    "style": "element('link', {rel: 'stylesheet', href: u + 'page/files/style.css'})",
    "object": "element('object', {data: u + 'page/samples/cat', type: 'image/png'})",
    "video": "element('video', {src: u + 'page/samples/cat', autoplay: true})",
    "event source": "new Promise(r => {const e = new EventSource(u + 'models'); e.onopen = () => r(true);"
    " e.onerror = () => {e.close(); r(false)}})",
    "websocket": "new Promise(r => {const w = new WebSocket(u.replace('http', 'ws')); w.onopen = () => r(true);"
    " w.onerror = () => r(false)})",
    "frame": "frame(f => {f.src = u})",
    "frame of data": "frame(f => {f.src = u + 'models'})",
    "form in a frame": "frame(f => {const s = document.createElement('form'); s.method = 'post';"
    " s.action = u + 'page/look'; s.enctype = 'multipart/form-data'; s.target = f.name = 'f';"
    " document.body.append(s); s.submit()})",
}
PAGE = """<!doctype html><title>evil</title><body><script>
const form = () => { const f = new FormData(); f.append("image", new Blob(["x"]), "x"); return f; };
const element = (name, set) => new Promise((resolve) => {
  const e = document.createElement(name);
  e.onload = e.onloadeddata = () => resolve(true);
  e.onerror = () => resolve(false);
  setTimeout(() => resolve(false), 1500);
  Object.assign(e, set);
  document.body.append(e);
});
const frame = (fill) => new Promise((resolve) => {
  const f = document.createElement("iframe");
  document.body.append(f);
  fill(f);
  setTimeout(() => { try { resolve(Boolean(f.contentDocument.body.innerText)); } catch { resolve(false); } }, 700);
});
</script>"""


class _EvilSite(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        with suppress(OSError):  # the browser may have gone
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(PAGE.encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


def hostile_pages(port: int) -> list[Result]:
    """Chromium on a page of another port, of another name, and of a name that is rebound to this machine.

    Held: the page gets nothing, and the server has not answered anything with success.
    """
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None or util.find_spec("playwright") is None:
        print("no Chromium on PATH, or no playwright: pages of other sites were not tried", file=sys.stderr)
        return []
    from playwright.sync_api import sync_playwright

    site = ThreadingHTTPServer(("127.0.0.1", 0), _EvilSite)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    # Recent Chromium asks the user before a page of the internet may reach this machine. Older browsers do not.
    older = "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests"
    args = ["--no-sandbox", "--host-resolver-rules=MAP rebound.example 127.0.0.1", older]
    rows = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=args)
        for name, host in (("another port", "127.0.0.1"), ("another name", "localhost")):
            held = 0
            for attack in PAGE_ATTACKS.values():
                page = browser.new_page()
                page.goto(f"http://{host}:{site.server_port}/")
                before = _successes(port)
                script = f"(u) => ({attack}).catch(() => false)"
                held += not page.evaluate(script, f"http://127.0.0.1:{port}/") and _successes(port) == before
                page.close()
            rows.append((f"page of {name}, in Chromium", len(PAGE_ATTACKS), held))
        rows.append(_rebinding(browser, port))
        browser.close()
    site.shutdown()
    return rows


def _rebinding(browser: Any, port: int) -> Result:
    """The page comes from elsewhere; then its name points at this machine, and to the browser it is the same site."""
    page, base = browser.new_page(), f"http://rebound.example:{port}/"
    page.route(f"{base}evil", lambda route: route.fulfill(body=PAGE, content_type="text/html"))
    page.goto(f"{base}evil")
    before, held, paths = _successes(port), 0, ("", "models", "metrics", "page/models", "page/runs", "openapi.json")
    for path in paths:
        status = page.evaluate("(u) => fetch(u).then((r) => r.status, () => 0)", base + path)
        held += status in (0, 400) and _successes(port) == before
    page.close()
    return "page of a name that was rebound, in Chromium", len(paths), held


def _successes(port: int) -> float:
    """Requests that the server has answered with success, but for those to /metrics."""
    text = ask(port, "GET", "/metrics")[2].decode()
    rows = re.findall(r'vitlab_requests_total{path="(.*?)",status="[23]\d\d"} (.*)', text)
    assert rows
    return sum(float(number) for path, number in rows if path != "/metrics")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small trial of the script itself")
    rows = run(quick=parser.parse_args().quick)
    sys.path.insert(0, str(BENCHMARKS))
    from measure import print_table

    print_table(["attack", "tried", "held"], [[name, str(tried), str(held)] for name, tried, held in rows])
    raise SystemExit(any(tried != held or not tried for _, tried, held in rows))


if __name__ == "__main__":
    main()
