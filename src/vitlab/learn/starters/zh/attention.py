"""练习 2/8：多头自注意力，ViT 论文（arXiv:2010.11929）式 5-8。

    [q, k, v] = z U_qkv              式 5，每个头中：(B, h, N, d)，d = D / h
    A = softmax(q k^T / sqrt(d))     式 6，(B, h, N, N)，每行之和为 1
    SA(z) = A v                      式 7，(B, h, N, d)
    MSA(z) = [SA_1(z); ...] U_msa    式 8，各个头并排，再经过 proj

self.qkv 为每个 token 给出 3D 个数：先是全部查询，然后全部键，最后全部值；每一部分中，各个头依次排列。

写好 forward，然后运行：vitlab learn attention attention.py
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
