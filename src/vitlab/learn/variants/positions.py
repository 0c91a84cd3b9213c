"""Positions for a grid of any size: 2-D sin-cos as in MAE (arXiv:2111.06377), and resized learned ones."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.learn.variants.base import Note, Sizes, Weights, no_record

Grid = tuple[int, int]


@dataclass(frozen=True)
class PositionsVariant:
    # sin-cos
    places: str = "2-D"
    halves: str = "column, row"
    order: str = "rows"
    waves: str = "sin, cos"
    exponent: str = "i / (D/4)"
    first: int = 0
    # learned
    rule: str = "bicubic"
    old_grid: str = "rows, columns"
    new_grid: str = "rows, columns"
    to_map: str = "permute"
    from_map: str = "permute"
    class_token: str = "kept"


def positions(w: Weights, x: Tensor, sizes: Sizes, variant: PositionsVariant, note: Note = no_record) -> Tensor:
    B, rows, columns, D = x.shape
    z = torch.cat([w["class_token"].expand(B, -1, -1), x.flatten(1, 2)], dim=1)  # (B, 1 + N, D)
    if sizes["learned"]:
        table = _resized(w["positions.table"], _old_grid(sizes, variant.old_grid), (rows, columns), variant, note)
    else:
        table = F.pad(note("sincos", _sincos((rows, columns), D, variant)), (0, 0, 1, 0))[None]
    return note("positions", z + table)


def _sincos(grid: Grid, D: int, variant: PositionsVariant) -> Tensor:
    """(N, D)"""
    rows, columns = (torch.arange(n, dtype=torch.float64) + variant.first for n in grid)
    if variant.places != "2-D":  # one number for each place, as for the words of a sentence
        number = torch.arange(len(rows) * len(columns), dtype=torch.float64) + variant.first
        return _waves(number, D // 2, variant, "interleaved" if variant.places == "1-D, interleaved" else "sin, cos")
    if variant.order == "rows":
        row, column = rows.repeat_interleave(len(columns)), columns.repeat(len(rows))
    else:
        row, column = rows.repeat(len(columns)), columns.repeat_interleave(len(rows))
    pair = (column, row) if variant.halves == "column, row" else (row, column)
    return torch.cat([_waves(place, D // 4, variant, variant.waves) for place in pair], dim=1)


def _waves(place: Tensor, count: int, variant: PositionsVariant, waves: str) -> Tensor:
    """Places (N,) -> (N, 2 * count)."""
    i = torch.arange(count, dtype=torch.float64)
    exponent = i / count if variant.exponent == "i / (D/4)" else i / (2 * count)
    angles = place[:, None] / 10000**exponent  # (N, count)
    sin, cos = angles.sin(), angles.cos()
    if waves == "interleaved":
        return torch.stack([sin, cos], dim=-1).flatten(1).float()
    return torch.cat([cos, sin] if waves == "cos, sin" else [sin, cos], dim=1).float()


def _old_grid(sizes: Sizes, reading: str) -> Grid:
    rows, columns = sizes["old rows"], sizes["old columns"]
    if reading == "square":
        return isqrt(rows * columns), isqrt(rows * columns)
    return (columns, rows) if reading == "columns, rows" else (rows, columns)


def _resized(table: Tensor, old: Grid, new: Grid, variant: PositionsVariant, note: Note) -> Tensor:
    """(1, 1 + old, D) -> (1, 1 + N, D)"""
    D = table.shape[-1]
    first, patches = table[:, :1], table[:, 1:]
    if variant.class_token == "resized":  # all tokens as one line
        return F.interpolate(table.mT, size=1 + new[0] * new[1], mode="linear").mT
    if variant.class_token == "missing":
        first = torch.zeros_like(first)
    if variant.rule == "line":
        return torch.cat([first, F.interpolate(patches.mT, size=new[0] * new[1], mode="linear").mT], dim=1)
    if variant.to_map == "permute":
        grid = patches.reshape(1, *old, D).permute(0, 3, 1, 2)  # (1, D, old rows, old columns)
    else:
        grid = patches.reshape(1, D, *old)
    grid = note("map", grid)
    options = {
        "bicubic": {"mode": "bicubic"},
        "antialias": {"mode": "bicubic", "antialias": True},
        "corners": {"mode": "bicubic", "align_corners": True},
        "bilinear": {"mode": "bilinear"},
        "nearest": {"mode": "nearest"},
    }[variant.rule]
    grid = F.interpolate(grid, size=new if variant.new_grid == "rows, columns" else new[::-1], **options)
    grid = note("resized", grid)  # (1, D, rows, columns)
    patches = grid.flatten(2).mT if variant.from_map == "permute" else grid.reshape(1, -1, D)
    return note("table", torch.cat([first, patches], dim=1))
