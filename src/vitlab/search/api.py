"""`vitlab index`, `vitlab search` and `vitlab embed` as functions. A model is a Network, a checkpoint or an export.

index_folder("photos", "photos.index", "bundled:dino")
result = search_index("photos.index", image="cat.jpg");  result.hits;  result.sheet()
embed_dataset("cifar10", "cifar10.parquet", "runs/first/best")
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import torch
from PIL import Image
from torch import nn

from vitlab.checkpoints.load import ModelOrName
from vitlab.device import pick_device
from vitlab.errors import ImageError, UsageError, VitlabError
from vitlab.explain import draw
from vitlab.export.loader import open_network
from vitlab.images.listing import Items, open_items
from vitlab.images.read import Source, read_image
from vitlab.images.samples import replace_sample
from vitlab.inference import embed, embed_text, encoder_of, fingerprint, reads_text
from vitlab.models.base import Network, features_of
from vitlab.search.database import FILE, ImageDatabase, MadeBy, remembered_size
from vitlab.search.embedding import FileEmbedder
from vitlab.search.graph import Progress
from vitlab.search.index import Counts, check, update
from vitlab.search.query import Hit, Index, open_database
from vitlab.search.table import TableSummary, write_table
from vitlab.training.processes import Processes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_MODEL = "bundled:dino"  # for `embed_dataset`


class SizeOptions(TypedDict, total=False):
    """Of a model given by its name."""

    image_size: int | tuple[int, int] | None  # as in vitlab.load


OTHER_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".npy", ".npz", ".txt")


def index_folder(
    folder: str | Path,
    index: str | Path,
    model: ModelOrName | None = None,
    *,
    batch_size: int = 64,
    moved: bool = False,
    device: str | torch.device = "auto",
    together: Processes | None = None,
    progress: Progress | None = None,
    **size: Unpack[SizeOptions],
) -> Counts:
    """Make an index of the images of a folder, or update it.

    `model`: None uses the model that made the index. `moved`: the same images are in another folder now. `device` is
    for a model given by name. `together`: the processes of torchrun, from vitlab.training.processes.start.
    `image_size` as in vitlab.load; the index remembers it.
    """
    index, options = Path(index).expanduser(), _given(size)
    if model is None and not index.exists():
        raise UsageError(f"{index} is a new index: which model makes it? Add --model CHECKPOINT.")
    if model is None or (not options and not isinstance(model, nn.Module) and ImageDatabase.exists(index / FILE)):
        with open_database(index) as database:  # without its graph, which `update` rebuilds
            model = database.made_by["checkpoint"] if model is None else model
            options = options or remembered_size(database.made_by)
    encoder, made_by = open_encoder(model, device, **options)
    return update(
        index,
        folder,
        made_by,
        FileEmbedder(encoder, batch_size),
        batch_size=batch_size,
        moved=moved,
        together=together,
        progress=progress,
    )


@dataclass(frozen=True)
class SearchResult:
    """The images of an index that are nearest to a text or an image."""

    hits: list[Hit]  # best first
    images: int  # in the index
    folder: Path
    model: str
    title: str
    query: Image.Image | None = None  # None: the query is a text
    notes: list[str] = field(default_factory=list)

    def sheet(self) -> Figure:
        """The hits as a figure."""
        return draw.contact_sheet(self._drawn(), title=self.title, lines=[self._line], query=self.query)

    def page(self) -> str:
        """The hits as a self-contained HTML page."""
        return draw.contact_page(self._drawn(), title=self.title, lines=[self._line], query=self.query)

    @property
    def _line(self) -> str:
        return f"{len(self.hits)} of {self.images:,} images in {self.folder}, by {self.model}"

    def _drawn(self) -> list[draw.SearchHit]:
        drawn = []
        for hit in self.hits:
            try:
                image = read_image(hit.path)
            except ImageError:  # deleted or changed since it was indexed
                image = None
            name = hit.path.relative_to(self.folder).as_posix()
            drawn.append(draw.SearchHit(image, name, hit.score, hit.path.as_uri()))
        return drawn


def search_index(
    index: str | Path,
    text: str | None = None,
    *,
    image: str | Path | Image.Image | None = None,
    top: int = 10,
    model: ModelOrName | None = None,
    progress: Progress | None = None,
    **size: Unpack[SizeOptions],
) -> SearchResult:
    """`image` may be a sample of a data source, "digits#3". `model`: None loads the model that made the index.

    `image_size`: default the one that the index was made with; another is refused.
    """
    if (text is None) == (image is None):
        raise UsageError('search by a text or by an image: vitlab search INDEX "a dog on a beach", or --image x.jpg.')
    if text is not None and not text.strip():
        raise UsageError('the text is empty: vitlab search INDEX "a dog on a beach".')
    with Index(index, progress) as opened:
        if text is not None and not opened.made_by.get("reads_text", True):
            raise UsageError(
                f"{opened.path}: was made with {opened.made_by['checkpoint']}, a model that reads no text. Search by "
                "image, --image x.jpg; or index with a CLIP: vitlab index FOLDER -o OTHER --model CLIP"
            )
        options: dict[str, Any] = _given(size)
        if not options and not isinstance(model, nn.Module):
            options = remembered_size(opened.made_by)
        try:
            encoder, made_by = open_encoder(model if model is not None else opened.made_by["checkpoint"], **options)
        except VitlabError as error:
            hint = "" if model is not None else " The index was made with it; where is it now? Add --model CHECKPOINT."
            raise UsageError(f"{error}{hint}") from None
        source = None if image is None else replace_sample(image)
        query = None if source is None else encoder.require_preprocess().prepare(source)[1]
        vector = embed_text(encoder, text)[0] if text is not None else _image_vector(encoder, source)
        check(opened.path, made_by)
        like = Path(image).name if isinstance(image, str | Path) else "an image"
        title = f"“{text}”" if text is not None else f"Like {like}"
        hits, images = opened.search(vector, top), len(opened)
        return SearchResult(hits, images, opened.folder, made_by["checkpoint"], title, query, opened.notes)


def embed_dataset(
    source: str | Path | Items,
    out: str | Path,
    model: ModelOrName = DEFAULT_MODEL,
    *,
    batch_size: int = 64,
    device: str | torch.device = "auto",
    together: Processes | None = None,
    progress: Progress | None = None,
    **size: Unpack[SizeOptions],
) -> TableSummary:
    """Embed all images of a data source into a Parquet table.

    `source`: what vitlab.images.listing.open_items takes or returns; other options as in `index_folder`.
    """
    check_table_name(Path(out))
    encoder, made_by = open_encoder(model, device, **_given(size))
    items = open_items(str(source)) if isinstance(source, str | Path) else source
    embed_images = partial(embed, encoder, batch_size=batch_size)
    return write_table(out, items, made_by, embed_images, batch_size=batch_size, together=together, progress=progress)


def check_table_name(path: Path) -> None:
    """Refuse the suffixes of other kinds of tables, and the current folder."""
    if not path.name:
        raise UsageError(f"{path}: is a folder: name the table in it, {path / 'out.parquet'}.")
    if path.suffix.lower() in OTHER_TABLES:
        raise UsageError(f"{path}: the table is written as Parquet: name it {path.with_suffix('.parquet')}.")


def _given(size: SizeOptions) -> dict[str, Any]:
    image_size = size.get("image_size")
    return {} if image_size is None else {"image_size": image_size}


def open_encoder(
    model: ModelOrName, device: str | torch.device | None = None, **size: Unpack[SizeOptions]
) -> tuple[Network, MadeBy]:
    """The network that embeds images, and how an index identifies it.

    A model that wraps an encoder (MAE, DINO) gives its encoder, a CLIP itself. An exported file must give features.
    """
    network = open_network(model, **size)
    if isinstance(model, nn.Module):
        name = (network.card.name if network.card is not None else None) or network.family
    else:
        path = Path(model).expanduser()
        name = str(path.absolute()) if path.exists() else str(model)
    encoder = encoder_of(network)
    features_of(encoder)  # raises where an exported file gives none
    if device is not None and not isinstance(model, nn.Module):
        encoder = encoder.to(pick_device(device) if isinstance(device, str) else device)
    made_by: MadeBy = {
        "checkpoint": name,
        "fingerprint": fingerprint(encoder),
        "family": encoder.family,
        "reads_text": reads_text(encoder),
        "resized": bool(size),
    }
    if encoder.preprocess is not None:
        made_by["image_size"] = list(encoder.preprocess.size)
    return encoder, made_by


def _image_vector(encoder: Network, image: Source | None) -> np.ndarray:
    (embedding,) = embed(encoder, [image])  # type: ignore[list-item]
    if embedding.vector is None:
        raise UsageError(f"the image cannot be embedded: {embedding.error}")
    return embedding.vector
