"""vitlab VERB ...: the verbs and their options. What they do lives in the module of the same name, imported on use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.explain.app import app as explain
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

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Heads = Annotated[int | None, typer.Option(help="Number of heads, where bare weights cannot tell.")]
Size = Annotated[
    str | None, typer.Option("--image-size", metavar="HxW", help="Image size: 384, or height x width: 384x256.")
]
Map = Annotated[Path | None, typer.Option("--map", help="Rename table (TOML) for a stranger's network.")]


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
    what: Annotated[str, typer.Argument(metavar="NAME|CHECKPOINT", help="A model's name, or a checkpoint.")],
    image_size: Size = None,
    batch: Annotated[int, typer.Option(help="Images per batch.")] = 1,
    depth: Annotated[int, typer.Option(help="Detail: 1 model, 2 blocks, 3 their parts, 4 every step.", min=1)] = 4,
    all_blocks: Annotated[bool, typer.Option("--all-blocks", help="List equal blocks one by one.")] = False,
    grads: Annotated[bool, typer.Option("--grads", help="Run one backward pass and list gradient norms.")] = False,
    heads: Heads = None,
    json: Json = False,
) -> None:
    """Show every step of a forward pass, with shapes and costs."""
    from vitlab.cli import inspect as verb

    verb.run(what, image_size, batch, depth, all_blocks, grads, heads, json)


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "*",
    json: Json = False,
) -> None:
    """List the models by name, with parameters and MACs."""
    from vitlab.cli import models as verb

    verb.run(pattern, json)


@app.command()
def predict(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint, bundled:NAME, hf-hub:owner/name, or an exported .onnx or .pt2.")
    ],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Picture files, or digits#3.")],
    top: Annotated[int, typer.Option(help="How many classes to show.", min=1)] = 5,
    heads: Heads = None,
    image_size: Size = None,
    json: Json = False,
) -> None:
    """Say what is in pictures. A file that cannot be read is reported; the others go on (exit code 1)."""
    from vitlab.cli import predict as verb

    verb.run(checkpoint, images, top, heads, image_size, json)


@app.command()
def zeroshot(
    checkpoint: Annotated[str, typer.Argument(help="A CLIP: folder, file, bundled:NAME, or hf-hub:owner/name.")],
    images: Annotated[list[str], typer.Argument(metavar="IMAGE...", help="Picture files, or digits#3.")],
    labels: Annotated[str, typer.Option("--labels", metavar="A,B,C", help="What may be in them; or a file of it.")],
    templates: Annotated[
        str, typer.Option("--templates", metavar="LIST", help='train, held_out, a file, or "a photo of a {}|one {}".')
    ] = "train",
    top: Annotated[int, typer.Option(help="How many labels to show.", min=1)] = 5,
    image_size: Size = None,
    json: Json = False,
) -> None:
    """Say which of your words fits each picture, with a CLIP. Files that cannot be read: as in predict."""
    from vitlab.cli import zeroshot as verb

    verb.run(checkpoint, images, labels, templates, top, image_size, json)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Any checkpoint, or hf-hub:owner/name.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; for jax an .npz file.")],
    to: Annotated[
        str, typer.Option("--to", metavar="native|timm|hf|jax|open_clip", help="Layout to write.")
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
        str | None, typer.Option(help="relu, gelu, gelu_tanh or quick_gelu, where the file does not say.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="Of a CLIP that came without: put it in.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing DST.")] = False,
    json: Json = False,
) -> None:
    """Convert weights between libraries, with a key-by-key report."""
    from vitlab.cli import convert as verb

    told = {"heads": heads, "classes": classes, "eps": eps, "activation": activation, "encoder": encoder or None}
    told["text.heads"] = text_heads
    verb.run(source, target, to, check, map, image_size, tokenizer, told, force, json)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or hf-hub:owner/name.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="model.onnx, or model.pt2 (torch.export).")],
    int8: Annotated[
        str | None, typer.Option("--int8", metavar="dynamic|static", help="Integers: smaller, and often faster.")
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", metavar="SOURCE", help="Real pictures to compare on, and to calibrate with.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="Where the files of a named source lie.")] = None,
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
    """Write a model as ONNX or torch.export, with its preprocess and labels, and compare both on real pictures.

    A file that answers otherwise than the model is not kept (exit code 1).
    """
    from vitlab.cli import export as verb

    asked = dict(int8=int8, source=data, data_path=path, images=images, dynamic_size=dynamic_size, reducer=reducer)
    asked |= dict(features=features, text=text, tolerance=tolerance, agreement=agreement, force=force)
    verb.run(checkpoint, out, image_size, asked, json)


@app.command()
def bench(
    what: Annotated[str, typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a model's name.")],
    against: Annotated[
        str | None, typer.Option("--against", metavar="transformers,onnxruntime", help="Other libraries, same weights.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Pictures in a batch that is timed.", min=1)] = 8,
    rounds: Annotated[int, typer.Option(help="Times that each way is timed, in turns.", min=3)] = 15,
    ways: Annotated[
        str | None, typer.Option("--ways", metavar="eager,compiled,...", help="Try these, not the usual ones.")
    ] = None,
    reducer: Annotated[
        list[str] | None, typer.Option("--reducer", metavar="tome:r=8|none", help="Fewer tokens; none: only all.")
    ] = None,
    agreement: Annotated[float, typer.Option(help="Share of equal answers asked; 1: equal to rounding.")] = 0.99,
    data: Annotated[str | None, typer.Option("--data", metavar="SOURCE", help="Real pictures to compare on.")] = None,
    path: Annotated[str | None, typer.Option(help="Where the files of a named source lie.")] = None,
    images: Annotated[int, typer.Option(help="Pictures to compare on.", min=1)] = 64,
    image_size: Size = None,
    json: Json = False,
) -> None:
    """Time a model run in every way: eager, compiled, ONNX Runtime, int8, fewer tokens; and pick the best.

    The fastest that agrees with the eager model as often as asked is picked. Run nothing else meanwhile.
    """
    from vitlab.cli import bench as verb

    asked = dict(batch=batch, rounds=rounds, agreement=agreement, source=data, path=path, images=images)
    verb.run(what, image_size, ways, reducer, against, asked, json)


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint; transformers:FOLDER is run by that library.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another copy of the same network.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="IMAGE", help="Picture files, or digits#3.")] = None,
    images: Annotated[list[str] | None, typer.Option("--images", metavar="IMAGE...", help="The same.")] = None,
    tolerance: Annotated[float, typer.Option(help="Share of a step's largest value that may differ.")] = 1e-5,
    image_size: Size = None,
    heads: Heads = None,
    all_blocks: Annotated[bool, typer.Option("--all-blocks", help="List every step of every block.")] = False,
    json: Json = False,
) -> None:
    """Run two checkpoints step by step, and say where and why they differ (exit code 1).

    Without pictures both get the same noise. With pictures each prepares them by itself, which is compared; then both
    networks get the same tensor.
    """
    from vitlab.cli import diff as verb

    verb.run(a, b, [*(images or []), *(more or [])], tolerance, image_size, heads, all_blocks, json)


@app.command()
def train(
    what: Annotated[str | None, typer.Argument(metavar="[RECIPE|SOURCE|FOLDER]", help="digits if left out.")] = None,
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to change.")] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with a run that was stopped.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Resume although the recipe was changed.")] = False,
    minutes: Annotated[
        float | None, typer.Option("--minutes", help="Pick all that is not given, to end within this time.")
    ] = None,
) -> None:
    """Train a model by a recipe, on a data source, or on a folder of your pictures."""
    began = time.perf_counter()
    from vitlab.cli import train as verb

    verb.run(what, settings or [], resume, changed, minutes, began)


@app.command(name="verify-resume")
def verify_resume(
    what: Annotated[str, typer.Argument(metavar="RECIPE|SOURCE|FOLDER", help="As for train.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to change.")] = None,
    kills: Annotated[int, typer.Option(help="How often the run is killed.", min=1)] = 3,
    steps: Annotated[int, typer.Option(help="Steps to train.", min=4)] = 24,
    json: Json = False,
) -> None:
    """Prove that a killed and resumed run ends with the same weights, to the bit (exit code 1 if not)."""
    from vitlab.cli import verify_resume as verb

    verb.run(what, settings or [], kills, steps, json)


@app.command()
def data(
    what: Annotated[str, typer.Argument(metavar="RECIPE|SOURCE|FOLDER", help="As for train.")],
    settings: Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Values to change.")] = None,
    preview: Annotated[
        Path | None, typer.Option("--preview", metavar="FILE", help="Draw what the model sees: .png, .svg or .pdf.")
    ] = None,
    images: Annotated[int, typer.Option(help="Pictures of the preview.", min=1, max=100)] = 8,
    views: Annotated[int, typer.Option(help="Epochs shown (DINO: all views of one).", min=1, max=20)] = 4,
    seed: Annotated[int | None, typer.Option(help="Another seed than the recipe's.")] = None,
    json: Json = False,
) -> None:
    """Show the data of a recipe, in numbers or as pictures before and after augmentation."""
    from vitlab.cli import data as verb

    verb.run(what, settings or [], preview, images, views, seed, json)


@app.command(name="eval")
def evaluate(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or hf-hub:owner/name.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A data source, or a folder of class folders.")],
    path: Annotated[str | None, typer.Option(help="Where the files of a named source lie.")] = None,
    split: Annotated[
        str | None, typer.Option(metavar="train|val|test", help="Default: test, or val without one.")
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
    batch_size: Annotated[int, typer.Option(help="Pictures at a time.", min=1)] = 256,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Where the model runs.")] = "auto",
    max_unreadable: Annotated[int, typer.Option(help="Pictures that may be skipped.", min=0)] = 20,
    json: Json = False,
) -> None:
    """Measure a model: top-1 and top-5, per class, calibration, what it confuses, speed; its features.

    On pictures with captions a CLIP is measured by recall@1, 5 and 10, both ways, beside chance.
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
        str | None, typer.Option("--model", metavar="CHECKPOINT", help="A CLIP, or any encoder. Default: the index's.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures at a time; a killed run repeats one batch.", min=1)] = 64,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Where the model runs.")] = "auto",
    moved: Annotated[bool, typer.Option("--moved", help="The pictures are the same, in another folder.")] = False,
    json: Json = False,
) -> None:
    """Make a folder of pictures searchable; the same command again looks only at what is new or changed."""
    from vitlab.cli import search as verb

    verb.index(folder, out, model, batch_size, device, moved, json)


