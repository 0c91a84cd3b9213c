"""练习 7/8：掩码自编码，MAE 论文（arXiv:2111.06377）第 3 节，不含类别 token。

    tokens = embed(patches) + positions          (B, N, D)
    遮住     噪声最小的 n = int(N * (1 - mask_ratio)) 个图块保持可见，每张图像各选各的
    latent = encoder(可见的 token)               (B, n, D)：编码器既看不到被遮的图块，也看不到掩码 token
    恢复     每个 latent 放回原来的位置，被遮的位置放 mask_token：(B, N, D)
    prediction = pixels(decoder(恢复后的 token + decoder_positions))       (B, N, C*P*P)
    损失     每个图块各数值的均方误差，只对被遮的图块求平均：()

噪声由外部给出，随机的选择因此可以重复：argsort(noise) 就是一个随机顺序，对这个顺序再做一次 argsort 就是回去的路。

写好 forward，然后运行：vitlab learn mae-masking mae_masking.py
"""

import torch
from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block  # 或者用你自己的：from block import Block


class MAE(nn.Module):
    def __init__(self, patches: int, values: int, width: int, heads: int, hidden: int, mask_ratio: float):
        super().__init__()
        self.mask_ratio = mask_ratio  # 被遮图块的比例
        self.embed = nn.Linear(values, width)  # C*P*P -> D
        self.positions = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.encoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_positions = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.decoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.pixels = nn.Linear(width, values)  # D -> C*P*P

    def forward(self, patches: Tensor, noise: Tensor) -> Tensor:  # (B, N, C*P*P), (B, N) -> ()
        raise NotImplementedError
