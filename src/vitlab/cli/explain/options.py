"""What all verbs of `vitlab explain` take, and the decorator that adds it to a verb. Does not import torch."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli.options import BatchSize, Checkpoint, MaybePictures, Pictures


@dataclass(frozen=True)
class Options:
    """Arguments and options that all verbs have."""

    verb: str
    checkpoint: str
    images: list[str]
    out: Path | None
    html: bool
    image_size: str | None
    batch_size: int
    json: bool


BEFORE: dict[str, Any] = {"checkpoint": Checkpoint, "images": Pictures}
AFTER: dict[str, Any] = {  # the type and the default of each
    "out": (
        Annotated[
            Path | None,
            typer.Option(
                "-o",
                "--out",
                metavar="FILE",
                help="File to draw: .png, .svg, .pdf, or .html. Default: explain-VERB.png.",
            ),
        ],
        None,
    ),
    "html": (
        Annotated[bool, typer.Option("--html", help="Also write one self-contained page to explore in a browser.")],
        False,
    ),
    "image_size": (
        Annotated[
            str | None,
            typer.Option(
                "--image-size", metavar="HxW", help="Another input size than the model's own, for finer maps."
            ),
        ],
        None,
    ),
    "batch_size": (BatchSize, 8),
    "json": (Annotated[bool, typer.Option("--json", help="Print JSON: top classes, files written, scores.")], False),
}


def verb(app: typer.Typer, *, needs_images: bool = True, batch_size: int = 8) -> Callable[[Any], Any]:
    """Register `function(options, **own)` as a command with the common parameters before and after its own."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = typing.get_type_hints(function, include_extras=True)
        own = list(signature(function).parameters.values())[1:]
        parameters = [
            *(Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind) for name, kind in BEFORE.items()),
            *(p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[p.name]) for p in own),
            *(Parameter(n, Parameter.KEYWORD_ONLY, annotation=t, default=d) for n, (t, d) in AFTER.items()),
        ]
        changed: dict[str, dict[str, Any]] = {"batch_size": {"default": batch_size}}
        if not needs_images:
            changed["images"] = {"annotation": MaybePictures, "default": None}
        parameters = [p.replace(**changed.get(p.name, {})) for p in parameters]

        def command(**values: Any) -> None:
            common = {name: values.pop(name) for name in (*BEFORE, *AFTER)}
            function(Options(function.__name__, **{**common, "images": common["images"] or []}), **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command()(command)
        return function

    return register