@app.command()
def search(
    index: Annotated[Path, typer.Argument(metavar="INDEX", help="What vitlab index has made.")],
    text: Annotated[
        str | None, typer.Argument(metavar="[WORDS]", help='"a dog on a beach", where a CLIP made it.')
    ] = None,
    image: Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="A picture, or digits#3.")] = None,
    top: Annotated[int, typer.Option(help="How many pictures to find.", min=1)] = 10,
    model: Annotated[
        str | None, typer.Option("--model", metavar="CHECKPOINT", help="Where the index's model is now.")
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
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder of pictures, or a data source.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The table: out.parquet.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="CHECKPOINT", help="Any model. Default: bundled:dino.")
    ] = None,
    path: Annotated[str | None, typer.Option(help="Where the files of a named source lie.")] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures at a time.", min=1)] = 64,
    device: Annotated[str, typer.Option(metavar="auto|cpu|cuda|mps", help="Where the model runs.")] = "auto",
    json: Json = False,
) -> None:
    """Write the vectors of all pictures to a Parquet table. Killed, the same command goes on; torchrun shares it."""
    from vitlab.cli import embed as verb

    verb.run(data, out, model, path, batch_size, device, json)


@app.command()
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CHECKPOINT|EXPORT]...", help="What to serve, or NAME=CHECKPOINT. Default: the bundled models."
        ),
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", metavar="INDEX", help="Pictures to search, by vitlab index.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is every one.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: any that is free.", min=0, max=65535)] = 8000,
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
    """A page at / that shows a model at work; predict, explain, embed, zeroshot, search over HTTP. Ctrl-C ends it."""
    from vitlab.cli import serve as verb

    options = {"host": host, "token": token, "hosts": tuple(allow_host or ()), "origins": tuple(allow_origin or ())}
    options |= {"max_batch": max_batch, "max_wait": max_wait_ms / 1e3, "queue": queue, "timeout": timeout}
    options |= {"runs": str(runs), "max_upload": round(max_upload_mb * 1e6), "max_pixels": round(max_megapixels * 1e6)}
    verb.run(models or [], index, port, access_log, threads, options)


