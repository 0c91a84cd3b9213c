"""vitlab serve."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vitlab.cli.console import say, say_notes
from vitlab.cli.options import ModelOptions, checkpoint_argument
from vitlab.optional import EXTRAS, require
from vitlab.printable import one_line

Engine = Literal["eager", "exact"]


@dataclass(frozen=True)
class AccessOptions:
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all addresses.")] = "127.0.0.1"
    token: Annotated[
        str | None, typer.Option(envvar="VITLAB_TOKEN", help="Token that clients must send (Authorization: Bearer).")
    ] = None
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="Another host name of this server (repeatable)."),
    ] = None
    allow_origin: Annotated[
        list[str] | None,
        typer.Option("--allow-origin", metavar="ORIGIN", help="Site whose pages may send requests (repeatable)."),
    ] = None


@dataclass(frozen=True)
class LimitOptions:
    engine: Annotated[
        Engine,
        typer.Option(help="exact: measure at the start which backend gives the same scores soonest, and use it."),
    ] = "eager"
    max_batch: Annotated[int, typer.Option(help="Largest batch of images.", min=1)] = 8
    max_wait_ms: Annotated[float, typer.Option(help="How long a batch waits for more images.", min=0)] = 5.0
    queue: Annotated[
        int, typer.Option(help="Queue length per model; further requests are refused with Retry-After (503).", min=1)
    ] = 64
    timeout: Annotated[float, typer.Option(help="Time limit of a request, in seconds.", min=0.001)] = 30.0
    max_upload_mb: Annotated[float, typer.Option(help="Largest request.", min=0.001)] = 20.0
    max_megapixels: Annotated[float, typer.Option(help="Largest image.", min=0.001)] = 50.0


@dataclass(frozen=True)
class ServedModelOptions(ModelOptions):
    threads: Annotated[int | None, typer.Option(help="Threads per model.", min=1)] = None

    def for_server(self) -> dict[str, Any]:
        return {**self.for_load(), "threads": self.threads}


def serve(
    access: AccessOptions,
    limits: LimitOptions,
    models: Annotated[
        list[str] | None,
        checkpoint_argument("CHECKPOINT|EXPORT", "Models, or NAME=CHECKPOINT. Default: the bundled models."),
    ] = None,
    index: Annotated[
        Path | None, typer.Option("--index", metavar="INDEX", help="Image index to search, made by vitlab index.")
    ] = None,
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.", min=0, max=65535)] = 8000,
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="Training runs to show on the page at /.")] = Path(
        "runs"
    ),
    *,
    options: ServedModelOptions,
    access_log: Annotated[bool, typer.Option("--access-log", help="Log every request.")] = False,
) -> None:
    """Serve models over HTTP, with a page to try them.

    The page is at /; predict, explain, embed, zeroshot and search are HTTP routes. Ctrl-C stops the server.
    """
    require("serve", *EXTRAS["serve"])
    from vitlab.serve.run import open_server
    from vitlab.serve.settings import Settings

    settings = Settings(
        host=access.host,
        token=access.token,
        hosts=tuple(access.allow_host or ()),
        origins=tuple(access.allow_origin or ()),
        engine=limits.engine,
        max_batch=limits.max_batch,
        max_wait=limits.max_wait_ms / 1e3,
        queue=limits.queue,
        timeout=limits.timeout,
        max_upload=round(limits.max_upload_mb * 1e6),
        max_pixels=round(limits.max_megapixels * 1e6),
        runs=str(runs),
    )
    with open_server(models or [], index, port=port, settings=settings, **options.for_server()) as server:
        if not settings.local and settings.token is None:
            say(f"note: anyone who reaches {server.address} may send requests. Add --token TOKEN, or leave out --host.")
        logging.basicConfig(level=logging.INFO if access_log else logging.ERROR, format="%(asctime)s %(message)s")
        for served in server.models:
            by = "" if served.engine is None else f" (predict by {served.engine.chosen.title})"
            say(f"{served.name}: {', '.join(served.verbs)}{by}")
        if server.index is not None:
            say_notes(map(one_line, server.index.notes))
            about = server.index.summary()
            query = "text or an image" if server.index.reads_text else "an image"
            say(f"search: {about['pictures']:,} images of {about['name']}, by {query}, with {server.index.model}")
        place = f"http://{server.address}"
        say(f"vitlab: open {place}/ in a browser; {place}/docs lists the routes. Ctrl-C stops.")
        server.run(access_log=access_log)
    say("vitlab: all accepted requests are answered.")
