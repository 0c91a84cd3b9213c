"""vitlab page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.console import console, print_json, say, table
from vitlab.cli.options import Commands, Json, checkpoint_argument
from vitlab.cli.progress import following_downloads
from vitlab.optional import EXTRAS, require

if TYPE_CHECKING:
    from vitlab.serve.static_page.build import BuiltPage

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
    print_json(built.to_dict()) if json else _show(built)


def _show(built: BuiltPage) -> None:
    grid = table("model", "MB", "difference", right=("MB", "difference"))
    for model in built.models:
        grid.add_row(model.name, f"{model.bytes / 1e6:.2f}", f"{model.difference:.0e}")
    console().print(grid)
    console().print(
        f"{built.bytes / 1e6:.1f} MB; a visitor fetches {built.first_load / 1e6:.1f} MB for {built.models[0].name}, "
        f"{built.everything / 1e6:.1f} MB for all models (gzip)"
    )
    say(f"written: {built.folder}")
    say(f"vitlab: look at it with: python -m http.server --directory {built.folder}")
