"""Known mistakes: the variant of each (variants.py), and a hint in both languages."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any


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
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(KnownMistake(**row) for row in table[exercise])


def candidate_mistakes(exercise: str) -> Iterator[tuple[KnownMistake, ...]]:
    """Single mistakes, then pairs with different options."""
    yield from ((mistake,) for mistake in known_mistakes(exercise))
    for pair in combinations(known_mistakes(exercise), 2):
        if not pair[0].options.keys() & pair[1].options.keys():
            yield pair
