"""The verbs about training runs and their data, and their options. What they do is in the module of the same name."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.options import (
    AllowCut,
    AllowOutside,
    BatchSize,
    CheckpointOrExport,
    Data,
    Device,
    Format,
    Json,
    Recipe,
    Reducer,
    Settings,
    SourcePath,
)
from vitlab.errors import UsageError

app = typer.Typer(rich_markup_mode=None)


@app.command()
def train(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE|SOURCE|FOLDER",
            help="A recipe, a data source, or a folder of your pictures. Default: digits.",
            autocompletion=complete.recipes,
        ),
    ] = None,
    settings: Settings = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            "--resume", metavar="RUN", help="Go on with a run that was stopped.", autocompletion=complete.runs
        ),
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Resume although the recipe was changed.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Pick all that is not given, to end within this time.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON; all else goes to stderr.")] = False,
) -> None:
    """Train by a recipe, on a data source, or on your pictures.

    Pictures of yours lie in a folder for each class, or have captions.
    """
    began = time.perf_counter()
    from vitlab.cli import train as verb

    verb.run(what, settings or [], resume, changed, minutes, began, json)


@app.command(name="verify-resume")
def verify_resume(
    what: Recipe,
    settings: Settings = None,
    kills: Annotated[int, typer.Option(help="How often the run is killed.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=4)] = 24,
    json: Json = False,
) -> None:
    """Prove that a resumed run ends with the same weights.

    It is killed and resumed; the weights must be the same to the bit (exit code 1 if not).
    """
    from vitlab.cli import verify_resume as verb

    verb.run(what, settings or [], kills, steps, json)


@app.command()
def data(
    what: Recipe,
    settings: Settings = None,
    preview: Annotated[
        Path | None,
        typer.Option("--preview", "-o", metavar="FILE", help="Draw what the model sees: .png, .svg or .pdf."),
    ] = None,
    images: Annotated[int, typer.Option(help="Pictures of the preview.", min=1, max=100)] = 8,
    views: Annotated[int, typer.Option(help="Epochs shown (DINO: all views of one).", min=1, max=20)] = 4,
    seed: Annotated[int | None, typer.Option(help="Another seed than the recipe's.")] = None,
    json: Json = False,
) -> None:
    """Show the data of a recipe, in numbers or as pictures.

    The pictures are shown before and after augmentation.
    """
    from vitlab.cli import data as verb

    verb.run(what, settings or [], preview, images, views, seed, json)


@app.command(name="eval")
def evaluate(
    checkpoint: CheckpointOrExport,
    data: Data,
    path: SourcePath = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="train|val|test",
            help="Which pictures. Default: test, or val without one.",
            autocompletion=complete.one_of("train", "val", "test"),
        ),
    ] = None,
    knn: Annotated[bool, typer.Option("--knn", help="Also k nearest neighbours on the features.")] = False,
    probe: Annotated[bool, typer.Option("--probe", help="Also a linear probe on the features.")] = False,
    few_shot: Annotated[
        int | None, typer.Option(metavar="K", help="Also a classifier on the features of K pictures a class.", min=1)
    ] = None,
    draws: Annotated[int, typer.Option(help="How often --few-shot draws its pictures.", min=2)] = 10,
    zeroshot: Annotated[bool, typer.Option("--zeroshot", help="Judge a CLIP by the names of the classes.")] = False,
    templates: Annotated[
        str | None,
        typer.Option("--templates", metavar="LIST", help='Of --zeroshot: held_out, a file, or "a photo of a {}".'),
    ] = None,
    flip: Annotated[bool, typer.Option("--flip", help="Average the scores with the mirror image's.")] = False,
    reducer: Reducer = None,
    batch_size: BatchSize = 256,
    device: Device = "auto",
    max_unreadable: Annotated[int, typer.Option(help="Pictures that may be skipped.", min=0)] = 20,
    allow_cut: AllowCut = False,
    allow_outside: AllowOutside = False,
    json: Json = False,
) -> None:
    """Measure a model: accuracy, calibration, errors, speed.

    Top-1 and top-5, also per class, and what it confuses; if asked, what its features are worth. On pictures with
    captions a CLIP is measured by recall@1, 5 and 10, both ways, beside chance.
    """
    from vitlab.cli import evaluate as verb

    if templates is not None and not zeroshot:
        raise UsageError("--templates are the sentences of --zeroshot: add it, or leave them out.")
    options = dict(
        path=path,
        split=split,
        knn=knn,
        probe=probe,
        few_shot=few_shot,
        draws=draws,
        templates=templates or "held_out" if zeroshot else None,
        flip=flip,
        reducer=reducer,
        batch_size=batch_size,
        device=device,
        max_unreadable=max_unreadable,
        allow_cut=allow_cut,
        allow_outside=allow_outside,
    )
    verb.run(checkpoint, data, json, options)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the runs are; or one run.")] = Path("runs"),
    format: Format = "table",
    plot: Annotated[
        Path | None,
        typer.Option("--plot", "-o", metavar="FILE", help="Draw the validation curves: .png, .svg or .pdf."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option("--sort", metavar="KEY", help="Best first, by a column or recipe key; -KEY: last.")
    ] = None,
    json: Json = False,
) -> None:
    """List and compare runs, newest first."""
    from vitlab.cli import runs as verb

    verb.run(folder, format, plot, sort, json)


@app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run's folder. Default: the installation.", autocompletion=complete.runs),
    ] = None,
    json: Json = False,
) -> None:
    """Say what is wrong with a run, or with the installation.

    Exit code 1: something is.
    """
    from vitlab.cli import doctor as verb

    verb.run(run, json)
