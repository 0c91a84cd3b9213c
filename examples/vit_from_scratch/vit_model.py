"""The Vision Transformer in plain PyTorch: "An Image is Worth 16x16 Words" (arXiv:2010.11929), eqs. 1-8.

    model = vit_base()
    logits = model(images)                              # (B, 3, 224, 224) -> (B, 1000)

The letters are the paper's: B images in a batch of C channels and H x W pixels; patches of P x P pixels, N = HW / P^2
of them; D the width of a token; L blocks; h heads of d = D / h channels each. The parameters have timm's names, so
its published ViT weights load with `load_state_dict`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    """Everything that decides the shape of the network; plain values, to be saved beside the weights."""

    image_size: int = 224
    patch_size: int = 16  # P
    channels: int = 3  # C
    classes: int = 1000  # K; 0: no classifier, the network returns features
    width: int = 768  # D
    depth: int = 12  # L
    heads: int = 12  # h
    mlp_ratio: float = 4.0
    pool: Literal["class", "mean"] = "class"  # what the classifier reads: the class token, or the mean of the patches
    stochastic_depth: float = 0.0  # chance to skip a branch of the last block; it grows linearly from 0 in the first
    eps: float = 1e-6  # of the norms: the released weights use 1e-6, torch defaults to 1e-5

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is not a multiple of patch_size {self.patch_size}.")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}.")


class PatchEmbed(nn.Module):
    """x_p E of eq. 1: cut the image into P x P patches and map each of them to a token, with one matrix for all."""

    def __init__(self, patch_size: int, channels: int, width: int):
        super().__init__()
        # Stride = kernel size: the kernel meets every patch once. The weight, flattened to (D, P*P*C), is E transposed.
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, images: Tensor) -> Tensor:
        x = self.proj(images)  # (B, C, H, W) -> (B, D, H/P, W/P)
        return x.flatten(2).transpose(1, 2)  # (B, N, D), row by row


class Attention(nn.Module):
    """Multi-head self-attention, eqs. 5-8: a token's query meets all keys; where they match, it reads the value."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)  # U_qkv of all heads, side by side
        self.proj = nn.Linear(width, width)  # U_msa, mixes the heads

    def forward(self, z: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        B, N, D = z.shape
        h, d = self.heads, D // self.heads
        qkv = self.qkv(z).reshape(B, N, 3, h, d)  # (B, N, 3D) -> (B, N, 3, h, d), eq. 5: [q, k, v] = z U_qkv
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, h, N, d)
        if maps is None:  # eqs. 6-7 in one kernel (FlashAttention, arXiv:2205.14135), which never stores all of A
            heads = F.scaled_dot_product_attention(q, k, v)  # (B, h, N, d)
        else:
            # A sum of d products of unit variance has variance d: without 1 / sqrt(d) the softmax would saturate.
            scores = q @ k.transpose(-2, -1) / d**0.5  # (B, h, N, N)
            A = scores.softmax(dim=-1)  # (B, h, N, N), eq. 6: row = who looks, column = at whom; each row sums to 1
            heads = A @ v  # (B, h, N, d), eq. 7
            maps.append(A)
        z = heads.transpose(1, 2).reshape(B, N, D)  # (B, N, D), the heads side by side
        return self.proj(z)  # (B, N, D), eq. 8


