"""练习 3/8：编码器块中的 MLP，见 ViT 论文（arXiv:2010.11929）式 3。

    MLP(x) = fc2(GELU(fc1(x)))       D -> hidden -> D，对每个 token 单独计算

GELU 用精确形式 x * Phi(x)，其中 Phi 是标准正态分布函数。

写好 forward，然后运行：vitlab learn mlp mlp.py
"""

from torch import Tensor, nn


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (B, N, D) -> (B, N, D)
        raise NotImplementedError
