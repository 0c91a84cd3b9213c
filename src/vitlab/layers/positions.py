"""Where a patch stands: learned, sin-cos, rotary and relative positions, and the resizing of a grid of any aspect.

Grids are (rows, columns). 196 positions are 14 x 14 and also 7 x 28: grids are compared, never token counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Device = torch.device | None


def resize_grid(values: Tensor, old: tuple[int, int], new: tuple[int, int], rule: str = "bicubic") -> Tensor:
    """Resize (1, rows*columns, D) from the old grid to the new one, as the weights' own library does.

    bicubic            transformers' ViT, DeiT and DINOv2
    bicubic_antialias  timm, and DINOv2 with registers: antialiased where the grid shrinks
    bilinear           PVT
    bilinear_antialias TIPSv2, and NaFlex of SigLIP 2
    bicubic_offset     facebook's DINO and DINOv2: by the scale (new + 0.1) / old
    """
    if same_grid(old, new):
        return values
    D = values.shape[-1]
    x = values.float().reshape(1, *old, D).permute(0, 3, 1, 2)  # (1, D, rows, columns)
    if not is_concrete(new):
        rows, columns = cubic_weights(old, new, rule, x.device)
        x = rows @ x @ columns.mT
    elif rule == "bicubic_offset":
        scale = [(n + 0.1) / o for n, o in zip(new, old, strict=True)]  # 0.1 keeps floor(old * scale) from losing a row
        x = F.interpolate(x, scale_factor=scale, mode="bicubic", align_corners=False)
    else:
        mode = rule.split("_")[0]
        x = F.interpolate(x, size=new, mode=mode, align_corners=False, antialias=rule.endswith("_antialias"))
    return x.permute(0, 2, 3, 1).reshape(1, new[0] * new[1], D).to(values.dtype)


def is_concrete(grid: tuple[int | torch.SymInt, int | torch.SymInt]) -> bool:
    """False in a graph that is exported for any image size: there a side is a symbol, not a number."""
    return all(isinstance(side, int) for side in grid)


def same_grid(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """A symbol is not asked, or the graph would be for the sizes that gave this answer."""
    return is_concrete(new) and old == new


def cubic_weights(old: tuple[int, int], new: tuple[int, int], rule: str, device: Device = None) -> list[Tensor]:
    """What `resize_grid` does along each axis as a matrix (new, old), in operations that leave `new` open."""
    places = [torch.arange(n, dtype=torch.float32, device=device) for n in new]  # (new,) each
    counts = [place[-1:] + 1 for place in places]
    extra = 0.0
    if rule == "bicubic_offset":  # a grid of the old size stays as it is
        extra = 0.1 * ((counts[0] != old[0]) | (counts[1] != old[1]))
    steps = [o / (count + extra) for o, count in zip(old, counts, strict=True)]
    return [_along(*axis, rule) for axis in zip(places, steps, old, strict=True)]


def _along(place: Tensor, step: Tensor, old: int, rule: str) -> Tensor:
    """Keys' cubic: a = -0.75 as in F.interpolate, and -0.5 with antialias, where it widens as the grid shrinks."""
    centre = (place + 0.5) * step - 0.5  # (new,)
    source = torch.arange(old, dtype=torch.float32, device=place.device)  # (old,)
    if rule.endswith("_antialias"):  # what would lie outside does not count
        t = (centre[:, None] - source).abs() / step.clamp(min=1)  # (new, old)
        weights = (1 - t).clamp(min=0) if rule.startswith("bilinear") else _cubic(t, a=-0.5)
        return weights / weights.sum(dim=1, keepdim=True)
    taps = centre.floor()[:, None] + torch.arange(-1.0, 3.0, device=place.device)  # (new, 4)
    weights = _cubic((centre[:, None] - taps).abs(), a=-0.75)
    inside = taps.clamp(0, old - 1)  # outside, the edge goes on
    return (weights[..., None] * (inside[..., None] == source)).sum(dim=1)


def _cubic(t: Tensor, a: float) -> Tensor:
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return torch.where(t <= 1, near, torch.where(t < 2, far, 0.0))


