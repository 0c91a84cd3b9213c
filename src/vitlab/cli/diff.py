"""vitlab diff."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Annotated

import typer

from vitlab.cli.console import print_json, print_table, say_notes
from vitlab.cli.options import AllBlocks, Heads, Json, ModelOptions, OptionalImages, checkpoint_argument


@dataclass(frozen=True)
class DiffImages:
    """Images to compare on, as arguments or as options."""

    more: OptionalImages = None
    images: Annotated[list[str] | None, typer.Option("--images", metavar="IMAGE", help="Image (repeatable).")] = None

    @property
    def files(self) -> list[str]:
        return [*(self.images or []), *(self.more or [])]


def diff(
    a: Annotated[str, checkpoint_argument("A", "A checkpoint; transformers:FOLDER is run by that library.")],
    b: Annotated[str, checkpoint_argument("B", "Another copy of the same network.")],
    images: DiffImages,
    tolerance: Annotated[float, typer.Option(help="Share of a step's largest value that may differ.")] = 1e-5,
    *,
    model: ModelOptions,
    heads: Heads = None,
    all_blocks: AllBlocks = False,
    json: Json = False,
) -> None:
    """Show where and why two checkpoints differ, step by step.

    Without images both get the same noise. With images each preprocesses them itself, which is compared; then both
    networks get the same tensor. Exit code 1: they differ.
    """
    from vitlab.explain.diff import diff

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the other library's; ours are in the notes
        difference = diff(a, b, images.files or None, tolerance, heads=heads, **model.for_load())
    say_notes(dict.fromkeys(difference.notes))
    if json:
        print_json(difference.to_dict())
    else:
        print_table(difference.table(all_blocks), no_wrap=("shape",))
    if not difference.equal:
        raise SystemExit(1)
