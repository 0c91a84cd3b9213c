"""Install vitlab and the exact versions of constraints.txt into .venv, and show how far it is.

    python3 tools/setup_venv.py          # what running needs
    python3 tools/setup_venv.py --dev    # and what the tests, checks and documentation add, from constraints-dev.txt

Two pip processes share the packages of a list, because pip itself uses one core. Needs Python's standard library only.
"""

from __future__ import annotations  # read by older Pythons up to the message below

import re
import subprocess
import sys
import time
import venv
from pathlib import Path
from threading import Thread
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar=off"]
LARGE = 10  # MB from which a download is named
LARGEST = "torch"  # about half of what running needs: one process installs it, the other one the rest
WEIGHS_LIKE = 80  # as many other packages take about as long


def main(dev: bool) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 it is run by whatever python3 is
        raise SystemExit(f"vitlab needs Python 3.11 or newer, this is {sys.version.split()[0]}: make PYTHON=python3.11")
    started = time.monotonic()
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    lists = [ROOT / "constraints.txt", *([ROOT / "constraints-dev.txt"] if dev else [])]
    install_pins([line for path in lists for line in path.read_text(encoding="utf-8").splitlines() if "==" in line])
    # Adds what another platform needs beyond the lists, and says why where a package does not exist for it.
    constraints = [word for path in lists for word in ("-c", str(path))]
    run_pip([[*constraints, "-e", f"{ROOT}{'[dev]' if dev else ''}"]])
    print(f"installed in {time.monotonic() - started:.0f} s; {VENV.name} has {size_of(VENV) / 1e6:,.0f} MB", flush=True)


def install_pins(pins: list[str]) -> None:
    """Packages of the lists that are not there, in two processes."""
    present = installed()
    missing = [pin for pin in pins if canonical(pin) not in present]
    if not missing:
        return
    largest = [pin for pin in missing if pin.startswith(f"{LARGEST}==")]
    others = [pin for pin in missing if pin not in largest]
    share = max(0, (len(others) - WEIGHS_LIKE) // 2)  # of them, beside the largest
    halves = [largest + others[:share], others[share:]] if largest else [others[::2], others[1::2]]
    print(f"{len(missing)} of {len(pins)} packages are to be installed", flush=True)
    run_pip([["--no-deps", *half] for half in halves if half], {canonical(pin) for pin in missing})


def run_pip(calls: list[list[str]], wanted: set[str] | None = None) -> None:
    """All calls at the same time. Where packages are wanted, a failure is no end: main tries them again."""
    pipes: Any = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8", errors="replace")
    processes = [subprocess.Popen([*PIP, *call], **pipes) for call in calls]
    readers = [Thread(target=show_output, args=(process,)) for process in processes]
    for reader in readers:
        reader.start()
    if wanted:
        show_progress(processes, wanted)
    for reader in readers:
        reader.join()
    if not wanted and any(process.wait() for process in processes):
        raise SystemExit("pip failed: see above")


def show_output(process: subprocess.Popen[str]) -> None:
    """Errors, and the packages that take long to fetch. Everything else pip says is left out."""
    assert process.stdout is not None
    failing = False
    for line in process.stdout:
        failing = failing or "error" in line.lower().split(":")[0]
        file = re.match(r" *(Downloading|Using cached|Processing) (\S+?)( \((.+)\))?$", line.rstrip())
        if failing:
            print(f"  {line.rstrip()}", flush=True)
        elif file is not None:
            verb, name, _, size = file.groups()
            local = Path(name)
            size = size or (f"{local.stat().st_size / 1e6:.1f} MB" if local.is_file() else "")
            number, _, unit = size.partition(" ")
            if unit == "GB" or (unit == "MB" and float(number) >= LARGE):
                print(f"  {'unpacking' if verb == 'Processing' else verb.lower()} {local.name} ({size})", flush=True)


def show_progress(processes: list[subprocess.Popen[str]], wanted: set[str]) -> None:
    """One line, rewritten in a terminal every two seconds; a line every ten seconds elsewhere."""
    terminal = sys.stdout.isatty()
    shown = time.monotonic()
    while any(process.poll() is None for process in processes):
        time.sleep(0.5)
        if time.monotonic() - shown < (2 if terminal else 10):
            continue
        shown = time.monotonic()
        line = f"  {len(wanted & installed())} of {len(wanted)} packages, {size_of(VENV) / 1e6:,.0f} MB"
        print(f"\r{line}  " if terminal else line, end="" if terminal else "\n", flush=True)
    if terminal:
        print("\r", end="")


def installed() -> set[str]:
    """name==version of the packages in the environment. RECORD is the last file that pip writes of a package."""
    records = VENV.glob("[Ll]ib*/**/site-packages/*.dist-info/RECORD")
    return {canonical(record.parent.stem.replace("-", "==", 1)) for record in records}


def canonical(pin: str) -> str:
    """PEP 503's name and the version without its build: torch==2.13.0+cpu is torch==2.13.0"""
    name, _, version = pin.strip().partition("==")
    return f"{re.sub(r'[-_.]+', '-', name).lower()}=={version.partition('+')[0]}"


def size_of(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.lstat().st_size
        except FileNotFoundError:  # pip works there meanwhile
            continue
    return total


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--dev"]):
        raise SystemExit(__doc__)
    main(dev="--dev" in sys.argv)
