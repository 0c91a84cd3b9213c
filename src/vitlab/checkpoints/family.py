"""One record per family: how its checkpoints are recognised, read and written. models/index.py lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from vitlab.checkpoints.keymap import Dialect, Options, Renamed, State, Stated
from vitlab.errors import CheckpointError
from vitlab.images.preprocess import Preprocess
from vitlab.models.base import Card, Network
from vitlab.models.config import Config, option_paths
from vitlab.models.dense import DenseOutput
from vitlab.models.entry import IMAGENET_CROP
from vitlab.models.task import CLASSES, ModelTask
from vitlab.text.tokenizer import Tokenizer


class ModelType(NamedTuple):
    """What transformers does with the networks of one model_type."""

    processor: str  # the image processor of a folder that names none
    size_note: str = ""  # what it needs for images of another size than the positions were made for
    preprocess: Mapping[str, Any] = IMAGENET_CROP  # usual values, where there is no preprocessor_config.json


@dataclass(frozen=True)
class Clues:
    """What is known about a file besides its tensors."""

    dialect: Dialect
    stated: Stated
    given: Options  # by the caller or a rename table
    hints: Options  # what the layout shows or a rename table states


@dataclass(frozen=True)
class Reading:
    """The network that tensors belong to."""

    config: Any  # the family's Config
    assumed: Options = field(default_factory=Options)  # options that neither file nor caller states
    preprocess: Mapping[str, Any] | None = None  # usual values; None: the dialect's
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """A model in another library's layout: tensors, and the files beside them as text or as values for JSON."""

    tensors: State
    files: Options = field(default_factory=Options)
    notes: list[str] = field(default_factory=list[str])
    bare_notes: list[str] = field(default_factory=list[str])  # where the weights are written without those files
    weights: str = "model.safetensors"  # the name in the folder; *.npz: one file and no folder


@dataclass(frozen=True)
class Writer:
    write: Callable[[Network, State], Written]
    any_size: Callable[[Any], bool] = lambda config: False  # whether the other library resizes positions by itself


def _no_dialect(renamed: Renamed, clues: Clues) -> Reading:
    raise CheckpointError("only vitlab's own files hold such a network.")


@dataclass(frozen=True)
class Family:
    name: str
    config: type[Config]
    dialects: tuple[Dialect, ...] = ()
    infer: Callable[[Renamed, Clues], Reading] = _no_dialect  # may leave tensors out
    writers: Mapping[str, Writer] = field(default_factory=dict[str, Writer])  # --to -> how
    bare_options: tuple[str, ...] = ()  # what bare weights do not show, so that a caller may have to pass it
    model_types: Mapping[str, ModelType] = field(default_factory=dict[str, ModelType])  # transformers' names
    map_template: Dialect | None = None  # what a rename table leaves out; recognises our own names in it
    by_path: Callable[[Options, bool], Options] = lambda options, encoder: options  # how callers may also write them
    check_inputs: Callable[[Network, Tensor], dict[str, Tensor]] = lambda model, images: {}  # beside images, to compare
    check_output: Callable[[Any], Tensor] = lambda output: output  # the part of an output that is compared
    check_theirs: Callable[[Any], DenseOutput] | None = None  # of transformers' output the same as a DenseOutput

    def check_options(self, options: Options) -> None:
        """Refuse a misspelt option, with the nearest name, before anything else goes wrong."""
        names = (*option_paths(self.config), "grid", "classes")
        self.config().with_options(**{name: value for name, value in options.items() if name not in names})


@dataclass
class LoadedWeights:
    """Tensors of a file under our names, and everything that the file or its dialect says about them."""

    tensors: State
    origin: dict[str, tuple[str, ...]]  # our key -> the keys it came from
    unused: dict[str, str]  # foreign key -> why it is left out
    dialect: str
    family: str
    config: Any  # the family's Config, as the weights were saved with
    preprocess: Preprocess | None = None
    labels: list[str] | None = None
    task: ModelTask = CLASSES
    card: Card = field(default_factory=Card)
    notes: list[str] = field(default_factory=list[str])  # what a caller must know
    tokenizer: Tokenizer | None = None
    assumed: Options = field(default_factory=Options)  # options that neither file nor caller states
    stated_preprocess: Options = field(default_factory=Options)  # values of the preprocess that are not assumed
    table: Path | None = None  # the rename table
    taken_as: str = ""
    size_note: str = ""  # on the size that images are read at, unless another is given


def check_agreement(stated: Options, inferred: Options) -> None:
    """A config that contradicts the weights beside it belongs to other weights."""
    for name in stated.keys() & inferred.keys():
        value = stated[name]
        if name.endswith("image_size"):
            value = (value, value) if isinstance(value, int) else tuple(value)
        if name != "layer_scale" and value != inferred[name]:
            raise CheckpointError(
                f"the config says {name}={value} but the weights have {inferred[name]}: they do not belong together."
            )
