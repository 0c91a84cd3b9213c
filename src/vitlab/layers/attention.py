"""Multi-head self-attention, one result by two paths: fused (torch's kernel) and explicit (every step written out).

Eqs. 5-8 of ViT (arXiv:2010.11929): [q, k, v] = z U_qkv;  A = softmax(q k^T / sqrt(d));  SA(z) = A v.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.positions import RelativeBias, Rotary, rotate
from vitlab.layers.trace import LayerTrace, mark, mark_side_by_side

Path = Literal["auto", "fused", "explicit"]


class Heads(nn.Module):
    """Base class of attention layers: what each does with its queries, keys and values.

    `path`: "auto" is fused except under a trace that needs gradients, or an edit of the weights; "fused" and "explicit"
    are always that.
    """

    by_sqrt_d = True  # scores are divided by sqrt(d)

    def __init__(self, heads: int, head_dim: int, attention_dropout: float, path: Path):
        super().__init__()
        self.heads, self.head_dim, self.path = heads, head_dim, path
        self.scale = head_dim**-0.5
        self.attention_dropout = attention_dropout
        self.relative: RelativeBias | None = None

    @property
    def biased(self) -> bool:
        """Whether a bias by the offset of query and key is added to the scores."""
        return self.relative is not None

    def split(self, x: Tensor, parts: int) -> list[Tensor]:
        """(B, N, parts * hd) -> `parts` tensors (B, h, N, d)."""
        x = torch.unflatten(x, -1, (parts, self.heads, self.head_dim))  # (B, N, parts, h, d)
        return [part.transpose(1, 2) for part in x.unbind(2)]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        mask: Tensor | None,
        trace: LayerTrace | None,
    ) -> Tensor:
        """q (B, h, N, d); k and v (B, h, M, d), where M = N unless keys are reduced -> (B, h, N, d).

        Both are added before the softmax: `bias` is part of the scores, `mask` says which keys count, and how much.
        """
        if trace is not None:
            q, k, v = (trace.mark_heads(kind, part) for kind, part in (("queries", q), ("keys", k), ("values", v)))
            root = self.head_dim**0.5 if self.by_sqrt_d else None
            q, bias, mask = trace.edit_scores(q, k.shape[2], bias, mask, root)
        added = bias if mask is None else mask if bias is None else bias + mask
        if self._explicit(trace):
            return self._explicit_attention(q, k, v, added, mask, trace)
        x = self.fused(q, k, v, added)
        if trace is not None:
            with nullcontext() if trace.gradients else torch.no_grad():
                self._record(q, k, added, trace)
        return x

    def fused(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        p = self.attention_dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, scale=self.scale)

    def weights(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
        return attention_weights(q, k, bias, self.scale)  # (B, h, N, M)

    def _explicit(self, trace: LayerTrace | None) -> bool:
        needed = trace is not None and trace.needs_explicit
        if needed and self.path == "fused":
            raise UsageError(
                'attention="fused" keeps no weights to change or to take gradients of: build the model with '
                'attention="auto", or trace without gradients=True and edit other steps.'
            )
        return needed or self.path == "explicit"

    def _explicit_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor | None,
        mask: Tensor | None,
        trace: LayerTrace | None,
    ) -> Tensor:
        weights = self.weights(q, k, added)
        if trace is not None:
            weights = trace.mark_heads("attention", weights, uniform=lambda: self.weights(torch.zeros_like(q), k, mask))
            trace.mark_heads("class_attention", weights, row=0)
        return F.dropout(weights, self.attention_dropout, self.training) @ v

    def _record(self, q: Tensor, k: Tensor, added: Tensor | None, trace: LayerTrace) -> None:
        """Compute only what the trace wants, beside the fused kernel."""
        if trace.wants("attention"):
            trace.mark_heads("attention", self.weights(q, k, added))
        if trace.wants("class_attention"):
            row = added[:, :, :1] if added is not None else None
            trace.mark_heads("class_attention", self.weights(q[:, :, :1], k, row), row=0)


class QVLinear(nn.Module):
    """[q, k, v] = x W + [b_q, 0, b_v]: keys have no bias (BEiT, EVA-02, DINOv3, Swin v2)."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3 * inner, width))
        self.q_bias = nn.Parameter(torch.zeros(inner))
        self.v_bias = nn.Parameter(torch.zeros(inner))
        nn.init.xavier_uniform_(self.weight)

    @property
    def bias(self) -> Tensor:
        return torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def as_linear(self) -> nn.Linear:
        """The same map as a plain layer, for inference."""
        rows, width = self.weight.shape
        layer = nn.Linear(width, rows, device=self.weight.device, dtype=self.weight.dtype)
        layer.weight, layer.bias = self.weight, nn.Parameter(self.bias.detach(), requires_grad=False)
        return layer


