"""vitlab page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.console import print_json, print_table, say
from vitlab.cli.options import Commands, Json, checkpoint_argument
from vitlab.cli.progress import following_downloads
from vitlab.optional import EXTRAS, require

app = Commands("Put the page on any web server, as plain files.")


@app.add
def build(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.")],
    models: Annotated[
        list[str] | None,
        checkpoint_argument("CHECKPOINT", "Models, or NAME=CHECKPOINT. Default: the bundled models."),
    ] = None,
    runtime: Annotated[
        Path | None,
        typer.Option("--runtime", metavar="FILE", help="Archive of onnxruntime-web, where npm cannot fetch it."),
    ] = None,
    json: Json = False,
) -> None:
    """Write the page as files that need no server.

    Models become ONNX and run in the visitor's browser; each is compared with the model it was made from. Needs npm
    once, for onnxruntime-web.
    """
    require("page", *EXTRAS["serve"], *EXTRAS["export"])
    from vitlab.serve.static_page.build import build_page

    progress = (lambda name: say(f"exporting {name}")) if sys.stderr.isatty() else (lambda name: None)
    with following_downloads():
        built = build_page(out, models or (), runtime=runtime, progress=progress)
    if json:
        print_json(built.to_dict())
        return
    print_table(built.table())
    say(f"written: {built.folder}")
    say(f"vitlab: look at it with: python -m http.server --directory {built.folder}")
