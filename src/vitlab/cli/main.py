"""vitlab VERB ...: the verbs and their options. What they do lives in the module of the same name, imported on use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.explain.app import app as explain
from vitlab.cli.options import (
    AllBlocks,
    BatchSize,
    Checkpoint,
    Data,
    Device,
    Format,
    Heads,
    Json,
    Map,
    MaybePictures,
    NameOrCheckpoint,
    Pictures,
    Pool,
    Recipe,
    Settings,
    Size,
    SourcePath,
    TimedBatch,
)
from vitlab.cli.study_app import app as study
from vitlab.version import __version__

app = typer.Typer(
    name="vitlab",
    help="Build, train, look inside and ship Vision Transformers.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would double the time it takes to appear
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"vitlab {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Build, train, look inside and ship Vision Transformers."""


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
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|EXPORT",
            help="A checkpoint, bundled:NAME, hf-hub:owner/name, or an exported .onnx or .pt2.",
            autocompletion=complete.checkpoints,
        ),
    ],
    images: Pictures,
    top: Annotated[int, typer.Option(help="How many classes to show.", min=1)] = 5,
    heads: Heads = None,
    image_size: Size = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Say what is in pictures.

    A file that cannot be read is reported; the others go on (exit code 1).
    """
    from vitlab.cli import predict as verb

    verb.run(checkpoint, images, top, heads, image_size, device, json)


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
    verb.run(source, target, to, check, map, image_size, tokenizer, told, force, json)


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

    asked = dict(int8=int8, source=data, data_path=path, images=images, dynamic_size=dynamic_size, reducer=reducer)
    asked |= dict(features=features, text=text, tolerance=tolerance, agreement=agreement, force=force)
    verb.run(checkpoint, out, image_size, asked, json)


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

    asked = dict(batch=batch, rounds=rounds, agreement=agreement, source=data, path=path, images=images)
    verb.run(what, image_size, ways, reducer, against, asked, json)


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
) -> None:
    """Train by a recipe, on a data source, or on your pictures.

    Pictures of yours lie in a folder for each class, or have captions.
    """
    began = time.perf_counter()
    from vitlab.cli import train as verb

    verb.run(what, settings or [], resume, changed, minutes, began)


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
    checkpoint: Checkpoint,
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
    batch_size: BatchSize = 256,
    device: Device = "auto",
    max_unreadable: Annotated[int, typer.Option(help="Pictures that may be skipped.", min=0)] = 20,
    json: Json = False,
) -> None:
    """Measure a model: accuracy, calibration, errors, speed.

    Top-1 and top-5, also per class, and what it confuses; if asked, what its features are worth. On pictures with
    captions a CLIP is measured by recall@1, 5 and 10, both ways, beside chance.
    """
    from vitlab.cli import evaluate as verb

    if templates is not None and not zeroshot:
        raise ValueError("--templates are the sentences of --zeroshot: add it, or leave them out.")
    words = templates or "held_out" if zeroshot else None
    asked = (knn, probe, few_shot, draws, words)
    verb.run(checkpoint, data, path, split, *asked, flip, batch_size, device, max_unreadable, json)


@app.command()
def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Pictures, at any depth.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="INDEX", help="The index: a folder to make or update.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="CHECKPOINT",
            help="A CLIP, or any encoder. Default: the index's.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures at a time; a killed run repeats one batch.", min=1)] = 64,
    device: Device = "auto",
    moved: Annotated[bool, typer.Option("--moved", help="The pictures are the same, in another folder.")] = False,
    json: Json = False,
) -> None:
    """Make a folder of pictures searchable.

    The same command again looks only at what is new or changed.
    """
    from vitlab.cli import search as verb

    verb.index(folder, out, model, batch_size, device, moved, json)


@app.command()
def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="What vitlab index has made.")],
    text: Annotated[
        str | None, typer.Argument(metavar="WORDS", help='"a dog on a beach", where a CLIP made it.')
    ] = None,
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="A picture, or digits#3.")] = None,
    top: Annotated[int, typer.Option(help="How many pictures to find.", min=1)] = 10,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="CHECKPOINT", help="Where the index's model is now.", autocompletion=complete.checkpoints
        ),
    ] = None,
    sheet: Annotated[
        Path | None, typer.Option("--sheet", metavar="FILE", help="Draw them: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Show them on a page.")] = None,
    json: Json = False,
) -> None:
    """Find pictures by words, or by a picture that is like them."""
    from vitlab.cli import search as verb

    verb.search(index, text, image, top, model, sheet, html, json)


@app.command()
def embed(
    data: Data,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The table: out.parquet.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="CHECKPOINT",
            help="Any model. Default: bundled:dino.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    path: SourcePath = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Write the vectors of all pictures to a Parquet table.

    Killed, the same command goes on; torchrun shares the work.
    """
    from vitlab.cli import embed as verb

    verb.run(data, out, model, path, batch_size, device, json)


