"""Exercise 8 of 8: the loss that matches images and texts, figure 3 of CLIP (arXiv:2103.00020).

    I_e = l2_normalize(I_f W_i)          (B, E), one embedding of length 1 for each image
    T_e = l2_normalize(T_f W_t)          (B, E), and for each text
    logits = exp(t) I_e T_e^T            (B, B), cosine of every image with every text, times the scale exp(t)
    loss = (loss_i + loss_t) / 2         loss_i: every image finds its text among all texts (cross-entropy over a row);
                                         loss_t: every text finds its image among all images (over a column)

Image number i belongs to text number i. t is self.log_scale: the scale, 1 / temperature, is learned as a logarithm.

Write forward, then: vitlab learn clip-loss clip_loss.py
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

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:  # features I_f (B, I), T_f (B, T) -> ()
        raise NotImplementedError
