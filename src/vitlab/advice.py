"""What to type next: arguments in Python, options on the command line. A message names what its reader uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_state = {"command": False}  # of the process, which is a command from its first line to its last, or is none


@contextmanager
def on_the_command_line() -> Iterator[None]:
    before = _state["command"]
    _state["command"] = True
    try:
        yield
    finally:
        _state["command"] = before


def to_type(python: str, command: str) -> str:
    return command if _state["command"] else python
