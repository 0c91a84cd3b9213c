"""English or Chinese: what is asked for, or what the terminal's locale says; and chinese.toml, the one table of words.

Only what people read is translated: help, and remarks and errors on stderr. JSON, tables and files stay as they are.
"""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from vitlab.errors import UsageError

Language = Literal["en", "zh"]


def language(asked: str | None = None) -> Language:
    """--lang, then VITLAB_LANG, then the locale by POSIX's order; English where none says Chinese."""
    if asked is not None and asked not in ("en", "zh"):
        raise UsageError(f"--lang {asked!r} is not known: use en or zh.")
    said = next((v for k in ("VITLAB_LANG", "LC_ALL", "LC_MESSAGES", "LANG") if (v := os.environ.get(k))), "")
    return "zh" if (asked or said).lower().startswith("zh") else "en"


def spoken(text: str) -> str:
    """The text in the terminal's language; what the table does not know stays English."""
    return chinese(text) if language() == "zh" else text


def chinese(text: str) -> str:
    helps, messages = table()
    if text in helps:
        return helps[text]
    for pattern, words in messages:
        if found := pattern.fullmatch(text):
            return words.format(**{name: chinese(part) for name, part in found.groupdict().items()})
    return text


@cache
def table() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]]]:
    """Help by its English words; messages as patterns, with {name} for any words."""
    found = tomllib.loads(Path(__file__).with_name("chinese.toml").read_text(encoding="utf-8"))
    return found["help"], [(_pattern(english), words) for english, words in found["messages"].items()]


def _pattern(english: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", english)  # words, name, words, name, ..., words
    return re.compile(
        "".join(f"(?P<{part}>.+?)" if number % 2 else re.escape(part) for number, part in enumerate(parts)), re.DOTALL
    )
