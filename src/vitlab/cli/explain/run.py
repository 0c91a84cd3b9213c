"""Runs one verb of `vitlab explain`: opens the model and images, calls vitlab.explain.figures, writes, reports."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.cli.console import out as console
from vitlab.cli.console import parse_size, print_json, say
from vitlab.cli.explain.options import Options
from vitlab.explain import figures
from vitlab.explain.methods import METHODS
from vitlab.explain.subject import Explanation, Subject, check_output, open_subject
from vitlab.images.read import Source
from vitlab.printable import one_line


def run(
    options: Options,
    figure: str,
    *,
    texts: Sequence[str] = (),
    encoder: bool = True,
    second: str | None = None,
    **arguments: Any,
) -> None:
    """Draw vitlab.explain.figures.FIGURE(subject, **arguments). `second` is another checkpoint for the same images."""
    path = check_output(options.out or f"explain-{options.verb}.png", [options.checkpoint, *options.images])
    subject = _open(options, options.checkpoint, options.images, texts, encoder)
    if options.images and not subject.views:
        if options.json:
            print_json(_report(options, subject, []))
        _fail(options, subject)
    if second is not None:
        arguments["other"] = _open(options, second, subject.sources, texts)
    explanation = getattr(figures, figure)(subject, **arguments)
    files = explanation.save(path, html=options.html)
    for note in explanation.notes:
        say(f"note: {one_line(note)}")
    if options.json:
        print_json({**_report(options, subject, files), **explanation.results})
    else:
        for view in subject.views:
            _print(f"{view.name}: {view.prediction}" if view.prediction else view.name)
        if figure in PRINT:
            PRINT[figure](explanation)
        for file in files:
            _print(f"written: {file}")
    if subject.failed:
        _fail(options, subject)


def _open(
    options: Options, checkpoint: str, images: Sequence[Source], texts: Sequence[str], encoder: bool = True
) -> Subject:
    size: dict[str, Any] = {} if options.image_size is None else {"image_size": parse_size(options.image_size)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # a file left open elsewhere says nothing about the model
        subject = open_subject(
            checkpoint,
            images,
            texts=texts,
            encoder=encoder,
            batch_size=options.batch_size,
            skip_unreadable=True,
            **size,
        )
    for note in caught:
        say(f"note: {note.message}")
    return subject


def _report(options: Options, subject: Subject, files: Sequence[Path]) -> dict[str, Any]:
    views = iter(subject.views)
    images: list[dict[str, Any]] = []
    for name in options.images:
        if name in subject.failed:
            images.append({"image": name, "error": subject.failed[name]})
        else:
            view = next(views)
            images.append({"image": name, "label": view.label, "probability": view.probability})
    return {"checkpoint": options.checkpoint, "images": images, "files": [str(file) for file in files]}


def _fail(options: Options, subject: Subject) -> None:
    for message in subject.failed.values():
        say(f"vitlab: {one_line(message)}")
    say(f"{len(subject.failed)} of {len(options.images)} pictures could not be read.")
    raise SystemExit(1)


def _print(line: str) -> None:
    console(markup=False).print(one_line(line), soft_wrap=True)


def _print_table(columns: dict[str, bool], rows: Sequence[Sequence[str]]) -> None:
    """Columns by title; True: aligned right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, right in columns.items():
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console(markup=False).print(table)


def _print_agreements(explanation: Explanation) -> None:
    rows = []
    for row in explanation.results["agreement"]:
        values = np.array([v for v in row["agreement"] if v is not None])
        spread = f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else ""
        rows.append((row["first"], row["second"], f"{values.mean():.2f}{spread}" if len(values) else "a map is flat"))
    _print_table({"map": False, "and map": False, "rank correlation": True}, rows)


def _print_scores(explanation: Explanation) -> None:
    rows = []
    for score in explanation.results["scores"]:
        many = score["images"] > 1
        cells = [f"{score['area']:.3f}" + (f" ± {score['spread']:.3f}" if many else "")]
        if not METHODS[score["method"]].baseline:
            gain = f"{score['gain']:+.3f}" + (f" ± {score['gain_spread']:.3f}" if many else "")
            cells += [gain, f"{score['wins']:.0%}"]
        rows.append((score["kind"], score["method"], *cells))
    columns = {"test": False, "method": False, "area": True, "better than random by": True, "better in": True}
    _print_table(columns, rows)
    console(markup=False).print("Area: deletion and road lower is better, insertion higher.")


def _print_neighbours(explanation: Explanation) -> None:
    for view, row in zip(explanation.subject.views, explanation.results["neighbours"], strict=True):
        for one in row:
            _print(f"{view.name}  {one['similarity']:.3f}  {one['image']}")


def _print_errors(explanation: Explanation) -> None:
    hidden = explanation.results["hidden_patches"]
    for view, error in zip(explanation.subject.views, explanation.results["error"], strict=True):
        _print(f"{view.name}: error {error:.4f} over {hidden} hidden patches")


PRINT = {
    "compare": _print_agreements,
    "faithfulness": _print_scores,
    "neighbours": _print_neighbours,
    "reconstruct": _print_errors,
}
