"""Build the sdist and the wheel, check them, and use the wheel in an empty environment, far from the source tree.

    python3 tools/release.py              # the files are in dist/
    python3 tools/release.py --python python3.13

The wheel is built from the sdist, in an isolated environment that has hatchling alone. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
BUILDERS = ("build==1.6.1", "twine==7.0.0")
NEEDED = {  # in the archives; a wheel without these breaks only for those who install it
    ".tar.gz": ("LICENSE", "README.md", "CHANGELOG.md", "recipes/digits.toml", "tests/conftest.py", "CITATION.cff"),
    ".whl": ("vitlab/py.typed", "vitlab/recipes/digits.toml", "vitlab/bundled/digits/model.json",
             "vitlab/serve/page/index.html", "vitlab/chinese.toml", "vitlab/learn/"),
}  # fmt: skip
COMMANDS = """
    vitlab --version
    vitlab doctor
    vitlab inspect vit_tiny
    vitlab models
    vitlab predict bundled:cifar10 sample:cat
    vitlab try --no-serve
    vitlab explain compare bundled:digits digits#3 --html
    vitlab train digits run.epochs=2 run.dir=runs/d
    vitlab eval runs/d/best digits
    vitlab runs
    vitlab export runs/d/best -o d.onnx --data digits
    vitlab predict d.onnx digits#3
    vitlab convert bundled:cifar10 copy
    vitlab embed digits -o d.parquet --model bundled:digits
    vitlab index photos -o photos.index --model bundled:clip
    vitlab search photos.index "a cat"
    vitlab zeroshot bundled:clip sample:cat --labels cat,dog
    vitlab learn
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--python", default=sys.executable, help="interpreter to try the wheel with")
    parser.add_argument("--no-try", action="store_true", help="build and check only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vitlab-release-") as scratch:
        wheel = build(Path(scratch))
        if not options.no_try:
            use(wheel, Path(scratch), options.python)


def build(scratch: Path) -> Path:
    """dist/*.tar.gz and dist/*.whl, of this version alone."""
    for old in DIST.glob("vitlab-*"):
        old.unlink()
    python = environment(scratch / "builders", sys.executable)
    run([python, "-m", "pip", "install", "-q", *BUILDERS])
    run([python, "-m", "build", "--outdir", DIST, ROOT])
    run([python, "-m", "twine", "check", "--strict", *sorted(DIST.glob("vitlab-*"))])
    sdist, wheel = next(DIST.glob("*.tar.gz")), next(DIST.glob("*.whl"))
    with tarfile.open(sdist) as tar, zipfile.ZipFile(wheel) as archive:
        names = {sdist: [name.partition("/")[2] for name in tar.getnames()], wheel: archive.namelist()}
    for file, needed in ((sdist, NEEDED[".tar.gz"]), (wheel, NEEDED[".whl"])):
        missing = [name for name in needed if not any(held.startswith(name) for held in names[file])]
        if missing:
            raise SystemExit(f"{file.name} lacks {', '.join(missing)}")
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB, {len(names[file])} files", flush=True)
    return wheel


def use(wheel: Path, scratch: Path, interpreter: str) -> None:
    """Install the wheel with the pinned versions, and run commands in an empty folder."""
    python = environment(scratch / "user", interpreter)
    started = time.monotonic()
    if sys.version_info[:2] == version_of(python):  # the pins are of one Python; another one gets what suits it
        run([python, "-m", "pip", "install", "-q", "--no-deps", "-r", ROOT / "constraints.txt"])
        run([python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", wheel])
    else:
        run([python, "-m", "pip", "install", "-q", wheel])
    print(f"installed in {time.monotonic() - started:.0f} s", flush=True)
    place = scratch / "elsewhere"
    (place / "photos").mkdir(parents=True)
    here = [python, "-c", "import vitlab, pathlib; print(pathlib.Path(vitlab.__file__).parent)"]
    package = Path(run(here, place, quiet=True).strip())
    assert ROOT not in package.parents, f"{package}: the source tree is tried, and not the wheel"
    for photo in (package / "images").rglob("*.jpg"):
        (place / "photos" / photo.name).write_bytes(photo.read_bytes())
    failed = []
    for line in filter(None, map(str.strip, COMMANDS.splitlines())):
        words = [str(python.parent / "vitlab"), *shlex.split(line)[1:]]
        started = time.monotonic()
        done = subprocess.run(words, cwd=place, env=clean(), capture_output=True, text=True, encoding="utf-8")
        good = done.returncode == 0 and "Traceback" not in done.stderr
        print(f"{'ok   ' if good else 'WRONG'} {time.monotonic() - started:5.1f} s  {line}", flush=True)
        if not good:
            failed.append(line)
            print(done.stdout[-1500:], done.stderr[-1500:])
    if not served(python, place):
        failed.append("vitlab serve")
    if failed:
        raise SystemExit(f"{len(failed)} commands failed: {'; '.join(failed)}")


def served(python: Path, place: Path) -> bool:
    """vitlab serve answers, and ends when it is asked to."""
    words = [str(python.parent / "vitlab"), "serve", "bundled:digits", "--port", "8971"]
    with subprocess.Popen(words, cwd=place, env=clean(), stderr=subprocess.PIPE, text=True, encoding="utf-8") as server:
        health: dict[str, object] = {}
        for _ in range(60):
            time.sleep(1)
            try:
                with urllib.request.urlopen("http://127.0.0.1:8971/health", timeout=5) as answer:
                    health = json.load(answer)
                break
            except OSError:
                continue
        server.terminate()
        code = server.wait(30)
    print(f"{'ok   ' if health else 'WRONG'} vitlab serve: {health}, ended with {code}", flush=True)
    return bool(health)


def environment(folder: Path, interpreter: str) -> Path:
    run([interpreter, "-m", "venv", folder])
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def version_of(python: Path) -> tuple[int, int]:
    major, minor = run([python, "-c", "import sys; print(*sys.version_info[:2])"], quiet=True).split()
    return int(major), int(minor)


def clean() -> dict[str, str]:
    """Without what would make the source tree visible."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def run(words: list[object], folder: Path | None = None, *, quiet: bool = False) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=folder, env=clean(), capture_output=True, text=True, encoding="utf-8"
    )
    if done.returncode:
        raise SystemExit(f"{shlex.join(map(str, words))}\n{done.stdout}{done.stderr}")
    if not quiet and done.stdout:
        print(done.stdout, end="", flush=True)
    return done.stdout


if __name__ == "__main__":
    main()
