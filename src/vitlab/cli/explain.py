"""vitlab explain: each command is one function of vitlab.explain.figures, whose files are written and reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, load_options, parse_names, print_json, print_table, say, say_notes
from vitlab.cli.options import (
    SIZE,
    BatchSize,
    Checkpoint,
    Commands,
    Device,
    Html,
    Images,
    Json,
    OptionalImages,
    choice,
    option,
    page_file,
)
from vitlab.errors import UsageError
from vitlab.explain.methods import BY_CLASS, SHOWN
from vitlab.explain.scale import DEFAULT, SCALES
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.explain.subject import Subject
    from vitlab.images.read import Source

app = Commands("Draw what a model sees, on the images themselves.\n\nThe numbers go beside each drawing as .npz.")

Target = Annotated[
    str | None, typer.Option("--target", metavar="CLASS", help="Name or number. Default: each image's top class.")
]
Text = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="SENTENCE", help="Sentence to explain with a CLIP or SigLIP (repeatable)."),
]
Methods = Annotated[
    str | None, typer.Option("--methods", metavar=",".join(SHOWN), help="Methods, separated by commas.")
]


@dataclass(frozen=True)
class Inputs:
    """Arguments of all commands but figure7."""

    checkpoint: Checkpoint
    images: Images


@dataclass(frozen=True)
class OptionalInputs:
    checkpoint: Checkpoint
    images: OptionalImages = None


@dataclass(frozen=True)
class FileOutput:
    """Options of all commands."""

    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", metavar="FILE", help="File to draw: .png, .svg, .pdf, or .html. Default: explain-VERB.png."
        ),
    ] = None
    html: Html = None
    image_size: Annotated[
        str | None,
        typer.Option("--image-size", metavar="HxW", help=f"{SIZE} The whole image is seen, not cropped."),
    ] = None
    device: Device = "cpu"
    batch_size: BatchSize = 8
    json: Json = False


@dataclass(frozen=True)
class Output(FileOutput):
    """Options of commands that draw heat maps."""

    scale: Annotated[str, choice(*SCALES, help="What the colours of a heat map span; numbers stay as they are.")] = (
        DEFAULT
    )


@dataclass(frozen=True)
class FaithfulnessOutput(FileOutput):
    batch_size: BatchSize = 32


@app.add
def attention(
    inputs: Inputs,
    layers: Annotated[
        str | None,
        typer.Option(metavar="0,5,-1|all", help="Which layers, from 0; -1 is the last. Figures count from 1."),
    ] = None,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="0,3|mean|all", help="Which heads. Default: all, or mean where their number differs by layer."
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(metavar="cls|mean|X,Y", help="Query: a token, or the patch under pixel X,Y of the image."),
    ] = None,
    *,
    output: Output,
) -> None:
    """Where a token looks, layer by layer and head by head.

    One image: a grid of layers and heads. Several: a row for each, mean over heads.
    """
    layer_numbers = None if layers is None else _parse_numbers(layers, "--layers", "all")
    head_numbers = None if heads is None else _parse_numbers(heads, "--heads", "all", "mean")
    _run("attention", inputs, output, layers=layer_numbers, heads=head_numbers, query=_parse_query(query))


@app.add
def rollout(
    inputs: Inputs,
    discard: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of the lowest weights of each layer to drop, e.g. 0.9.")
    ] = 0.0,
    *,
    output: Output,
) -> None:
    """Attention multiplied through all layers.

    Figure 6 of the ViT paper.
    """
    _run("rollout", inputs, output, discard=discard)


@app.add
def relevance(
    inputs: Inputs,
    method: Annotated[str, choice(*BY_CLASS, help="Method.")] = "relevance",
    target: Target = None,
    text: Text = None,
    *,
    output: Output,
) -> None:
    """Which patches speak for a class, or for a sentence."""
    if text and target is not None:
        raise UsageError("--target names one of a model's classes; with --text the sentences are what is asked for.")
    _run("relevance", inputs, output, texts=text, method=method, target=target)


@app.add
def compare(
    inputs: Inputs,
    other: Annotated[
        str | None, option("--with", "CHECKPOINT", "A second model, on the same images.", complete.checkpoints)
    ] = None,
    methods: Methods = None,
    target: Target = None,
    text: Text = None,
    *,
    output: Output,
) -> None:
    """Two checkpoints or methods side by side, and how they agree."""
    names = None if methods is None else _parse_list(methods, "--methods")
    _run("compare", inputs, output, texts=text, second=other, methods=names, target=target)


@app.add
def figure7(inputs: OptionalInputs, output: Output) -> None:
    """Figure 7 of the ViT paper: filters, positions, distances.

    Position similarity, attention distance and entropy, and the lengths of the tokens. Without images, only what the
    weights show.
    """
    _run("figure7", inputs, output)


@app.add
def features(
    inputs: Inputs,
    joint: Annotated[
        bool, typer.Option("--joint/--each", help="Same colours for all images, or separate ones.")
    ] = True,
    at: Annotated[
        str | None,
        typer.Option(metavar="X,Y", help="Also similarity to the patch under this pixel of the first image."),
    ] = None,
    mask: Annotated[bool, typer.Option("--mask", help="Also the foreground; colours of the foreground only.")] = False,
    neighbours: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Instead: the most similar images of this folder.")
    ] = None,
    k: Annotated[int, typer.Option("--top", "-k", help="How many neighbours.", min=1)] = 5,
    layer: Annotated[int, typer.Option(help="Tokens after this layer, from 0; -1 is the last.")] = -1,
    *,
    output: Output,
) -> None:
    """Compare patches: colours, similarity, neighbours.

    The colours are principal components; optionally of the foreground only, or the nearest images of a folder.
    """
    if neighbours is not None:
        _run("neighbours", inputs, output, default="explain-features.png", folder=neighbours, k=k)
    else:
        point = None if at is None else _parse_point(at, "--at")
        _run("features", inputs, output, joint=joint, at=point, mask=mask, layer=layer)


@app.add
def faithfulness(
    inputs: Inputs,
    methods: Methods = None,
    kinds: Annotated[
        str, typer.Option(metavar="deletion,insertion,road", help="Which tests.")
    ] = "deletion,insertion,road",
    steps: Annotated[int, typer.Option(help="Steps of the curves.", min=1)] = 16,
    target: Target = None,
    text: Text = None,
    *,
    output: FaithfulnessOutput,
) -> None:
    """How faithful each method is: a table, and curves.

    Measures the class probability while the patches with the highest scores are removed.
    """
    names = None if methods is None else _parse_list(methods, "--methods")
    tests = _parse_list(kinds, "--kinds")
    _run("faithfulness", inputs, output, texts=text, methods=names, kinds=tests, steps=steps, target=target)


@app.add
def reconstruct(
    inputs: Inputs,
    mask_ratio: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Share of the patches to hide. Default: the model's own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed hides other patches.")] = 0,
    *,
    output: FileOutput,
) -> None:
    """Reconstruct hidden patches with a masked autoencoder.

    Figure 2 of the MAE paper.
    """
    _run("reconstruct", inputs, output, encoder=False, mask_ratio=mask_ratio, seed=seed)


@app.add
def pruned(
    inputs: Inputs,
    reducer: Annotated[
        str, typer.Option(metavar="tome:r=8|evit:keep=0.7|random:keep=0.7", help="Token reducer.")
    ] = "tome:r=8",
    *,
    output: FileOutput,
) -> None:
    """Which patches a reducer kept, merged or dropped, by layer."""
    _run("pruned", inputs, output, reducer=reducer)


@app.add
def lens(inputs: Inputs, target: Target = None, text: Text = None, *, output: FileOutput) -> None:
    """Logit lens: which class each patch would be, by layer.

    The tokens after every layer are read by the model's own last norm and head.
    """
    _run("lens", inputs, output, texts=text, target=target)


@app.add
def attribution(inputs: Inputs, target: Target = None, text: Text = None, *, output: Output) -> None:
    """Shares of heads, MLPs and patches in one logit.

    Direct logit attribution: the shares sum to the logit.
    """
    _run("attribution", inputs, output, texts=text, target=target)


@app.add
def ablate(
    inputs: Inputs,
    how: Annotated[str, choice("zero", "mean", help="What takes the place of a part: zeros, or its mean.")] = "zero",
    target: Target = None,
    text: Text = None,
    *,
    output: FileOutput,
) -> None:
    """How much each head and MLP matters, by leaving it out.

    One pass for every part: the change of the class's logit.
    """
    _run("ablate", inputs, output, texts=text, how=how, target=target)


@app.add
def patch(
    checkpoint: Checkpoint,
    image: Annotated[str, typer.Argument(metavar="IMAGE", help="Image that goes through the model.")],
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Image whose activations are put in.")],
    by_patch: Annotated[
        bool, typer.Option("--by-patch", help="Also every patch alone, at every layer: many passes.")
    ] = False,
    target: Target = None,
    text: Text = None,
    *,
    output: Output,
) -> None:
    """Activation patching: parts of one image's pass in another's.

    How far the logit moves from the first image's to the other's, for each layer, half of a block and head.
    """
    _run("patch", Inputs(checkpoint, [image, other]), output, texts=text, target=target, by_patch=by_patch)


def _run(
    figure: str,
    inputs: Inputs | OptionalInputs,
    output: FileOutput,
    *,
    texts: Sequence[str] | None = None,
    encoder: bool = True,
    second: str | None = None,
    default: str | None = None,
    **arguments: Any,
) -> None:
    """Draw vitlab.explain.figures.FIGURE(subject, **arguments). second: another checkpoint for the same images."""
    from vitlab.explain import figures
    from vitlab.explain.subject import check_output, open_subject

    def open_model(checkpoint: str, images: Sequence[Source], encoder: bool = True) -> Subject:
        options: dict[str, Any] = dict(
            texts=texts or (), encoder=encoder, batch_size=output.batch_size, device=output.device
        )
        options |= load_options(output.image_size)
        options |= {"scale": output.scale} if isinstance(output, Output) else {}
        return open_subject(checkpoint, images, skip_unreadable=True, **options)

    names = inputs.images or []
    path = check_output(output.out or default or f"explain-{figure}.png", [inputs.checkpoint, *names])
    subject = open_model(inputs.checkpoint, names, encoder)
    if names and not subject.views:
        if output.json:
            print_json({**subject.to_dict(), "files": []})
        _fail(subject)
    if second is not None:
        arguments["other"] = open_model(second, subject.sources)
    explanation = getattr(figures, figure)(subject, **arguments)
    files = [str(file) for file in explanation.save(path, html=page_file(output.html))]
    say_notes(map(one_line, explanation.notes))
    if output.json:
        print_json({**subject.to_dict(), "files": files, **explanation.results})
    else:
        for view in subject.views:
            _print(f"{view.name}: {view.prediction}" if view.prediction else view.name)
        for table in explanation.tables:
            print_table(table)
        for file in files:
            _print(f"written: {file}")
    if subject.failed:
        _fail(subject)


def _fail(subject: Subject) -> None:
    for message in subject.failed.values():
        say(f"vitlab: {one_line(message)}")
    say(f"{len(subject.failed)} of {len(subject.names)} images could not be read.")
    raise SystemExit(1)


def _print(line: str) -> None:
    console().print(one_line(line), soft_wrap=True)


def _parse_query(text: str | None) -> str | tuple[float, float] | None:
    """A token's name, or the pixel X,Y."""
    if text in (None, "class", "distillation", "mean"):
        return text
    return "class" if text == "cls" else _parse_point(text, "--query")


def _parse_point(text: str, option: str) -> tuple[float, float]:
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text!r} is no place in the image: write X,Y in its pixels, e.g. 100,60.") from None
    return x, y


def _parse_list(text: str, option: str) -> list[str]:
    names = parse_names(text)
    if not names:
        raise UsageError(f"{option} {text!r} names nothing.")
    return names


def _parse_numbers(text: str, option: str, *names: str) -> str | list[int]:
    """A list of whole numbers, or one of `names`."""
    if text in names:
        return text
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        either = " or ".join(names)
        raise UsageError(f"{option} {text!r} is no list of numbers: write 0,3,-1, or {either}.") from None
