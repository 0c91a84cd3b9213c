"""vitlab eval, for now."""

from __future__ import annotations

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
    Json,
    Reducer,
    SourcePath,
)
from vitlab.errors import UsageError


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
    words = templates or "held_out" if zeroshot else None
    asked = (knn, probe, few_shot, draws, words)
    allow = {"allow_cut": allow_cut, "allow_outside": allow_outside}
    verb.run(checkpoint, data, path, split, *asked, flip, reducer, batch_size, device, max_unreadable, json, allow)