@app.command()
def doctor(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="A run folder; without one: the installation.")
    ] = None,
) -> None:
    """Say what is wrong with a run, or with the installation."""
    from vitlab.cli import doctor as verb

    verb.run(run)


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the runs are; or one run.")] = Path("runs"),
    format: Annotated[str, typer.Option("--format", metavar="table|markdown|csv", help="How to print.")] = "table",
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the validation curves: .png, .svg or .pdf.")
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
        typer.Argument(metavar="[EXERCISE]", help="patch-embed, attention, mlp, block or vit; without one: the list."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Your file, to be checked; without one: a file to begin with."),
    ] = None,
    lang: Annotated[str | None, typer.Option("--lang", metavar="en|zh", help="Default: the locale's.")] = None,
    solution: Annotated[bool, typer.Option("--solution", help="Show ours.")] = False,
    show: Annotated[bool, typer.Option("--print", help="Print the file to begin with instead of writing it.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for your code; then it is stopped.")] = 20.0,
    json: Json = False,
) -> None:
    """Write a ViT yourself, in five exercises that check themselves (exit code 1: not yet right)."""
    from vitlab.cli import learn as verb

    verb.run(exercise, file, lang, solution, show, seconds, json)


app.add_typer(explain, name="explain")

studies = typer.Typer(help="Answer a question by many training runs: one table, one plot.", no_args_is_help=True)
app.add_typer(studies, name="study")


