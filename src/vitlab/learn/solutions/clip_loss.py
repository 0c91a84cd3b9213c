import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CLIPLoss(nn.Module):
    def __init__(self, image_width: int, text_width: int, width: int):
        super().__init__()
        self.image_projection = nn.Linear(image_width, width, bias=False)
        self.text_projection = nn.Linear(text_width, width, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        I_e = F.normalize(self.image_projection(images), dim=-1)  # (B, E)
        T_e = F.normalize(self.text_projection(texts), dim=-1)  # (B, E)
        logits = self.log_scale.exp() * I_e @ T_e.mT  # (B, B): row = image, column = text
        own = torch.arange(len(logits))  # the pair of number i is (i, i)
        of_images = F.cross_entropy(logits, own)  # each image finds its text
        of_texts = F.cross_entropy(logits.mT, own)  # each text finds its image
        return (of_images + of_texts) / 2
