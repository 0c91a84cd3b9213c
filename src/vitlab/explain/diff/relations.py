"""The relation of two tensors: equal, transposed, reordered, rounded, scaled, all zeros, or other values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from vitlab.models.vit_config import ViTConfig

AGREE = 1e-6  # of the largest value: what float32 loses on the way through a file or a resize


@dataclass(frozen=True)
class Relation:
    """`description` says how the second tensor, {r}'s, follows from the first, {p}'s."""

    kind: str  # equal, bias, zero, rounded, transposed, qkv, positions, classes, channels, scaled, values
    description: str = ""
    distance: float = 0.0  # |p - r| / |r|
    cosine: float = 1.0
    order: tuple[int, ...] = ()  # for reordered rows: the index in p of each row of r


EQUAL = Relation("equal")


def relate(name: str, p: Tensor, r: Tensor, config: ViTConfig) -> Relation:
    """Both tensors have our names and the same shape; `config` is the network's."""
    p, r = (t.detach().cpu().float() for t in (p, r))
    if close(p, r):
        return EQUAL
    if name.endswith((".qkv.weight", ".qkv.bias")):
        relation = _in_qkv(p, r, config.heads) or _by_part(p, r) or _simple_relation(name, p, r)
    elif name == "positions.table":
        relation = _in_positions(p, r, config) or _simple_relation(name, p, r)
    elif name.startswith(("head.", "head_distill.")):
        relation = _simple_relation(name, p, r) or _in_classes(p, r)
    else:
        relation = _simple_relation(name, p, r)
    return relation or Relation("values", "", *measured(p, r))


def close(p: Tensor, r: Tensor) -> bool:
    """Compares the first row first, which rules out most guesses."""
    return p.shape == r.shape and _close(p[:1], r[:1]) and _close(p, r)


def _close(p: Tensor, r: Tensor) -> bool:
    return bool((p - r).abs().max() <= AGREE * r.abs().max()) if r.numel() else True


def measured(p: Tensor, r: Tensor) -> tuple[float, float]:
    """Distance over r's length, and cosine."""
    p, r = p.double().flatten(), r.double().flatten()
    size = float(r.norm())
    distance = float((p - r).norm()) / size if size else float("inf")
    return distance, float(torch.nn.functional.cosine_similarity(p, r, dim=0))


def _simple_relation(name: str, p: Tensor, r: Tensor) -> Relation | None:
    missing = "bias" if name.endswith("bias") else "zero"
    if not p.any():
        return Relation(missing, "all zeros in {p}, not in {r}")
    if not r.any():
        return Relation(missing, "all zeros in {r}, not in {p}")
    for dtype in (torch.float16, torch.bfloat16):
        short = str(dtype).removeprefix("torch.")
        if torch.equal(p.to(dtype).float(), r):
            return Relation("rounded", f"{{p}}'s rounded to {short}")
        if torch.equal(r.to(dtype).float(), p):
            return Relation("rounded", f"rounded to {short} in {{p}}")
    if (turned := _turned(p, r)) is not None:
        return turned
    factor = float((p.double() * r.double()).sum() / p.double().square().sum())
    if r.numel() > 1 and close(p * factor, r):
        return Relation("scaled", f"{{p}}'s times {factor:.6g}")
    return None


def _turned(p: Tensor, r: Tensor) -> Relation | None:
    if p.ndim == 2 and min(p.shape) > 1:
        if p.shape[0] == p.shape[1] and close(p.T, r):
            return Relation("transposed", "the transpose of {p}'s")
        if close(p.T.reshape(r.shape), r) or close(r.T.reshape(p.shape), p):
            return Relation("transposed", "{p}'s numbers filled in along the other axis: reshaped, not transposed")
    if p.ndim == 4:  # (D, C, P, P)
        if close(p.transpose(2, 3), r):
            return Relation("transposed", "{p}'s with rows and columns of every patch swapped")
        if p.shape[1] > 1 and close(p.flip(1), r):
            return Relation("channels", "{p}'s with the channels in the opposite order (RGB, BGR)")
    return None


