"""vitlab convert, vitlab push."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli import complete
from vitlab.cli.console import console, parse_size, print_json, say, say_notes, table
from vitlab.cli.options import CHECKPOINT, Checkpoint, Heads, Json, Size, checkpoint_argument, choice
from vitlab.errors import UsageError
from vitlab.printable import one_line
from vitlab.tables import by, short

if TYPE_CHECKING:
    from vitlab.checkpoints.convert import Compared
    from vitlab.checkpoints.report import Report

COLOURS = {"matched": "green", "resized": "cyan", "new": "yellow", "missing": "red", "unused": "yellow"}


@dataclass(frozen=True)
class ReadOptions:
    """What the file does not say, and what to change."""

    map: Annotated[
        Path | None, typer.Option("--map", metavar="FILE", help="Table of names (TOML) for an unknown network.")
    ] = None
    heads: Heads = None
    text_heads: Annotated[int | None, typer.Option(help="Attention heads of the text tower.")] = None
    image_size: Size = None
    classes: Annotated[int | None, typer.Option(help="Replace the head by a new one with this many classes.")] = None
    encoder: Annotated[
        bool, typer.Option("--encoder", help="Convert only the ViT of an MAE, DINO, CLIP or SigLIP.")
    ] = False
    base: Annotated[
        str | None, typer.Option("--base", metavar="CHECKPOINT", help="Base of a low-rank adapter, if it was moved.")
    ] = None
    eps: Annotated[float | None, typer.Option(help="LayerNorm eps, if the file does not say.")] = None
    activation: Annotated[
        str | None, choice("relu", "gelu", "gelu_tanh", "quick_gelu", help="Activation, if the file does not say.")
    ] = None
    mean: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Mean of each channel, if the file does not say.")
    ] = None
    std: Annotated[str | None, typer.Option(metavar="R,G,B", help="Standard deviation of each channel, likewise.")] = (
        None
    )

    def for_load(self) -> dict[str, Any]:
        """As options of vitlab.load."""
        options = {"heads": self.heads, "text.heads": self.text_heads, "classes": self.classes, "eps": self.eps}
        options |= {"activation": self.activation, "encoder": self.encoder or None, "preprocess": self._channels()}
        options |= {"base": self.base}
        options |= {"map": self.map and self.map.expanduser(), "image_size": parse_size(self.image_size)}
        return {name: value for name, value in options.items() if value is not None}

    def _channels(self) -> dict[str, tuple[float, ...]] | None:
        """--mean 0.49,0.48,0.45 and --std likewise, both or neither."""
        if self.mean is None and self.std is None:
            return None
        if self.mean is None or self.std is None:
            given = "std" if self.mean is None else "mean"
            raise UsageError(f"--{given} needs its counterpart: give --mean and --std.")
        try:
            mean, std = (tuple(map(float, text.split(","))) for text in (self.mean, self.std))
        except ValueError:
            raise UsageError("--mean and --std are numbers, one for each channel: --mean 0.49,0.48,0.45.") from None
        return {"mean": mean, "std": std}


def convert(
    source: Annotated[str, checkpoint_argument("SRC", CHECKPOINT)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; for jax an .npz file.")],
    options: ReadOptions,
    to: Annotated[str, choice(*complete.layouts(), name="--to", help="Layout to write.")] = "native",
    check: Annotated[
        bool, typer.Option("--check", help="Compare logits, also in the other library if it is installed.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", metavar="FILE", help="Tokenizer to add to a CLIP or SigLIP that has none."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing DST.")] = False,
    json: Json = False,
) -> None:
    """Convert weights between libraries, with a report by key."""
    from vitlab.checkpoints.convert import convert

    target = target.expanduser()
    result = convert(source, target, to, check=check, force=force, tokenizer=tokenizer, **options.for_load())
    if json:
        checks = [dict(what=row.what, max_difference=row.difference, remark=row.remark) for row in result.checks]
        print_json({**result.report.to_dict(), "written": str(target), "to": to, "check": checks})
    else:
        _show(result.report)
        console().print(f"written: {target} ({to})")
        for row in result.checks:
            outcome = row.remark if row.difference is None else f"largest logit difference {row.difference:.2e}"
            console().print(f"check: {row.what}: {outcome}")
    wrong = [f"{row.what}: {_how_wrong(row)}" for row in result.checks if row.wrong]
    if wrong:
        say(f"vitlab: error: logits differ: {'; '.join(wrong)}")
        raise SystemExit(1)


def push(
    checkpoint: Checkpoint,
    name: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub, made if it is not there.")],
    to: Annotated[str, choice("native", "hf", "timm", "open_clip", name="--to", help="Layout to upload.")] = "native",
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Message of the commit.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show files and model card; send nothing.")] = False,
    json: Json = False,
) -> None:
    """Upload a model to the Hugging Face hub, with a model card."""
    from vitlab.checkpoints.push import push

    pushed = push(checkpoint, name, to=to, private=private, message=message, dry_run=dry_run)
    if json:
        print_json(vars(pushed))
        return
    for file, size in pushed.files.items():
        console().print(f"{file}  {short(size)}B")
    if dry_run:
        console().print(f"\n{pushed.card}")
    say_notes(pushed.notes)
    console().print(f"{'pushed to' if pushed.uploaded else 'nothing was sent; it would go to'} {pushed.url}")


def _how_wrong(row: Compared) -> str:
    if row.difference is None or not math.isfinite(row.difference):
        return "NaN or infinity"
    return f"by {row.difference:.2e}, where {row.allowed:.2e} is allowed"


def _show(report: Report) -> None:
    from rich.text import Text

    grid = table("", "ours", f"theirs ({report.dialect})", "shape", "")
    for row in report.rows:
        status = Text(row.status, style=COLOURS[row.status])
        theirs = one_line(" + ".join(row.theirs)) or "-"
        grid.add_row(status, one_line(row.ours or "-"), theirs, by(row.shape), one_line(row.note))
    console().print(grid)
    console().print(", ".join(f"{n} {status}" for status, n in report.counts().items()))
    for note in report.notes:
        console().print(f"note: {note}")
