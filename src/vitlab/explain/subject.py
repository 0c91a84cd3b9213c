"""What `figures` explains, a model with its images, and what it gives: a figure, a page and the numbers behind them.

subject = open_subject("bundled:cifar10", ["cat.jpg", "dog.jpg"])
figures.rollout(subject).save("rollout.png", html=True)      # rollout.png, rollout.npz, rollout.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName, as_network
from vitlab.errors import DataError, ImageError, UsageError
from vitlab.explain.clip_prompts import ask
from vitlab.explain.draw.page import figure_page, figure_url
from vitlab.explain.draw.sheet import check_kind, save
from vitlab.explain.inputs import ImageBatch, TokenModel, as_batch, as_list, token_model
from vitlab.explain.outliers import OutlierTokens, outlier_tokens
from vitlab.explain.scale import DEFAULT, check_scale
from vitlab.explain.views import View, views
from vitlab.images.read import Source
from vitlab.models.base import Network
from vitlab.models.hierarchy import Hierarchy
from vitlab.tables import Table, Tabular, escaped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANY = 800  # patches, above which images are tested one by one for outliers: a layer's attention grows with the square


@dataclass(frozen=True)
class Subject(Tabular):
    """A model and the images to explain it on."""

    name: str
    network: Network
    batch: ImageBatch | None  # None without images
    views: list[View]
    sources: list[Source]  # the images that could be read
    names: list[str] = field(default_factory=list)  # of all images, also those that could not be read
    failed: dict[str, str] = field(default_factory=dict)  # image -> why it could not be read
    batch_size: int = 8
    scale: str = DEFAULT  # of heat maps' colours: one of explain.scale.SCALES

    def table(self) -> Table:
        rows = [view.row() for view in self.views]
        failed = [f"{name}: {reason}" for name, reason in self.failed.items()]
        return Table(["", "image", "top class"], rows, heading=[self.name], notes=failed)

    def to_dict(self) -> dict[str, Any]:
        """The checkpoint, and each image with its top class or with what is wrong with it."""
        views, images = iter(self.views), list[dict[str, Any]]()
        for name in self.names:
            if name in self.failed:
                images.append({"image": name, "error": self.failed[name]})
            else:
                view = next(views)
                images.append({"image": name, "label": view.label, "probability": view.probability})
        return {"checkpoint": self.name, "images": images}

    @cached_property
    def model(self) -> TokenModel:
        """The network itself, or the encoder that it wraps."""
        return token_model(self.network.encoder)

    @cached_property
    def outliers(self) -> OutlierTokens | None:
        """The outlier tokens of every image; None without images, and where the model has several grids."""
        testable = {"attention", "tokens"} <= set(self.model.traceable) and not isinstance(self.model, Hierarchy)
        if not self.views or not testable:
            return None
        rows, columns = self.views[0].grid
        batch_size = self.batch_size if rows * columns <= MANY else 1
        return outlier_tokens(self.model, self.images, batch_size=batch_size)

    @property
    def images(self) -> Tensor:
        """(B, C, H, W), normalised."""
        if self.batch is None:
            raise UsageError("there is no image to look at: give at least one.")
        return self.batch.images


def open_subject(
    model: ModelOrName,
    images: Source | Iterable[Source] = (),
    *,
    texts: Sequence[str] = (),
    encoder: bool = True,
    batch_size: int = 8,
    skip_unreadable: bool = False,
    scale: str = DEFAULT,
    device: str | None = None,
    **load_options: Any,
) -> Subject:
    """Load the model and read the images: paths, PIL images, arrays, or samples of a dataset, "cifar10#3".

    texts            sentences to explain with a CLIP, which become its classes
    encoder          False: of MAE and DINO, load the decoder and the heads as well
    skip_unreadable  leave out what cannot be read; Subject.failed says why
    scale            of the colours of heat maps: "percentile", "log" or "minmax"
    device           where the model runs: "cpu", "cuda", "auto"; None: where it is
    load_options     as in vitlab.load. With image_size=(384, 256) the whole image is seen, stretched to this size where
                     the model's own preprocess would crop it: a map should cover the image, while `predict` and
                     `evaluate` keep the crop that published accuracies are measured with
    """
    check_scale(scale)
    name = str(model) if isinstance(model, str | Path) else type(model).__name__
    network = as_network(model, device=device, encoder=encoder and not texts, **load_options)
    if load_options.get("image_size") is not None and network.preprocess is not None:
        network.preprocess = network.preprocess.uncropped()
    network = ask(network, texts) if texts else network
    sources: list[Source] = []
    names: list[str] = []
    readable: list[str] = []
    parts: list[ImageBatch] = []
    failed: dict[str, str] = {}
    none = isinstance(images, list | tuple) and not images
    for source in [] if none else as_list(images):
        shown = str(source) if isinstance(source, str | os.PathLike) else f"image {len(sources)}"
        names.append(shown)
        try:
            part = as_batch(network.encoder, source)
        except (ImageError, DataError) as error:
            if not skip_unreadable:
                raise
            failed[shown] = str(error) if isinstance(error, ImageError) else " ".join(str(error).split())  # one line
            continue
        sources.append(source)
        readable.append(shown)
        parts.append(part)
    if not parts:
        return Subject(name, network, None, [], [], names, failed, batch_size, scale)
    batch = ImageBatch(
        torch.cat([part.images for part in parts]),
        [image for part in parts for image in part.originals or []],
        [geometry for part in parts for geometry in part.geometries or []],
    )
    seen = views(network.encoder, batch, readable, batch_size=batch_size)
    return Subject(name, network, ImageBatch(batch.images), seen, sources, names, failed, batch_size, scale)


@dataclass
class Explanation:
    """A figure, an HTML page and the numbers behind them. Nothing is drawn before it is asked for."""

    subject: Subject
    title: str
    figure: Callable[[], Figure]
    numbers: dict[str, Any]  # arrays, for the .npz file
    results: dict[str, Any] = field(default_factory=dict)  # plain values, for JSON
    interactive: Callable[[], str] | None = None  # makes the page; None: the figure on a page
    notes: list[str] = field(default_factory=list)  # what was left out
    tables: Sequence[Table] = ()  # the main numbers, to print

    def _repr_html_(self) -> str:
        """The figure, in a notebook."""
        notes = "".join(f'<div style="opacity:.65">{escaped(note)}</div>' for note in self.notes)
        return f'<img alt="{escaped(self.title)}" src="{figure_url(self.figure())}" style="max-width:100%">{notes}'

    def page(self) -> str:
        """One self-contained HTML page."""
        return figure_page(self.figure(), title=self.title) if self.interactive is None else self.interactive()

    def save(self, path: str | Path, *, html: bool | str | Path = False) -> list[Path]:
        """Write the figure by its suffix, the numbers as .npz and, if wanted, the page.

        `html` names the page's file, or is True for an .html beside the figure. A path that ends in .html is the page
        without the figure.
        """
        path = Path(path).expanduser()
        only_page = path.suffix.lower() == ".html"
        numbers = {**_image_numbers(self.subject.views), **self.numbers}
        page = self.page() if only_page or html else None
        place = None if isinstance(html, bool) else html
        return save(None if only_page else self.figure(), path, numbers=numbers, page=page, page_path=place)


def _image_numbers(views: Sequence[View]) -> dict[str, Any]:
    """Image names and geometry, so that the maps can be laid on the images again."""
    if not views:
        return {}
    geometries = [view.geometry for view in views]
    numbers: dict[str, Any] = {
        "image": [view.name for view in views],
        "original_size": [g.original for g in geometries],  # (B, 2): height, width
        "resized_size": [g.resized for g in geometries],
        "view_corner": [(g.top, g.left) for g in geometries],
        "view_size": views[0].size,
        "patch_size": views[0].patch_size,
    }
    if views[0].label is not None:
        numbers |= {"label": [view.label for view in views], "probability": [view.probability for view in views]}
    return numbers


def check_output(path: str | Path, sources: Iterable[str] = ()) -> Path:
    """The path for `Explanation.save`. Raises if it cannot be written or would overwrite one of the sources."""
    path = Path(path).expanduser()
    if path.suffix.lower() != ".html":
        check_kind(path)
    for written in {path, path.with_suffix(".npz"), path.with_suffix(".html")}:
        if any(Path(source).exists() and written.exists() and written.samefile(source) for source in sources):
            raise UsageError(f"{path} would write over {written}, which is read here. Name another file.")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = "may not be written to" if folder.is_dir() else "is no folder"
        raise UsageError(f"{path}: {folder} {reason}. Name a file elsewhere.")
    return path
