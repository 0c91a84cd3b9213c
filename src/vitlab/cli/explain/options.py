"""What all verbs of `vitlab explain` take, and the decorator that adds it to a verb. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli.options import BatchSize, Checkpoint, Images, OptionalImages

Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="FILE", help="File to draw: .png, .svg, .pdf, or .html. Default: explain-VERB.png."
    ),
]
Html = Annotated[bool, typer.Option("--html", help="Also write one self-contained page to explore in a browser.")]
Size = Annotated[
    str | None,
    typer.Option("--image-size", metavar="HxW", help="Another input size than the model's own, for finer maps."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON: top classes, files written, scores.")]


@dataclass(frozen=True)
class Options:
    """Arguments and options of all verbs, in the order of the help page; a verb's own come after `images`."""

    checkpoint: Checkpoint
    images: Images
    out: Out = None
    html: Html = False
    image_size: Size = None
    batch_size: BatchSize = 8
    json: Json = False
    verb: str = ""


def verb(app: typer.Typer, *, needs_images: bool = True, batch_size: int = 8) -> Callable[[Any], Any]:
    """Register `function(options, ...)` as a command that also takes the fields of Options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        common = dict(signature(Options, eval_str=True).parameters)
        del common["verb"]
        common["batch_size"] = common["batch_size"].replace(default=batch_size)
        if not needs_images:
            common["images"] = common["images"].replace(annotation=OptionalImages, default=None)
        _, *own = signature(function, eval_str=True).parameters.values()
        checkpoint, images, *rest = common.values()
        parameters = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in (checkpoint, images, *own, *rest)]

        def command(**values: Any) -> None:
            values["images"] = values["images"] or []
            function(Options(verb=function.__name__, **{name: values.pop(name) for name in common}), **values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        app.command()(command)
        return function

    return register
