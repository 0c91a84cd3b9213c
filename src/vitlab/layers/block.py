"""The encoder block and its parts: MLP, SwiGLU, LayerScale, stochastic depth; eqs. 2-3 of ViT (arXiv:2010.11929)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]  # it has no types

from vitlab.layers.attention import Attention
from vitlab.layers.positions import Rotary
from vitlab.layers.trace import LayerTrace, mark

Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), OpenAI CLIP's approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """Two layers with a nonlinearity between: D -> hidden -> D, on every token alone."""

    def __init__(
        self, width: int, hidden: int, *, activation: Activation = "gelu", bias: bool = True, dropout: float = 0.0
    ):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.fc2 = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, trace: LayerTrace | None = None) -> Tensor:
        x = mark(trace, "fc1_pre", self.fc1(x))  # (B, N, hidden)
        x = mark(trace, "fc1", self.dropout(self.activation(x)))
        return mark(trace, "fc2", self.dropout(self.fc2(x)))  # (B, N, D)


class SwiGLU(nn.Module):
    """silu(x W1) * (x W2), then W3 (arXiv:2002.05202), as in DINOv2's giant; fc1 holds W1 and W2 side by side.

    `norm_eps` puts a LayerNorm before W3 (EVA-02, arXiv:2303.11331); another `activation` makes another gated MLP.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: Activation = "silu",
        bias: bool = True,
        norm_eps: float | None = None,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * hidden, bias=bias)
        self.activation = ACTIVATIONS[activation]
        self.norm = None if norm_eps is None else nn.LayerNorm(hidden, eps=norm_eps)
        self.fc2 = nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, trace: LayerTrace | None = None) -> Tensor:
        gate, up = mark(trace, "fc1_pre", self.fc1(x)).chunk(2, dim=-1)  # each (B, N, hidden)
        x = mark(trace, "fc1", self.dropout(self.activation(gate) * up))  # (B, N, hidden)
        x = x if self.norm is None else self.norm(x)
        return mark(trace, "fc2", self.dropout(self.fc2(x)))  # (B, N, D)


def swiglu_hidden(width: int, ratio: float) -> int:
    """Two thirds of the MLP's hidden size, so that the parameters stay equal, rounded up to a multiple of 8."""
    return (int(int(width * ratio) * 2 / 3) + 7) // 8 * 8


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch, small at first (CaiT, arXiv:2103.17239)."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class StochasticDepth(nn.Module):
    """In training, leave a branch out for a random share of the samples (arXiv:1603.09382)."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return x
        kept = torch.rand(x.shape[0], *[1] * (x.ndim - 1), device=x.device) >= self.rate
        return x * kept / (1 - self.rate)


T = TypeVar("T")


def run(function: Callable[..., T], *inputs: Tensor | object, recompute: bool = False) -> T:
    """function(*inputs). With `recompute` (gradient checkpointing) its inner values are not stored but computed again
    for the gradients, so the function must have no side effects.
    """
    if not recompute:
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False)  # type: ignore[return-value]


class Block(nn.Module):
    """Encoder block, eqs. 2-3 of ViT: pre-norm, or post-norm as in the first Transformer (arXiv:1706.03762).

    `norm="branch"` puts each norm at the end of its branch, before the sum (Swin v2, arXiv:2111.09883). `rms`: norms
    divide by the root mean square and subtract no mean (arXiv:1910.07467).
    """

    def __init__(
        self,
        attention: Attention,
        mlp: MLP | SwiGLU,
        width: int,
        *,
        norm: Literal["pre", "post", "branch"] = "pre",
        rms: bool = False,
        eps: float = 1e-6,
        layer_scale: float = 0.0,
        stochastic_depth: float = 0.0,
    ):
        super().__init__()
        self.norm = norm
        layer_norm = nn.RMSNorm if rms else nn.LayerNorm
        self.norm1 = layer_norm(width, eps=eps)
        self.attention = attention
        self.scale1 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.norm2 = layer_norm(width, eps=eps)
        self.mlp = mlp
        self.scale2 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.depth_drop = StochasticDepth(stochastic_depth)

    def forward(
        self,
        z: Tensor,
        rope: Rotary | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        trace: LayerTrace | None = None,
        reduce: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """z (B, N, D); rope, bias and mask go to the attention; `reduce` shortens the token list between the halves."""
        y = mark(trace, "norm1", self.norm1(z)) if self.norm == "pre" else z
        y = self.attention(y, rope, bias, mask, trace)
        y = self.norm1(y) if self.norm == "branch" else y
        z = z + mark(trace, "attention_out", self.depth_drop(self.scale1(y)))  # eq. 2
        z = mark(trace, "after_attention", self.norm1(z) if self.norm == "post" else z)
        if reduce is not None:
            z = reduce(z)  # (B, M, D), M < N
        y = mark(trace, "norm2", self.norm2(z)) if self.norm == "pre" else z
        y = self.mlp(y, trace)
        y = self.norm2(y) if self.norm == "branch" else y
        z = z + mark(trace, "mlp_out", self.depth_drop(self.scale2(y)))  # eq. 3
        return mark(trace, "tokens", self.norm2(z) if self.norm == "post" else z)


BLOCK_KINDS = (
    *("norm1", "qkv", "heads", "proj", "attention_out", "after_attention"),
    *("norm2", "fc1_pre", "fc1", "fc2", "mlp_out", "tokens"),
)
