"""vitlab export, vitlab bench."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, parse_names, print_json, print_table, say, say_notes
from vitlab.cli.options import (
    REDUCERS,
    ROUNDS,
    BatchSize,
    Checkpoint,
    Json,
    ModelOptions,
    NameOrCheckpoint,
    SourcePath,
    choice,
    option,
)
from vitlab.cli.progress import following_downloads

if TYPE_CHECKING:
    from vitlab.export.verify import Comparison


@dataclass(frozen=True)
class ExportOptions:
    int8: Annotated[
        str | None,
        choice("dynamic", "static", name="--int8", help="Quantize: smaller, faster; static calibrates on --data."),
    ] = None
    dynamic_size: Annotated[bool, typer.Option("--dynamic-size", help="Let the file take any image size.")] = False
    reducer: Annotated[
        str | None, typer.Option("--reducer", metavar=REDUCERS, help="Token reducer to build into the file.")
    ] = None
    features: Annotated[bool, typer.Option("--features", help="Export features instead of classes.")] = False
    text: Annotated[bool, typer.Option("--text", help="Export the text tower of a CLIP or SigLIP.")] = False
    force: Annotated[bool, typer.Option("--force", help="Keep the file even if it differs.")] = False


@dataclass(frozen=True)
class CompareOptions:
    """Images to compare on, and how many must agree."""

    data: Annotated[
        str | None, option("--data", "DATA", "Real images to compare on: a data source or folder.", complete.sources)
    ] = None
    path: SourcePath = None
    agreement: Annotated[
        float, typer.Option(help="Share of images that must get the same class; 1: equal up to rounding.")
    ] = 0.99

    def comparison(self, **more: Any) -> Comparison:
        from vitlab.export.verify import Comparison

        return Comparison(source=self.data, path=self.path, agreement=self.agreement, **more)


def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="model.onnx, or model.pt2 (torch.export).")],
    options: ExportOptions,
    compare: CompareOptions,
    images: Annotated[int, typer.Option(help="Number of images to compare on.", min=8)] = 128,
    tolerance: Annotated[float, typer.Option(help="Largest difference of a value, float32.")] = 1e-4,
    *,
    model: ModelOptions,
    json: Json = False,
) -> None:
    """Write a model as ONNX or torch.export, and compare both.

    Preprocess and labels are written too. Both are compared on real images: a file that answers differently is not
    kept (exit code 1).
    """
    from vitlab.export.pipeline import ExportMismatchError, export_model

    refused = None
    with following_downloads():
        try:
            result = export_model(
                checkpoint,
                out,
                gives="text" if options.text else "features" if options.features else None,
                int8=options.int8,
                dynamic_size=options.dynamic_size,
                reducer=options.reducer,
                compare=compare.comparison(images=images, tolerance=tolerance),
                force=options.force,
                **model.for_load(),
            )
        except ExportMismatchError as error:
            result, refused = error.result, str(error)
    written = str(out) if refused is None else None
    if json:
        print_json({"written": written, **result.to_dict()})
    else:
        if written is not None:
            console().print(f"written: {written}")
        print_table(result.table())
    say_notes(f"{note}." for note in result.notes)
    if refused is not None:
        say(f"vitlab: error: {refused} --force keeps it.")
        raise SystemExit(1)
    say_notes(f"kept by --force: {problem}." for problem in result.problems)


@dataclass(frozen=True)
class BackendOptions:
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="transformers,onnxruntime", help="Other libraries, with the same weights."),
    ] = None
    ways: Annotated[
        str | None,
        typer.Option("--ways", metavar="eager,compiled,...", help="Backends to time instead of the default ones."),
    ] = None
    reducer: Annotated[
        list[str] | None,
        typer.Option("--reducer", metavar="tome:r=8|none", help="Token reducer (repeatable); none: no reducers."),
    ] = None


def bench(
    what: NameOrCheckpoint,
    options: BackendOptions,
    compare: CompareOptions,
    batch: BatchSize = 8,
    rounds: Annotated[int, typer.Option(help=ROUNDS, min=3)] = 15,
    images: Annotated[int, typer.Option(help="Number of images to compare on.", min=1)] = 64,
    *,
    model: ModelOptions,
    json: Json = False,
) -> None:
    """Time a model with every backend, and pick the fastest.

    The backends are eager, compiled, ONNX Runtime, int8 and token reducers. The fastest that agrees with the eager
    model on enough images is picked. Run nothing else meanwhile.
    """
    from vitlab.export.bench import DEFAULT_BACKENDS, open_or_create, run_bench

    with following_downloads():
        result = run_bench(
            open_or_create(what, **model.for_load()),
            backends=parse_names(options.ways) or DEFAULT_BACKENDS,
            reducers=None if options.reducer is None else [text for text in options.reducer if text != "none"],
            against=parse_names(options.against),
            progress=(lambda name: say(f"making {name}")) if sys.stderr.isatty() else None,
            compare=compare.comparison(images=images),
            batch=batch,
            rounds=rounds,
        )
    say_notes(result.notes)
    print_json(result.to_dict()) if json else print_table(result.table())
