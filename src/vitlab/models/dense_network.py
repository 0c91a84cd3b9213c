"""What networks that answer for every pixel or object share: any encoder, by its family and config, and a head.

    config = EoMTConfig().with_encoder(encoder.family, encoder.config)      # the same head around another encoder
    model = EoMT(config)
    model.load_encoder(encoder)                # its weights, its preprocess and its origin

A paper's file says which encoders it can read (`check_encoder`), what it returns and what it learns by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.block import ACTIVATIONS, Activation
from vitlab.layers.edit import Edit
from vitlab.layers.trace import Trace
from vitlab.models.base import Capability, Network, WrapsEncoder
from vitlab.models.config import Config, nearest, option_paths
from vitlab.models.dense import DenseOutput, DenseTarget
from vitlab.models.entry import IMAGENET
from vitlab.models.pvt import PVTv2, PVTv2Config
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

STRETCH: dict[str, Any] = {**IMAGENET, "interpolation": "bilinear", "how": "stretch"}  # the whole image


def backbone(family: str, config: Config) -> dict[str, Any]:
    """An encoder in the config of the network around it: its family and its options, as model.json holds them."""
    return json.loads(json.dumps({"family": family, "config": config.with_options(classes=0).to_dict()}))


@dataclass(frozen=True)
class DenseConfig(Config):
    """The head's options, and the encoder's by their own names: with_options(layers=(2, 5), registers=4)."""

    image_size: tuple[int, int] = (224, 224)  # (H, W)
    classes: int = 150  # K
    backbone: dict[str, Any] = field(default_factory=lambda: backbone("vit", ViTConfig()))  # family and config

    names_classes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.names_classes and self.classes < 1:
            raise UsageError(f"classes={self.classes} must be at least 1: this network names what it finds.")
        if self.classes and not self.names_classes:
            raise UsageError(f"classes={self.classes} is not possible: this network names no classes.")
        if not isinstance(self.backbone.get("family"), str) or "config" not in self.backbone:
            raise UsageError("backbone must be the encoder's family and config.")
        self.check_encoder(self.backbone["family"], self.encoder)

    def check_encoder(self, family: str, encoder: Config) -> None:
        """Refuse an encoder that the paper's head cannot read, and say which ones it can."""

    @property
    def encoder(self) -> Config:
        kind, _ = _family(self.backbone["family"])
        return kind.from_dict(self.backbone["config"]).with_options(image_size=self.image_size, classes=0)

    @property
    def channels(self) -> int:
        return self.encoder.option("channels")

    def with_encoder(self, family: str, encoder: Config) -> Self:
        """The same head around another encoder."""
        if encoder.wraps_encoder:
            raise UsageError(f"a {family} is itself a network around an encoder: take that alone, with encoder=True.")
        return replace(self, image_size=encoder.option("image_size"), backbone=backbone(family, encoder))

    def option(self, name: str) -> Any:
        return super().option(name) if name in option_paths(type(self)) else self.encoder.option(name)

    def with_options(self, **options: Any) -> Self:
        """As ever; what the head has no option for is the encoder's."""
        own, inside = option_paths(type(self)), option_paths(type(self.encoder))
        names = [*own, *inside]
        if unknown := [name for name in options if name not in names]:
            short = sorted({name for name in names if "." not in name})
            raise UsageError(
                f"the model has no option {unknown[0]!r}.{nearest(unknown[0], names)} Options: {', '.join(short)}."
            )
        changes = {name: value for name, value in options.items() if name not in own}
        if "image_size" in options and changes:  # both at once: either alone may not fit the other
            changes["image_size"] = options["image_size"]
        kept = {name: value for name, value in options.items() if name in own}
        if changes:
            encoder = self.encoder.with_options(**changes)
            kept |= {"backbone": backbone(self.backbone["family"], encoder), "image_size": encoder.option("image_size")}
        return super().with_options(**kept)


FIRST: dict[str, tuple[type[Config], Callable[[Any], Network]]] = {
    # The registry, which lists these papers too, is made of configs around them.
    "vit": (ViTConfig, VisionTransformer),
    "pvt_v2": (PVTv2Config, PVTv2),
}


def _family(name: str) -> tuple[type[Config], Callable[[Any], Network]]:
    """The config and the network of a family."""
    if name in FIRST:
        return FIRST[name]
    from vitlab.models.registry import FAMILIES

    if name not in FAMILIES:
        raise UsageError(f"backbone of the family {name!r:.40} is not known: update vitlab.")
    return FAMILIES[name]


class DenseNetwork(WrapsEncoder):
    """Base class: `forward` gives a DenseOutput, `loss` compares it with one DenseTarget per image."""

    config: Any  # a DenseConfig
    answers: frozenset[Capability] = frozenset()  # SEGMENT, DETECT, DEPTH
    untrained = ("head",)

    def __init__(self, config: DenseConfig):
        super().__init__(config)
        # Under a name that is a property of the class.
        self._modules["encoder"] = _family(config.backbone["family"])[1](config.encoder)

    @property
    def encoder(self) -> Network:
        """The network whose tokens or maps the head reads."""
        encoder = self._modules["encoder"]
        assert isinstance(encoder, Network)
        return encoder

    @property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities | self.answers

    def forward(self, images: Tensor, *, trace: Trace | None = None, edit: Edit | None = None) -> DenseOutput:
        """(B, C, H, W) -> what the network answers; Trace and Edit reach the encoder and the head."""
        raise NotImplementedError(f"{type(self).__name__} must say what it answers.")

    def loss(self, output: DenseOutput, targets: Sequence[DenseTarget]) -> dict[str, Tensor]:
        """The terms of the loss by name, weighted: their sum is the loss."""
        raise UsageError(f"a {self.family} is read and not trained here.")

    def anneal(self, progress: float) -> None:
        """What changes while a run goes from 0 to 1; most networks change nothing."""

    def reset_classifier(self, classes: int) -> None:
        """A new, untrained layer for another number of classes; everything else stays."""
        self.config = replace(self.config, classes=classes)
        like = next(self.parameters())
        self.new_classifier()
        self.to(like.device, like.dtype)
        self.labels = None

    def new_classifier(self) -> None:
        """The layer or layers whose shape depends on the number of classes."""
        raise NotImplementedError(f"{type(self).__name__} must say how its classifier is made.")


class HeadMLP(nn.Module):
    """Three layers on every token alone: D -> D -> D -> outputs (DETR, arXiv:2005.12872)."""

    def __init__(self, width: int, outputs: int, *, activation: Activation = "relu"):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, outputs)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.activation(self.fc2(self.activation(self.fc1(x)))))
