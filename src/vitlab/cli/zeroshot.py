"""vitlab zeroshot."""

from __future__ import annotations

from pathlib import Path

from vitlab.cli.console import say
from vitlab.cli.predict import open_model, place, report, with_progress
from vitlab.errors import UsageError
from vitlab.inference import embed_labels, zero_shot
from vitlab.text.templates import fill, read_templates


def run(
    checkpoint: str, images: list[str], labels: str, templates: str, top: int, size: str | None, device: str, json: bool
) -> None:
    sentences = read_templates(templates)
    names = read_labels(labels)
    model = place(open_model(checkpoint, size), device)
    known = embed_labels(model, names, sentences)
    if len(names) == 1:
        say("note: one label alone is always certain: name others that it could be.")
    say(f"note: each label is the mean of {len(sentences)} sentences, e.g. {fill(sentences[0], names[0])!r}.")
    report(with_progress(lambda pictures, **more: zero_shot(model, pictures, known, top=top, **more), images), json)


def read_labels(text: str) -> list[str]:
    """cat,dog; or a file with one a line."""
    path = Path(text).expanduser()
    if not path.is_file() and "," not in text and (path.suffix == ".txt" or len(path.parts) > 1):
        raise UsageError(f"--labels {text}: no such file. Write cat,dog, or name a file with one label a line.")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines() if path.is_file() else text.split(",")
    except UnicodeDecodeError:
        raise UsageError(f"--labels {text}: is no text. Write cat,dog, or name a file with one label a line.") from None
    names = [name.strip() for name in lines if name.strip()]
    if not names:
        raise UsageError(f"--labels {text!r} names nothing: write cat,dog, or a file with one label a line.")
    return names
