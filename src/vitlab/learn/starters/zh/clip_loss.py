"""练习 8/8：让图像与文本配对的损失，CLIP 论文（arXiv:2103.00020）图 3。

    I_e = l2_normalize(I_f W_i)          (B, E)，每张图像一个长度为 1 的嵌入
    T_e = l2_normalize(T_f W_t)          (B, E)，每个文本也是如此
    logits = exp(t) I_e T_e^T            (B, B)，每张图像与每个文本的余弦，再乘以缩放系数 exp(t)
    loss = (loss_i + loss_t) / 2         loss_i：每张图像在所有文本中找到自己的（沿行的交叉熵）；
                                         loss_t：每个文本在所有图像中找到自己的（沿列）

第 i 张图像与第 i 个文本是一对。t 即 self.log_scale：缩放系数是温度的倒数，以对数的形式学习。

写好 forward，然后运行：vitlab learn clip-loss clip_loss.py
"""

import math

import torch
from torch import Tensor, nn


class CLIPLoss(nn.Module):
    def __init__(self, image_width: int, text_width: int, width: int):
        super().__init__()
        self.image_projection = nn.Linear(image_width, width, bias=False)  # W_i: I -> E
        self.text_projection = nn.Linear(text_width, width, bias=False)  # W_t: T -> E
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # t

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:  # 特征 I_f (B, I)、T_f (B, T) -> ()
        raise NotImplementedError
