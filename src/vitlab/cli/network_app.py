"""The verbs about one network, and their options. What they do is in the module of the same name, imported on use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.options import (
    AllBlocks,
    Checkpoint,
    CheckpointOrExport,
    Device,
    Heads,
    Json,
    Map,
    MaybePictures,
    NameOrCheckpoint,
    Pictures,
    Pool,
    Reducer,
    Size,
    SourcePath,
    TimedBatch,
)

app = typer.Typer(rich_markup_mode=None)


@app.command()
def inspect(
    what: NameOrCheckpoint,
    image_size: Size = None,
    batch: Annotated[int, typer.Option("--batch-size", "--batch", help="Pictures in the batch.", min=1)] = 1,
    depth: Annotated[int, typer.Option(help="Detail: 1 model, 2 blocks, 3 their parts, 4 every step.", min=1)] = 4,
    all_blocks: AllBlocks = False,
    grads: Annotated[bool, typer.Option("--grads", help="Run one backward pass and list gradient norms.")] = False,
    heads: Heads = None,
    json: Json = False,
) -> None:
    """Show every step of a forward pass, with shapes and costs."""
    from vitlab.cli import inspect as verb

    verb.run(what, image_size, batch, depth, all_blocks, grads, heads, json)


@app.command()
def models(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN", help="Part of a name, or a pattern with * and ?.", autocompletion=complete.models
        ),
    ] = "*",
    json: Json = False,
) -> None:
    """List the models by name, with parameters and MACs."""
    from vitlab.cli import models as verb

    verb.run(pattern, json)


@app.command()
def predict(
    checkpoint: CheckpointOrExport,
    images: Pictures,
    top: Annotated[int, typer.Option(help="How many classes to show.", min=1)] = 5,
    heads: Heads = None,
    image_size: Size = None,
    reducer: Reducer = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Say what is in pictures.

    A file that cannot be read is reported; the others go on (exit code 1).
    """
    from vitlab.cli import predict as verb

    verb.run(checkpoint, images, top, heads, image_size, reducer, device, json)


