"""A page without a server in headless Chromium: bytes over the wire, seconds until it can be used, time of a pass.

    vitlab page build site && python benchmarks/static_page.py site
    python benchmarks/static_page.py site --visits 5

The folder is served with gzip, as web servers do, and nothing is cached between visits. The machine must be idle.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from mimetypes import guess_type
from pathlib import Path
from statistics import median
from typing import Any

SHOWN = {  # what a visitor waits for, in this order
    "answer": "() => Boolean(window.vitlab?.data.base)",
    "heat": "() => Boolean(window.vitlab?.data.heat)",
    "usable": "() => Boolean(window.vitlab?.data.rows)",
}
PASS = """async () => {
  const { source, data } = window.vitlab, times = [];
  for (let n = 1; n <= 7; n++) {
    const began = performance.now();
    await source.forward(data.look, { temperature: 1 + n / 100 });
    times.push(performance.now() - began);
  }
  return times;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--visits", type=int, default=5)
    options = parser.parse_args()
    sent: list[int] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(options.folder.resolve(), sent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps(measured(f"http://127.0.0.1:{server.server_port}/", options.visits, sent), indent=2))
    server.shutdown()


def handler(folder: Path, sent: list[int]) -> type[BaseHTTPRequestHandler]:
    @cache
    def packed(path: Path) -> bytes:
        return gzip.compress(path.read_bytes(), 6)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = folder / (self.path.partition("?")[0].lstrip("/") or "index.html")
            found = path.is_file() and folder in path.resolve().parents
            body = packed(path) if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", guess_type(path.name)[0] or "application/octet-stream")
            self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            sent.append(len(body))

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


def measured(address: str, visits: int, sent: list[int]) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    seconds: dict[str, list[float]] = {name: [] for name in SHOWN}
    passes: list[float] = []
    fetched = 0
    with sync_playwright() as playwright:
        for _ in range(visits):
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            sent.clear()
            began = time.perf_counter()
            page.goto(address)
            for name, condition in SHOWN.items():
                while not page.evaluate(condition):
                    page.wait_for_timeout(10)
                seconds[name].append(time.perf_counter() - began)
            fetched = sum(sent)
            passes += page.evaluate(PASS)
            browser.close()
    return {
        "megabytes": round(fetched / 1e6, 2),
        "seconds": {name: round(median(values), 2) for name, values in seconds.items()},
        "pass_milliseconds": round(median(passes), 1),
        "visits": visits,
    }


if __name__ == "__main__":
    main()
