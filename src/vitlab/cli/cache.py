"""vitlab cache."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vitlab.cli.console import print_json, print_table, say
from vitlab.cli.options import Json
from vitlab.errors import UsageError


def cache(
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="KEY", help="Remove the features of one encoder (repeatable)."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", min=0.0, help="Remove features not used for so many days."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all features.")] = False,
    json: Json = False,
) -> None:
    """List or remove image features kept on disk.

    Training, evaluation and search keep the features of each image, so that an encoder never sees it twice.
    """
    from vitlab.training import feature_cache

    if sum((bool(remove), older_than is not None, clear)) > 1:
        raise UsageError("--remove, --older-than and --clear: use one of them.")
    if remove or older_than is not None or clear:
        encoders = feature_cache.clean(keys=remove, unused_days=older_than)
    else:
        encoders = feature_cache.encoders()
    removed = bool(remove or clear or older_than is not None)
    if json:
        name = "removed" if removed else "features"
        print_json({"folder": str(feature_cache.folder()), name: [asdict(encoder) for encoder in encoders]})
        return
    print_table(encoders.table())
    total = sum(encoder.bytes for encoder in encoders) / 1e6
    images = sum(encoder.images for encoder in encoders)
    say(f"{'removed: ' if removed else ''}{images:,} features, {total:,.1f} MB, in {feature_cache.folder()}")