def _in_qkv(p: Tensor, r: Tensor, heads: int) -> Relation | None:
    """The three parts in another order, or laid out head by head."""
    parts = dict(zip("qkv", p.chunk(3), strict=True))
    for order in permutations("qkv"):
        if close(torch.cat([parts[part] for part in order]), r):
            return Relation("qkv", f"in the order {', '.join(order)} of {{p}}'s q, k, v")
    d = p.shape[0] // 3 // heads
    ours = p.unflatten(0, (3, heads, d))
    layouts = {  # how r lists what p lists as (3, heads, d)
        "head by head, each with its q, k, v": (ours.transpose(0, 1), p.unflatten(0, (heads, 3, d)).transpose(0, 1)),
        "channel by channel, each with its q, k, v": (
            ours.permute(1, 2, 0, *range(3, ours.ndim)),
            p.unflatten(0, (heads, d, 3)).permute(2, 0, 1, *range(3, ours.ndim)),
        ),
    }
    for layout, (there, back) in layouts.items():
        if close(there.reshape(p.shape), r):
            return Relation("qkv", f"listed {layout}, in {{p}} part by part")
        if close(back.reshape(p.shape), r):
            return Relation("qkv", f"listed part by part, in {{p}} {layout}")
    return None


def _by_part(p: Tensor, r: Tensor) -> Relation | None:
    """One change that explains all parts which differ: q, k and v transposed, k's bias zero, q scaled."""
    name = "bias" if p.ndim == 1 else "weight"
    parts = {part: (x, y) for part, x, y in zip("qkv", p.chunk(3), r.chunk(3), strict=True) if not close(x, y)}
    by_part = {part: _simple_relation(name, x, y) for part, (x, y) in parts.items()}
    changes = set(by_part.values())
    if len(changes) != 1 or (change := changes.pop()) is None:
        return None
    if len(by_part) == 3 and change.kind in ("bias", "zero", "rounded", "scaled"):
        return change
    return Relation(change.kind, f"{_and(by_part)}: {change.description}")


def _and(parts: Iterable[str]) -> str:
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last


def _in_classes(p: Tensor, r: Tensor) -> Relation | None:
    order = row_order(*(x if x.ndim == 2 else x[:, None] for x in (p, r)))
    return None if order is None else Relation("classes", "{p}'s rows in another order", order=order)


def _in_positions(p: Tensor, r: Tensor, config: ViTConfig) -> Relation | None:
    rows, columns = config.grid
    prefix = config.positioned_prefix
    order = row_order(p[0], r[0])
    if order is not None:
        patches = torch.arange(rows * columns).view(rows, columns)
        ways = {
            "the patches column by column": [*range(prefix), *(patches.T.flatten() + prefix).tolist()],
            "the patches from the bottom up": [*range(prefix), *(patches.flip(0).flatten() + prefix).tolist()],
            "the prefix at the end": [*range(prefix, len(order)), *range(prefix)],
        }
        moved = sum(i != j for i, j in enumerate(order))
        how = next((name for name, way in ways.items() if list(order) == way), f"{moved} of {len(order)} moved")
        return Relation("positions", f"{{p}}'s rows in another order ({how})", order=order)
    if prefix and close(p[:, :prefix], r[:, :prefix]):
        distance, cosine = measured(p[:, prefix:], r[:, prefix:])
        if cosine > 0.5:  # training on would have moved the prefix's rows too
            return Relation(
                "positions",
                f"{{p}}'s for the prefix, other values for the patches (cosine {cosine:.4f}), as after a resize by "
                "another rule",
                *(distance, cosine),
            )
    return None


def row_order(p: Tensor, r: Tensor) -> tuple[int, ...] | None:
    """p[order] = r for rows of (n, D), found by sorting both along one random direction; None where there is none."""
    along = torch.randn(p.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    by_p, by_r = ((x.double() @ along).argsort() for x in (p, r))
    order = torch.empty_like(by_p)
    order[by_r] = by_p
    return tuple(order.tolist()) if close(p[order], r) else None
