"""Exercise 2 of 8: multi-head self-attention, eqs. 5-8 of ViT (arXiv:2010.11929).

    [q, k, v] = z U_qkv              eq. 5, in every head: (B, h, N, d), d = D / h
    A = softmax(q k^T / sqrt(d))     eq. 6, (B, h, N, N), each row sums to 1
    SA(z) = A v                      eq. 7, (B, h, N, d)
    MSA(z) = [SA_1(z); ...] U_msa    eq. 8, the heads side by side, then proj

self.qkv gives 3D numbers a token: first all queries, then all keys, then all values; within each, head after head.

Write forward, then: vitlab learn attention attention.py
"""

from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads  # h
        self.qkv = nn.Linear(width, 3 * width)  # U_qkv
        self.proj = nn.Linear(width, width)  # U_msa

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        raise NotImplementedError
