"""What the benchmarks share: the machine in a line, means and spreads, tables, training runs."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from vitlab.training.loop import Silent, Stopped, fit
from vitlab.training.recipe import Recipe
from vitlab.training.run_report import environment


def machine() -> str:
    """The environment in a line; every benchmark prints it first, because a figure without it says little."""
    found = environment()
    cores = f"{platform.system()} {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    versions = f"Python {found['python']}, torch {found['torch']}, vitlab {found['vitlab']}"
    if "transformers" in sys.modules:
        versions += f", transformers {sys.modules['transformers'].__version__}"
    return f"{cores}, {found['threads']} threads; {versions}"


def mean_and_spread(values: Sequence[float]) -> str:
    """98.32 % (97.48 .. 99.16 %)"""
    return f"{100 * statistics.mean(values):.2f} % ({100 * min(values):.2f} .. {100 * max(values):.2f} %)"


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.1f} minutes"


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As docs/benchmarks.md has it."""
    for row in (head, ["---"] * len(head), *rows):
        print(f"| {' | '.join(row)} |" if row[0] != "---" else f"|{'|'.join(row)}|", flush=True)


class Watch(Silent):
    """What a training run says on its way, on stderr: the table stays alone on stdout."""

    def note(self, text: str) -> None:
        print(f"  {text}", file=sys.stderr, flush=True)


def fit_or_go_on(recipe: Recipe, run: Path) -> dict[str, Any]:
    """A new run, or the rest of one that was stopped; what result.json holds."""
    try:
        return fit(recipe, run, resume=(run / "recipe.toml").is_file(), show=Watch())
    except Stopped:
        raise SystemExit("stopped. With --runs FOLDER the same command goes on from here.") from None
