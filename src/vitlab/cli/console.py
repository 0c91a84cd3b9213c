"""What the verbs share: the console, numbers in words, and how errors are shown."""

from __future__ import annotations

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vitlab.cli.language import spoken
from vitlab.errors import UsageError, VitlabError
from vitlab.parsing import spell_not_finite
from vitlab.printable import printable, printable_json

BUG = "vitlab: this is a bug in vitlab: please report it with these lines, your command and `vitlab doctor`'s output."


def set_up_output() -> None:
    """A terminal that cannot show a character gets a ? instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def out(markup: bool = True) -> Any:
    """The console for results; wide when piped, so that no table is cut. Paths and names go out with markup=False.

    Whatever text is printed on it, no control character of that text reaches the terminal.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, renderable: Any, options: Any = None) -> Any:
            for segment in super().render(renderable, options):
                safe = segment.text if segment.control else printable(segment.text)
                yield segment if safe == segment.text else Segment(safe, segment.style)

    return PrintableConsole(width=None if sys.stdout.isatty() else 200, highlight=False, markup=markup, emoji=markup)


def say(text: str) -> None:
    """A remark beside the result, in the terminal's language: to stderr, so that --json output stays clean."""
    print(printable(spoken(text)), file=sys.stderr)


@contextmanager
def warnings_as_notes(show: bool = True) -> Iterator[None]:
    """Warnings of vitlab become notes on stderr; or, without `show`, are dropped."""

    def note(message: Warning | str, *place: Any, **more: Any) -> None:
        if show:
            say(f"note: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("ignore", ResourceWarning)  # a file left open is no note on the model
        warnings.showwarning = note
        yield


def print_plain(text: str, end: str = "\n") -> None:
    """Lines of a result as they are, but for control characters."""
    print(printable(text), end=end, flush=True)


def print_json(value: Any) -> None:
    import json

    text = json.dumps(spell_not_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    print_json_text(text + "\n")


def print_json_text(text: str) -> None:
    print(printable_json(text), end="")


def count(n: int) -> str:
    return f"{n:,}"


def short(n: float) -> str:
    """12345678 -> 12.35 M"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.2f} {unit}"
    return str(int(n))


def parse_size(text: str | None) -> tuple[int, int] | None:
    """384 or 384x256 (height x width)."""
    if text is None:
        return None
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) not in (1, 2) or not all(p.strip().isdigit() for p in parts):
        raise UsageError(f"--image-size {text!r} is not a size: write 384, or height x width: 384x256.")
    numbers = [int(p) for p in parts]
    return (numbers[0], numbers[-1])


def _words(error: Exception) -> str:
    """The system tells of a file only "[Errno 13] Permission denied: ...": what to do is added."""
    if isinstance(error, UnicodeDecodeError):
        return f"a file that is read as text holds other bytes (at byte {error.start}). Name a text file, in UTF-8."
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        advice = "Name another place, or see that it is there and that you may read and write it."
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}. {advice}"
    return str(error)


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Print a user's error in one line (VITLAB_DEBUG=1 shows its traceback), and a bug with its traceback."""
    import typer

    from vitlab.cli.help import UsageError, usage_error

    try:
        yield
    except UsageError as error:
        print(printable(usage_error(error)), file=sys.stderr)
        raise SystemExit(2) from None
    except (VitlabError, OSError, UnicodeDecodeError) as error:
        if os.environ.get("VITLAB_DEBUG"):
            raise
        say(f"vitlab: error: {_words(error)}")
        raise SystemExit(2) from None
    except (KeyboardInterrupt, typer.Abort):
        say("vitlab: stopped.")
        raise SystemExit(130) from None
    except Exception:
        traceback.print_exc()
        say(BUG)
        raise SystemExit(1) from None
