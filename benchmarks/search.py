"""An index of many pictures: made, killed, changed; and questions to many vectors, beside a comparison with all.

    python benchmarks/search.py [--images 10000] [--vectors 100000] [--queries 200] [--quick]

Pictures are drawn by a formula, embedded by bundled:cifar10. The vectors of the second part are made up, as embeddings
are: around a common direction, in groups of very unequal sizes, along few of the 512 directions. Questions are new
draws ("a picture"), and draws shifted to where no picture is, as CLIP's texts are ("words").
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import duration, machine, print_table
from PIL import Image

import vitlab
from vitlab.export.timing import alternate, summary
from vitlab.inference import embed, fingerprint
from vitlab.search import Counts, Index, graph, update
from vitlab.search.database import ImageDatabase, ImageRecord, MadeBy

MODEL = "bundled:cifar10"
BATCH = 64
WIDTH, GROUPS = 512, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--vectors", type=int, default=100_000)
    parser.add_argument("--queries", type=int, default=200, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="a small trial of the script itself")
    args = parser.parse_args()
    if args.quick:
        args.images, args.vectors, args.queries = 300, 2_000, 20
        graph.EXACT = 0  # type: ignore[misc]
    print(machine() + "\n")
    with tempfile.TemporaryDirectory() as here:
        pictures(Path(here), args.images)
        print()
        vectors(Path(here), args.vectors, args.queries)


# ------------------------------------------------------------------------------------------------------------ pictures


def pictures(here: Path, count: int) -> None:
    for number in range(count):
        draw(here / "photos" / f"{number % 100:02d}" / f"{number}.png", number)
    model = vitlab.load(MODEL)
    rows = [["made", *made(model, here / "photos", here / "ix", Counts(new=count, embedded=count, images=count))]]
    same = Counts(unchanged=count, images=count)
    rows += [["again, nothing changed", *made(model, here / "photos", here / "ix", same)]]
    expected = disturb(here / "photos", count)
    rows += [["after some changes", *made(model, here / "photos", here / "ix", expected)]]
    print_table(["Index", "seconds", "embedded", "new", "changed", "moved", "removed", "unchanged"], rows)
    killed(model, here, expected.images)


def draw(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((32, 32), Image.Resampling.BICUBIC).save(path)


def disturb(folder: Path, count: int) -> Counts:
    """A hundredth of the pictures is new, changed, moved or removed, each; ten hundredths have a new time only."""
    part = count // 100
    files = sorted(folder.rglob("*.png"), key=lambda path: int(path.stem))
    for number in range(part):
        draw(folder / "new" / f"{count + number}.png", count + number)
        draw(files[number], 2 * count + number)
        files[part + number].rename(folder / "new" / f"moved-{number}.png")
        files[2 * part + number].unlink()
    for path in files[3 * part : 13 * part]:
        os.utime(path)
    unchanged = count - 3 * part
    return Counts(part, part, part, unchanged, 2 * part, embedded=2 * part, images=unchanged + 3 * part)


def made(model: Any, folder: Path, index: Path, expected: Counts) -> list[str]:
    about = MadeBy(checkpoint=MODEL, fingerprint=fingerprint(model), reads_text=False)
    start = time.perf_counter()
    counts = update(index, folder, about, partial(embed, model, batch_size=BATCH), batch_size=BATCH)
    seconds = time.perf_counter() - start
    assert counts == expected, (counts, expected)
    return [f"{seconds:.1f}", *(str(getattr(counts, k)) for k in ("embedded", "new", "changed", "moved", "removed")),
            str(counts.unchanged)]  # fmt: skip


def killed(model: Any, here: Path, count: int) -> None:
    """A process of its own is killed when a third is done; another goes on; the result is that of one that was not."""
    command = [sys.executable, "-m", "vitlab", "index", str(here / "photos"), "-o", str(here / "killed")]
    process = subprocess.Popen([*command, "--model", MODEL, "--batch-size", str(BATCH), "--device", "cpu"])
    while held(here / "killed") < count // 3:
        assert process.poll() is None, "it was done before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = held(here / "killed")
    about = MadeBy(checkpoint=MODEL, fingerprint=fingerprint(model), reads_text=False)
    look = partial(embed, model, batch_size=BATCH)
    counts = update(here / "killed", here / "photos", about, look, batch_size=BATCH)
    one, other = everything(here / "ix"), everything(here / "killed")
    assert one.keys() == other.keys()
    difference = max(float(np.abs(one[path] - other[path]).max()) for path in one)
    print(
        f"\nkilled with {before} of {count} written; then {counts.embedded} embedded, {counts.unchanged} left alone: "
        f"{before + counts.embedded - count} twice; largest difference to an index that was not killed {difference:.1e}"
    )
    assert before + counts.embedded == count


def held(index: Path) -> int:
    if not ImageDatabase.exists(index / "pictures.sqlite"):
        return 0
    with ImageDatabase(index / "pictures.sqlite") as database:
        return len(database)


def everything(index: Path) -> dict[str, np.ndarray]:
    with ImageDatabase(index / "pictures.sqlite") as database:
        numbers = database.numbers()
        paths = database.paths(numbers)
        parts = [zip(part.tolist(), found, strict=True) for part, found in database.vectors(numbers)]
        return {paths[number]: vector for part in parts for number, vector in part}


# ------------------------------------------------------------------------------------------------------------- vectors


def vectors(here: Path, count: int, queries: int) -> None:
    draws = Embeddings(seed=0)
    known = draws.pictures(count)
    index = here / "vectors"
    index.mkdir()
    about = {"checkpoint": "made up", "fingerprint": "", "reads_text": True}
    with ImageDatabase.create(index / "pictures.sqlite", {"folder": "/photos", "made_by": about}) as database:
        for start in range(0, count, 1000):
            part = enumerate(known[start : start + 1000], start)
            database.put(ImageRecord(f"{number}.jpg", 1, 1, b"%d" % number, vector) for number, vector in part)
        start = time.perf_counter()
        graph.update_graph(database, index / graph.FILE)
        print(f"graph of {count:,} vectors made in {duration(time.perf_counter() - start)}", end="; ")
    size = sum(path.stat().st_size for path in index.iterdir())
    print(f"index {size / 1e6:.0f} MB, vectors alone {known.nbytes / 1e6:.0f} MB\n")
    start = time.perf_counter()
    with Index(index) as opened:
        opened.search(known[0])
        first = time.perf_counter() - start
        rows = []
        for kind, asked in (("a picture", draws.pictures(queries)), ("words", draws.words(queries))):
            rows += ask(opened, known, asked, kind)
    print_table(["Question", "how", "median ms", "half of them in", "recall@10"], rows)
    print(f"\nopened and asked for the first time in {1e3 * first:.0f} ms")


def ask(index: Index, known: np.ndarray, asked: np.ndarray, kind: str) -> list[list[str]]:
    found: dict[str, list[set[int]]] = {"index": [], "all compared (numpy)": []}
    turn = {name: iter([asked[0], asked[0], *asked]) for name in found}  # two to warm up

    def by_index() -> None:
        found["index"].append({int(hit.path.stem) for hit in index.search(next(turn["index"]), 10)})

    def by_all() -> None:
        scores = known @ next(turn["all compared (numpy)"])
        found["all compared (numpy)"].append(set(np.argpartition(-scores, 10)[:10].tolist()))

    times = alternate({"index": by_index, "all compared (numpy)": by_all}, len(asked))
    truth = found["all compared (numpy)"]
    rows = []
    for name, values in times.items():
        t = summary([1e3 * value for value in values])
        recall = np.mean([len(a & b) / 10 for a, b in zip(found[name][2:], truth[2:], strict=True)])
        spread = f"{t['quarter']:.1f} .. {t['three_quarters']:.1f} ms"
        rows.append([f"{kind}, n={t['n']}", name, f"{t['median']:.1f}", spread, f"{recall:.3f}"])
    return rows


class Embeddings:
    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        spectrum = np.arange(1, WIDTH + 1) ** -0.5  # variance falls along the directions
        turn, _ = np.linalg.qr(self.random.standard_normal((WIDTH, WIDTH)))
        self.shape = (spectrum[:, None] * turn).astype(np.float32)
        self.common, self.gap = 0.8 * self._draw(1)[0], 1.5 * self._draw(1)[0]
        self.centres = self._draw(GROUPS)
        sizes = np.arange(1, GROUPS + 1) ** -1.0  # a few things are in very many pictures
        self.sizes = sizes / sizes.sum()

    def _draw(self, count: int) -> np.ndarray:
        """(count, WIDTH), of length about 1."""
        x = self.random.standard_normal((count, WIDTH), dtype=np.float32) @ self.shape
        return x / np.linalg.norm(x, axis=1).mean()

    def pictures(self, count: int, shift: float = 0.0) -> np.ndarray:
        group = self.random.choice(GROUPS, count, p=self.sizes)
        x = self.common + self.centres[group] + 0.6 * self._draw(count) + shift * self.gap
        return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)

    def words(self, count: int) -> np.ndarray:
        return self.pictures(count, shift=1.0)


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
