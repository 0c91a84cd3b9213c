"""English or Chinese, as requested or by the terminal's locale; chinese.toml is the one table of translations.

Only what people read is translated: help, and remarks and errors on stderr. JSON, tables and files stay as they are.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

from vitlab.language import language


def translate(text: str) -> str:
    """The text in the terminal's language; text without a translation stays English."""
    return to_chinese(text) if language() == "zh" else text


def to_chinese(text: str) -> str:
    helps, messages = translations()
    if text in helps:
        return helps[text]
    for pattern, chinese in messages:
        if match := pattern.fullmatch(text):
            return chinese.format(**{name: to_chinese(part) for name, part in match.groupdict().items()})
    return text


@cache
def translations() -> tuple[dict[str, str], list[tuple[re.Pattern[str], str]]]:
    """Help texts by their English text; messages as patterns, in which {name} matches any text."""
    tables = tomllib.loads(Path(__file__).with_name("chinese.toml").read_text(encoding="utf-8"))
    return tables["help"], [(_pattern(english), chinese) for english, chinese in tables["messages"].items()]


def _pattern(english: str) -> re.Pattern[str]:
    parts = re.split(r"\{(\w+)\}", english)  # text, name, text, name, ..., text
    return re.compile(
        "".join(f"(?P<{part}>.+?)" if number % 2 else re.escape(part) for number, part in enumerate(parts)), re.DOTALL
    )
