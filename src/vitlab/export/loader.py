"""Open exported files. They replace a model in vitlab.predict and vitlab.embed and bring their own preprocess.

exported = open_export("model.onnx")
vitlab.predict(exported, "cat.jpg")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitlab.checkpoints.load import ModelOrName, as_network
from vitlab.errors import ExportError, UsageError
from vitlab.export.metadata import KEY, ExportMetadata, OutputKind
from vitlab.export.onnx import Session, external_data_path
from vitlab.export.program import load_program
from vitlab.images.preprocess import Preprocess
from vitlab.layers.edit import Edit
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, Card, Network, features_of
from vitlab.models.dense import DenseOutput, dense_output
from vitlab.models.task import task_from_dict
from vitlab.text.tokenizer import Tokenizer

SUFFIXES = (".onnx", ".pt2")
Run = Callable[[Tensor], Tensor | tuple[Tensor, ...]]
DENSE = {  # what fields of a DenseOutput make a network able to do
    "masks": Capability.SEGMENT,
    "semantic": Capability.SEGMENT,
    "boxes": Capability.DETECT,
    "depth": Capability.DEPTH,
}
CAPABILITY = {"logits": Capability.CLASSIFY, "features": Capability.EMBED, "text": Capability.TEXT}


def is_export(source: object) -> bool:
    """Whether this is an existing file with the suffix of an export."""
    if not isinstance(source, str | PathLike):
        return False
    path = Path(source).expanduser()
    return path.suffix.lower() in SUFFIXES and path.is_file()


class InferenceNetwork(Network):
    """Base class of networks that give one kind of output and show nothing of their inside."""

    gives: OutputKind

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({CAPABILITY[self.gives]})

    def features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        features_of(self)  # refuses a classifier
        if edit:
            raise UsageError("an exported model cannot be edited inside: load the checkpoint it was made from.")
        return self(images)

    def encode_text(
        self, ids: Tensor, *, normalise: bool = True, trace: Trace | None = None, edit: Edit | None = None
    ) -> Tensor:
        return self(ids) if self.gives == "text" else super().encode_text(ids)


class Exported(InferenceNetwork):
    """An exported model. It runs on the CPU and has no torch parameters."""

    def __init__(self, run: Run, metadata: ExportMetadata, path: Path):
        super().__init__()
        self.path, self.metadata, self._run = path, metadata, [run]  # a list hides the program from nn.Module
        self.gives, self.family, self.labels = metadata.gives, metadata.family, metadata.labels
        self.config, self.task = metadata, task_from_dict(metadata.task)
        self.preprocess = Preprocess.from_dict(metadata.preprocess) if metadata.preprocess else None
        self.tokenizer = Tokenizer.from_json(metadata.tokenizer) if metadata.tokenizer else None
        self.card = Card(**metadata.card)

    @property
    def bytes(self) -> int:
        return file_size(self.path)

    def forward(self, x: Tensor) -> Tensor:
        if self.gives != "text":
            self._check(x)
        outputs = self._run[0](x)
        assert isinstance(outputs, Tensor)
        return outputs

    def with_size(self, size: tuple[int, int]) -> Exported:
        """This model for another image size, if it was exported with dynamic size."""
        self._check_fixed(size)
        other = type(self)(self._run[0], replace(self.metadata, image_size=size), self.path)
        other.preprocess = self.preprocess.with_size(size) if self.preprocess is not None else None
        return other

    def _check_fixed(self, size: tuple[int, int]) -> None:
        h, w = self.config.image_size
        if not self.metadata.dynamic_size and size != (h, w):
            raise UsageError(
                f"{self.path} was exported for {h} x {w} pixels, not for {size[0]} x {size[1]}: "
                "vitlab export ... --dynamic-size."
            )

    def _check(self, images: Tensor) -> None:
        channels, stride = self.metadata.channels, self.metadata.stride
        if images.ndim != 4 or images.shape[1] != channels:
            raise UsageError(f"images must be (batch, {channels}, height, width) but are {tuple(images.shape)}.")
        h, w = images.shape[-2:]
        self._check_fixed((h, w))
        if h % stride or w % stride:
            raise UsageError(f"{self.path}: height and width must be multiples of {stride}, not {h} x {w}.")


class DenseExported(Exported):
    """An exported network for pixels or objects: `forward` gives a DenseOutput."""

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset(DENSE[name] for name in self.metadata.fields if name in DENSE)

    def forward(self, x: Tensor) -> DenseOutput:  # type: ignore[override]
        self._check(x)
        outputs = self._run[0](x)
        values = (outputs,) if isinstance(outputs, Tensor) else outputs
        return dense_output(dict(zip(self.metadata.fields, values, strict=True)))


def open_export(source: str | PathLike[str]) -> Exported:
    path = Path(source).expanduser()
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: an exported file ends in {' or '.join(SUFFIXES)}.")
    if not path.is_file():
        raise ExportError(f"{path}: no such file.")
    if path.suffix.lower() == ".pt2":
        run, metadata = load_program(path)
    else:
        run = Session(path)
        metadata = ExportMetadata.from_json(run.metadata.get(KEY), path)
        run = run.outputs if metadata.gives == "dense" else run
    return (DenseExported if metadata.gives == "dense" else Exported)(run, metadata, path).eval()


def open_network(model: ModelOrName, **load_options: Any) -> Network:
    """A model as it is; the name of a checkpoint or of an exported file is opened.

    `load_options` as in vitlab.load. Of an exported file only image_size can change.
    """
    if isinstance(model, nn.Module) or not is_export(model):
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