class MLP(nn.Module):
    """Two layers with a GELU between them, on every token by itself; tokens exchange nothing here."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, z: Tensor) -> Tensor:
        z = self.fc1(z)  # (B, N, 4D)
        z = F.gelu(z)  # (B, N, 4D)
        return self.fc2(z)  # (B, N, D)


class Block(nn.Module):
    """Encoder block, eqs. 2-3. Pre-norm: nothing stands on the path from z to z, so gradients reach every layer."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, stochastic_depth: float = 0.0, eps: float = 1e-6):
        super().__init__()
        self.stochastic_depth = stochastic_depth
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.mlp = MLP(width, round(width * mlp_ratio))

    def forward(self, z: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        z = z + self.skip(self.attn(self.norm1(z), maps))  # (B, N, D), eq. 2
        return z + self.skip(self.mlp(self.norm2(z)))  # (B, N, D), eq. 3

    def skip(self, branch: Tensor) -> Tensor:
        """Stochastic depth (arXiv:1603.09382): in training, leave the branch out for a random part of the images."""
        if not self.training or self.stochastic_depth == 0:
            return branch
        keep = 1 - self.stochastic_depth
        kept = torch.rand(len(branch), 1, 1, device=branch.device) < keep  # (B, 1, 1)
        return branch * kept / keep  # (B, N, D), with the same mean


class VisionTransformer(nn.Module):
    """z_0 = [x_class; x_p E] + E_pos,  z_l = block(z_l-1),  y = LN(z_L)[class],  logits = y W."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = c = config
        self.grid = (c.image_size // c.patch_size, c.image_size // c.patch_size)  # rows and columns of patches
        N = self.grid[0] * self.grid[1]
        self.patch_embed = PatchEmbed(c.patch_size, c.channels, c.width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, c.width))  # x_class: where the image's class is gathered
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + N, c.width))  # E_pos: attention itself knows no order
        rates = [c.stochastic_depth * layer / max(c.depth - 1, 1) for layer in range(c.depth)]
        self.blocks = nn.ModuleList(Block(c.width, c.heads, c.mlp_ratio, rate, c.eps) for rate in rates)
        self.norm = nn.LayerNorm(c.width, eps=c.eps)
        self.head = nn.Linear(c.width, c.classes) if c.classes else nn.Identity()
        self.apply(init_weights)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, images: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        """(B, C, H, W) -> (B, K). Give an empty list as `maps`, and each layer appends its attention (B, h, N, N)."""
        z = self.tokens(images, maps)  # (B, 1 + N, D)
        y = z[:, 0] if self.config.pool == "class" else z[:, 1:].mean(dim=1)  # (B, D), eq. 4
        return self.head(y)  # (B, K)

    def tokens(self, images: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        """The tokens after the last norm, the class token first."""
        H, W = images.shape[-2:]
        P = self.config.patch_size
        if H % P or W % P:
            raise ValueError(f"images of {H} x {W} pixels cannot be cut into patches of {P} x {P}: resize them.")
        z = self.patch_embed(images)  # (B, N, D), x_p E
        x_class = self.cls_token.expand(len(z), -1, -1)  # (B, 1, D), the same for every image
        z = torch.cat([x_class, z], dim=1)  # (B, 1 + N, D)
        z = z + self.positions(H // P, W // P)  # (B, 1 + N, D), eq. 1
        for block in self.blocks:
            z = block(z, maps)  # (B, 1 + N, D), eqs. 2-3
        return self.norm(z)  # (B, 1 + N, D), the LN of eq. 4

    def positions(self, rows: int, columns: int) -> Tensor:
        """E_pos; for another grid (224 -> 384 pixels) resized as if it were an image of D channels (section 3.2)."""
        if (rows, columns) == self.grid:
            return self.pos_embed  # (1, 1 + N, D)
        x_class, E = self.pos_embed[:, :1], self.pos_embed[:, 1:]  # (1, 1, D), (1, N, D)
        E = E.unflatten(1, self.grid).permute(0, 3, 1, 2)  # (1, D, H/P, W/P)
        E = F.interpolate(E, (rows, columns), mode="bicubic")  # (1, D, rows, columns)
        E = E.flatten(2).transpose(1, 2)  # (1, rows * columns, D)
        return torch.cat([x_class, E], dim=1)  # (1, 1 + rows * columns, D)


def init_weights(module: nn.Module) -> None:
    """As the paper's code: matrices random (Xavier; U_qkv is three in one), biases at zero."""
    if isinstance(module, nn.Linear):
        parts = 3 if module.out_features == 3 * module.in_features else 1
        for matrix in module.weight.chunk(parts):
            nn.init.xavier_uniform_(matrix)
        nn.init.zeros_(module.bias)


# Base, Large and Huge are Table 1 of the paper; Tiny and Small came with DeiT (arXiv:2012.12877).


def vit_tiny(**options) -> VisionTransformer:
    return VisionTransformer(ViTConfig(width=192, depth=12, heads=3, **options))


def vit_small(**options) -> VisionTransformer:
    return VisionTransformer(ViTConfig(width=384, depth=12, heads=6, **options))


def vit_base(**options) -> VisionTransformer:
    return VisionTransformer(ViTConfig(width=768, depth=12, heads=12, **options))


def vit_large(**options) -> VisionTransformer:
    return VisionTransformer(ViTConfig(width=1024, depth=24, heads=16, **options))


def vit_huge(patch_size: int = 14, **options) -> VisionTransformer:
    return VisionTransformer(ViTConfig(patch_size=patch_size, width=1280, depth=32, heads=16, **options))
