"""The most similar others of each row, in blocks: memory grows with n, not with n x n."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**24  # cosines at a time


def nearest(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Cosines and rows, both (n, k), of unit vectors; query i and row i of the bank are one image, and left out."""
    n = len(bank)
    k, rows = min(k, n - 1), max(1, BLOCK // n)
    cosines, indices = torch.empty(n, k), torch.empty(n, k, dtype=torch.int64)
    for start in range(0, n, rows):
        block = queries[start : start + rows] @ bank.T
        block[torch.arange(len(block)), torch.arange(start, start + len(block))] = -2.0
        cosines[start : start + rows], indices[start : start + rows] = block.topk(k, dim=1)
    return cosines, indices
