"""The function that an exported file computes, as a module: one tensor in, one out; of a DenseOutput, its fields."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.export.metadata import OutputKind
from vitlab.layers.reducer import Reducer
from vitlab.models import registry
from vitlab.models.base import Network, features_of
from vitlab.models.dense import DenseOutput
from vitlab.models.dense_network import DenseNetwork
from vitlab.models.hierarchy import StagedConfig
from vitlab.models.resnet import ResNetConfig
from vitlab.models.two_towers import TwoTowers, as_two_towers
from vitlab.reduce import reducer_of

INPUTS = {"logits": "images", "features": "images", "text": "ids", "dense": "images"}
OUTPUTS = {"logits": "logits", "features": "features", "text": "features"}


class ExportWrapper(nn.Module):
    """images (B, C, H, W) -> logits (B, K), features (B, E) or the fields of a DenseOutput; or ids (T, N) -> (T, E)."""

    def __init__(self, model: Network, gives: OutputKind, reducer: Reducer | str | None = None):
        super().__init__()
        self.gives: OutputKind = gives
        self.model = _required_part(model, gives)
        self.reducer = reducer_of(reducer) if isinstance(reducer, str) else reducer
        if gives == "features":
            features_of(self.model)  # refuses a model without features; here, so that `forward` is traced without it

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        if self.gives == "text":
            return self.model.encode_text(x)
        if self.gives == "dense":
            return tuple(self.model(x).tensors().values())
        run = self.model if self.gives == "logits" else self.model.features
        return run(x) if self.reducer is None else run(x, reducer=self.reducer)


def run_where_it_is(wrapper: ExportWrapper, x: Tensor) -> Tensor:
    """Outputs on the CPU, of inputs on the CPU. A timing thus includes the transfer, and that a GPU has finished."""
    return in_a_row(wrapper(x.to(next(wrapper.parameters()).device))).cpu()


def in_a_row(outputs: Tensor | Sequence[Tensor] | DenseOutput) -> Tensor:
    """Outputs as one tensor: of several, their numbers side by side, (B, ...)."""
    if isinstance(outputs, Tensor):
        return outputs
    values = outputs.tensors().values() if isinstance(outputs, DenseOutput) else outputs
    return torch.cat([value.flatten(1) for value in values], dim=1)


def output_kind(model: Network, gives: OutputKind | None = None) -> OutputKind:
    """What an export of this model returns: by default logits where it has classes, else features; of a network for
    pixels or objects all that it answers.
    """
    if isinstance(model, DenseNetwork) and gives in (None, "logits", "dense"):
        return "dense"
    if gives == "dense":
        raise UsageError(f"a {model.family} answers for whole images, and not for pixels or objects.")
    if gives == "text" and not isinstance(model, TwoTowers):
        raise UsageError(f"only a CLIP or SigLIP reads text; this is a {model.family}: leave --text out.")
    if gives == "text":
        return gives
    return "logits" if model.config.classes and gives != "features" else "features"


def _required_part(model: Network, gives: OutputKind) -> Network:
    """The part that computes the output, so that unused weights are not exported. The model itself stays as it is."""
    if isinstance(model, TwoTowers):
        other = "image" if gives == "text" else "text"
        part = copy.copy(model)
        part._modules = {k: m for k, m in model._modules.items() if k not in (other, f"{other}_projection")}
        return part
    return model if gives in ("logits", "dense") else model.encoder


def example_input(model: Network, gives: OutputKind, size: tuple[int, int] | None = None, batch: int = 2) -> Tensor:
    """An input of the right shape, with a batch of two because torch.export treats a batch of one as a constant."""
    if gives == "text":
        return as_two_towers(model).text.blank_ids(batch)
    return torch.zeros(batch, model.config.channels, *(size or model.input_size))


def dense_fields(model: Network) -> list[str]:
    """Names of the fields that a network's DenseOutput has."""
    with torch.device("meta"), torch.no_grad():
        network = registry.build(model.family, model.config).eval()
        return list(network(torch.empty(1, model.config.channels, *model.input_size)).tensors())


@dataclass(frozen=True)
class SizeRange:
    """Allowed image sides of an export with dynamic size: multiples of `stride` from `least` to `most` pixels."""

    stride: int
    least: int
    most: int = 2**13


def dynamic_size_range(model: Network) -> SizeRange:
    config = model.encoder.config
    if isinstance(model, DenseNetwork):
        raise UsageError(
            f"a {model.family} is exported for one image size: leave --dynamic-size out, and choose one with "
            "--image-size."
        )
    if isinstance(config, StagedConfig):
        raise UsageError(
            f"a {model.family} lays out its windows for one image size, so it cannot be exported for all sizes: leave "
            "--dynamic-size out, and choose one size with --image-size."
        )
    if isinstance(config, ResNetConfig):  # takes any size that leaves more than one position at the end
        halved = 2 ** (len(config.depths) - 1 + 2 * (config.stem == "imagenet"))
        return SizeRange(1, halved + 1)
    return SizeRange(config.patch_size, 2 * config.patch_size)
