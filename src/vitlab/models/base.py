"""Network: what every model is, whatever its paper. A family adds its own layers and says what it can do.

model = vitlab.load("runs/first/best")
embeddings = model.features(images)                       # (B, C, H, W) -> (B, E)
if Capability.TEXT in model.capabilities: ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vitlab.advice import to_type
from vitlab.errors import UsageError
from vitlab.layers.apply_edit import with_edit
from vitlab.layers.edit import Edit
from vitlab.layers.reducer import Reducer
from vitlab.layers.trace import Trace
from vitlab.models.config import Config
from vitlab.models.task import CLASSES, ModelTask

if TYPE_CHECKING:
    from vitlab.images.preprocess import Preprocess
    from vitlab.text.tokenizer import Tokenizer


class Capability(Enum):
    """What some networks can do and others cannot."""

    CLASSIFY = "classify"  # a classifier: forward gives logits (B, classes)
    EMBED = "embed"  # features of images
    TEXT = "text"  # encode_image and encode_text, in one space
    RECONSTRUCT = "reconstruct"  # predicts the pixels of hidden patches
    TOKENS = "tokens"  # patches as tokens: layout, attention
    PYRAMID = "pyramid"  # forward_pyramid: maps at several strides
    REDUCE = "reduce"  # takes a reducer, which merges or drops tokens
    MIXED = "mixed"  # images of mixed sizes: takes a list of them, each (C, H, W), as one batch
    SEGMENT = "segment"  # forward gives a DenseOutput with masks, or with a semantic map
    DETECT = "detect"  # forward gives a DenseOutput with boxes
    DEPTH = "depth"  # forward gives a DenseOutput with a depth map


@dataclass
class Card:
    """Where a model comes from; everything here travels in model.json."""

    name: str | None = None
    source: str | None = None
    licence: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])


class Network(nn.Module):
    """Base class of all models. `vitlab.create` and `vitlab.load` fill in preprocess, labels and card."""

    family: str  # the name in the registry and in model.json
    config: Any  # the family's Config
    meanings: Mapping[str, str] = MappingProxyType({})  # what its steps do, in words, for `vitlab inspect`
    labels: list[str] | None = None  # class names, where they are known
    task: ModelTask = CLASSES  # what the outputs of the classifier mean
    _preprocess: Preprocess | None = None
    _card: Card | None = None
    _tokenizer: Tokenizer | None = None

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset({Capability.EMBED, *([Capability.CLASSIFY] if self.classes else [])})

    @property
    def encoder(self) -> Network:
        """The network that makes image features: of a model that wraps an encoder, the encoder; otherwise itself."""
        return self

    @property
    def preprocess(self) -> Preprocess | None:
        """How an image becomes this model's input. It belongs to the encoder, which may be used alone."""
        return self.encoder._preprocess

    @preprocess.setter
    def preprocess(self, value: Preprocess | None) -> None:
        self.encoder._preprocess = value

    def require_preprocess(self) -> Preprocess:
        """`preprocess`, for callers that read images; an error where the model has none."""
        if self.preprocess is None:
            raise UsageError(
                "the model has no preprocess, so it cannot read images: "
                + to_type(
                    "set model.preprocess = vitlab.images.preprocess.Preprocess(size=...) first, or use tensors "
                    "(B, C, H, W).",
                    "vitlab convert CHECKPOINT FOLDER --mean ... --std ... gives it one.",
                )
            )
        return self.preprocess

    @property
    def tokenizer(self) -> Tokenizer | None:
        """How a text becomes the input of a model with Capability.TEXT; saved beside the weights."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, value: Tokenizer | None) -> None:
        if value is not None:
            self.check_tokenizer(value)
        self._tokenizer = value

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer that does not belong to the model."""

    def require_tokenizer(self) -> Tokenizer:
        """`tokenizer`, for callers that read text; an error where the model has none."""
        if self.tokenizer is None:
            raise UsageError(
                f"this model ({self.family}) came without its tokenizer, so it cannot read text. Add it: vitlab "
                "convert CHECKPOINT FOLDER --tokenizer FILE (tokenizer.json, vocab.json, spiece.model, or OpenAI's "
                "bpe_simple_vocab_16e6.txt.gz)"
                + to_type("; or in Python: model.tokenizer = vitlab.text.tokenizer.Tokenizer.read(PATH).", ".")
            )
        return self.tokenizer

    @property
    def card(self) -> Card | None:
        """Where the weights come from."""
        return self.encoder._card

    @card.setter
    def card(self, value: Card | None) -> None:
        self.encoder._card = value

    @property
    def classes(self) -> int:
        """Outputs of the classifier; 0: there is none."""
        return self.config.classes

    @property
    def traceable(self) -> tuple[str, ...]:
        """What a Trace can record in this model; nothing in an exported file."""
        return ()

    @property
    def feature_width(self) -> int:
        """E, the width of `features`."""
        raise NotImplementedError(f"{type(self).__name__} must state the width of its features.")

    @property
    def input_size(self) -> tuple[int, int]:
        """(H, W) of the images that are read; config.image_size is the size that its positions were made for.

        The released DINOv2 weights have positions for 518 x 518 pixels and read 224 x 224.
        """
        height, width = self.config.image_size if self.preprocess is None else self.preprocess.size
        return height, width

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches (or of the last map) for images of this (H, W)."""
        raise NotImplementedError(f"{type(self).__name__} must say how it divides an image.")

    def features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """(B, C, H, W) -> (B, E): what the classifier reads, or would read."""
        trace = with_edit(trace, edit)
        last = self.forward_features(images, trace=trace, reducer=reducer)
        return self.forward_head(last, pre_logits=True, trace=trace)

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        """What the last layer gives, before pooling: tokens (B, N, D) or a map."""
        raise NotImplementedError(f"{type(self).__name__} must give its last layer's output.")

    def forward_head(self, last: Tensor, /, *, pre_logits: bool = False, trace: Trace | None = None) -> Tensor:
        """What `forward_features` gives -> logits (B, classes); `pre_logits=True` or classes=0: features (B, E)."""
        raise NotImplementedError(f"{type(self).__name__} must have a head.")

    @property
    def linear_head(self) -> nn.Linear | None:
        """The layer that makes logits of `features`, where it is a single linear one."""
        head = dict(self.named_children()).get("head")
        return head if isinstance(head, nn.Linear) else None

    def reset_classifier(self, classes: int) -> None:
        """A new, untrained head for another number of classes (0: none); everything else stays."""
        raise NotImplementedError(f"{type(self).__name__} must say how its classifier is replaced.")

    def encode_text(
        self, ids: Tensor, *, normalise: bool = True, trace: Trace | None = None, edit: Edit | None = None
    ) -> Tensor:
        """(T, N) token ids -> (T, E), of length 1 unless normalise=False; only with Capability.TEXT."""
        raise UsageError(f"a {self.family} reads no text: use a CLIP.")

    def label_of(self, index: int) -> str:
        """The name of a class, or "class 7" where it has none."""
        return self.labels[index] if self.labels and index < len(self.labels) else f"class {index}"


def class_labels(model: Network) -> list[str]:
    return [model.label_of(index) for index in range(model.classes)]


class WrapsEncoder(Network):
    """Base class of models that wrap an encoder (MAE, DINO, CLIP): image features are the encoder's."""

    untrained: tuple[str, ...] = ()  # parts that are new where a run starts from an encoder alone
    encoder_loaded = False  # alone: all else is untrained

    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    def load_encoder(self, encoder: Network) -> None:
        """Take the weights of an encoder that the config was made `around`, how it reads images, and its origin."""
        self._load_into(self.encoder, encoder)
        self.preprocess, self.card, self.encoder_loaded = encoder.preprocess, encoder.card, True

    def _load_into(self, network: Network, encoder: Network) -> None:
        own = network.state_dict().keys()  # without what an encoder may have for its classifier
        network.load_state_dict({key: value for key, value in encoder.state_dict().items() if key in own})

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.encoder.capabilities & {Capability.EMBED, Capability.REDUCE}  # its features take a reducer

    @property
    def traceable(self) -> tuple[str, ...]:
        return self.encoder.traceable

    @property
    def feature_width(self) -> int:
        return self.encoder.feature_width

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        return self.encoder.grid_of(size)

    def features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        return self.encoder.features(images, trace=trace, reducer=reducer, edit=edit)

    def forward_features(
        self,
        images: Tensor,
        *,
        trace: Trace | None = None,
        reducer: Reducer | None = None,
        edit: Edit | None = None,
    ) -> Tensor:
        return self.encoder.forward_features(images, trace=trace, reducer=reducer, edit=edit)


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[None]:
    """No dropout, running statistics; afterwards every module is in the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]  # some may be frozen
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Inference: evaluation mode without gradients."""
    with evaluation_mode(model), torch.inference_mode():
        yield


def unwrap(model: object) -> Network:
    """The Network inside what torch.compile, DataParallel and DistributedDataParallel wrap around it."""
    while isinstance(model, nn.Module) and not isinstance(model, Network):
        children = dict(model.named_children())
        wrapped = children.get("_orig_mod", children.get("module"))
        if wrapped is None:
            break
        model = wrapped
    if not isinstance(model, Network):
        raise UsageError(
            f"expected a model of vitlab (vitlab.create, vitlab.load), found a {type(model).__name__}. "
            "For another network: torch.save(model.state_dict(), path)."
        )
    return model


def features_of(model: Network, **options: Any) -> Callable[[Tensor], Tensor]:
    """model.features with these options; an exported classifier, which gives logits alone, is refused."""
    if Capability.EMBED not in model.capabilities:
        raise UsageError("this gives no features of images: take the model itself, or export it with --features.")
    return partial(model.features, **options)
