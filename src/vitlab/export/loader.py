"""Open exported files. They replace a model in vitlab.predict and vitlab.embed and bring their own preprocess.

exported = open_export("model.onnx")
vitlab.predict(exported, "cat.jpg")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.checkpoints.load import as_network
from vitlab.errors import ExportError, UsageError
from vitlab.export.metadata import KEY, ExportMetadata
from vitlab.export.onnx import Session, external_data_path
from vitlab.export.program import load_program
from vitlab.images.preprocess import Preprocess
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, Card, Network
from vitlab.text.tokenizer import Tokenizer

SUFFIXES = (".onnx", ".pt2")
CAPABILITY = {"logits": Capability.CLASSIFY, "features": Capability.EMBED, "text": Capability.TEXT}


def is_export(source: str | Path) -> bool:
    """Whether this is an existing file with the suffix of an export."""
    path = Path(source).expanduser()
    return path.suffix.lower() in SUFFIXES and path.is_file()


@dataclass(frozen=True)
class ExportedConfig:
    """The part of a model's config that inference needs."""

    metadata: ExportMetadata

    @property
    def classes(self) -> int:
        return self.metadata.classes

    @property
    def image_size(self) -> tuple[int, int]:
        return tuple(self.metadata.image_size)  # type: ignore[return-value]

    @property
    def channels(self) -> int:
        return self.metadata.channels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.metadata)


class Exported(Network):
    """An exported model. It runs on the CPU and has no torch parameters."""

    def __init__(self, run: Callable[[Tensor], Tensor], metadata: ExportMetadata, path: Path):
        super().__init__()
        self.path, self.metadata, self._run = path, metadata, [run]  # a list hides the program from nn.Module
        self.family, self.labels = metadata.family, metadata.labels
        self.config = ExportedConfig(metadata)
        self.preprocess = Preprocess.from_dict(metadata.preprocess) if metadata.preprocess else None
        self.card = Card(**metadata.card)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({CAPABILITY[self.metadata.gives]})

    @property
    def bytes(self) -> int:
        return file_size(self.path)

    def forward(self, x: Tensor) -> Tensor:
        if self.metadata.gives != "text":
            self._check(x)
        return self._run[0](x)

    def with_size(self, size: tuple[int, int]) -> Exported:
        """This model for another image size, if it was exported with dynamic size."""
        if not self.metadata.dynamic_size and tuple(size) != self.config.image_size:
            h, w = self.config.image_size
            raise ExportError(f"{self.path} was exported for {h} x {w} pixels: vitlab export ... --dynamic-size.")
        other = type(self)(self._run[0], replace(self.metadata, image_size=tuple(size)), self.path)
        other.preprocess = self.preprocess.with_size(size) if self.preprocess is not None else None
        return other

    def _check(self, images: Tensor) -> None:
        h, w = self.config.image_size
        channels, stride = self.metadata.channels, self.metadata.stride
        if images.ndim != 4 or images.shape[1] != channels:
            raise ExportError(f"images must be (batch, {channels}, height, width) but are {tuple(images.shape)}.")
        size = tuple(images.shape[-2:])
        if not self.metadata.dynamic_size and size != (h, w):
            raise ExportError(
                f"{self.path} was exported for {h} x {w} pixels, not for {size[0]} x {size[1]}: "
                "vitlab export ... --dynamic-size."
            )
        if size[0] % stride or size[1] % stride:
            raise ExportError(
                f"{self.path}: height and width must be multiples of {stride}, not {size[0]} x {size[1]}."
            )


class ExportedFeatures(Exported):
    def features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        return self(images)


class ExportedText(Exported):
    """The text tower of a CLIP: vitlab.embed_text(exported, "a cat")."""

    def __init__(self, run: Callable[[Tensor], Tensor], metadata: ExportMetadata, path: Path):
        super().__init__(run, metadata, path)
        self.tokenizer = Tokenizer.from_json(metadata.tokenizer) if metadata.tokenizer else None

    def encode_text(self, ids: Tensor, *, normalise: bool = True, trace: Trace | None = None) -> Tensor:
        return self(ids)


KINDS: dict[str, type[Exported]] = {"logits": Exported, "features": ExportedFeatures, "text": ExportedText}


def open_export(source: str | Path) -> Exported:
    path = Path(source).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise ExportError(f"{path}: an exported file ends in {' or '.join(SUFFIXES)}.")
    if not path.is_file():
        raise ExportError(f"{path}: no such file.")
    if path.suffix.lower() == ".pt2":
        run, metadata = load_program(path)
    else:
        run = Session(path)
        metadata = ExportMetadata.from_json(run.metadata.get(KEY), path)
    return KINDS[metadata.gives](run, metadata, path).eval()


def open_network(model: Network | str | Path, **load_options: Any) -> Network:
    """A model as it is; the name of a checkpoint or of an exported file is opened.

    `load_options` as in vitlab.load. Of an exported file only image_size can change.
    """
    if isinstance(model, Network) or not is_export(model):
        return as_network(model, **load_options)
    exported, size = open_export(model), load_options.pop("image_size", None)
    if load_options:
        raise UsageError(f"{model} is an exported network: leave out {', '.join(load_options)}.")
    if size is None:
        return exported
    return exported.with_size((size, size) if isinstance(size, int) else size)


def file_size(path: Path) -> int:
    """Bytes, including the external weights of a large model."""
    return sum(part.stat().st_size for part in (path, external_data_path(path)) if part.is_file())
