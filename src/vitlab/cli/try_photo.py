"""vitlab try."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, print_json, print_table, say, say_notes
from vitlab.cli.options import IMAGE, Json, ModelOptions, option
from vitlab.images.photos import FIRST
from vitlab.optional import EXTRAS, require
from vitlab.printable import one_line


@dataclass(frozen=True)
class TryOutput:
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="FILE", help="Heat map to draw; a page goes beside it, as .html.")
    ] = Path("try.png")
    serve: Annotated[bool, typer.Option("--serve/--no-serve", help="Serve the page, or write the files and end.")] = (
        True
    )
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free port.", min=0, max=65535)] = 0
    json: Json = False


def try_photo(
    photo: Annotated[str, typer.Argument(metavar="PHOTO", help=IMAGE)] = FIRST,
    model: Annotated[
        str | None,
        option(
            "--model",
            "CHECKPOINT",
            "A checkpoint: folder, file, bundled:NAME, or hf-hub:owner/name. Default: a bundled model.",
            complete.checkpoints,
        ),
    ] = None,
    *,
    options: ModelOptions,
    output: TryOutput,
) -> None:
    """Ask a model about a photo, and look inside.

    Prints the answer, draws what speaks for it, and opens a page on this photo. Ctrl-C ends it.
    """
    from vitlab.checkpoints.bundled import DEFAULT
    from vitlab.first_look import first_look

    model = model or DEFAULT
    look = first_look(model, photo, **options.for_load())
    files = look.save(output.out)
    if output.json:
        answer = {"image": photo, "scores": []} if look.prediction is None else look.prediction.to_dict()
        print_json({"checkpoint": model, **answer, "files": [str(file) for file in files]})
        return
    say_notes(map(one_line, [*look.heat.notes, *look.attention.notes]))
    if look.prediction is not None:
        print_table(look.prediction.table())
    for file in files:
        console().print(one_line(f"written: {file}"), soft_wrap=True)
    if output.serve:
        _serve(photo, model, output, **options.for_load())


def _serve(photo: str, model: str, output: TryOutput, **options: Any) -> None:
    require("the page", *EXTRAS["serve"], otherwise="Or add --no-serve.")
    from vitlab.serve.browser import open_browser
    from vitlab.serve.page_photo import open_photo
    from vitlab.serve.run import open_server

    with open_server([model], port=output.port, photo=open_photo(photo), **options) as server:
        opened = output.browser and open_browser(server.url)
        say(f"vitlab: {'opened' if opened else 'open'} {server.url} in a browser. Ctrl-C stops.")
        if not opened:
            port = server.address.rpartition(":")[2]
            say(f"vitlab: from another machine, run there first: ssh -L {port}:127.0.0.1:{port} THIS_MACHINE")
        server.run()
    say("vitlab: stopped.")
