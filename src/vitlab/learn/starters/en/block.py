"""Exercise 4 of 8: one encoder block, eqs. 2-3 of ViT (arXiv:2010.11929).

    z' = MSA(LN(z)) + z              eq. 2
    z  = MLP(LN(z')) + z'            eq. 3

Each half has a norm of its own. This is pre-norm: the norm stands before the layer, the sum carries z itself.

Write forward, then: vitlab learn block block.py
"""

from torch import Tensor, nn

from vitlab.layers.attention import Attention  # or your own: from attention import Attention
from vitlab.layers.block import MLP  # or your own: from mlp import MLP


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)

    def forward(self, z: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        raise NotImplementedError
