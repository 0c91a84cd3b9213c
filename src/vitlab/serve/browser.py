"""Opens a page in the user's browser, where there is one to see it."""

from __future__ import annotations

import os
import sys
import webbrowser


def open_browser(url: str) -> bool:
    """False: nothing was opened, because nobody sits in front of this machine, or it has no browser."""
    return has_screen() and webbrowser.open(url)


def has_screen() -> bool:
    """Not over ssh, and on Linux with a display: otherwise a browser for text could take over the terminal."""
    if "SSH_CONNECTION" in os.environ or "SSH_TTY" in os.environ:
        return False
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
