"""How long `import vitlab` and `vitlab --help` take, each in a process of its own, beside an empty Python.

python benchmarks/startup.py [--rounds 21]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from measure import machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    rounds = parser.parse_args().rounds
    print(machine())
    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import vitlab": [sys.executable, "-c", "import vitlab"],
        "vitlab --help": [str(Path(sys.executable).parent / "vitlab"), "--help"],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(rounds + 1):
        for name, command in commands.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            times[name].append(time.perf_counter() - start)
    for name, values in times.items():
        values = values[1:]  # the first round warms the file cache
        low, median, high = statistics.quantiles(values, n=4)
        print(f"{name:15s} median {median:.3f} s, half of the runs in {low:.3f} .. {high:.3f} s, n={len(values)}")


if __name__ == "__main__":
    main()
