"""English or Chinese, for all that people read: as requested, or by the terminal's locale."""

from __future__ import annotations

import os
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
