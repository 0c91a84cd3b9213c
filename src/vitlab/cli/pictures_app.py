"""The verbs about many pictures and many users, and their options. What they do is in the module of the same name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli import complete
from vitlab.cli.options import AllowCut, AllowOutside, BatchSize, Data, Device, Json, SourcePath

app = typer.Typer(rich_markup_mode=None)


@app.command()
def index(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Pictures, at any depth.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="INDEX", help="The index: a folder to make or update.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="CHECKPOINT|EXPORT",
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
            "--model",
            metavar="CHECKPOINT|EXPORT",
            help="Where the index's model is now.",
            autocompletion=complete.checkpoints,
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
            metavar="CHECKPOINT|EXPORT",
            help="Any model. Default: bundled:dino.",
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    path: SourcePath = None,
    batch_size: BatchSize = 64,
    device: Device = "auto",
    allow_cut: AllowCut = False,
    allow_outside: AllowOutside = False,
    json: Json = False,
) -> None:
    """Write the vectors of all pictures to a Parquet table.

    Killed, the same command goes on; torchrun shares the work.
    """
    from vitlab.cli import embed as verb

    allow = {"allow_cut": allow_cut, "allow_outside": allow_outside}
    verb.run(data, out, model, path, batch_size, device, json, allow)


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
