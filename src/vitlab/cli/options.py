"""Arguments and options that several verbs take, each written once: same name, same words, same completion."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli import complete

Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT",
        help="A checkpoint: folder, file, bundled:NAME, or hf-hub:owner/name.",
        autocompletion=complete.checkpoints,
    ),
]
CheckpointOrExport = Annotated[
    str,
    typer.Argument(
        metavar="CHECKPOINT|EXPORT",
        help="A checkpoint, bundled:NAME, hf-hub:owner/name, or an exported .onnx or .pt2.",
        autocompletion=complete.checkpoints,
    ),
]
NameOrCheckpoint = Annotated[
    str,
    typer.Argument(
        metavar="NAME|CHECKPOINT",
        help="A model's name, or a checkpoint.",
        autocompletion=complete.models_and_checkpoints,
    ),
]
Pictures = Annotated[list[str], typer.Argument(metavar="IMAGE", help="Picture files, or digits#3.")]
MaybePictures = Annotated[list[str] | None, typer.Argument(metavar="IMAGE", help="Picture files, or digits#3.")]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE|SOURCE|FOLDER", help="As for train.", autocompletion=complete.recipes)
]
Settings = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Values to change.")]
Data = Annotated[
    str,
    typer.Argument(
        metavar="DATA", help="A data source, or a folder of your pictures.", autocompletion=complete.sources
    ),
]

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Heads = Annotated[int | None, typer.Option(help="Number of heads, where bare weights cannot tell.")]
Size = Annotated[
    str | None, typer.Option("--image-size", metavar="HxW", help="Image size: 384, or height x width: 384x256.")
]
Reducer = Annotated[
    str | None, typer.Option("--reducer", metavar="tome:r=8|evit:keep=0.7", help="With fewer tokens. Only ViTs can.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", help="Pictures at a time.", min=1)]
TimedBatch = Annotated[int, typer.Option("--batch-size", "--batch", help="Pictures in a batch that is timed.", min=1)]
Device = Annotated[
    str,
    typer.Option(
        metavar="auto|cpu|cuda|mps",
        help="Where the model runs.",
        autocompletion=complete.one_of("auto", "cpu", "cuda", "mps"),
    ),
]
Pool = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="DATA",
        help="Real pictures to compare on: a source or folder.",
        autocompletion=complete.sources,
    ),
]
SourcePath = Annotated[
    str | None, typer.Option("--path", metavar="FOLDER", help="Where the files of a named source lie.")
]
AllowCut = Annotated[bool, typer.Option("--allow-cut", help="Use what is whole of tar shards that are cut off.")]
AllowOutside = Annotated[bool, typer.Option("--allow-outside", help="A CSV may name files outside its own folder.")]
Format = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="table|markdown|csv",
        help="How to print.",
        autocompletion=complete.one_of("table", "markdown", "csv"),
    ),
]
Map = Annotated[
    Path | None, typer.Option("--map", metavar="FILE", help="Rename table (TOML) for a stranger's network.")
]
AllBlocks = Annotated[bool, typer.Option("--all-blocks", help="List equal blocks one by one.")]
