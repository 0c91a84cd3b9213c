"""`vitlab serve` under load: overload, batching, SIGTERM, damaged pictures, decompression bombs; each passes or fails.

    python benchmarks/server.py [--seconds 60] [--fuzz 10000] [--model NAME] [--processes 3] [--quick]

Clients are processes on the same machine (server_client.py); all traffic is to 127.0.0.1. Every answer is compared with
`vitlab.predict` on the same file, to 1e-5. Capacity is what the server answers when 2 * max_batch connections ask
without a pause. At SIGTERM a request is lost if it was sent whole before the signal and got no answer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch
from measure import machine, print_table
from PIL import Image

import vitlab

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "serve"))
from test_fuzz import mutated  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_limits import bomb  # noqa: E402  # pyright: ignore[reportMissingImports]

BATCH, QUEUE = 8, 64
ROWS: list[list[str]] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of the overload")
    parser.add_argument("--load", type=float, default=4, help="times the capacity")
    parser.add_argument("--fuzz", type=int, default=10_000, help="damaged pictures")
    parser.add_argument("--model", default="vit_tiny", help="a model's name; its weights are random")
    parser.add_argument("--processes", type=int, default=3, help="of clients")
    parser.add_argument("--quick", action="store_true", help="a small trial of the script itself")
    args = parser.parse_args()
    probe, rounds, signals = 8.0, 3, 5
    if args.quick:
        args.seconds, args.fuzz, args.model, probe, rounds, signals = 6, 300, "vit_digits", 1.5, 1, 1
    print(f"{machine()}\nmodel {args.model}, batches of {BATCH}, a queue of {QUEUE}\n")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.model, args.processes)
        batching(bench, probe, rounds)
        overload(bench, args.seconds, args.load, probe)
        sigterm(bench, signals, probe)
        fuzz(bench, args.fuzz)
        bombs(bench)
    print_table(["What", "measured", "limit", ""], ROWS)
    raise SystemExit(any(row[-1] != "pass" for row in ROWS))


def note(what: str, measured: str, limit: str, passed: bool) -> None:
    ROWS.append([what, measured, limit, "pass" if passed else "FAIL"])
    print(f"  {what}: {measured} ({ROWS[-1][-1]})", file=sys.stderr, flush=True)


class Bench:
    """The model, the pictures and what is true of them."""

    def __init__(self, here: Path, name: str, processes: int):
        self.here, self.processes = here, processes
        torch.manual_seed(0)
        model = vitlab.create(name, classes=10)
        model.get_parameter("head.weight").data.normal_(std=0.5)  # a new head gives every class the same chance
        self.checkpoint = vitlab.save(model, here / "model")
        self.images = []
        for number in range(32):
            coarse = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
            size = (320 + 10 * number, 240)
            self.images.append(here / f"{number}.jpg")
            Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(self.images[-1], quality=85)
        self.expected = [p.scores for p in vitlab.predict(vitlab.load(self.checkpoint), self.images)]

    def ask(self, server: Server, **job: Any) -> Clients:
        """Clients that have begun; what is to be shared among them is shared."""
        shared = {key: job.pop(key) / self.processes for key in ("rate", "count") if key in job}
        job = {"path": "/predict", "images": list(map(str, self.images)), "expected": self.expected, **job}
        job |= {"port": server.port, "rate": shared.get("rate", 0)}
        job |= {"count": round(shared["count"])} if "count" in shared else {}
        return Clients(self.here, [{**job, "first": 7 * n} for n in range(self.processes)])


class Clients:
    def __init__(self, here: Path, jobs: list[dict[str, Any]]):
        self.running = []
        for number, job in enumerate(jobs):
            (here / f"job{number}.json").write_text(json.dumps(job), encoding="utf-8")
            command = [sys.executable, str(HERE / "server_client.py"), str(here / f"job{number}.json")]
            out = (here / f"rows{number}.json").open("w+", encoding="utf-8")
            self.running.append((subprocess.Popen(command, stdout=out), out))

    def rows(self) -> list[list[Any]]:
        """began, sent, done, status, what is wrong: of every request, when all have ended."""
        found = []
        for process, out in self.running:
            assert process.wait(timeout=600) == 0, "a client failed"
            out.seek(0)
            found += json.load(out)
            out.close()
        return found


class Server:
    def __init__(self, bench: Bench, *, max_batch: int = BATCH, more: tuple[str, ...] = ()):
        options = ["--port", "0", "--max-batch", str(max_batch), "--queue", str(QUEUE), *more]
        command = [sys.executable, "-m", "vitlab", "serve", str(bench.checkpoint), *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"http://127\.0\.0\.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise SystemExit("the server did not start")
        bench.ask(self, connections=2 * BATCH, count=4 * BATCH * bench.processes).rows()  # every size of batch once

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        if self.alive:
            self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=120)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, more: int) -> None:
        """Until so many more pictures were asked about."""
        first = None
        while first is None or self._asked() < first + more:
            first = self._asked() if first is None else first
            time.sleep(0.02)

    def _asked(self) -> float:
        with urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=60) as page:
            return sum(map(float, re.findall(r'vitlab_requests_total{path="/predict".*} (.*)', page.read().decode())))

    @property
    def rss(self) -> float:
        """MB."""
        text = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8")
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1e3  # type: ignore[index]


def answered(rows: list[list[Any]]) -> list[list[Any]]:
    return [row for row in rows if row[3] == 200]


def wrong(rows: list[list[Any]]) -> list[str]:
    return [row[4] for row in rows if row[4] is not None]


def per_second(rows: list[list[Any]]) -> float:
    """Pictures answered a second, between the first and the last answer."""
    done = sorted(row[2] for row in answered(rows))
    return (len(done) - 1) / (done[-1] - done[0])


def batching(bench: Bench, seconds: float, rounds: int) -> None:
    """In batches and one by one, in turns, by servers that both stand ready."""
    with Server(bench) as batches, Server(bench, max_batch=1) as singly:
        for name, connections in (("one client", 1), (f"{2 * BATCH} clients", 2 * BATCH)):
            speeds: dict[str, list[float]] = {"batches": [], "one by one": []}
            for _ in range(rounds):
                for kind, server in (("batches", batches), ("one by one", singly)):
                    clients = 1 if connections == 1 else bench.processes
                    job = dict(connections=max(1, connections // clients), seconds=seconds)
                    processes, bench.processes = bench.processes, clients
                    rows = bench.ask(server, **job).rows()
                    bench.processes = processes
                    assert not wrong(rows), wrong(rows)[:3]
                    speeds[kind].append(per_second(rows))
            together, alone = median(speeds["batches"]), median(speeds["one by one"])
            spread = f"{together:.1f} and {alone:.1f} pictures/s, {together / alone:.2f}x"
            enough = together >= (0.97 if connections == 1 else 1.0) * alone
            limit = ">= 0.97x (there is nothing to batch)" if connections == 1 else ">= 1x"
            note(f"In batches and one by one, {name}", spread, limit, enough)


def overload(bench: Bench, seconds: float, load: float, probe: float) -> list[list[Any]]:
    """Returns the rows of all requests."""
    with Server(bench) as server:
        capacity = per_second(bench.ask(server, connections=2 * BATCH // bench.processes + 1, seconds=probe).rows())
        clients = bench.ask(server, connections=400, rate=load * capacity, seconds=seconds)
        began, early, late = time.monotonic(), 0.0, 0.0
        while time.monotonic() - began < seconds:
            time.sleep(0.25)
            late = server.rss
            early = early or (late if time.monotonic() - began >= min(10.0, seconds / 3) else 0.0)
        rows = clients.rows()
        alive = server.alive
    codes = Counter(row[3] for row in rows)
    offered = len(rows) / seconds
    note(
        "Capacity, and what was asked",
        f"{capacity:.1f}/s, {offered:.1f}/s",
        f">= {0.8 * load:.1f}x",
        offered >= 0.8 * load * capacity,
    )
    note("The process", "alive" if alive else "gone", "alive", alive)
    note("Answers", f"{codes[200]} right, {codes[503]} told to come back", "200 or 503", set(codes) == {200, 503})
    note("Wrong, lost, or 503 without Retry-After", str(len(wrong(rows))), "0", not wrong(rows))
    for text in wrong(rows)[:3]:
        print(f"    {text}", file=sys.stderr)
    pace = per_second(rows)
    limit = (QUEUE + 2 * BATCH) / pace
    p95 = quantiles([row[2] - row[0] for row in answered(rows)], n=20)[-1]
    note(f"p95 of those answered, at {pace:.1f}/s", f"{p95:.2f} s", f"queue + 2 batches = {limit:.2f} s", p95 <= limit)
    refused = quantiles([row[2] - row[0] for row in rows if row[3] == 503] or [0.0, 0.0], n=20)[-1]
    note("p95 of the refused", f"{1e3 * refused:.0f} ms", "below the above", refused <= limit)
    note(
        "Memory at 10 s and at the end",
        f"{early:.0f} and {late:.0f} MB, {late / early:.3f}x",
        "<= 1.05x",
        late <= 1.05 * early,
    )
    return rows


def sigterm(bench: Bench, times: int, probe: float) -> None:
    lost = before = 0
    codes, chance = [], random.Random(0)
    for _ in range(times):
        with Server(bench) as server:
            clients = bench.ask(server, connections=30, seconds=600)  # until nobody listens
            server.wait_for(100)
            time.sleep(probe * chance.random() / 2)
            moment = time.monotonic()  # one clock for all processes
            server.process.send_signal(signal.SIGTERM)
            rows = clients.rows()
            codes.append(server.process.wait(timeout=120))
        sent = [row for row in rows if row[1] is not None and row[1] < moment and (row[2] or 1e18) > moment]
        before += len(sent)
        lost += sum(row[2] is None for row in sent)
        bad = [text for text in wrong(answered(rows)) if text]
        lost += len(bad)
    note(f"SIGTERM under load, {times} times", f"{lost} lost of {before} under way", "0", lost == 0 and before > 0)
    note("Exit codes", ", ".join(map(str, codes)), "0", not any(codes))


def fuzz(bench: Bench, count: int) -> None:
    chance = random.Random(0)
    seeds = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        path = bench.here / f"seed.{kind.lower()}"
        with Image.open(bench.images[0]) as image:
            image.resize((61, 43)).save(path, kind)
        seeds.append(path.read_bytes())
    codes: Counter[int] = Counter()
    wrongs: list[str] = []
    with Server(bench) as server:
        for first in range(0, count, 1000):
            files = []
            for number in range(first, min(first + 1000, count)):
                files.append(bench.here / f"fuzz{number % 1000}")
                files[-1].write_bytes(mutated(seeds[number % len(seeds)], chance))
            parts = [files[n :: bench.processes] for n in range(bench.processes)]
            job = {"port": server.port, "path": "/predict", "expected": None, "connections": 4}
            clients = Clients(bench.here, [{**job, "images": list(map(str, p)), "count": len(p)} for p in parts])
            rows = clients.rows()
            codes.update(row[3] for row in rows)
            wrongs += wrong(rows)
        after = bench.ask(server, connections=4, count=60).rows()
        alive = server.alive
    told = ", ".join(f"{n} x {code}" for code, n in sorted(codes.items()))
    right = all(code == 200 or 400 <= code < 500 for code in codes) and sum(codes.values()) == count and not wrongs
    note(f"{count} damaged pictures", told, "200 and 4xx only", right)
    fine = alive and not wrong(after) and len(answered(after)) == len(after)
    note("Afterwards", "alive, answers right" if fine else "not as before", "alive, answers right", fine)


def bombs(bench: Bench) -> None:
    path = bench.here / "bomb.png"
    path.write_bytes(bomb(50_000, 50_000))
    second = bench.here / "bomb2.png"
    second.write_bytes(bomb(12_000, 12_000))
    with Server(bench) as server:
        before = highest = server.rss
        job = {"images": [str(path), str(second)], "expected": None, "connections": 4, "count": 30}
        clients = bench.ask(server, **job)
        while any(process.poll() is None for process, _ in clients.running):
            highest = max(highest, server.rss)
            time.sleep(0.005)
        rows = clients.rows()
    codes = Counter(row[3] for row in rows)
    slowest = max((row[2] or 1e9) - row[0] for row in rows)
    note(
        "Decompression bombs",
        f"{dict(codes)}, slowest {slowest:.2f} s",
        "413 within 1 s",
        set(codes) == {413} and slowest < 1,
    )
    note("Memory they took", f"{highest - before:.0f} MB", "< 200 MB", highest - before < 200)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))
    main()
