"""English or Chinese, for all that people read: as requested, or by the terminal's locale.

chinese.toml is the one table of translations. Help, messages, tables, figures and pages are translated; JSON, logs and
files of values stay as they are.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Container
from dataclasses import dataclass
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
    """Help and messages first, then results; what a {name} stands for is translated by the same part of the table."""
    return _messages().translate(text) or _results().translate(text) or text


@dataclass(frozen=True)
class Translations:
    """Texts by their English text, and patterns, in their order."""

    exact: dict[str, str]
    patterns: list[tuple[re.Pattern[str], str]]

    def translate(self, text: str) -> str | None:
        if text in self.exact:
            return self.exact[text]
        for pattern, chinese in self.patterns:
            if match := pattern.fullmatch(text):
                parts = match.groupdict().items()
                return chinese.format(**{name: self.translate(part) or part for name, part in parts})
        return None


@cache
def read_translations() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("chinese.toml").read_text(encoding="utf-8"))


@cache
def _messages() -> Translations:
    tables = read_translations()
    patterns = [(_pattern(english), chinese) for english, chinese in tables["messages"].items()]
    return Translations(tables["help"], patterns)


@cache
def _results() -> Translations:
    table = read_translations()["results"]
    longest_first = sorted(table.items(), key=lambda row: -len(re.sub(r"\{\w+\}", "", row[0])))
    return Translations(table, [(_pattern(english, NUMBERS), chinese) for english, chinese in longest_first])


NUMBERS = ("count", "number", "rows", "columns", "heads", "head", "width", "height")  # in results: digits only


def _pattern(english: str, numbers: Container[str] = ()) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", english)  # text, name, text, name, ..., text
    return re.compile(
        "".join(
            f"(?P<{part}>{'[0-9][0-9,.]*' if part in numbers else '.+?'})" if number % 2 else re.escape(part)
            for number, part in enumerate(parts)
        ),
        re.DOTALL,
    )
