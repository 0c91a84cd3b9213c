"""练习 6/8：适用于任意网格的位置编码，即 ViT 论文（arXiv:2010.11929）式 1 中的 E_pos。

    z_0 = [x_class; x_p E] + E_pos       forward 中已经写好；E_pos 为 (1, 1 + N, D)，按行排列

sincos：直接计算，没有权重，做法与 MAE（arXiv:2111.06377）相同。网格上每个位置有 D 个数：
    angle_i(p) = p / 10000^(i / (D/4))   i = 0 .. D/4 - 1；p 从 0 数起
    wave(p) = [sin(angle(p)), cos(angle(p))]       共 D/2 个数：先是全部 sin，再是全部 cos
    E_pos(row, column) = [wave(column), wave(row)]     列在前
    类别 token 不在任何位置上：全为零。

resized：在一个网格上学到的位置，用在另一个网格上。self.table 为 (1, 1 + N_old, D)：先是类别 token 的位置，再是
self.grid（old rows, old columns）上各图块的位置。把图块的部分当作 D 个通道的图像缩放，用双三次插值，不加抗锯齿
（torch.nn.functional.interpolate）；类别 token 的位置保持不变。网格不一定是正方形：36 个位置可以是 6 x 6，也可以是
4 x 9。

写好 sincos 和 resized，然后运行：vitlab learn positions positions.py
"""

import torch
from torch import Tensor, nn


class Positions(nn.Module):
    def __init__(self, grid: tuple[int, int], width: int, learned: bool):
        super().__init__()
        self.grid = grid  # (old rows, old columns)
        self.learned = learned
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))  # x_class
        self.table = nn.Parameter(torch.randn(1, 1 + grid[0] * grid[1], width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:  # 排在网格上的图块 token (B, rows, columns, D) -> (B, 1 + N, D)
        B, rows, columns, D = x.shape
        z = torch.cat([self.class_token.expand(B, -1, -1), x.flatten(1, 2)], dim=1)
        return z + (self.resized(rows, columns) if self.learned else self.sincos(rows, columns, D))

    def sincos(self, rows: int, columns: int, D: int) -> Tensor:  # (1, 1 + N, D)
        raise NotImplementedError

    def resized(self, rows: int, columns: int) -> Tensor:  # (1, 1 + N, D)
        raise NotImplementedError
