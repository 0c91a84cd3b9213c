"""Attacks that take longer than a test may: on run folders, the tokenizer and the server. Prints what held.

python benchmarks/attack.py [--only runs]
"""

from __future__ import annotations

import argparse
import time
from importlib import import_module

from measure import machine

MODULES = ("runs", "tokenizer", "server")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODULES, help="one of the groups")
    only = parser.parse_args().only
    print(machine())
    print("| attack | tried | held |\n|---|---|---|")
    began, failed = time.perf_counter(), 0
    for name in MODULES if only is None else (only,):
        for attack, tried, held in import_module(f"attacks.{name}").run():
            print(f"| {attack} | {tried:,} | {held:,} |", flush=True)
            failed += tried - held
    print(f"\n{time.perf_counter() - began:.0f} s")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
