"""vitlab convert."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vitlab.cli.console import by, console, parse_size, print_json, say, table
from vitlab.cli.options import CHECKPOINT, Heads, Json, Size, checkpoint_argument, choice
from vitlab.errors import UsageError
from vitlab.printable import one_line

if TYPE_CHECKING:
    from vitlab.checkpoints.convert import Compared
    from vitlab.checkpoints.report import Report

COLOURS = {"matched": "green", "resized": "cyan", "new": "yellow", "missing": "red", "unused": "yellow"}


def convert(
    source: Annotated[str, checkpoint_argument("SRC", CHECKPOINT)],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write; for jax an .npz file.")],
    to: Annotated[
        str, choice("native", "timm", "hf", "jax", "open_clip", name="--to", help="Layout to write.")
    ] = "native",
    check: Annotated[
        bool, typer.Option("--check", help="Compare logits, also in the other library if it is installed.")
    ] = False,
    map: Annotated[
        Path | None, typer.Option("--map", metavar="FILE", help="Table of names (TOML) for an unknown network.")
    ] = None,
    heads: Heads = None,
    text_heads: Annotated[int | None, typer.Option(help="Attention heads of the text tower.")] = None,
    image_size: Size = None,
    classes: Annotated[int | None, typer.Option(help="Replace the head by a new one with this many classes.")] = None,
    encoder: Annotated[bool, typer.Option("--encoder", help="Convert only the ViT of an MAE, DINO or CLIP.")] = False,
    eps: Annotated[float | None, typer.Option(help="LayerNorm eps, if the file does not say.")] = None,
    activation: Annotated[
        str | None,
        choice("relu", "gelu", "gelu_tanh", "quick_gelu", help="Activation, if the file does not say."),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Mean of each channel, if the file does not say.")
    ] = None,
    std: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Standard deviation of each channel, likewise.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="FILE", help="Tokenizer to add to a CLIP that has none.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing DST.")] = False,
    json: Json = False,
) -> None:
    """Convert weights between libraries, with a report by key."""
    from vitlab.checkpoints import convert
    from vitlab.checkpoints.load import load_with_report
    from vitlab.inference import reads_text

    if to not in convert.TARGETS:
        raise UsageError(f"--to {to!r} is not known: use {', '.join(convert.TARGETS)}.")
    target, map = target.expanduser(), map.expanduser() if map is not None else None
    if target.exists() and not force and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already. Name another place, or pass --force to write over it.")
    options = {"heads": heads, "text.heads": text_heads, "classes": classes, "eps": eps, "activation": activation}
    options |= {"encoder": encoder or None, "image_size": parse_size(image_size)}
    given = {key: value for key, value in options.items() if value is not None}
    model, report = load_with_report(source, map=map, preprocess=_channels(mean, std), **given)
    if tokenizer is not None:
        _give_tokenizer(model, tokenizer)
    elif reads_text(model) and model.tokenizer is None:
        report.notes.append("it came without its tokenizer; --tokenizer FILE adds one, so that it can read text.")
    report.notes += convert.write(model, target, to)
    changed = any(row.status in ("new", "resized") for row in report.rows)
    rows = convert.check(source, target, model, changed=changed) if check else []
    if json:
        compared = [dict(what=row.what, max_difference=row.difference, remark=row.remark) for row in rows]
        print_json({**report.to_dict(), "written": str(target), "to": to, "check": compared})
    else:
        _show(report)
        console().print(f"written: {target} ({to})")
        for row in rows:
            result = row.remark if row.difference is None else f"largest logit difference {row.difference:.2e}"
            console().print(f"check: {row.what}: {result}")
    wrong = [f"{row.what}: {_how_wrong(row)}" for row in rows if row.wrong]
    if wrong:
        say(f"vitlab: error: logits differ: {'; '.join(wrong)}")
        raise SystemExit(1)


def _how_wrong(row: Compared) -> str:
    if row.difference is None or not math.isfinite(row.difference):
        return "NaN or infinity"
    return f"by {row.difference:.2e}, where {row.allowed:.2e} is allowed"


def _channels(mean: str | None, std: str | None) -> dict[str, tuple[float, ...]] | None:
    """--mean 0.49,0.48,0.45 and --std likewise, both or neither -> values for Preprocess."""
    if mean is None and std is None:
        return None
    if mean is None or std is None:
        raise UsageError(f"--{'std' if mean is None else 'mean'} needs its counterpart: give --mean and --std.")
    try:
        return {name: tuple(map(float, text.split(","))) for name, text in (("mean", mean), ("std", std))}
    except ValueError:
        raise UsageError("--mean and --std are numbers, one for each channel: --mean 0.49,0.48,0.45.") from None


def _give_tokenizer(model: Any, path: Path) -> None:
    """Read a tokenizer with the model's context length and padding."""
    from vitlab.inference import reads_text
    from vitlab.text.tokenizer import Tokenizer

    if not reads_text(model):
        raise UsageError(f"--tokenizer is for a CLIP; this is of the family {model.family}.")
    c = model.config.text
    model.tokenizer = Tokenizer.read(path, context=c.context, pad_id=c.pad_id)


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
