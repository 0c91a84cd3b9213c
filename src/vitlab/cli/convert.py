"""vitlab convert."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vitlab.checkpoints import convert
from vitlab.checkpoints.load import load_with_report
from vitlab.checkpoints.report import Report
from vitlab.cli.console import out, parse_size, print_json, say
from vitlab.errors import UsageError
from vitlab.inference import reads_text
from vitlab.printable import one_line
from vitlab.text.tokenizer import Tokenizer

COLOURS = {"matched": "green", "resized": "cyan", "new": "yellow", "missing": "red", "unused": "yellow"}


def run(
    source: str,
    target: Path,
    to: str,
    check: bool,
    map: Path | None,
    size: str | None,
    tokenizer: Path | None,
    told: dict[str, Any],
    colours: dict[str, str | None],
    force: bool,
    json: bool,
) -> None:
    if to not in convert.TARGETS:
        raise UsageError(f"--to {to!r} is not known: use {', '.join(convert.TARGETS)}.")
    target, map = target.expanduser(), map.expanduser() if map is not None else None
    if target.exists() and not force and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already. Name another place, or pass --force to write over it.")
    told = {k: v for k, v in {**told, "image_size": parse_size(size)}.items() if v is not None}
    model, report = load_with_report(source, map=map, preprocess=_numbers(colours), **told)
    if tokenizer is not None:
        _give_tokenizer(model, tokenizer)
    elif reads_text(model) and model.tokenizer is None:
        report.notes.append("it came without its tokenizer; --tokenizer FILE puts it in, so that it can read words.")
    report.notes += convert.write(model, target, to)
    changed = any(row.status in ("new", "resized") for row in report.rows)
    rows = convert.check(source, target, model, changed=changed) if check else []
    if json:
        compared = [dict(what=row.what, max_difference=row.difference, remark=row.remark) for row in rows]
        print_json({**report.to_dict(), "written": str(target), "to": to, "check": compared})
    else:
        _show(report)
        console = out(markup=False)
        console.print(f"written: {target} ({to})")
        for what, difference, remark, _ in rows:
            shown = remark if difference is None else f"largest logit difference {difference:.2e}"
            console.print(f"check: {what}: {shown}")
    wrong = [f"{row.what}: {_how_wrong(row)}" for row in rows if row.wrong]
    if wrong:
        say(f"vitlab: error: logits differ: {'; '.join(wrong)}")
        raise SystemExit(1)


def _how_wrong(row: convert.Compared) -> str:
    if row.difference is None or not math.isfinite(row.difference):
        return "NaN or infinity"
    return f"by {row.difference:.2e}, where {row.allowed:.2e} is allowed"


def _numbers(colours: dict[str, str | None]) -> dict[str, Any] | None:
    """--mean 0.49,0.48,0.45 and --std likewise, both or neither -> values for Preprocess."""
    given = {name: text for name, text in colours.items() if text is not None}
    if len(given) == 1:
        raise UsageError(f"--{next(iter(given))} needs its counterpart: give --mean and --std.")
    try:
        return {name: tuple(float(part) for part in text.split(",")) for name, text in given.items()} or None
    except ValueError:
        raise UsageError("--mean and --std are numbers, one for each channel: --mean 0.49,0.48,0.45.") from None


def _give_tokenizer(model: Any, path: Path) -> None:
    """Its words, as long and padded as the model wants them."""
    if not reads_text(model):
        raise UsageError(f"--tokenizer is for a CLIP; this is of the family {model.family}.")
    c = model.config.text
    model.tokenizer = Tokenizer.read(path, context=c.context, pad_id=c.pad_id)


def _show(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    console = out(markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "ours", f"theirs ({report.dialect})", "shape", ""):
        table.add_column(column)
    for row in report.rows:
        table.add_row(
            Text(row.status, style=COLOURS[row.status]),
            one_line(row.ours or "-"),
            one_line(" + ".join(row.theirs)) or "-",
            " x ".join(map(str, row.shape)),
            one_line(row.note),
        )
    console.print(table)
    console.print(", ".join(f"{n} {status}" for status, n in report.counts().items()))
    for note in report.notes:
        console.print(f"note: {note}")
