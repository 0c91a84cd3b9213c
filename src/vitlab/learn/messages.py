"""messages.toml: the messages of the check, by key and language."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def message(key: str, language: str, **values: Any) -> str:
    return _table()[key][language].format(**values)


def step_name(step: str, language: str) -> str:
    kind, _, number = step.partition(" ") if step.startswith("block ") else (step, "", "")
    return _table()["steps"][kind][language].format(number=number)
