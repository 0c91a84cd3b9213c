"""The known mistakes: the options of `variants` that make them, and the hint for each in both languages."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Mistake:
    name: str
    options: dict[str, Any]
    en: str
    zh: str

    def hint(self, language: str) -> str:
        return self.zh if language == "zh" else self.en


@cache
def known(exercise: str) -> tuple[Mistake, ...]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return tuple(Mistake(**row) for row in table[exercise])


def suspects(exercise: str) -> Iterator[tuple[Mistake, ...]]:
    """One mistake alone, then two at once where they concern different options."""
    yield from ((mistake,) for mistake in known(exercise))
    for pair in combinations(known(exercise), 2):
        if not pair[0].options.keys() & pair[1].options.keys():
            yield pair
