"""vitlab doctor."""

from __future__ import annotations

from pathlib import Path

from vitlab.cli.console import out, print_json
from vitlab.training.doctor import check_installation, check_run

MARKS = {True: "ok ", False: "BAD", None: "   "}


def run(folder: Path | None, json: bool) -> None:
    if folder is not None:
        rows = [(well, words) for well, words in check_run(folder)]
        found = [{"ok": well, "says": words} for well, words in rows]
    else:
        installed = check_installation()
        rows = [(well, f"{what:16s} {words}") for what, well, words in installed]
        found = [{"what": what, "ok": well, "says": words} for what, well, words in installed]
    if json:
        print_json(found)
    else:
        console = out(markup=False)
        for well, words in rows:
            console.print(f"{MARKS[well]} {words}")
    if any(well is False for well, _ in rows):
        raise SystemExit(1)
