"""Exercise 3 of 8: the MLP of a block, in eq. 3 of ViT (arXiv:2010.11929).

    MLP(x) = fc2(GELU(fc1(x)))       D -> hidden -> D, on every token alone

GELU is the exact one, x * Phi(x), where Phi is the normal distribution function.

Write forward, then: vitlab learn mlp mlp.py
"""

from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        raise NotImplementedError
