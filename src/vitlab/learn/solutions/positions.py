import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Positions(nn.Module):
    def __init__(self, grid: tuple[int, int], width: int, learned: bool):
        super().__init__()
        self.grid = grid
        self.learned = learned
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.table = nn.Parameter(torch.randn(1, 1 + grid[0] * grid[1], width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        B, rows, columns, D = x.shape
        z = torch.cat([self.class_token.expand(B, -1, -1), x.flatten(1, 2)], dim=1)
        return z + (self.resized(rows, columns) if self.learned else self.sincos(rows, columns, D))

    def sincos(self, rows: int, columns: int, D: int) -> Tensor:
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        omega = 10000 ** -(torch.arange(D // 4) / (D // 4))  # (D/4,)
        by_column = column.reshape(-1, 1) * omega  # (N, D/4)
        by_row = row.reshape(-1, 1) * omega
        table = torch.cat([by_column.sin(), by_column.cos(), by_row.sin(), by_row.cos()], dim=1)  # (N, D)
        return torch.cat([torch.zeros(1, D), table])[None]  # (1, 1 + N, D)

    def resized(self, rows: int, columns: int) -> Tensor:
        first, patches = self.table[:, :1], self.table[:, 1:]
        x = patches.reshape(1, *self.grid, -1).permute(0, 3, 1, 2)  # (1, D, old rows, old columns)
        x = F.interpolate(x, size=(rows, columns), mode="bicubic")  # (1, D, rows, columns)
        return torch.cat([first, x.flatten(2).transpose(1, 2)], dim=1)  # (1, 1 + N, D)