@app.command()
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CHECKPOINT|EXPORT",
            help="What to serve, or NAME=CHECKPOINT. Default: the bundled models.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", metavar="INDEX", help="Pictures to search, by vitlab index.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 is any that is free.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, typer.Option(envvar="VITLAB_TOKEN", help="Whoever asks must know it (Authorization: Bearer).")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option("--allow-host", metavar="NAME", help="Another name of this server.")
    ] = None,
    allow_origin: Annotated[
        list[str] | None, typer.Option("--allow-origin", metavar="ORIGIN", help="A site whose pages may ask.")
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Pictures run together.", min=1)] = 8,
    max_wait_ms: Annotated[float, typer.Option(help="How long a batch waits for more.", min=0)] = 5.0,
    queue: Annotated[int, typer.Option(help="Requests a model holds; more are told to come back (503).", min=1)] = 64,
    timeout: Annotated[float, typer.Option(help="Seconds from request to answer.", min=0.001)] = 30.0,
    max_upload_mb: Annotated[float, typer.Option(help="Size of a request.", min=0.001)] = 20.0,
    max_megapixels: Annotated[float, typer.Option(help="Size of a picture.", min=0.001)] = 50.0,
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="Training runs that the page at / follows.")] = Path(
        "runs"
    ),
    threads: Annotated[int | None, typer.Option(help="Threads of each model.", min=1)] = None,
    access_log: Annotated[bool, typer.Option("--access-log", help="A line for each request.")] = False,
) -> None:
    """Serve models over HTTP, with a page to see them at work.

    The page is at /; predict, explain, embed, zeroshot and search are asked over HTTP. Ctrl-C ends it.
    """
    from vitlab.cli import serve as verb

    options = {"host": host, "token": token, "hosts": tuple(allow_host or ()), "origins": tuple(allow_origin or ())}
    options |= {"max_batch": max_batch, "max_wait": max_wait_ms / 1e3, "queue": queue, "timeout": timeout}
    options |= {"runs": str(runs), "max_upload": round(max_upload_mb * 1e6), "max_pixels": round(max_megapixels * 1e6)}
    verb.run(models or [], index, port, access_log, threads, options)


@app.command()
def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run's folder. Default: the installation.", autocompletion=complete.runs),
    ] = None,
) -> None:
    """Say what is wrong with a run, or with the installation."""
    from vitlab.cli import doctor as verb

    verb.run(run)


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


app.add_typer(explain, name="explain")
app.add_typer(study, name="study")


def run() -> None:
    """The console script: errors a user can cause end in one clear line, not in a traceback."""
    from typer.main import get_command

    from vitlab.cli.console import reporting_errors, set_up_output
    from vitlab.cli.help import prepare

    set_up_output()
    with reporting_errors(), complete.answering_bash():
        code = prepare(get_command(app))(prog_name="vitlab", standalone_mode=False)
        if code == 130:  # what Typer makes of Ctrl-C
            raise KeyboardInterrupt
        raise SystemExit(code)