@app.command()
def zeroshot(
    checkpoint: Checkpoint,
    images: Pictures,
    labels: Annotated[str, typer.Option("--labels", metavar="A,B,C", help="What may be in them; or a file of it.")],
    templates: Annotated[
        str, typer.Option("--templates", metavar="LIST", help='train, held_out, a file, or "a photo of a {}|one {}".')
    ] = "train",
    top: Annotated[int, typer.Option(help="How many labels to show.", min=1)] = 5,
    image_size: Size = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Say which of your words fits each picture, with a CLIP.

    A file that cannot be read is reported; the others go on (exit code 1).
    """
    from vitlab.cli import zeroshot as verb

    verb.run(checkpoint, images, labels, templates, top, image_size, device, json)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint: folder, file, bundled:NAME, or hf-hub:owner/name.",
            autocompletion=complete.checkpoints,
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; for jax an .npz file.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="native|timm|hf|jax|open_clip",
            help="Layout to write.",
            autocompletion=complete.one_of("native", "timm", "hf", "jax", "open_clip"),
        ),
    ] = "native",
    check: Annotated[
        bool, typer.Option("--check", help="Compare logits, also in the other library if it is here.")
    ] = False,
    map: Map = None,
    heads: Heads = None,
    text_heads: Annotated[int | None, typer.Option(help="The same of a CLIP's text tower.")] = None,
    image_size: Size = None,
    classes: Annotated[int | None, typer.Option(help="Give the model a new head of so many classes.")] = None,
    encoder: Annotated[bool, typer.Option("--encoder", help="Of an MAE, DINO or CLIP, the ViT alone.")] = False,
    eps: Annotated[float | None, typer.Option(help="LayerNorm eps, where the file does not say.")] = None,
    activation: Annotated[
        str | None,
        typer.Option(
            metavar="relu|gelu|gelu_tanh|quick_gelu",
            help="Activation, where the file does not say.",
            autocompletion=complete.one_of("relu", "gelu", "gelu_tanh", "quick_gelu"),
        ),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Mean of each channel, where the file does not say.")
    ] = None,
    std: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Standard deviation of each channel, likewise.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="Of a CLIP that came without: put it in.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing DST.")] = False,
    json: Json = False,
) -> None:
    """Convert weights between libraries, with a report by key."""
    from vitlab.cli import convert as verb

    told = {"heads": heads, "classes": classes, "eps": eps, "activation": activation, "encoder": encoder or None}
    told["text.heads"] = text_heads
    verb.run(source, target, to, check, map, image_size, tokenizer, told, {"mean": mean, "std": std}, force, json)


@app.command()
def export(
    checkpoint: Checkpoint,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="model.onnx, or model.pt2 (torch.export).")],
    int8: Annotated[
        str | None,
        typer.Option(
            "--int8",
            metavar="dynamic|static",
            help="Integers: smaller, and often faster; static is calibrated on --data.",
            autocompletion=complete.one_of("dynamic", "static"),
        ),
    ] = None,
    data: Pool = None,
    path: SourcePath = None,
    images: Annotated[int, typer.Option(help="Pictures to compare on.", min=8)] = 128,
    image_size: Size = None,
    dynamic_size: Annotated[bool, typer.Option("--dynamic-size", help="Let the file take any image size.")] = False,
    reducer: Annotated[
        str | None, typer.Option("--reducer", metavar="tome:r=8|evit:keep=0.7", help="Fewer tokens, inside the file.")
    ] = None,
    features: Annotated[bool, typer.Option("--features", help="Give features instead of classes.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Of a CLIP, the tower that reads text.")] = False,
    tolerance: Annotated[float, typer.Option(help="Largest difference of a value, float32.")] = 1e-4,
    agreement: Annotated[float, typer.Option(help="Share of pictures that must get the same answer.")] = 0.99,
    force: Annotated[bool, typer.Option("--force", help="Keep the file although it differs.")] = False,
    json: Json = False,
) -> None:
    """Write a model as ONNX or torch.export, and compare both.

    Its preprocess and labels are written too. Both are compared on real pictures: a file that answers otherwise than
    the model is not kept (exit code 1).
    """
    from vitlab.cli import export as verb

    gives = "text" if text else "features" if features else None
    options = dict(gives=gives, int8=int8, dynamic_size=dynamic_size, reducer=reducer, force=force)
    compare = dict(source=data, path=path, images=images, tolerance=tolerance, agreement=agreement)
    verb.run(checkpoint, out, image_size, options, compare, json)


@app.command()
def bench(
    what: NameOrCheckpoint,
    against: Annotated[
        str | None, typer.Option("--against", metavar="transformers,onnxruntime", help="Other libraries, same weights.")
    ] = None,
    batch: TimedBatch = 8,
    rounds: Annotated[int, typer.Option(help="Times that each way is timed, in turns.", min=3)] = 15,
    ways: Annotated[
        str | None, typer.Option("--ways", metavar="eager,compiled,...", help="Try these, not the usual ones.")
    ] = None,
    reducer: Annotated[
        list[str] | None, typer.Option("--reducer", metavar="tome:r=8|none", help="Fewer tokens; none: only all.")
    ] = None,
    agreement: Annotated[float, typer.Option(help="Share of equal answers asked; 1: equal to rounding.")] = 0.99,
    data: Pool = None,
    path: SourcePath = None,
    images: Annotated[int, typer.Option(help="Pictures to compare on.", min=1)] = 64,
    image_size: Size = None,
    json: Json = False,
) -> None:
    """Time a model run in every way, and pick the best.

    The ways are eager, compiled, ONNX Runtime, int8 and fewer tokens. The fastest that agrees with the eager model as
    often as asked is picked. Run nothing else meanwhile.
    """
    from vitlab.cli import bench as verb

    compare = dict(agreement=agreement, source=data, path=path, images=images)
    verb.run(what, image_size, ways, reducer, against, dict(batch=batch, rounds=rounds), compare, json)


@app.command()
def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A checkpoint; transformers:FOLDER is run by that library.",
            autocompletion=complete.checkpoints,
        ),
    ],
    b: Annotated[
        str,
        typer.Argument(metavar="B", help="Another copy of the same network.", autocompletion=complete.checkpoints),
    ],
    more: MaybePictures = None,
    images: Annotated[list[str] | None, typer.Option("--images", metavar="IMAGE", help="A picture, again.")] = None,
    tolerance: Annotated[float, typer.Option(help="Share of a step's largest value that may differ.")] = 1e-5,
    image_size: Size = None,
    heads: Heads = None,
    all_blocks: AllBlocks = False,
    json: Json = False,
) -> None:
    """Say where and why two checkpoints differ, step by step.

    Without pictures both get the same noise. With pictures each prepares them by itself, which is compared; then both
    networks get the same tensor. Exit code 1: they differ.
    """
    from vitlab.cli import diff as verb

    verb.run(a, b, [*(images or []), *(more or [])], tolerance, image_size, heads, all_blocks, json)


@app.command()
def learn(
    exercise: Annotated[
        str | None,
        typer.Argument(
            metavar="EXERCISE",
            help="patch-embed, attention, mlp, block or vit. Default: the list.",
            autocompletion=complete.exercises,
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Your file, to be checked. Default: write a file to begin with."),
    ] = None,
    lang: Annotated[
        str | None,
        typer.Option(
            "--lang",
            metavar="en|zh",
            help="Language. Default: the locale's.",
            autocompletion=complete.one_of("en", "zh"),
        ),
    ] = None,
    solution: Annotated[bool, typer.Option("--solution", help="Show our solution.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the file to begin with instead of writing it.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for your code; then it is stopped.", min=0.01)] = 20.0,
    json: Json = False,
) -> None:
    """Write a ViT yourself, in five exercises that are checked.

    Exit code 1: not yet right.
    """
    from vitlab.cli import learn as verb

    verb.run(exercise, file, lang, solution, show, seconds, json)
