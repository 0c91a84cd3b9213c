"""What the commands share: printing, tables, and how errors and warnings are shown."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from vitlab.advice import on_the_command_line
from vitlab.cli.help import ClickUsageError, usage_error
from vitlab.errors import UsageError, VitlabError
from vitlab.language import translate
from vitlab.optional import missing_package
from vitlab.parsing import spell_not_finite
from vitlab.printable import one_line, printable, printable_json
from vitlab.tables import Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

BUG = "vitlab: this is a bug in vitlab: please report it with these lines, your command and `vitlab doctor`'s output."
NAMED = 10  # unreadable images that are named; --json names all


def set_up_output() -> None:
    """A terminal that cannot show a character gets a ? instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def console(markup: bool = False) -> Console:
    """The console for results; wide when piped, so that no table is cut. Escapes control characters in all text."""
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(translate(x) if isinstance(x, str) else x for x in objects), **options)

        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                safe = segment.text if segment.control else printable(segment.text)
                yield segment if safe == segment.text else Segment(safe, segment.style)

    return PrintableConsole(width=None if sys.stdout.isatty() else 200, highlight=False, markup=markup, emoji=markup)


def table(*titles: str, right: Container[str] = (), no_wrap: Container[str] = ()) -> RichTable:
    """A table without rows; `right`: titles of right-aligned columns, which never wrap."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        number = title in right
        justify = "right" if number else "left"
        made.add_column(Text(translate(title)), justify=justify, no_wrap=number or title in no_wrap, overflow="fold")
    return made


def print_tables(tables: Iterable[Table]) -> None:
    """With an empty line between two."""
    for number, contents in enumerate(tables):
        if number:
            console().print()
        print_table(contents)


def print_table(contents: Table, no_wrap: Container[str] = ()) -> None:
    """A result's table, with its heading, total and notes."""
    from rich.text import Text

    out, no_wrap = console(), [translate(title) for title in contents.titles if title in no_wrap]
    contents = contents.in_language().fitted(out.width)
    for number, line in enumerate(contents.heading):
        out.print(Text(line, style="" if number else "bold"))
    titles, *rows = contents.texts() or [[]]
    grid = table(*titles, right=contents.right, no_wrap=no_wrap)
    grid.show_header = any(titles)
    for number, row in enumerate(rows):
        bold = number in contents.strong or (contents.total is not None and number == len(rows) - 1)
        grid.add_row(*row, style="bold" if bold else None)
    if rows:
        out.print(grid)
    for line in contents.notes:
        out.print(Text(line))


def say(text: str) -> None:
    """Print a remark in the terminal's language to stderr, so that --json output stays clean."""
    print(printable(translate(text)), file=sys.stderr)


def say_note(note: str) -> None:
    say(f"note: {note}")


def say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        say_note(note)


def say_unreadable(errors: dict[str, str]) -> None:
    """Name the first images that could not be read. errors: path -> reason."""
    for path, reason in list(errors.items())[:NAMED]:
        say(f"vitlab: {one_line(path)}: {one_line(reason)}")
    if len(errors) > NAMED:
        say(f"and {len(errors) - NAMED} more (--json names all)")


def print_plain(text: str, end: str = "\n") -> None:
    """Print lines of a result without markup, with control characters escaped."""
    print(printable(text), end=end, flush=True)


def print_json(value: object) -> None:
    text = json.dumps(spell_not_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    print_json_text(text + "\n")


def print_json_text(text: str) -> None:
    print(printable_json(text), end="")


def parse_size(text: str | None) -> tuple[int, int] | None:
    """384 or 384x256 (height x width)."""
    if text is None:
        return None
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) not in (1, 2) or not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise UsageError(f"--image-size {text!r} is not a size: write 384, or height x width: 384x256.")
    return int(parts[0]), int(parts[-1])


def load_options(image_size: str | None, heads: int | None = None) -> dict[str, Any]:
    """--image-size and --heads as options of vitlab.load and vitlab.create."""
    options = {"image_size": parse_size(image_size), "heads": heads}
    return {name: value for name, value in options.items() if value is not None}


def parse_names(text: str | None) -> list[str]:
    """a, b,c -> [a, b, c]"""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Show warnings for users as notes, each once, and only in the first process of torchrun."""
    shown: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        show_others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, UserWarning):
                show_others(message, category, *place, **more)
            elif str(message) not in shown and os.environ.get("RANK", "0") == "0":
                shown.add(str(message))
                say(f"note: {message}")

        warnings.showwarning = show
        yield


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print a user's error in one line (VITLAB_DEBUG=1 shows its traceback), and a bug with its traceback."""
    try:
        with on_the_command_line():
            yield
    except ClickUsageError as error:
        print(printable(usage_error(error)), file=sys.stderr)
        raise SystemExit(2) from None
    except (VitlabError, OSError, UnicodeDecodeError) as error:
        if os.environ.get("VITLAB_DEBUG"):
            raise
        say(f"vitlab: error: {_message(error)}")
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        say("vitlab: stopped.")
        raise SystemExit(130) from None
    except Exception as error:
        missing = missing_package(error)
        if missing and not os.environ.get("VITLAB_DEBUG"):
            say(f"vitlab: error: {missing}")
            raise SystemExit(2) from None
        traceback.print_exc()
        say(BUG)
        raise SystemExit(1) from None


def _message(error: Exception) -> str:
    """The error's message; advice is added to the system's own, such as "[Errno 13] Permission denied: ..."."""
    if isinstance(error, UnicodeDecodeError):
        return f"a file that is read as text holds other bytes (at byte {error.start}). Name a text file, in UTF-8."
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        advice = "Name another place, or see that it is there and that you may read and write it."
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}. {advice}"
    return str(error)
