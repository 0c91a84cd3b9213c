"""Exercise 7 of 8: masked autoencoding, section 3 of MAE (arXiv:2111.06377), without the class token.

    tokens = embed(patches) + positions          (B, N, D)
    hide     the n = int(N * (1 - mask_ratio)) patches of lowest noise stay visible, in each image its own
    latent = encoder(visible tokens)             (B, n, D): the encoder sees neither hidden patches nor mask tokens
    restore  every latent back in its place, mask_token wherever a patch is hidden: (B, N, D)
    prediction = pixels(decoder(restored + decoder_positions))       (B, N, C*P*P)
    loss     the mean squared error of a patch's values, averaged over the hidden patches only: ()

The noise comes from outside, so that chance can be repeated: a random order is argsort(noise), and the way back is the
argsort of that order.

Write forward, then: vitlab learn mae-masking mae_masking.py
"""

import torch
from torch import Tensor, nn

from vitlab.layers.attention import Attention
from vitlab.layers.block import MLP, Block  # or your own: from block import Block


class MAE(nn.Module):
    def __init__(self, patches: int, values: int, width: int, heads: int, hidden: int, mask_ratio: float):
        super().__init__()
        self.mask_ratio = mask_ratio  # share of the patches that is hidden
        self.embed = nn.Linear(values, width)  # C*P*P -> D
        self.positions = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.encoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        self.decoder_positions = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.decoder = Block(Attention(width, heads), MLP(width, hidden), width)
        self.pixels = nn.Linear(width, values)  # D -> C*P*P

    def forward(self, patches: Tensor, noise: Tensor) -> Tensor:  # (B, N, C*P*P), (B, N) -> ()
        raise NotImplementedError
