"""The page of `vitlab serve` in headless Chromium: time to the first picture, frames per second while it plays, memory.

    python benchmarks/page.py                                       # the default model
    python benchmarks/page.py bundled:dino                          # another one
    python benchmarks/page.py CHECKPOINT --image-size 518           # a large one
    python benchmarks/page.py vit_base_patch16_224 --new --visits 3 # an architecture, with random weights

The machine must be idle: Chromium and the server share its cores. Frames are counted by requestAnimationFrame, over
whole seconds of playing, all steps of one block included. `block_s` is the time until a block stands open after a
click, `knob_s` until the answer has followed a knob, each the median of BLOCKS.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import vitlab
from vitlab.checkpoints.bundled import DEFAULT

BLOCKS = 5
READY = "window.vitlab && vitlab.data.now && vitlab.data.heat && vitlab.data.rows"
COUNT = """(seconds) => new Promise((done) => {
  const gaps = []; let last = performance.now(); const end = last + 1000 * seconds;
  const frame = (now) => { gaps.push(now - last); last = now; now < end ? requestAnimationFrame(frame) : done(gaps); };
  requestAnimationFrame(frame);
})"""
OPEN_BLOCKS = """async (count) => {
  const { data, setState } = window.vitlab;
  const until = async (done) => { while (!done()) await new Promise(requestAnimationFrame); };
  const seconds = { block: [], knob: [] };
  for (let i = 0; i < count; i++) {
    const layer = Math.round(i * (data.model.depth - 1) / Math.max(count - 1, 1));
    let began = performance.now();
    setState({ layer, step: "norm1" });
    await until(() => data.block?.layer === layer && document.querySelector(".block.open .stage"));
    seconds.block.push((performance.now() - began) / 1000);
    setState({ step: "block" });
    await until(() => !data.block);
    if (!data.model.offers.includes("edit")) continue;
    const before = data.now;
    began = performance.now();
    setState({ edit: { temperature: 2 + i } });
    await until(() => data.now !== before);
    seconds.knob.push((performance.now() - began) / 1000);
  }
  setState({ edit: {} });
  return seconds;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT)
    parser.add_argument("--new", action="store_true", help="MODEL is an architecture; its weights are random")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--seconds", type=float, default=20, help="of playing")
    parser.add_argument("--visits", type=int, default=5, help="for the time to the first picture")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.new:
            vitlab.save(vitlab.create(options.model), f"{folder}/{options.model}")
            options.model = f"{folder}/{options.model}"
        run(options)


def run(options: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "vitlab", "serve", options.model, "--port", "0"]
    command += ["--image-size", str(options.image_size)] if options.image_size else []
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    try:
        result = measured(address_of(server), options.seconds, options.visits)
        print(json.dumps(result | {"server_peak_mb": peak_mb(server.pid)}, indent=2))
    finally:
        server.terminate()
        server.wait(60)


def peak_mb(process: int) -> int:
    """The most memory that a process has held: VmHWM of Linux."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    (kilobytes,) = re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return round(int(kilobytes) * 1024 / 1e6)


def address_of(server: subprocess.Popen[str]) -> str:
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://[\d.:]+", line):
            address = found[0]
            break
    else:
        raise RuntimeError("the server has ended")
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{address}/ready").close()
            return address
        except OSError:
            time.sleep(0.2)
    raise RuntimeError("the server does not become ready")


def visit(browser: Any, address: str) -> tuple[Any, float]:
    """The page in a window with an empty cache, and the seconds until its picture was complete."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}, bypass_csp=True).new_page()
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_function(READY, timeout=600_000)
    return page, time.perf_counter() - began


def measured(address: str, seconds: float, visits: int) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    path = next(found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page, first = visit(browser, address)
        times = [first, *(visit(browser, address)[1] for _ in range(visits - 1))]
        page.evaluate("vitlab.setState({ step: 'positions' })")
        page.select_option("#speed", "2")
        page.click("#play")
        gaps = sorted(page.evaluate(COUNT, seconds))
        opened: dict[str, list[float]] = page.evaluate(OPEN_BLOCKS, BLOCKS)
        heap = page.evaluate("performance.memory.usedJSHeapSize")
        browser.close()
    metrics = urllib.request.urlopen(f"{address}/metrics").read().decode()
    memory = re.search(r"^process_resident_memory_bytes (\S+)", metrics, re.MULTILINE)
    return {
        "first_picture_s": round(median(times), 3),
        "frames_per_second": round(1000 * len(gaps) / sum(gaps), 1),
        "slowest_percent_of_frames_ms": round(gaps[int(0.99 * (len(gaps) - 1))], 1),
        **{f"{name}_s": round(median(values), 3) for name, values in opened.items() if values},
        "server_mb": round(float(memory[1]) / 1e6) if memory else None,
        "page_heap_mb": round(heap / 1e6, 1),
    }


if __name__ == "__main__":
    main()
