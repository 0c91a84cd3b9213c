"""Help pages and usage errors, laid out for the terminal and told in its language."""

from __future__ import annotations

import inspect
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from vitlab.cli.language import spoken

UsageError: Any = typer.BadParameter.__base__  # Typer names this one in no other way
Context: Any = TyperGroup.context_class


class Page(Context.formatter_class):
    """Click's layout of a help page, with words from the table; characters that are twice as wide count twice."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        usage = spoken("Usage")
        super().write_usage(prog, args, prefix or usage + (": " if usage.isascii() else "："))

    def write_heading(self, heading: str) -> None:
        words = spoken(heading)
        self.write(f"{'':>{self.current_indent}}{words}{':' if words.isascii() else '：'}\n")

    def write_text(self, text: str) -> None:
        room = self.width - self.current_indent
        super().write_text("\n\n".join(fold(spoken(words), room) for words in paragraphs(text)))

    def write_dl(self, rows: Sequence[tuple[str, str]], *args: Any, **more: Any) -> None:
        rows = [(_named(name), words) for name, words in rows]
        left = max((len(name) for name, _ in rows if len(name) <= 30), default=30)  # as Click has it
        room = self.width - self.current_indent - left - 2
        super().write_dl([(name, fold(_told(words), room)) for name, words in rows], *args, **more)


def prepare(command: Any) -> Any:
    """Give a command, and all below it, these pages and a line for the list of commands."""
    command.context_class = type("Context", (Context,), {"formatter_class": Page})
    command.short_help = spoken(next(iter(paragraphs(command.help or "")), ""))
    for below in getattr(command, "commands", {}).values():
        prepare(below)
    return command


def paragraphs(text: str) -> list[str]:
    return [" ".join(words.split()) for words in inspect.cleandoc(text).split("\n\n") if words.strip()]


def fold(text: str, room: int) -> str:
    """Lines of Chinese, which may end behind any character, but do not begin with a comma; other text as it is."""
    if text.isascii():
        return text
    lines = [""]
    for part in re.findall(r"[（[]*(?:[!-~]+ ?|.)[，。；：、！？）]*", text):
        if lines[-1] and _cells(lines[-1] + part.rstrip()) > room:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return "\b\n" + "\n".join(lines)  # \b: Click leaves the lines as they are


def usage_error(error: Any) -> str:
    """How the command is used, where its help is, and what was wrong."""
    found = error.__cause__.errors()[0] if hasattr(error.__cause__, "errors") else None  # pydantic's, of a value
    if found is not None:
        wanted = found["msg"].removeprefix("Input should be ").partition(", unable")[0]
        wanted = wanted.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
        error.message = f"found {found['input']!r}, but it should be {wanted}"
    said = error.format_message()
    if error.ctx is None:
        return spoken(f"vitlab: error: {said}")
    if said == error.ctx.get_help():  # a command without arguments, that shows its help
        return said
    advice = f"Try '{error.ctx.command_path} {error.ctx.help_option_names[0]}' for help."
    return f"{error.ctx.get_usage()}\n{spoken(advice)}\n\n{spoken(f'vitlab: error: {said}')}"


def _named(name: str) -> str:
    """Without what Typer puts behind it and its help says better."""
    return name.replace(" range>", ">") if name.startswith("-") else name.partition(" <")[0]


def _told(words: str) -> str:
    """A help text, with what Click put behind it in brackets."""
    text, bracket, extra = words.partition("  [")
    told = "；".join(spoken(part) for part in extra.removesuffix("]").split("; "))
    return spoken(text) + (f"  [{told if not told.isascii() else extra.removesuffix(']')}]" if bracket else "")


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
