"""Exercise 6 of 8: positions for a grid of any size, E_pos in eq. 1 of ViT (arXiv:2010.11929).

    z_0 = [x_class; x_p E] + E_pos       written for you in forward; E_pos is (1, 1 + N, D), row by row

sincos: computed, without weights, as in MAE (arXiv:2111.06377). D numbers for each place of the grid:
    angle_i(p) = p / 10000^(i / (D/4))   i = 0 .. D/4 - 1; p counts from 0
    wave(p) = [sin(angle(p)), cos(angle(p))]       D/2 numbers: first all sines, then all cosines
    E_pos(row, column) = [wave(column), wave(row)]     the column comes first
    The class token stands nowhere: zeros.

resized: learned on one grid, used on another. self.table is (1, 1 + N_old, D): the class token's, then those of the
patches of self.grid (old rows, old columns). Resize the patches' as an image with D channels, bicubic without
antialiasing (torch.nn.functional.interpolate); the class token's stays. Grids are not square: 36 positions are 6 x 6
and also 4 x 9.

Write sincos and resized, then: vitlab learn positions positions.py
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

    def forward(self, x: Tensor) -> Tensor:  # patch tokens on their grid (B, rows, columns, D) -> (B, 1 + N, D)
        B, rows, columns, D = x.shape
        z = torch.cat([self.class_token.expand(B, -1, -1), x.flatten(1, 2)], dim=1)
        return z + (self.resized(rows, columns) if self.learned else self.sincos(rows, columns, D))

    def sincos(self, rows: int, columns: int, D: int) -> Tensor:  # (1, 1 + N, D)
        raise NotImplementedError

    def resized(self, rows: int, columns: int) -> Tensor:  # (1, 1 + N, D)
        raise NotImplementedError
