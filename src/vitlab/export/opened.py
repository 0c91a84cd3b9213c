"""An exported file, opened: it takes a model's place in vitlab.predict and vitlab.embed, with the preprocess it brings.

shipped = open_export("model.onnx")
vitlab.predict(shipped, "cat.jpg")
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.export.about import KEY, About
from vitlab.export.onnx import Session, beside
from vitlab.export.program import load_program
from vitlab.images.preprocess import Preprocess
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, Card, Network
from vitlab.text.tokenizer import Tokenizer

ENDINGS = (".onnx", ".pt2")
CAPABILITY = {"logits": Capability.CLASSIFY, "features": Capability.EMBED, "text": Capability.TEXT}


def is_export(source: str | Path) -> bool:
    """By its name, and because it is there."""
    path = Path(source).expanduser()
    return path.suffix.lower() in ENDINGS and path.is_file()


@dataclass(frozen=True)
class ExportedConfig:
    """What the rest of vitlab asks of a model's config."""

    about: About

    @property
    def classes(self) -> int:
        return self.about.classes

    @property
    def image_size(self) -> tuple[int, int]:
        return tuple(self.about.image_size)  # type: ignore[return-value]

    @property
    def channels(self) -> int:
        return self.about.channels

    def to_dict(self) -> dict[str, Any]:
        return asdict(self.about)


class Exported(Network):
    """Runs on the CPU. It holds no weights that torch knows of."""

    def __init__(self, run: Any, about: About, path: Path):
        super().__init__()
        self.path, self.about, self._run = path, about, [run]  # in a list: a program is a module, and not part of this
        self.family, self.labels = about.family, about.labels
        self.config = ExportedConfig(about)
        self.preprocess = Preprocess.from_dict(about.preprocess) if about.preprocess else None
        self.card = Card(**about.card)

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({CAPABILITY[self.about.gives]})

    @property
    def bytes(self) -> int:
        return size_of_file(self.path)

    def forward(self, x: Tensor) -> Tensor:
        if self.about.gives != "text":
            self._check(x)
        return self._run[0](x)

    def with_size(self, size: tuple[int, int]) -> Exported:
        """The same for pictures of another size, where the file was exported for all."""
        if not self.about.dynamic_size and tuple(size) != self.config.image_size:
            h, w = self.config.image_size
            raise ValueError(f"{self.path} was exported for {h} x {w} pixels: vitlab export ... --dynamic-size.")
        other = type(self)(self._run[0], replace(self.about, image_size=tuple(size)), self.path)
        other.preprocess = self.preprocess.with_size(size) if self.preprocess is not None else None
        return other

    def _check(self, images: Tensor) -> None:
        h, w = self.config.image_size
        channels, stride = self.about.channels, self.about.stride
        if images.ndim != 4 or images.shape[1] != channels:
            raise ValueError(f"images must be (batch, {channels}, height, width) but are {tuple(images.shape)}.")
        found = tuple(images.shape[-2:])
        if not self.about.dynamic_size and found != (h, w):
            raise ValueError(
                f"{self.path} was exported for {h} x {w} pixels, not for {found[0]} x {found[1]}: "
                "vitlab export ... --dynamic-size."
            )
        if found[0] % stride or found[1] % stride:
            raise ValueError(
                f"{self.path}: height and width must be multiples of {stride}, not {found[0]} x {found[1]}."
            )


class ExportedFeatures(Exported):
    def features(self, images: Tensor, *, trace: Trace | None = None, reducer: Reducer | None = None) -> Tensor:
        return self(images)


class ExportedText(Exported):
    """The text tower of a CLIP: vitlab.embed_text(shipped, "a cat")."""

    def __init__(self, run: Any, about: About, path: Path):
        super().__init__(run, about, path)
        self.tokenizer = Tokenizer.from_json(about.tokenizer) if about.tokenizer else None

    def encode_text(self, ids: Tensor, *, normalise: bool = True, trace: Trace | None = None) -> Tensor:
        return self(ids)


KINDS: dict[str, type[Exported]] = {"logits": Exported, "features": ExportedFeatures, "text": ExportedText}


def open_export(source: str | Path) -> Exported:
    path = Path(source).expanduser()
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path}: an exported file ends in {' or '.join(ENDINGS)}.")
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    if path.suffix.lower() == ".pt2":
        run, about = load_program(path)
    else:
        run = Session(path)
        about = About.from_json(run.metadata.get(KEY), path)
    return KINDS[about.gives](run, about, path).eval()


def size_of_file(path: Path) -> int:
    """Bytes, with the weights that lie beside a large one."""
    return sum(part.stat().st_size for part in (path, beside(path)) if part.is_file())
