"""English or Chinese: what is asked for, or what the terminal's locale says."""

from __future__ import annotations

import os
from typing import Literal

Language = Literal["en", "zh"]


def language(asked: str | None = None) -> Language:
    """--lang, then VITLAB_LANG, then the locale by POSIX's order; English where none says Chinese."""
    if asked is not None and asked not in ("en", "zh"):
        raise ValueError(f"--lang {asked!r} is not known: use en or zh.")
    said = next((v for k in ("VITLAB_LANG", "LC_ALL", "LC_MESSAGES", "LANG") if (v := os.environ.get(k))), "")
    return "zh" if (asked or said).lower().startswith("zh") else "en"