@studies.command()
def configs(
    what: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe, data source or folder, as for train.")],
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=A,B...", help="Values to compare; one value is simply set.")
    ] = None,
    dir: Annotated[
        Path | None, typer.Option("--dir", metavar="FOLDER", help="Default: studies/<recipe>-<what varies>.")
    ] = None,
    format: Annotated[str, typer.Option("--format", metavar="table|markdown|csv", help="How to print.")] = "table",
    json: Json = False,
) -> None:
    """Train all combinations of settings, and compare.

    run.seed=0,1,2 gives means and spreads. The same command again goes on where it was stopped. A run that fails is
    reported; the others go on (exit code 1).
    """
    from vitlab.cli import study as verb

    verb.configs(what, settings or [], dir, format, json)


@studies.command()
def ssl(
    source: Annotated[str, typer.Argument(metavar="DATA", help="A data source or folder, as for train.")],
    methods: Annotated[str, typer.Option("--methods", metavar="mae,dino", help="What to compare.")] = "mae,dino",
    path: Annotated[str | None, typer.Option("--path", help="Where a named source's files lie.")] = None,
    per_class: Annotated[int | None, typer.Option("--per-class", min=1, help="Labels of each class.")] = None,
    fraction: Annotated[
        float | None, typer.Option("--fraction", min=0.0, max=1.0, help="Share of the labels; default 0.1.")
    ] = None,
    pretrain: Annotated[
        list[str] | None, typer.Option("--pretrain", metavar="KEY=VALUE", help="Change the pre-training recipes.")
    ] = None,
    few: Annotated[
        list[str] | None, typer.Option("--few", metavar="KEY=VALUE", help="Change what learns from the few labels.")
    ] = None,
    pretrained: Annotated[
        list[str] | None,
        typer.Option("--pretrained", metavar="METHOD=CHECKPOINT", help="Judge this encoder; do not pre-train one."),
    ] = None,
    dir: Annotated[Path | None, typer.Option("--dir", metavar="FOLDER", help="Default: studies/ssl-<data>.")] = None,
    json: Json = False,
) -> None:
    """Does learning without labels pay? Pre-train, judge, fine-tune on few labels, and learn from scratch.

    Fine-tuned and from scratch are the same network with the same steps on the same pictures. --pretrained
    mae=bundled:mae judges an encoder that is there. The same command again goes on where it was stopped.
    """
    from vitlab.cli import study as verb

    verb.ssl(source, methods, path, per_class, fraction, pretrain or [], few or [], pretrained or [], dir, json)


