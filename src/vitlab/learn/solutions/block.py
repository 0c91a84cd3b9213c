from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.attention(self.norm1(z))  # eq. 2
        return z + self.mlp(self.norm2(z))  # eq. 3
