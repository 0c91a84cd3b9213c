"""vitlab export, vitlab bench."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.console import console, parse_names, print_json, say, say_notes, size_option, table
from vitlab.cli.options import (
    REDUCERS,
    ROUNDS,
    Checkpoint,
    ComparedData,
    Json,
    NameOrCheckpoint,
    Size,
    SourcePath,
    TimedBatch,
    choice,
)
from vitlab.cli.progress import following_downloads

if TYPE_CHECKING:
    from vitlab.export.bench import Bench
    from vitlab.export.verify import Verification


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="model.onnx, or model.pt2 (torch.export).")],
    int8: Annotated[
        str | None,
        choice(
            "dynamic", "static", name="--int8", help="Quantize: smaller, often faster; static calibrates on --data."
        ),
    ] = None,
    data: ComparedData = None,
    path: SourcePath = None,
    images: Annotated[int, typer.Option(help="Number of images to compare on.", min=8)] = 128,
    image_size: Size = None,
    dynamic_size: Annotated[bool, typer.Option("--dynamic-size", help="Let the file take any image size.")] = False,
    reducer: Annotated[
        str | None, typer.Option("--reducer", metavar=REDUCERS, help="Token reducer to build into the file.")
    ] = None,
    features: Annotated[bool, typer.Option("--features", help="Export features instead of classes.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Export the text tower of a CLIP.")] = False,
    tolerance: Annotated[float, typer.Option(help="Largest difference of a value, float32.")] = 1e-4,
    agreement: Annotated[float, typer.Option(help="Share of images that must get the same class.")] = 0.99,
    force: Annotated[bool, typer.Option("--force", help="Keep the file even if it differs.")] = False,
    json: Json = False,
) -> None:
    """Write a model as ONNX or torch.export, and compare both.

    Preprocess and labels are written too. Both are compared on real images: a file that answers differently is not
    kept (exit code 1).
    """
    from vitlab.checkpoints.load import as_network
    from vitlab.export.pipeline import ExportMismatchError, export_model
    from vitlab.export.verify import Comparison

    gives = "text" if text else "features" if features else None
    compare = Comparison(source=data, path=path, images=images, tolerance=tolerance, agreement=agreement)
    options = dict(gives=gives, int8=int8, dynamic_size=dynamic_size, reducer=reducer, force=force)
    refused = None
    with following_downloads():
        try:
            model = as_network(checkpoint, **size_option(image_size))
            result = export_model(model, out, **options, compare=compare)  # type: ignore[arg-type]
        except ExportMismatchError as error:
            result, refused = error.result, str(error)
    written = str(out) if refused is None else None
    print_json({"written": written, **result.to_dict()}) if json else _show(result, written)
    say_notes(f"{note}." for note in result.notes)
    if refused is not None:
        say(f"vitlab: error: {refused} --force keeps it.")
        raise SystemExit(1)
    say_notes(f"kept by --force: {problem}." for problem in result.problems)


def _show(result: Verification, written: str | None) -> None:
    ms, size = result.milliseconds, result.bytes
    classes = "" if result.answers is None else f", to which the model gives {result.answers} different classes"
    rows = {
        "same answer": f"{result.agreement:.2%} of {result.images} images{classes}",
        "largest difference": f"{result.max_difference:.1e}, of values up to {result.largest:.3g}",
        f"a batch of {result.batch}": f"{ms['export']:.1f} ms, the model {ms['model']:.1f} ms",
        "size": f"{size['export'] / 1e6:.2f} MB, the model {size['model'] / 1e6:.2f} MB",
    }
    if written is not None:
        console().print(f"written: {written}")
    for name, value in rows.items():
        console().print(f"{name:18s} {value}")


def bench(
    what: NameOrCheckpoint,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="transformers,onnxruntime", help="Other libraries, with the same weights."),
    ] = None,
    batch: TimedBatch = 8,
    rounds: Annotated[int, typer.Option(help=ROUNDS, min=3)] = 15,
    ways: Annotated[
        str | None,
        typer.Option("--ways", metavar="eager,compiled,...", help="Backends to time instead of the default ones."),
    ] = None,
    reducer: Annotated[
        list[str] | None,
        typer.Option("--reducer", metavar="tome:r=8|none", help="Token reducer (repeatable); none: no reducers."),
    ] = None,
    agreement: Annotated[
        float, typer.Option(help="Share of images that must get the same class; 1: equal up to rounding.")
    ] = 0.99,
    data: ComparedData = None,
    path: SourcePath = None,
    images: Annotated[int, typer.Option(help="Number of images to compare on.", min=1)] = 64,
    image_size: Size = None,
    json: Json = False,
) -> None:
    """Time a model with every backend, and pick the fastest.

    The backends are eager, compiled, ONNX Runtime, int8 and token reducers. The fastest that agrees with the eager
    model on enough images is picked. Run nothing else meanwhile.
    """
    from vitlab.export.bench import DEFAULT_BACKENDS, open_or_create, run_bench
    from vitlab.export.verify import Comparison

    with following_downloads():
        result = run_bench(
            open_or_create(what, **size_option(image_size)),
            backends=parse_names(ways) or DEFAULT_BACKENDS,
            reducers=None if reducer is None else [text for text in reducer if text != "none"],
            against=parse_names(against),
            progress=(lambda name: say(f"making {name}")) if sys.stderr.isatty() else None,
            compare=Comparison(agreement=agreement, source=data, path=path, images=images),
            batch=batch,
            rounds=rounds,
        )
    say_notes(result.notes)
    print_json(result.to_dict()) if json else _show_bench(result)


def _show_bench(bench: Bench) -> None:
    titles = (f"ms, batch {bench.batch}", "half of the runs", "images/s", "speed-up", "agreement", "difference")
    titles += ("memory MB", "size MB", "")
    grid = table("way", *titles, right=titles)
    for row in bench.rows:
        timing = row.to_dict(bench.batch)
        grid.add_row(
            row.title,
            f"{timing['ms']:.2f}",
            f"{timing['ms_quarter']:.2f} .. {timing['ms_three_quarters']:.2f}",
            f"{timing['images_per_second']:.1f}",
            f"{row.speedup:.2f} x",
            f"{row.agreement:.1%}",
            f"{row.difference:.1e}",
            "-" if row.memory is None else f"{row.memory / 1e6:.1f}",
            f"{row.bytes / 1e6:.1f}",
            "*" if row is bench.picked else "",
        )
    console().print(grid)
    share = f"{bench.agreement:.0%} of"
    if bench.picked is None:
        console().print(f"none agrees on {share} the images")
    else:
        console().print(f"* the fastest that agrees on {share} {bench.images} images: {bench.picked.title}")
