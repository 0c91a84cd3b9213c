"""练习 4/8：一个编码器块，ViT 论文（arXiv:2010.11929）式 2-3。

    z' = MSA(LN(z)) + z              式 2
    z  = MLP(LN(z')) + z'            式 3

两半各有自己的归一化。这是 pre-norm：归一化在层之前，相加时传递的是 z 本身。

写好 forward，然后运行：vitlab learn block block.py
"""

from torch import Tensor, nn

from vitlab.layers.attention import Attention  # 或者用你自己的：from attention import Attention
from vitlab.layers.block import MLP  # 或者用你自己的：from mlp import MLP


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = MLP(width, hidden)

    def forward(self, z: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        raise NotImplementedError
