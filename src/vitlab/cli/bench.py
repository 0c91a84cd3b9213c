"""vitlab bench."""

from __future__ import annotations

import sys
from typing import Any

from vitlab.checkpoints.load import is_checkpoint
from vitlab.cli.console import out, parse_size, print_json, say
from vitlab.cli.predict import open_model
from vitlab.cli.progress import following_downloads
from vitlab.export.bench import DEFAULT_BACKENDS, Bench, run_bench
from vitlab.export.verify import Comparison
from vitlab.factory import create


def run(
    what: str,
    size: str | None,
    ways: str | None,
    reducers: list[str] | None,
    against: str | None,
    timing: dict[str, Any],
    compare: dict[str, Any],
    json: bool,
) -> None:
    if is_checkpoint(what):
        model = open_model(what, size)
    else:
        options = {} if size is None else {"image_size": parse_size(size)}
        model = create(what, **options).eval()
        say(f"note: {what} is a new, untrained model: its times are right, its agreement says little.")
    if reducers is not None:
        reducers = [text for text in reducers if text != "none"]
    with following_downloads():
        bench = run_bench(
            model,
            backends=_names(ways) or DEFAULT_BACKENDS,
            reducers=reducers,
            against=_names(against),
            progress=(lambda name: say(f"making {name}")) if sys.stderr.isatty() else None,
            compare=Comparison(**compare),
            **timing,
        )
    for note in bench.notes:
        say(f"note: {note}")
    print_json(bench.to_dict()) if json else _show(bench)


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _show(bench: Bench) -> None:
    from rich.table import Table

    console = out(markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("way", f"ms, batch {bench.batch}", "half of the runs", "images/s", "speed-up", "agreement"):
        table.add_column(title, justify="left" if title == "way" else "right")
    for title in ("difference", "memory MB", "size MB", ""):
        table.add_column(title, justify="right")
    for row in bench.rows:
        found = row.to_dict(bench.batch)
        table.add_row(
            row.title,
            f"{found['ms']:.2f}",
            f"{found['ms_quarter']:.2f} .. {found['ms_three_quarters']:.2f}",
            f"{found['images_per_second']:.1f}",
            f"{row.speedup:.2f} x",
            f"{row.agreement:.1%}",
            f"{row.difference:.1e}",
            "-" if row.memory is None else f"{row.memory / 1e6:.1f}",
            f"{row.bytes / 1e6:.1f}",
            "*" if row is bench.picked else "",
        )
    console.print(table)
    if bench.picked is None:
        console.print(f"none agrees on {bench.agreement:.0%} of the pictures")
    else:
        console.print(
            f"* the fastest that agrees on {bench.agreement:.0%} of {bench.images} pictures: {bench.picked.title}"
        )