def resize_positions(table: Tensor, prefix: int, old: tuple[int, int], new: tuple[int, int], rule: str) -> Tensor:
    """Resize (1, prefix + rows*columns, D); the prefix tokens' positions stay."""
    if same_grid(old, new):
        return table
    return torch.cat([table[:, :prefix], resize_grid(table[:, prefix:], old, new, rule)], dim=1)


def resize_relative(table: Tensor, old: tuple[int, int], new: tuple[int, int], rule: str = "bicubic") -> Tensor:
    """Resize a relative bias table, (offsets + 3, h), made for the old grid; the prefix tokens' entries stay."""
    if same_grid(old, new):
        return table
    before, after = ((2 * rows - 1, 2 * columns - 1) for rows, columns in (old, new))
    count = before[0] * before[1]
    return torch.cat([resize_grid(table[None, :count], before, after, rule)[0], table[count:]])


def sincos_2d(grid: tuple[int, int], width: int, temperature: float = 10000.0, device: Device = None) -> Tensor:
    """Fixed 2-D sine-cosine positions (MAE, MoCo v3): the first half of D encodes the column, the second the row."""
    rows, columns = (torch.arange(n, dtype=torch.float64, device=device) for n in grid)
    row, column = torch.meshgrid(rows, columns, indexing="ij")
    omega = torch.arange(width // 4, dtype=torch.float64, device=device) / (width // 4)
    omega = temperature**-omega  # (D/4,)
    angles = torch.stack([column.flatten(), row.flatten()])[..., None] * omega  # (2, N, D/4)
    halves = torch.cat([angles.sin(), angles.cos()], dim=-1)  # (2, N, D/2)
    return torch.cat([halves[0], halves[1]], dim=-1)[None].float()  # (1, N, D)


class LearnedPositions(nn.Module):
    """E_pos of eq. 1: one vector per place, for `prefix` leading tokens and then for every patch of the stored grid."""

    def __init__(self, grid: tuple[int, int], width: int, *, prefix: int, rule: str = "bicubic"):
        super().__init__()
        self.grid, self.prefix, self.rule = grid, prefix, rule
        self.table = nn.Parameter(torch.empty(1, prefix + grid[0] * grid[1], width))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        """`like` tells the device and dtype to positions that hold no weights; here the weights have their own."""
        return resize_positions(self.table, self.prefix, self.grid, grid, self.rule)  # (1, prefix + N, D)


class SinCosPositions(nn.Module):
    """Fixed sin-cos positions of the stored grid, resized like learned ones; prefix tokens get zeros (as in MAE)."""

    def __init__(self, grid: tuple[int, int], width: int, *, prefix: int, rule: str = "bicubic"):
        super().__init__()
        self.grid, self.width, self.prefix, self.rule = grid, width, prefix, rule

    def forward(self, grid: tuple[int, int], like: Tensor) -> Tensor:
        table = resize_grid(sincos_2d(self.grid, self.width, device=like.device), self.grid, grid, self.rule)
        return F.pad(table, (0, 0, self.prefix, 0)).to(like.dtype)  # (1, prefix + N, D)


class Rotary(NamedTuple):
    """Angles by which pairs of channels of queries and keys are turned, one for each token and pair."""

    cos: Tensor  # (N, d/2), or (B, 1, N, d/2) where samples keep other patches
    sin: Tensor
    halves: bool = False  # pairs are (i, i + d/2), as in DINOv3; otherwise neighbours (2i, 2i + 1)

    def of_tokens(self, kept: Tensor) -> Rotary:
        """Those of the tokens at `kept` (B, n): (B, 1, n, d/2) each."""
        return self._replace(cos=self.cos[kept][:, None], sin=self.sin[kept][:, None])

    def with_still(self, count: int) -> Rotary:
        """With angles of 0, which turn nothing, for further tokens at the end."""
        still = (0, 0, 0, count)
        return self._replace(cos=F.pad(self.cos, still, value=1.0), sin=F.pad(self.sin, still))


def with_unbiased(bias: Tensor | None, count: int) -> Tensor | None:
    """A bias of the attention, (1, h, N, N), with zeros for further tokens at the end."""
    return None if bias is None else F.pad(bias, (0, count, 0, count))


def rotary_2d(grid: tuple[int, int], head_dim: int, base: float, prefix: int, device: Device = None) -> Rotary:
    """Axial 2-D rotary positions (arXiv:2403.13298): half the channels turn by row, half by column."""
    rows, columns = (torch.arange(n, dtype=torch.float32, device=device) for n in grid)
    return rotary_at(grid_points(rows, columns), rotary_speeds(head_dim, base, device), prefix)


def rotary_scaled(
    grid: tuple[int, int],
    reference: tuple[int, int],
    speeds: Tensor,
    prefix: int,
    *,
    first: int = 0,
    columns_first: bool = False,
) -> Rotary:
    """Rotary positions counted from `first`, stretched so that every grid spans the reference grid (EVA-02, PE)."""
    axes = [
        (torch.arange(n, dtype=torch.float32, device=speeds.device) + first) / n * wanted
        for n, wanted in zip(grid, reference, strict=True)
    ]
    points = grid_points(*axes)  # (N, 2)
    return rotary_at(points.flip(1) if columns_first else points, speeds, prefix)


def rotary_speeds(head_dim: int, base: float, device: Device = None) -> Tensor:
    """(d/4,), from 1 down towards 1 / base: how fast each pair of channels turns along an axis."""
    return base ** -(torch.arange(head_dim // 4, dtype=torch.float32, device=device) / (head_dim // 4))


def grid_points(rows: Tensor, columns: Tensor) -> Tensor:
    """Coordinates of every place of a grid, row by row: (rows,), (columns,) -> (N, 2)."""
    return torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)


def rotary_at(points: Tensor, speeds: Tensor, prefix: int, *, halves: bool = False) -> Rotary:
    """cos and sin for patches at `points` (N, 2): half of the pairs turn by the first coordinate, half by the second.

    Prefix tokens stand nowhere: their angle is 0, which turns nothing.
    """
    angles = (points[..., None] * speeds).flatten(1)  # (N, d/2)
    angles = F.pad(angles, (0, 0, prefix, 0))  # (prefix + N, d/2)
    return Rotary(angles.cos(), angles.sin(), halves)


def rotate(x: Tensor, rope: Rotary) -> Tensor:
    """Turn each pair of channels by its token's angle: the product of complex numbers."""
    cos, sin = rope.cos.to(x.dtype), rope.sin.to(x.dtype)
    if rope.halves:
        first, second = x.chunk(2, dim=-1)  # (B, h, N, d/2)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    even, odd = x[..., 0::2], x[..., 1::2]  # (B, h, N, d/2)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def relative_index(grid: tuple[int, int], prefix: int, device: Device = None) -> Tensor:
    """Which entry of `RelativeBias.table` each (query, key) pair reads: (N, N) of whole numbers.

    Patches read by their offset; with prefix tokens three more entries follow (Swin's table, BEiT's additions):
    prefix to patch, patch to prefix, prefix to prefix.
    """
    rows, columns = grid
    row = torch.arange(rows, device=device).repeat_interleave(columns)
    column = torch.arange(columns, device=device).repeat(rows)
    down = row[:, None] - row[None, :] + rows - 1  # 0 .. 2 rows - 2
    right = column[:, None] - column[None, :] + columns - 1
    offsets = (2 * rows - 1) * (2 * columns - 1)
    index = F.pad(down * (2 * columns - 1) + right, (prefix, 0, prefix, 0))
    index[:prefix, prefix:] = offsets
    index[prefix:, :prefix] = offsets + 1
    index[:prefix, :prefix] = offsets + 2
    return index


class RelativeBias(nn.Module):
    """A learned number per head and per offset between query and key, added to Q K^T (Swin, arXiv:2103.14030)."""

    def __init__(self, grid: tuple[int, int], heads: int, *, prefix: int, rule: str = "bicubic"):
        super().__init__()
        self.grid, self.rule = grid, rule
        offsets = (2 * grid[0] - 1) * (2 * grid[1] - 1)
        self.table = nn.Parameter(torch.empty(offsets + (3 if prefix else 0), heads))
        nn.init.trunc_normal_(self.table, std=0.02)

    def forward(self, index: Tensor, grid: tuple[int, int]) -> Tensor:
        table = resize_relative(self.table, self.grid, grid, self.rule)  # (offsets + 3, h)
        return table[index].permute(2, 0, 1)[None]  # (1, h, N, N)
