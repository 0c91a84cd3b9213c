"""English or Chinese, for all that people read: as requested, or by the terminal's locale.

chinese.toml is the one table of translations. Help, messages, tables, figures and pages are translated; JSON, logs and
files of values stay as they are.
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


def language(requested: str | None = None) -> Language:
    """--lang, then VITLAB_LANG, then the locale in POSIX's order; English unless one says Chinese."""
    if requested is not None and requested not in ("en", "zh"):
        raise UsageError(f"--lang {requested!r} is not known: use en or zh.")
    variables = ("VITLAB_LANG", "LC_ALL", "LC_MESSAGES", "LANG")
    locale = next((value for name in variables if (value := os.environ.get(name))), "")
    return "zh" if (requested or locale).lower().startswith("zh") else "en"


def translate(text: str) -> str:
    """The text in the terminal's language; text without a translation stays English."""
    return to_chinese(text) if language() == "zh" else text


def to_chinese(text: str) -> str:
    exact, patterns = translations()
    if text in exact:
        return exact[text]
    for pattern, chinese in patterns:
        if match := pattern.fullmatch(text):
            return chinese.format(**{name: to_chinese(part) for name, part in match.groupdict().items()})
    return text


@cache
def translations() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]]]:
    """Texts by their English text, and texts with {names} as patterns, in which a name matches any text."""
    tables = read_translations()
    exact = {english: chinese for table in tables.values() for english, chinese in table.items()}
    texts = {**tables["messages"], **tables["results"]}
    return exact, [(_pattern(english), chinese) for english, chinese in texts.items() if "{" in english]


@cache
def read_translations() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("chinese.toml").read_text(encoding="utf-8"))


def _pattern(english: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", english)  # text, name, text, name, ..., text
    return re.compile(
        "".join(f"(?P<{part}>.+?)" if number % 2 else re.escape(part) for number, part in enumerate(parts)), re.DOTALL
    )
