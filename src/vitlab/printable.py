"""Makes text from untrusted files safe to print: control characters and bidi overrides become visible escapes.

A label such as "\\x1b[2J" would clear the terminal, "\\u202e" would reverse the rest of the line.
"""

from __future__ import annotations

import re

# C0 (without tab and newline), DEL, C1, line and paragraph separators, bidi marks and overrides, lone surrogates, BOM
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with unsafe characters as Python escapes; tabs and newlines stay."""
    return UNSAFE.sub(_escape, text)


def one_line(text: str) -> str:
    """The text with tabs and newlines escaped too: a name that cannot pretend to be the next line."""
    return re.sub("[\t\n]", _escape, printable(text))


def valid_utf8(text: str) -> str:
    """The text with bytes of a file name that are not UTF-8 replaced, as JSON and tables need it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def printable_json(text: str) -> str:
    """JSON text with unsafe characters as JSON escapes, which keep its value."""
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def csv_cell(value: object) -> object:
    """The value for csv.writer. A spreadsheet would run =HYPERLINK(...) or +cmd|...; a name like +mixup stays."""
    if isinstance(value, str) and re.match(r"[=+\-@\t\r].*[(|!]", value, re.DOTALL):
        return "'" + value
    return value


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape", "surrogatepass").decode("ascii")
