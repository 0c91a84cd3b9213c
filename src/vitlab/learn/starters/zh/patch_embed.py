"""练习 1/8：从图像到 token，即 ViT 论文（arXiv:2010.11929）式 1 的前半部分。

    x_p E        每个 P x P 的图块展成一个长向量，乘以同一个矩阵 E

把图像 (B, C, H, W) 按行切成 N = (H/P)(W/P) 个图块。图块内部数值的顺序是通道、行、列。
然后由 self.proj 把每个图块变成宽度为 D 的 token：(B, N, D)。图像不一定是正方形。

写好 forward，然后运行：vitlab learn patch-embed patch_embed.py
"""

from torch import Tensor, nn


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, channels: int, width: int):
        super().__init__()
        self.patch_size = patch_size  # P
        self.proj = nn.Linear(channels * patch_size**2, width)  # E：C*P*P -> D

    def forward(self, images: Tensor) -> Tensor:  # (B, C, H, W) -> (B, N, D)
        raise NotImplementedError
