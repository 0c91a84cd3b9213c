"""LoRA: low-rank adapters (arXiv:2106.09685). Beside each frozen matrix W, two thin ones learn: W + (alpha / r) B A.

add_lora(model, rank=8)                    # freezes the network; A and B of every attention matrix learn
merge_lora(model)                          # W <- W + (alpha / r) B A: a plain network again, as fast as before
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.attention import Heads

LORA_A, LORA_B = "lora_a", "lora_b"
M = TypeVar("M", bound=nn.Module)


class LoRALinear(nn.Linear):
    """h = W x + b + (alpha / r) B A x, eq. 3. W and b are the given layer's; B begins at 0, so that nothing changes."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        bias = _has_bias(layer)
        super().__init__(layer.in_features, layer.out_features, bias, device="meta")  # pyright: ignore[reportUnknownMemberType]
        self.weight, self.bias, self.training = layer.weight, layer.bias, layer.training
        self.rank, self.alpha = rank, alpha
        self.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))  # A
        self.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))  # B
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as the authors' code, and peft

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, input: Tensor) -> Tensor:
        low = F.linear(F.linear(input, self.lora_a), self.lora_b)  # (..., r) -> (..., out)
        return F.linear(input, self.weight, self.bias) + low * self.scale

    def merged_weight(self) -> Tensor:
        return self.weight + (self.lora_b @ self.lora_a) * self.scale


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))  # torch gives it no full type


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The adapted layers by name; empty for a plain network."""
    return {name: module for name, module in modules_of(model).items() if isinstance(module, LoRALinear)}


def lora_scale(model: nn.Module) -> float | None:
    """alpha / r, which is the same for all layers; None for a plain network."""
    scales = {layer.scale for layer in lora_layers(model).values()}
    assert len(scales) < 2, scales
    return next(iter(scales), None)


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float | None = None,
    layers: str = "attention",
    *,
    trained: tuple[str, ...] = (),
) -> dict[str, LoRALinear]:
    """Freeze a network except for parameters whose names begin with one of `trained`, and adapt `layers` in place.

    `layers`: "attention" (the matrices of every attention layer), "mlp", or ends of names as peft's target_modules,
    e.g. "qkv,fc1". `alpha`: the rank unless given, which adds B A as it is.
    """
    if lora_layers(model):
        raise UsageError("the network has adapters already: merge_lora(model) first.")
    chosen = [name for name in choose_layers(model, layers) if not f"{name}.".startswith(trained)]
    if not chosen:
        raise UsageError(f"layers={layers!r} names only matrices that learn fully anyway.")
    learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learns and name.startswith(trained))
    adapted = adapt(model, chosen, rank, rank if alpha is None else alpha)
    for name, layer in adapted.items():  # what did not learn before (DINO's teacher) does not begin to
        for part in (layer.lora_a, layer.lora_b):
            part.requires_grad_(f"{name}.weight" in learns)
    return adapted


def choose_layers(model: nn.Module, layers: str) -> list[str]:
    """Names of the nn.Linear modules that `layers` means; see `add_lora`."""
    kinds = [kind.strip() for kind in layers.split(",") if kind.strip()]
    linear = [name for name, module in modules_of(model).items() if isinstance(module, nn.Linear)]
    by_kind: dict[str, list[str]] = {}
    for kind in kinds:
        if kind == "attention":
            attentions = {name for name, module in modules_of(model).items() if isinstance(module, Heads)}
            by_kind[kind] = [name for name in linear if name.rpartition(".")[0] in attentions]
        elif kind == "mlp":
            by_kind[kind] = [name for name in linear if "mlp" in name.split(".")[:-1]]
        else:
            by_kind[kind] = [name for name in linear if name == kind or name.endswith(f".{kind}")]
    missing = [kind for kind in kinds if not by_kind[kind]]
    if missing or not kinds:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        what = f"has no matrix for {missing[0]!r}" if missing else "needs the names of its layers"
        raise UsageError(f"the network {what}. Its matrices, by the ends of their names: {names}.")
    wanted = {name for names in by_kind.values() for name in names}
    return [name for name in linear if name in wanted]


def adapt(model: nn.Module, names: Sequence[str], rank: int, alpha: float) -> dict[str, LoRALinear]:
    """Put adapters beside these layers, in place; what learns and what is frozen stays as it is."""
    layers = {name: model.get_submodule(name) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear):
            raise UsageError(f"{name} is a {type(layer).__name__}, and only an nn.Linear can have an adapter here.")
        most = min(layer.in_features, layer.out_features)
        if not 1 <= rank <= most:
            raise UsageError(
                f"rank {rank} does not fit {name}, {layer.out_features} x {layer.in_features}: 1 to {most}."
            )
    if not alpha > 0:
        raise UsageError(f"alpha={alpha} must be above 0.")
    for name, layer in layers.items():
        assert isinstance(layer, nn.Linear)
        _replace(model, name, LoRALinear(layer, rank, alpha))
    return lora_layers(model)


@torch.no_grad()
def merge_lora(model: M) -> M:
    """Add every adapter to its matrix, in place: a plain network that gives the same results to rounding."""
    for name, layer in lora_layers(model).items():
        plain = nn.Linear(layer.in_features, layer.out_features, _has_bias(layer), device="meta")
        plain.weight = nn.Parameter(layer.merged_weight(), requires_grad=layer.weight.requires_grad)
        plain.bias, plain.training = layer.bias, layer.training
        _replace(model, name, plain)
    return model


def merged(model: M) -> M:
    """A merged copy; a plain network as it is."""
    return merge_lora(copy.deepcopy(model)) if lora_layers(model) else model


@torch.no_grad()
def merge_tensors(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """`merge_lora` for a state dict; `scale` is alpha / r."""
    merged = {key: value for key, value in tensors.items() if not is_adapter_key(key)}
    for key in tensors:
        if key.endswith(f".{LORA_A}"):
            layer = key.removesuffix(f".{LORA_A}")
            W, A, B = (tensors.get(f"{layer}.{name}") for name in ("weight", LORA_A, LORA_B))
            if W is None or A is None or B is None or not _fit(W, A, B):
                raise UsageError(f"the adapter of {layer} is incomplete, or of other shapes than its matrix.")
            merged[f"{layer}.weight"] = W + (B @ A) * scale
    return merged


def _fit(W: Tensor, A: Tensor, B: Tensor) -> bool:
    return W.ndim == A.ndim == B.ndim == 2 and W.shape == (B.shape[0], A.shape[1]) and A.shape[0] == B.shape[1]


def is_adapter_key(key: str) -> bool:
    return key.endswith((f".{LORA_A}", f".{LORA_B}"))


def _has_bias(layer: nn.Linear) -> bool:
    return cast("Tensor | None", layer.bias) is not None


def _replace(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
