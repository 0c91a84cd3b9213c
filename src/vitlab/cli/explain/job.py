"""What every verb of `vitlab explain` does first and last: load the model and images; write the files and report."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image

from vitlab.checkpoints.load import load
from vitlab.cli.console import out as console
from vitlab.cli.console import parse_size, print_json, say
from vitlab.cli.explain.options import Options
from vitlab.errors import ImageError, UsageError
from vitlab.explain import draw
from vitlab.explain.clip_prompts import ask
from vitlab.explain.inputs import Batch, as_batch
from vitlab.images.read import read_image
from vitlab.images.samples import is_sample, open_sample
from vitlab.printable import one_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class ExplainJob:
    """A model and the images that it could read."""

    options: Options
    model: Any
    out: Path
    pictures: list[tuple[str, Image.Image]] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # image -> error message
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
    def batch_size(self) -> int:
        return self.options.batch_size


def start(
    options: Options, *, texts: Sequence[str] = (), keep_pictures: bool = False, encoder: bool = True
) -> ExplainJob:
    """Check the output path, load the model, read the images. Exits where no image can be read.

    texts: sentences that a CLIP is asked for.
    keep_pictures: keep the original images for a second model.
    encoder: load only the encoder of MAE and DINO.
    """
    path = check_out(options)
    job = ExplainJob(options, open_model(options.checkpoint, options.image_size, encoder=encoder, texts=texts), path)
    for text in options.images:
        try:
            picture = open_sample(text).picture if is_sample(text) else read_image(text)
        except ValueError as error:  # not an image, or no such sample
            job.failed[text] = str(error)
            continue
        picture.filename = text  # type: ignore[attr-defined]  # used in messages
        job.pictures.append((text, picture))
    job.batch, job.views = preprocess(
        getattr(job.model, "encoder", job.model), job.pictures, job.failed, job.batch_size
    )
    job.pictures = (
        [(name, picture) for name, picture in job.pictures if name not in job.failed] if keep_pictures else []
    )
    if options.images and not job.views:
        if options.json:
            print_json(report(job, []))
        fail(job)
    return job


def open_model(checkpoint: str, size: str | None = None, *, encoder: bool = True, texts: Sequence[str] = ()) -> Any:
    """With `texts` the model is a CLIP, and each sentence is a class."""
    load_options: dict[str, Any] = {} if size is None else {"image_size": parse_size(size)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # a file left open elsewhere says nothing about the model
        model = load(checkpoint, encoder=encoder and not texts, **load_options)
    for note in caught:
        say(f"note: {note.message}")
    return ask(model, texts) if texts else model


def preprocess(
    model: Any, pictures: Sequence[tuple[str, Image.Image]], failed: dict[str, str], batch_size: int
) -> tuple[Batch | None, list[draw.View]]:
    """The images as the model's input, and their views. Images that it cannot take are added to `failed`."""
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
    views = draw.views(model, batch, [name for name, _ in parts], batch_size=batch_size)
    return Batch(batch.images), views


def finish(
    job: ExplainJob,
    figure: Callable[[], Figure],
    numbers: dict[str, Any],
    page: Callable[[], str] | str,
    results: dict[str, Any] | None = None,
    show: Callable[[], None] | None = None,
) -> None:
    """Draw, write all files and report them.

    figure: draws the figure; not called where only a page is requested.
    numbers: arrays for the .npz file.
    page: makes the HTML page; a title puts the figure itself on a page.
    results: added to the JSON report.
    show: prints the results as text.
    """
    only_page = job.out.suffix.lower() == ".html"
    drawn = None if only_page else figure()
    text = None
    if only_page or job.options.html:
        text = draw.figure_page(drawn or figure(), title=page) if isinstance(page, str) else page()
    files = draw.save(drawn, job.out, numbers={**_common(job), **numbers}, page=text)
    if job.options.json:
        print_json({**report(job, files), **(results or {})})
    else:
        printed = console(markup=False)
        for view in job.views:
            line = f"{view.name}: {view.prediction}" if view.prediction else view.name
            printed.print(one_line(line), soft_wrap=True)
        if show is not None:
            show()
        for file in files:
            printed.print(one_line(f"written: {file}"), soft_wrap=True)
    if job.failed:
        fail(job)


def report(job: ExplainJob, files: Sequence[Path]) -> dict[str, Any]:
    views = iter(job.views)
    images = []
    for name in job.options.images:
        if name in job.failed:
            images.append({"image": name, "error": job.failed[name]})
        else:
            view = next(views)
            images.append({"image": name, "label": view.label, "probability": view.probability})
    return {"checkpoint": job.name, "images": images, "files": [str(file) for file in files]}


def fail(job: ExplainJob) -> None:
    for message in job.failed.values():
        say(f"vitlab: {one_line(message)}")
    say(f"{len(job.failed)} of {len(job.options.images)} pictures could not be read.")
    raise SystemExit(1)


def check_out(options: Options) -> Path:
    """The output path. Raises before anything is computed if it cannot be written or would overwrite an input."""
    path = (options.out or Path(f"explain-{options.verb}.png")).expanduser()
    if path.suffix.lower() != ".html":
        draw.check_kind(path)
    sources = [options.checkpoint, *options.images]
    for made in {path, path.with_suffix(".npz"), path.with_suffix(".html")}:
        if any(Path(source).exists() and made.exists() and made.samefile(source) for source in sources):
            raise UsageError(f"--out {path} would write over {made}, which is read here. Name another file.")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "may not be written to" if folder.is_dir() else "is no folder"
        raise UsageError(f"--out {path}: {folder} {reason}. Name a file elsewhere.")
    return path


def parse_point(text: str, option: str) -> tuple[float, float]:
    parts = text.split(",")
    try:
        x, y = (float(part) for part in parts)
    except ValueError:
        raise UsageError(
            f"{option} {text!r} is no place in the picture: write X,Y in its pixels, e.g. 100,60."
        ) from None
    return x, y


def parse_list(text: str, option: str, known: Sequence[str] | None = None) -> list[str]:
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise UsageError(f"{option} {text!r} names nothing{': ' + ', '.join(known) if known else ''}.")
    for name in names:
        if known is not None and name not in known:
            raise UsageError(f"{option}: there is no {name!r}. There are: {', '.join(known)}.")
    return list(dict.fromkeys(names))


def parse_numbers(text: str, option: str, *words: str) -> str | list[int]:
    """A list of whole numbers, or one of `words`."""
    if text in words:
        return text
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        either = " or ".join(words)
        raise UsageError(f"{option} {text!r} is no list of numbers: write 0,3,-1, or {either}.") from None


def _common(job: ExplainJob) -> dict[str, Any]:
    """Image names and geometry, so that the maps can be laid on the images again."""
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