@studies.command()
def tokens(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A trained ViT, as for eval.")],
    source: Annotated[str, typer.Argument(metavar="DATA", help="A data source or folder, as for train.")],
    path: Annotated[str | None, typer.Option("--path", help="Where a named source's files lie.")] = None,
    way: Annotated[
        list[str] | None,
        typer.Option("--way", metavar="tome:r=8|evit:keep=0.7|random:keep=0.7", help="Compare these, not the usual."),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Pictures in a batch that is timed.")] = 8,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Times that each way is timed, in turns.")] = 15,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="Judge on so many pictures, not on all.")
    ] = None,
    dir: Annotated[Path | None, typer.Option("--dir", metavar="FOLDER", help="Default: studies/tokens-<run>.")] = None,
    json: Json = False,
) -> None:
    """How much faster with fewer tokens, and at what cost? Merging, pruning and dropping at random, measured here."""
    from vitlab.cli import study as verb

    verb.tokens(checkpoint, source, path, way or [], batch, rounds, images, dir, json)


@studies.command()
def scaling(
    models: Annotated[
        str, typer.Option("--models", metavar="A,B:KEY=VALUE", help="Names, with options of the model behind colons.")
    ] = "vit_tiny,vit_tiny:attention=explicit,swin_tiny,resnet18",
    sizes: Annotated[
        str | None, typer.Option("--sizes", metavar="96,128,...", help="Sides of square images. Default: 96 to 768.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images in a pass.")] = 1,
    rounds: Annotated[int, typer.Option("--rounds", min=2, help="Times that each is timed, in turns.")] = 15,
    dir: Annotated[Path | None, typer.Option("--dir", metavar="FOLDER", help="Default: studies/scaling.")] = None,
    json: Json = False,
) -> None:
    """How do time and memory grow with the image? Measured, with the fitted exponent, beside the formula.

    The same command again goes on where it was stopped. OMP_NUM_THREADS=1 measures one thread.
    """
    from vitlab.cli import study as verb

    verb.scaling(models, sizes, batch, rounds, dir, json)


@studies.command("data-efficiency")
def data_efficiency(
    source: Annotated[str, typer.Argument(metavar="DATA", help="A data source or folder, as for train.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE...", help="Of all runs, as for train; of one model: resnet:optim.lr=0.05."),
    ] = None,
    models: Annotated[
        str,
        typer.Option("--models", metavar="A,B:KEY=VALUE", help="vit, deit, swin, resnet, fitting the data; or names."),
    ] = "vit,deit,swin,resnet",
    fractions: Annotated[
        str, typer.Option("--fractions", metavar="0.01,0.1,1", help="Shares of the training pictures.")
    ] = "0.01,0.1,1",
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs of each: seeds 0, 1, ...")] = 1,
    path: Annotated[str | None, typer.Option("--path", help="Where a named source's files lie.")] = None,
    dir: Annotated[
        Path | None, typer.Option("--dir", metavar="FOLDER", help="Default: studies/data-efficiency-<data>.")
    ] = None,
    json: Json = False,
) -> None:
    """How many pictures does each network need? Accuracy against the size of the training set, from scratch.

    Every run has the same number of steps: those of run.epochs over the largest share. A deit is taught by the resnet
    that learned from the same pictures. The same command again goes on where it was stopped.
    """
    from vitlab.cli import study as verb

    verb.data_efficiency(source, settings or [], models, fractions, seeds, path, dir, json)


def run() -> None:
    """The console script: errors a user can cause end in one clear line, not in a traceback."""
    from vitlab.cli.console import reporting_errors, set_up_output

    set_up_output()
    with reporting_errors():
        app()
