"""Arguments and options that several commands take, each written once: same name, same help, same completion.

Options that belong together are a dataclass, which a command takes as one parameter; `expand` makes its fields options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from vitlab.advice import on_the_command_line
from vitlab.cli import complete
from vitlab.cli.console import load_options
from vitlab.errors import UsageError

LARGEST = 2**31 - 1  # of any whole number: more neither fits the computer nor ends


class Commands(typer.Typer):
    """A group of commands. Plain help: rich would double the time it takes to appear."""

    def __init__(self, help: str, **more: Any) -> None:
        super().__init__(help=help, no_args_is_help=True, rich_markup_mode=None, **more)

    def add(self, function: Callable[..., None], name: str | None = None) -> Callable[..., None]:
        """Make a command of a function, which may take dataclasses of options."""
        self.command(name)(expand(function))
        return function


def expand(function: Callable[..., None]) -> Callable[..., None]:
    """The function with a parameter for each field of the dataclasses that it takes, as Typer needs it."""
    groups: dict[str, tuple[type, list[str]]] = {}
    parameters: list[Parameter] = []
    for parameter in signature(function, eval_str=True).parameters.values():
        fields = {parameter.name: parameter}
        if isinstance(group := parameter.annotation, type) and is_dataclass(group):
            fields = _fields(group)
            groups[parameter.name] = (group, list(fields))
        parameters += [field.replace(kind=Parameter.KEYWORD_ONLY) for field in fields.values()]

    @wraps(function)
    def command(**values: Any) -> None:
        for parameter in parameters:
            _check_number(parameter, values[parameter.name])
        for name, (group, fields) in groups.items():
            values[name] = group(**{field: values.pop(field) for field in fields})
        with on_the_command_line({spelling for parameter in parameters for spelling in _spellings(parameter)}):
            function(**values)

    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _fields(group: type) -> dict[str, Parameter]:
    """With their types, those of a base class as its own module means them."""
    types = get_type_hints(group, include_extras=True)
    return {name: field.replace(annotation=types[name]) for name, field in signature(group).parameters.items()}


def _check_number(option: Parameter, value: object) -> None:
    """Refuse infinity, NaN, and numbers that overflow somewhere below."""
    wrong = isinstance(value, float) and not math.isfinite(value) and "must be finite"
    wrong = wrong or (isinstance(value, int) and abs(value) > LARGEST and f"must lie within ±{LARGEST}")
    if wrong:
        raise UsageError(f"{max(_spellings(option), key=len)} {value} {wrong}.")


def _spellings(option: Parameter) -> list[str]:
    info = option.annotation.__metadata__[0]  # Typer takes the first name for a default until it builds the option
    names = [name for name in (info.default, *(info.param_decls or ())) if str(name).startswith("-")]
    return names or [f"--{option.name.replace('_', '-')}"]


def choice(*values: str, name: str | None = None, help: str) -> Any:
    """An option that takes one of some values; the function that it is passed to checks them."""
    names = () if name is None else (name,)
    return typer.Option(*names, metavar="|".join(values), help=help, autocompletion=complete.one_of(*values))


def argument(metavar: str, help: str, values: complete.Complete) -> Any:
    return typer.Argument(metavar=metavar, help=help, autocompletion=values)


def option(name: str, metavar: str, help: str, values: complete.Complete) -> Any:
    return typer.Option(name, metavar=metavar, help=help, autocompletion=values)


def model_option(help: str) -> Any:
    return option("--model", "CHECKPOINT|EXPORT", help, complete.checkpoints)


def folder_option(default: str) -> Any:
    return typer.Option("-o", "--out", "--dir", metavar="FOLDER", help=f"Folder for the results. Default: {default}.")


BESIDE = Path("-")  # --html alone, its old form: beside the figure


def old_spellings(words: Sequence[str]) -> list[str]:
    """The command line with what older versions accepted: `vitlab explain ... --html` without a file."""
    pairs = pairwise([*words, ""])
    explain = list(words[:1]) == ["explain"]
    lone = [explain and word == "--html" and not after.endswith(".html") for word, after in pairs]
    return [f"{word}={BESIDE}" if alone else word for word, alone in zip(words, lone, strict=True)]


def page_file(html: Path | None) -> bool | Path:
    """--html as `Explanation.save` takes it."""
    if html is not None and html != BESIDE and html.suffix.lower() != ".html":
        raise UsageError(f"--html {html}: name an .html file.")
    return html is not None if html in (None, BESIDE) else html


def checkpoint_argument(metavar: str, help: str) -> Any:
    return argument(metavar, help, complete.checkpoints)


CHECKPOINT = "A checkpoint: folder, file, bundled:NAME, or hf-hub:owner/name."
IMAGE = "An image, sample:cat, or digits#3."
IMAGES = "Image files, sample:cat, or digits#3."
IMAGES_OR_FOLDERS = (
    "Image files, folders of images, lists of files (.txt, .csv), sample:cat, or digits#3; - reads paths from stdin."
)
REDUCERS = "tome:r=8|evit:keep=0.7"

Checkpoint = Annotated[str, checkpoint_argument("CHECKPOINT", CHECKPOINT)]
CheckpointOrExport = Annotated[
    str,
    checkpoint_argument(
        "CHECKPOINT|EXPORT", "A checkpoint, bundled:NAME, hf-hub:owner/name, or an exported .onnx or .pt2."
    ),
]
NameOrCheckpoint = Annotated[
    str, argument("NAME|CHECKPOINT", "A model's name, or a checkpoint.", complete.models_and_checkpoints)
]
ImagesOrFolders = Annotated[list[str], typer.Argument(metavar="IMAGE|FOLDER|LIST", help=IMAGES_OR_FOLDERS)]
Images = Annotated[list[str], typer.Argument(metavar="IMAGE", help=IMAGES)]
OptionalImages = Annotated[list[str] | None, typer.Argument(metavar="IMAGE", help=IMAGES)]
Recipe = Annotated[str, argument("RECIPE|SOURCE|FOLDER", "As for train.", complete.recipes)]
Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values to change.")]
FoldersAndSettings = Annotated[
    list[str] | None, typer.Argument(metavar="[FOLDER]... [KEY=VALUE]", help="More folders, then values to change.")
]
Data = Annotated[str, argument("DATA", "A data source, or a folder of your images.", complete.sources)]

SIZE = "Image size: 384, or height x width: 384x256."

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page for a browser: .html.")]
Heads = Annotated[int | None, typer.Option(help="Number of attention heads, if the weights do not say.")]
Size = Annotated[str | None, typer.Option("--image-size", metavar="HxW", help=SIZE)]
Reducer = Annotated[str | None, typer.Option("--reducer", metavar=REDUCERS, help="Token reducer (ViT models only).")]
BatchSize = Annotated[int, typer.Option("--batch-size", "--batch", help="Images per batch.", min=1)]
ROUNDS = "Repetitions per backend, interleaved."
Device = Annotated[str, choice("auto", "cpu", "cuda", "mps", help="Device to run the model on.")]
SourcePath = Annotated[
    str | None, typer.Option("--path", metavar="FOLDER", help="Folder with the files of a named data source.")
]
AllowCut = Annotated[bool, typer.Option("--allow-cut", help="Use the complete samples of truncated tar shards.")]
AllowOutside = Annotated[bool, typer.Option("--allow-outside", help="Let a CSV name files outside its own folder.")]
Format = Annotated[str, choice("table", "markdown", "csv", name="--format", help="Output format.")]
AllBlocks = Annotated[bool, typer.Option("--all-blocks", help="List equal blocks one by one.")]


@dataclass(frozen=True)
class ModelOptions:
    """How a model is opened, and where it runs."""

    image_size: Size = None
    device: Device = "cpu"

    def for_load(self) -> dict[str, Any]:
        return {**load_options(self.image_size), "device": self.device}


@dataclass(frozen=True)
class SourceOptions:
    """How the files of a data source are opened."""

    path: SourcePath = None
    allow_cut: AllowCut = False
    allow_outside: AllowOutside = False
