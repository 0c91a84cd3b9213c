"""The walk of docs/en/finetune.md, from an empty shell to a served, explained model: each command with its wall time.

    python benchmarks/walk.py ants-bees --weights vit_s14                  # folder with train/ and val/; a checkpoint
    python benchmarks/walk.py ants-bees --weights vit_s14 --install        # pip install into a new environment first

The commands are the documented ones, with the weights named. They run in a new folder and with an empty cache, so
nothing is stored before. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from measure import machine, print_table

PORT, PATIENCE = 8765, 300.0
REPOSITORY = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--images", type=int, default=57, help="photos that are predicted")
    args = parser.parse_args()
    print(machine(), flush=True)
    with tempfile.TemporaryDirectory() as place:
        walk(args, Path(place))


def walk(args: argparse.Namespace, place: Path) -> None:
    weights = Path(args.weights).resolve() if Path(args.weights).exists() else args.weights
    (place / "photos").symlink_to(args.folder.resolve())
    new = place / "new"
    new.mkdir()
    photos = sorted(path for path in (args.folder / "val").rglob("*") if path.is_file())
    for number, photo in enumerate(photos[:: max(1, len(photos) // args.images)][: args.images]):
        shutil.copy(photo, new / f"{number}{photo.suffix}")
    environment = {**os.environ, "VITLAB_CACHE": str(place / "cache")}
    rows: list[list[str]] = []

    def timed(shown: str, work: Callable[[], None]) -> None:
        began = time.perf_counter()
        work()
        rows.append([f"`{shown}`", f"{time.perf_counter() - began:.1f} s"])
        print(f"  {rows[-1][1]:>8}  {shown}", file=sys.stderr, flush=True)

    python = sys.executable
    if args.install:
        python = str(place / "env" / "bin" / "python")

        def install() -> None:
            venv.create(place / "env", with_pip=True)
            extras = f"{REPOSITORY}[plot,export,serve]"
            subprocess.run([python, "-m", "pip", "install", "-q", "-e", extras], check=True)

        timed('pip install -e ".[plot,export,serve]"', install)

    def run(text: str) -> None:
        words = [python, "-m", *shlex.split(text)]
        timed(text, lambda: _run(words, place, environment))

    run(f"vitlab check photos/ --model {weights}")
    run(f"vitlab train photos/ --minutes {args.minutes:g} model.init_from={weights} run.dir=runs/photos")
    run("vitlab predict runs/photos/best new/ --csv answers.csv --sort sorted/")
    run(f"vitlab explain relevance runs/photos/best new/0{photos[0].suffix} --out why.png")
    run("vitlab export runs/photos/best -o photos.onnx --data photos/")
    server: list[subprocess.Popen[bytes]] = []

    def serve() -> None:
        words = [python, "-m", "vitlab", "serve", "runs/photos/best", "--port", str(PORT)]
        server.append(subprocess.Popen(words, cwd=place, env=environment, stdout=subprocess.DEVNULL))
        _wait_for(f"http://127.0.0.1:{PORT}/health", server[0])

    try:
        timed("vitlab serve runs/photos/best (until it answers)", serve)
    finally:
        for process in server:
            process.terminate()
            process.wait()
    print_table(["command", "wall time"], rows)
    result = json.loads((place / "runs" / "photos" / "result.json").read_text(encoding="utf-8"))
    low, high = result["interval"]
    print(
        f"{result['rung']}: {result['top1']:.2%} of {result['images']} {result['split']} images "
        f"(95 % interval {low:.1%} to {high:.1%}); most frequent class {result['majority']:.1%}"
    )
    for rung in result["rungs"]:
        print(f"  {rung['title']}: {rung['val_top1']:.2%}, {rung['seconds']:.1f} s{', kept' if rung['kept'] else ''}")


def _run(words: list[str], place: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(words, cwd=place, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words[2:])} ended with code {done.returncode}")


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    began = time.perf_counter()
    while time.perf_counter() - began < PATIENCE:
        with suppress(OSError), urllib.request.urlopen(address, timeout=5) as answer:
            if answer.status == 200:
                return
        if process.poll() is not None:
            raise SystemExit(f"vitlab serve ended with code {process.returncode}")
        time.sleep(0.1)
    raise SystemExit(f"{address}: no answer in {PATIENCE:.0f} s")


if __name__ == "__main__":
    main()
