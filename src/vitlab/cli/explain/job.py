"""What all verbs of `vitlab explain` do first and last: open the model, read the pictures; write the files, report."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from vitlab.checkpoints.load import load
from vitlab.cli.console import out as console
from vitlab.cli.console import parse_size, print_json, say
from vitlab.explain import draw
from vitlab.explain.inputs import Batch, as_batch
from vitlab.explain.sentences import ask
from vitlab.images.read import ImageError, read_image
from vitlab.images.samples import is_sample, open_sample
from vitlab.printable import one_line


@dataclass
class Options:
    """What all verbs take."""

    verb: str
    checkpoint: str
    images: list[str]
    out: Path | None
    html: bool
    size: str | None
    batch_size: int
    json: bool
    texts: tuple[str, ...] = ()  # sentences that a CLIP is asked for


@dataclass
class Job:
    """A model and the pictures that it could read."""

    options: Options
    model: Any
    out: Path
    pictures: list[tuple[str, Image.Image]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # picture -> what is wrong
    batch: Batch | None = None
    views: list[draw.View] = field(default_factory=list)

    @property
    def images(self) -> torch.Tensor:
        assert self.batch is not None
        return self.batch.images

    @property
    def name(self) -> str:
        return self.options.checkpoint

    @property
    def many(self) -> int:
        return self.options.batch_size


def start(options: Options, *, keep: bool = False, whole: bool = False) -> Job:
    """Check where the result goes, load, read. Pictures that cannot be read are set aside; with none left, it ends.

    keep: hold on to the pictures as they are, for another model.
    whole: of MAE and DINO all of the model, not its encoder alone.
    """
    target = check_out(options)
    job = Job(options, open_model(options.checkpoint, options.size, whole=whole, texts=options.texts), target)
    for text in options.images:
        try:
            picture = open_sample(text).picture if is_sample(text) else read_image(text)
        except ValueError as error:  # not a picture, or no such sample
            job.failed[text] = str(error)
            continue
        picture.filename = text  # type: ignore[attr-defined]  # what messages call it
        job.pictures.append((text, picture))
    job.batch, job.views = lay(getattr(job.model, "encoder", job.model), job.pictures, job.failed, job.many)
    job.pictures = [(name, picture) for name, picture in job.pictures if name not in job.failed] if keep else []
    if options.images and not job.views:
        if options.json:
            print_json(report(job, []))
        fail(job)
    return job


def open_model(checkpoint: str, size: str | None = None, *, whole: bool = False, texts: Sequence[str] = ()) -> Any:
    """`texts`: the model is a CLIP, and each sentence is a class."""
    told: dict[str, Any] = {} if size is None else {"image_size": parse_size(size)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # whoever left a file open, it is no note on the model
        model = load(checkpoint, encoder=not (whole or texts), **told)  # of MAE, DINO and CLIP
    for note in caught:
        say(f"note: {note.message}")
    return ask(model, texts) if texts else model


def lay(
    model: Any, pictures: Sequence[tuple[str, Image.Image]], failed: dict[str, str], batch_size: int
) -> tuple[Batch | None, list[draw.View]]:
    """The pictures as this model sees them; what it cannot take is added to `failed`."""
    parts = []
    for name, picture in pictures:
        try:
            parts.append((name, as_batch(model, picture)))
        except ImageError as error:
            failed[name] = str(error)
    if not parts:
        return None, []
    batch = Batch(
        torch.cat([part.images for _, part in parts]),
        [picture for _, part in parts for picture in part.pictures or []],
        [geometry for _, part in parts for geometry in part.geometries or []],
    )
    shown = draw.views(model, batch, [name for name, _ in parts], batch_size=batch_size)
    return Batch(batch.images), shown


def finish(
    job: Job,
    figure: Callable[[], Any],
    numbers: dict[str, Any],
    page: Callable[[Any], str],
    found: dict[str, Any] | None = None,
    show: Callable[[], None] | None = None,
) -> None:
    """Draw, write all files, and say so. `page` is called with the figure, or None where only a page is asked for."""
    only_page = job.out.suffix.lower() == ".html"
    drawn = None if only_page else figure()
    text = page(drawn) if only_page or job.options.html else None
    files = draw.save(drawn, job.out, numbers={**_common(job), **numbers}, page=text)
    if job.options.json:
        print_json({**report(job, files), **(found or {})})
    else:
        printed = console(markup=False)
        for view in job.views:
            printed.print(one_line(f"{view.name}: {view.said}" if view.said else view.name), soft_wrap=True)
        if show is not None:
            show()
        for file in files:
            printed.print(one_line(f"written: {file}"), soft_wrap=True)
    if job.failed:
        fail(job)


def report(job: Job, files: Sequence[Path]) -> dict[str, Any]:
    seen = iter(job.views)
    images = []
    for name in job.options.images:
        if name in job.failed:
            images.append({"image": name, "error": job.failed[name]})
        else:
            view = next(seen)
            images.append({"image": name, "label": view.label, "probability": view.probability})
    return {"checkpoint": job.name, "images": images, "files": [str(file) for file in files]}


def fail(job: Job) -> None:
    for message in job.failed.values():
        say(f"vitlab: {one_line(message)}")
    say(f"{len(job.failed)} of {len(job.options.images)} pictures could not be read.")
    raise SystemExit(1)


def check_out(options: Options) -> Path:
    """Where the drawing goes; what would fail or destroy something is refused before anything is computed."""
    path = (options.out or Path(f"explain-{options.verb}.png")).expanduser()
    if path.suffix.lower() != ".html":
        draw.check_kind(path)
    sources = [options.checkpoint, *options.images]
    for made in {path, path.with_suffix(".npz"), path.with_suffix(".html")}:
        if any(Path(source).exists() and made.exists() and made.samefile(source) for source in sources):
            raise ValueError(f"--out {path} would write over {made}, which is read here. Name another file.")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "may not be written to" if folder.is_dir() else "is no folder"
        raise ValueError(f"--out {path}: {folder} {reason}. Name a file elsewhere.")
    return path


def parse_point(text: str, option: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        x, y = (float(part) for part in parts)
    except ValueError:
        raise ValueError(
            f"{option} {text!r} is no place in the picture: write X,Y in its pixels, e.g. 100,60."
        ) from None
    return x, y


def parse_list(text: str, option: str, known: Sequence[str] | None = None) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ValueError(f"{option} {text!r} names nothing{': ' + ', '.join(known) if known else ''}.")
    for name in names:
        if known is not None and name not in known:
            raise ValueError(f"{option}: there is no {name!r}. There are: {', '.join(known)}.")
    return list(dict.fromkeys(names))


def parse_numbers(text: str, option: str, *words: str) -> str | list[int]:
    """One of the words, or whole numbers."""
    if text in words:
        return text
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        either = " or ".join(words)
        raise ValueError(f"{option} {text!r} is no list of numbers: write 0,3,-1, or {either}.") from None


def _common(job: Job) -> dict[str, Any]:
    """What the maps belong to, so that they can be laid on the pictures again."""
    if not job.views:
        return {}
    geometries = [view.geometry for view in job.views]
    common: dict[str, Any] = {
        "image": [view.name for view in job.views],
        "original_size": [g.original for g in geometries],  # (B, 2): height, width
        "resized_size": [g.resized for g in geometries],
        "view_corner": [(g.top, g.left) for g in geometries],
        "view_size": job.views[0].size,
        "patch_size": job.views[0].patch_size,
    }
    if job.views[0].label is not None:
        common |= {
            "label": [view.label for view in job.views],
            "probability": [view.probability for view in job.views],
        }
    return common
