"""Two partners for the numbers: transformers' own attention (float64), and models whose attention is known by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import ViTConfig

SMALL: dict[str, Any] = dict(
    hidden_size=48, num_hidden_layers=3, num_attention_heads=4, patch_size=8, attn_implementation="eager"
)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], int]] = {  # the last number: tokens before the patches
    "vit": ("ViT", "ForImageClassification", dict(image_size=(32, 48), intermediate_size=96), 1),
    "distilled": ("DeiT", "ForImageClassificationWithTeacher", dict(image_size=(32, 48), intermediate_size=96), 2),
    "registers": ("Dinov2WithRegisters", "ForImageClassification", dict(image_size=32, num_register_tokens=3), 4),
}


@dataclass
class Pair:
    """One network twice, in float64, and what transformers says of two images of 32 x 48."""

    ours: VisionTransformer
    theirs: Any
    images: Tensor
    attentions: np.ndarray  # (L, B, h, N, N)
    hidden: np.ndarray  # (L, B, N, D), after each block
    prefix: int
    grid: tuple[int, int] = (4, 6)


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request, tmp_path_factory) -> Pair:
    import transformers as hf

    family, task, options, prefix = FAMILIES[request.param]
    config = getattr(hf, f"{family}Config")(**SMALL, **options, num_labels=5)
    torch.manual_seed(7)
    theirs = getattr(hf, f"{family}{task}")(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(mean=float("norm" in name and name.endswith("weight")), std=0.2)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    images = torch.randn(2, 3, 32, 48).double()
    with torch.no_grad():
        out = theirs.double()(images, output_attentions=True, output_hidden_states=True)
    attentions = np.stack([a.numpy() for a in out.attentions])
    hidden = np.stack([h.numpy() for h in out.hidden_states[1:]])
    return Pair(vitlab.load(folder).double(), theirs, images, attentions, hidden, prefix)


def known(*heads: str | int, grid=(3, 5), depth: int = 3, patch_size: int = 4, **options: Any) -> VisionTransformer:
    """Blocks that change no token, and heads that look everywhere ("uniform"), at themselves ("self"), or at one token.

    Token i is the unit vector e_i; after LayerNorm these stay far from each other.
    """
    size = (grid[0] * patch_size, grid[1] * patch_size)
    shape = dict(
        image_size=size, patch_size=patch_size, classes=3, width=32, depth=depth, heads=len(heads), head_dim=32
    )
    model = VisionTransformer(ViTConfig().with_options(**shape, **options)).eval()
    tokens = torch.eye(32)
    prefix = len(model.config.prefix)
    with torch.no_grad():
        first = [t for t in (model.class_token, model.distill_token, model.register_tokens) if t is not None]
        for token, unit in zip((t[0, i] for t in first for i in range(t.shape[1])), tokens, strict=False):
            token.copy_(unit)
        model.patch_embed.proj.weight.zero_()
        patches = grid[0] * grid[1]
        model.positions.table.zero_()
        model.positions.table[0, -patches:] = tokens[prefix : prefix + patches]
        for block in model.blocks:
            for layer in (block.attention.proj, block.mlp.fc2, block.attention.qkv):
                layer.weight.zero_()
                layer.bias.zero_()
            q, k, _ = block.attention.qkv.weight.view(3, len(heads), 32, 32)
            for number, head in enumerate(heads):
                if head == "uniform":
                    continue
                k[number] = tokens
                if head == "self":
                    q[number] = 100 * tokens
                else:
                    block.attention.qkv.bias.view(3, len(heads), 32)[0, number, head] = 1000
    return model


@pytest.fixture(name="known")
def _known():
    return known


def relevance_by_loops(attentions, gradients) -> np.ndarray:
    """Eqs. 5-6 of arXiv:2103.15679, one image and one number at a time: all of R, (B, N, N)."""
    B, h, N, _ = attentions[0].shape
    found = np.zeros((B, N, N))
    for b in range(B):
        R = np.eye(N)
        for A, G in zip(attentions, gradients, strict=True):
            bar = np.zeros((N, N))
            for i in range(N):
                for j in range(N):
                    bar[i, j] = sum(max(G[b, head, i, j] * A[b, head, i, j], 0.0) for head in range(h)) / h
            R = R + bar @ R
        found[b] = R
    return found


@pytest.fixture(name="relevance_by_loops")
def _relevance_by_loops():
    return relevance_by_loops
