"""Options of all verbs of `vitlab explain`, the decorator that adds them, and parsers. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli.options import BatchSize, Checkpoint, Images, OptionalImages
from vitlab.errors import UsageError

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


def parse_query(text: str | None) -> str | tuple[float, float] | None:
    """A token's name, or the pixel X,Y."""
    if text in (None, "class", "distillation", "mean"):
        return text
    return "class" if text == "cls" else parse_point(text, "--query")


def parse_point(text: str, option: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is no place in the picture: write X,Y in its pixels, e.g. 100,60."
        ) from None
    return x, y


def parse_list(text: str, option: str) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise UsageError(f"{option} {text!r} names nothing.")
    return names


def parse_numbers(text: str, option: str, *words: str) -> str | list[int]:
    """A list of whole numbers, or one of `words`."""
    if text in words:
        return text
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        either = " or ".join(words)
        raise UsageError(f"{option} {text!r} is no list of numbers: write 0,3,-1, or {either}.") from None
