"""What to type next: arguments in Python, options on the command line. A message names what its reader uses."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class _Reader:
    """Of this process, which is a command from its first line to its last, or is none."""

    command: bool = False
    options: Collection[str] = ()  # that the running command takes


_reader = _Reader()


@contextmanager
def on_the_command_line(options: Collection[str] = ()) -> Iterator[None]:
    """`options`: what the running command takes, as far as it is known."""
    before = vars(_reader).copy()
    _reader.command, _reader.options = True, options
    try:
        yield
    finally:
        vars(_reader).update(before)


def to_type(python: str, command: str) -> str:
    return command if _reader.command else python


def option_or_setting(key: str, value: str) -> str:
    """--target price, where the running command has this option; elsewhere the recipe's setting, data.target=price."""
    option = f"--{key.rpartition('.')[2].replace('_', '-')}"
    if option not in _reader.options:
        return f"{key}={value}"
    return option if value == "true" else f"{option} {value}"
