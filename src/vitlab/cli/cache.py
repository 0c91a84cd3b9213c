"""vitlab cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from vitlab.cli.console import print_json, print_table, say
from vitlab.cli.options import Json
from vitlab.errors import UsageError

if TYPE_CHECKING:
    from vitlab.images.copies import StoredCopies
    from vitlab.training.feature_cache import CachedEncoder

Stored = TypeVar("Stored", "CachedEncoder", "StoredCopies")


def cache(
    remove: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="KEY", help="Remove what is stored under a key (repeatable)."),
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option("--older-than", metavar="DAYS", min=0.0, help="Remove what was not used for so many days."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all of it.")] = False,
    json: Json = False,
) -> None:
    """List or remove cached features and shrunken photos.

    Training, evaluation and search keep the features of each image, so that an encoder never sees it twice. Training
    keeps shrunken copies of photos, so that it decodes each of them once.
    """
    from vitlab.images import copies
    from vitlab.images.sources.download import cache_dir
    from vitlab.training import feature_cache

    if sum((bool(remove), older_than is not None, clear)) > 1:
        raise UsageError("--remove, --older-than and --clear: use one of them.")
    encoders, photos = feature_cache.encoders(), copies.stored_copies()
    removed = bool(remove or clear or older_than is not None)
    if removed:
        if missing := set(remove or ()) - {stored.key for stored in (*encoders, *photos)}:
            raise UsageError(f"nothing is kept under the key {min(missing)}. `vitlab cache` lists the keys.")
        before = time.time() - 86_400 * (older_than or 0.0)
        encoders = feature_cache.CachedEncoders(_chosen(encoders, remove, before))
        photos = _chosen(photos, remove, before)
        feature_cache.remove_features(encoders)
        copies.remove_copies(photos)
    if json:
        names = ("removed", "removed_copies") if removed else ("features", "copies")
        listed = ([asdict(stored) for stored in chosen] for chosen in (encoders, photos))
        print_json({"folder": str(cache_dir()), **dict(zip(names, listed, strict=True))})
        return
    about = encoders.table()
    print_table(replace(about, rows=[*about.rows, *(stored.cells() for stored in photos)]))
    counts = f"{sum(e.images for e in encoders):,} features, {sum(p.images for p in photos):,} shrunken photos"
    total = sum(stored.bytes for stored in (*encoders, *photos)) / 1e6
    say(f"{'removed: ' if removed else ''}{counts}, {total:,.1f} MB, in {cache_dir()}")


def _chosen(stored: Sequence[Stored], keys: list[str] | None, before: float) -> list[Stored]:
    """Of these keys, or of all, what was last used before this time."""
    return [entry for entry in stored if (keys is None or entry.key in keys) and entry.used <= before]
