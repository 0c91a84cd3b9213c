"""vitlab export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vitlab.checkpoints.load import as_network
from vitlab.cli.console import out, parse_size, print_json, say, warnings_as_notes
from vitlab.cli.progress import following_downloads
from vitlab.export.pipeline import ExportMismatchError, export_model
from vitlab.export.verify import Comparison, Verification


def run(
    checkpoint: str, target: Path, size: str | None, options: dict[str, Any], compare: dict[str, Any], json: bool
) -> None:
    with following_downloads(), warnings_as_notes():
        try:
            model = as_network(checkpoint, **({} if size is None else {"image_size": parse_size(size)}))
            verdict = export_model(model, target, **options, compare=Comparison(**compare))
            refused = None
        except ExportMismatchError as error:
            verdict, refused = error.result, str(error)
    kept = str(target) if refused is None else None
    print_json({"written": kept, **verdict.to_dict()}) if json else _show(verdict, kept)
    for note in verdict.notes:
        say(f"note: {note}.")
    if refused is not None:
        say(f"vitlab: error: {refused} --force keeps it.")
        raise SystemExit(1)
    for problem in verdict.problems:
        say(f"note: kept by --force: {problem}.")


def _show(verdict: Verification, kept: str | None) -> None:
    console = out(markup=False)
    ms, size = verdict.milliseconds, verdict.bytes
    classes = "" if verdict.answers is None else f", to which the model gives {verdict.answers} different classes"
    rows = {
        "same answer": f"{verdict.agreement:.2%} of {verdict.images} pictures{classes}",
        "largest difference": f"{verdict.max_difference:.1e}, of values up to {verdict.largest:.3g}",
        f"a batch of {verdict.batch}": f"{ms['export']:.1f} ms, the model {ms['model']:.1f} ms",
        "size": f"{size['export'] / 1e6:.2f} MB, the model {size['model'] / 1e6:.2f} MB",
    }
    if kept is not None:
        console.print(f"written: {kept}")
    for name, words in rows.items():
        console.print(f"{name:18s} {words}")
