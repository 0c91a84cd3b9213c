"""Known mistakes, one file per exercise: the options of variants/ that make each, and a hint in both languages.

A hint is given when its options, run on our side, reproduce the learner's numbers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(frozen=True)
class KnownMistake:
    name: str
    options: dict[str, Any]
    en: str
    zh: str

    def hint(self, language: str) -> str:
        return self.zh if language == "zh" else self.en


@cache
def known_mistakes(exercise: str) -> tuple[KnownMistake, ...]:
    table = tomllib.loads((HERE / f"{exercise.replace('-', '_')}.toml").read_text(encoding="utf-8"))
    return tuple(KnownMistake(**row) for row in table["mistake"])


def candidate_mistakes(exercise: str) -> Iterator[tuple[KnownMistake, ...]]:
    """Single mistakes, then pairs with different options."""
    yield from ((mistake,) for mistake in known_mistakes(exercise))
    for pair in combinations(known_mistakes(exercise), 2):
        if not pair[0].options.keys() & pair[1].options.keys():
            yield pair
