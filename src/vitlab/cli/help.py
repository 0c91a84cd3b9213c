"""Help pages and usage errors, laid out for the terminal and in its language."""

from __future__ import annotations

import inspect
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from vitlab.language import translate

ClickUsageError: Any = typer.BadParameter.__base__  # Typer exports this class under no name of its own
Context: Any = TyperGroup.context_class


class Page(Context.formatter_class):
    """Click's layout of a help page, translated; characters that are twice as wide count twice."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        usage = translate("Usage")
        super().write_usage(prog, args, prefix or usage + (": " if usage.isascii() else "："))

    def write_heading(self, heading: str) -> None:
        heading = translate(heading)
        self.write(f"{'':>{self.current_indent}}{heading}{':' if heading.isascii() else '：'}\n")

    def write_text(self, text: str) -> None:
        room = self.width - self.current_indent
        super().write_text("\n\n".join(fold(translate(paragraph), room) for paragraph in paragraphs(text)))

    def write_dl(self, rows: Sequence[tuple[str, str]], *args: Any, **more: Any) -> None:
        rows = [(_without_type(name), text) for name, text in rows]
        left = max((len(name) for name, _ in rows if len(name) <= 30), default=30)  # as in Click
        room = self.width - self.current_indent - left - 2
        super().write_dl([(name, fold(_translate_option(text), room)) for name, text in rows], *args, **more)


def prepare(command: Any) -> Any:
    """Give a command, and all below it, these pages and a line for the list of commands."""
    command.context_class = type("Context", (Context,), {"formatter_class": Page})
    command.short_help = translate(next(iter(paragraphs(command.help or "")), ""))
    for below in getattr(command, "commands", {}).values():
        prepare(below)
    return command


def paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n") if part.strip()]


def fold(text: str, room: int) -> str:
    """Wrap Chinese text, which may break after any character but not before a comma. ASCII text stays as it is."""
    if text.isascii():
        return text
    lines = [""]
    for part in re.findall(r"[（[]*(?:[!-~]+ ?|.)[，。；：、！？）]*", text):
        if lines[-1] and _cells(lines[-1] + part.rstrip()) > room:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return "\b\n" + "\n".join(lines)  # \b: Click does not rewrap these lines


def usage_error(error: Any) -> str:
    """How the command is used, where its help is, and what was wrong."""
    if hasattr(error.__cause__, "errors"):  # pydantic's, about a value
        problem = error.__cause__.errors()[0]
        expected = problem["msg"].removeprefix("Input should be ").partition(", unable")[0]
        expected = expected.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
        error.message = f"found {problem['input']!r}, but it should be {expected}"
    message = error.format_message() + _as_setting(error)
    if error.ctx is None:
        return translate(f"vitlab: error: {message}")
    if message == error.ctx.get_help():  # a command without arguments shows its help
        return message
    advice = f"Try '{error.ctx.command_path} {error.ctx.help_option_names[0]}' for help."
    return f"{error.ctx.get_usage()}\n{translate(advice)}\n\n{translate(f'vitlab: error: {message}')}"


def _as_setting(error: Any) -> str:
    """train --epochs 3: a value of the recipe is no option."""
    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    takes_settings = error.ctx is not None and any(p.name == "settings" for p in error.ctx.command.params)
    if not name or not takes_settings or error.possibilities:  # Click names an option that is near
        return ""
    from vitlab.training.recipe import near_keys

    given = {word.lstrip("-").replace("-", "_"): at for at, word in enumerate(sys.argv) if word.startswith("--")}
    after = sys.argv[given[name] + 1 :][:1] if name in given else []
    value = after[0] if after and not after[0].startswith("-") else "VALUE"
    keys = [f"{key}={value}" for key in near_keys(name) if key.endswith(f".{name}")]
    return f". Values of the recipe have no dashes: {' or '.join(keys)}" if keys else ""


def _without_type(name: str) -> str:
    """An option or argument without the type that Typer appends and its help says better."""
    return name.replace(" range>", ">") if name.startswith("-") else name.partition(" <")[0]


def _translate_option(text: str) -> str:
    """Translate a help text and the remarks that Click appends in brackets."""
    text, bracket, extra = text.partition("  [")
    remarks = [translate(part) for part in extra.removesuffix("]").split("; ")]
    separator = "; " if "".join(remarks).isascii() else "；"
    return translate(text) + (f"  [{separator.join(remarks)}]" if bracket else "")


def _cells(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text)
