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
from vitlab.layers.attention import Heads, QVLinear

LORA_A, LORA_B = "lora_a", "lora_b"
M = TypeVar("M", bound=nn.Module)


class LowRank(nn.Module):
    """h = W x + b + (alpha / r) B A x, eq. 3. W and b are the given layer's; B begins at 0, so that nothing changes."""

    weight: Tensor

    def add_matrices(self, rank: int, alpha: float) -> None:
        rows, columns = self.weight.shape
        self.rank, self.alpha = rank, alpha
        self.lora_a = nn.Parameter(self.weight.new_empty(rank, columns))  # A
        self.lora_b = nn.Parameter(self.weight.new_zeros(rows, rank))  # B
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))  # as the authors' code, and peft

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def low_rank(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale  # (..., in) -> (..., r) -> (..., out)

    def merged_weight(self) -> Tensor:
        return self.weight + (self.lora_b @ self.lora_a) * self.scale

    def merged_layer(self) -> nn.Module:
        raise NotImplementedError


class LoRALinear(LowRank, nn.Linear):
    def __init__(self, layer: nn.Linear, rank: int, alpha: float):
        with torch.device("meta"):
            nn.Linear.__init__(self, layer.in_features, layer.out_features, _has_bias(layer))  # pyright: ignore
        self.weight, self.bias, self.training = layer.weight, layer.bias, layer.training
        self.add_matrices(rank, alpha)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias) + self.low_rank(input)

    def merged_layer(self) -> nn.Linear:
        with torch.device("meta"):
            layer = nn.Linear(self.in_features, self.out_features, _has_bias(self))
        layer.weight = nn.Parameter(self.merged_weight(), requires_grad=self.weight.requires_grad)
        layer.bias, layer.training = self.bias, self.training
        return layer


class LoRAQVLinear(LowRank, QVLinear):
    def __init__(self, layer: QVLinear, rank: int, alpha: float):
        with torch.device("meta"):
            QVLinear.__init__(self, layer.weight.shape[1], len(layer.q_bias))
        self.weight, self.q_bias, self.v_bias, self.training = layer.weight, layer.q_bias, layer.v_bias, layer.training
        self.add_matrices(rank, alpha)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias) + self.low_rank(x)

    def merged_layer(self) -> QVLinear:
        with torch.device("meta"):
            layer = QVLinear(self.weight.shape[1], len(self.q_bias))
        layer.weight = nn.Parameter(self.merged_weight(), requires_grad=self.weight.requires_grad)
        layer.q_bias, layer.v_bias, layer.training = self.q_bias, self.v_bias, self.training
        return layer


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))  # torch gives it no full type


def lora_layers(model: nn.Module) -> dict[str, LowRank]:
    """The adapted layers by name; empty for a plain network."""
    return {name: module for name, module in modules_of(model).items() if isinstance(module, LowRank)}


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
) -> dict[str, LowRank]:
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
    """Names of the matrices that `layers` means; see `add_lora`."""
    kinds = [kind.strip() for kind in layers.split(",") if kind.strip()]
    linear = [name for name, module in modules_of(model).items() if isinstance(module, nn.Linear | QVLinear)]
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


def adapt(model: nn.Module, names: Sequence[str], rank: int, alpha: float) -> dict[str, LowRank]:
    """Put adapters beside these layers, in place; what learns and what is frozen stays as it is."""
    layers = {name: model.get_submodule(name) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, nn.Linear | QVLinear):
            raise UsageError(f"{name} is a {type(layer).__name__}, and only a matrix can have an adapter here.")
        rows, columns = layer.weight.shape
        if not 1 <= rank <= min(rows, columns):
            raise UsageError(f"rank {rank} does not fit {name}, {rows} x {columns}: 1 to {min(rows, columns)}.")
    if not alpha > 0:
        raise UsageError(f"alpha={alpha} must be above 0.")
    for name, layer in layers.items():
        assert isinstance(layer, nn.Linear | QVLinear)
        kind = LoRAQVLinear if isinstance(layer, QVLinear) else LoRALinear
        _replace(model, name, kind(layer, rank, alpha))  # type: ignore[arg-type]
    return lora_layers(model)


@torch.no_grad()
def merge_lora(model: M) -> M:
    """Add every adapter to its matrix, in place: a plain network that gives the same results to rounding."""
    for name, layer in lora_layers(model).items():
        _replace(model, name, layer.merged_layer())
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