class Attention(Heads):
    """`qkv_bias="qv"` gives keys none; `inner_norm` is a LayerNorm between the heads and the projection (EVA-02)."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int | None = None,
        *,
        qkv_bias: bool | Literal["qv"] = True,
        proj_bias: bool = True,
        qk_norm: bool = False,
        inner_norm: bool = False,
        eps: float = 1e-6,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        path: Path = "auto",
        relative: RelativeBias | None = None,
    ):
        super().__init__(heads, head_dim or head_width(width, heads), attention_dropout, path)
        inner = heads * self.head_dim
        self.qkv = QVLinear(width, inner) if qkv_bias == "qv" else nn.Linear(width, 3 * inner, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, eps=eps) if qk_norm else None
        self.k_norm = nn.LayerNorm(self.head_dim, eps=eps) if qk_norm else None
        self.relative = relative
        self.inner_norm = nn.LayerNorm(inner, eps=eps) if inner_norm else None
        self.proj = nn.Linear(inner, width, bias=proj_bias)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        rope: Rotary | None = None,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        trace: LayerTrace | None = None,
    ) -> Tensor:
        """x (B, N, D); `bias` and `mask`, (1 or B, 1 or h, 1 or N, N), are added to the scores: see `attend`."""
        q, k, v = self.split(mark(trace, "qkv", self.qkv(x)), 3)  # each (B, h, N, d)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rope = rope if trace is None else trace.edit_rope(rope)
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        x = self.attend(q, k, v, bias, mask, trace)  # (B, h, N, d)
        x = mark_side_by_side(trace, "heads", x.transpose(1, 2).flatten(2), self.heads)  # (B, N, hd)
        x = x if self.inner_norm is None else self.inner_norm(x)
        return mark(trace, "proj", self.dropout(self.proj(x)))  # (B, N, D), eq. 8


def head_width(width: int, heads: int) -> int:
    if width % heads:
        raise UsageError(f"width {width} is not a multiple of heads {heads}: change one of them, or give head_dim.")
    return width // heads


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """A = softmax(q k^T / sqrt(d) + bias), eq. 6; each row sums to 1."""
    scores = (q * scale) @ k.transpose(-2, -1)  # (B, h, N, N)
    return (scores if bias is None else scores + bias).softmax(dim=-1)


def kernel_name(model: nn.Module, device: str = "cpu") -> str:
    """Describes the attention code that a forward pass of this model would run on this device."""
    layer = next((m for m in model.modules() if isinstance(m, Heads)), None)
    if layer is None:
        return "no attention"
    if layer.path == "explicit":
        return "explicit: softmax(q k^T / sqrt(d)) v, written out"
    q = torch.empty(1, layer.heads, 8, layer.head_dim, device=device)
    mask = torch.zeros(1, layer.heads, 8, 8, device=device) if layer.biased else None
    try:  # torch has no public function that tells which kernel it would choose
        number = torch._fused_sdp_choice(q, q, q, mask, scale=layer.scale)  # pyright: ignore
        choice = torch.nn.attention.SDPBackend(number).name.lower()
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return f"fused: scaled_dot_product_attention, torch chooses the kernel on {device}"
    otherwise = mask is not None or layer.attention_dropout > 0  # a bias to be learned, dropout: other kernels
    return f"fused: scaled_dot_product_attention, {choice} kernel on {device}{' for inference' if otherwise else ''}"
