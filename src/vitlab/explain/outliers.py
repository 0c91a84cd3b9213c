"""Outlier tokens: the few patches that take over a ViT's attention or grow far longer than the others.

    outliers = outlier_tokens(model, "cat.jpg")
    outliers.mask                              # (B, grid_h, grid_w), True on outliers
    outliers.listed()                          # for each image: [Outlier(row=6, column=6, attention=21.8, ...)]
    rollout(model, "cat.jpg", leave_out="outliers")

A trained ViT uses patches with little to show as a store for global information. Two signs give them away: their tokens
are long in the last layers ("Vision Transformers Need Registers", arXiv:2309.16588), or all tokens look at them (an
attention sink, arXiv:2309.17453). One network can have either sign alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.checkpoints.load import ModelOrName
from vitlab.errors import UsageError
from vitlab.explain.inputs import Images, batches, run_trace, wide
from vitlab.explain.stages import one_grid
from vitlab.explain.weights import last_layers
from vitlab.layers.trace import check_offered
from vitlab.tables import Table, Tabular

LONG = 3.0  # times the median patch token of the image
SINK = 10.0  # times the attention that 95 % of the patches stay below
MOST = 0.95


@dataclass(frozen=True)
class Outlier:
    """One patch, and by how much it stands out."""

    row: int
    column: int
    length: float  # of its token, times the median patch's: the most in the last quarter of the layers
    attention: float  # that it draws, times what 95 % of the patches stay below: the most in any layer
    layer: int  # where it draws the most
    long: bool  # by which sign it is an outlier
    sink: bool

    def __str__(self) -> str:
        signs = [f"attention x {self.attention:.0f} in layer {self.layer + 1}"] * self.sink
        signs += [f"length x {self.length:.1f}"] * self.long
        return f"row {self.row}, column {self.column} ({', '.join(signs)})"


@dataclass(frozen=True)
class OutlierTokens(Tabular):
    """How far every patch stands out, and which patches are outliers."""

    length: Tensor  # (B, grid_h, grid_w), as in Outlier
    attention: Tensor  # (B, layers, grid_h, grid_w)
    long: Tensor  # (B, grid_h, grid_w), True where the token is long
    sink: Tensor  # (B, grid_h, grid_w), True where it draws far more attention than others, in any layer

    def table(self) -> Table:
        rows = [
            [str(i), f"{one.row}, {one.column}", f"{one.length:.1f}", f"{one.attention:.0f}", str(one.layer + 1)]
            for i, image in enumerate(self.listed())
            for one in image
        ]
        titles = ["image", "row, column", "length x", "attention x", "in layer"]
        notes = [] if rows else ["No patch token stands out."]
        return Table(titles, rows, titles, ["Outlier tokens, against the other patches"], notes=notes)

    @property
    def mask(self) -> Tensor:
        """(B, grid_h, grid_w), True on outliers."""
        return self.long | self.sink

    def listed(self) -> list[list[Outlier]]:
        """The outliers of each image, the strongest sink first."""
        most, layer = self.attention.max(dim=1)  # (B, grid_h, grid_w)
        images: list[list[Outlier]] = [[] for _ in self.mask]
        for b, row, column in self.mask.nonzero().tolist():
            at = (b, row, column)
            numbers = float(self.length[at]), float(most[at]), int(layer[at]), bool(self.long[at]), bool(self.sink[at])
            images[b].append(Outlier(row, column, *numbers))
        return [sorted(found, key=lambda one: -one.attention) for found in images]

    def to_dicts(self) -> list[list[dict[str, Any]]]:
        """`listed` as plain values, for JSON."""
        return [[asdict(one) for one in found] for found in self.listed()]


def outlier_tokens(
    model: ModelOrName, images: Images, *, long: float = LONG, sink: float = SINK, batch_size: int = 8
) -> OutlierTokens:
    """Patches that stand far out from the others of the same image, by either of two signs:

    long   their token is longer than `long` times the image's median patch token, after one of the last quarter of the
           layers (at least one). As in `high_norm_tokens`: the paper's outliers are about 10 times as long
    sink   the attention that they draw in some layer, mean over heads and over all tokens that look, is above `sink`
           times what 95 % of the patches draw in that layer

    Both factors lie where a trained ViT-S/14 (224 pixels, 98 photos) leaves a gap. 95 of the photos have a sink in the
    first layer, of 10 to 50 times; in the other layers no patch draws more than 9.5 times, in the bundled models at
    their own size none more than 5. No token of these models is longer than 2.3 times the median.

    For models with one grid of patches. Holds one layer's attention at a time.
    """
    for name, factor in (("long", long), ("sink", sink)):
        if not factor > 1:
            raise UsageError(f"{name}={factor!r} must be above 1: it multiplies what is usual.")
    model = one_grid(model, "a list of outlier tokens")
    check_offered(["attention", "tokens"], model.traceable)
    grid, last = (0, 0), last_layers(len(model.blocks))
    lengths, drawn = [], []
    for batch in batches(model, images, batch_size):
        layout = model.layout(*batch.images.shape[-2:])
        grid, patches = layout.grid, slice(len(layout.prefix), None)
        norms = run_trace(model, batch.images, "tokens", layers=last, reduce=_norms).stack("tokens")  # (L, B, N)
        received = run_trace(model, batch.images, "attention", reduce=_received).stack("attention")  # (L, B, N)
        lengths.append(norms.transpose(0, 1)[..., patches])
        drawn.append(received.transpose(0, 1)[..., patches])
    length, attention = torch.cat(lengths), torch.cat(drawn)  # (B, L, patches)
    length = _over(length, length.median(dim=-1, keepdim=True).values).amax(dim=1).unflatten(-1, grid)
    usual = attention.quantile(MOST, dim=-1, keepdim=True, interpolation="lower")
    attention = _over(attention, usual).unflatten(-1, grid)
    return OutlierTokens(length, attention, length > long, (attention > sink).any(dim=1))


def _norms(tokens: Tensor, _: int | None) -> Tensor:
    return wide(tokens).norm(dim=-1).cpu()


def _received(weights: Tensor, _: int | None) -> Tensor:
    """(B, h, N, N) -> (B, N): the mean over heads and over the tokens that look."""
    return wide(weights).mean((1, 2)).cpu()


def _over(values: Tensor, usual: Tensor) -> Tensor:
    """values / usual, finite where 95 % of the patches have 0."""
    return values / usual.clamp_min(torch.finfo(values.dtype).eps)


def resolve_mask(model: ModelOrName, images: Images, leave_out: str | Tensor | None, batch_size: int) -> Tensor | None:
    """`leave_out` of rollout and attention_maps as a mask (B, grid_h, grid_w): "outliers", or a mask of your own."""
    if leave_out is None:
        return None
    model = one_grid(model, "leaving tokens out")
    if isinstance(leave_out, str):
        if leave_out != "outliers":
            raise UsageError(f'leave_out={leave_out!r} must be "outliers", or a mask (B, rows, columns) of patches.')
        return outlier_tokens(model, images, batch_size=batch_size).mask
    mask = torch.as_tensor(leave_out).cpu().bool()
    if mask.ndim != 3 or mask.flatten(1).all(dim=1).any():
        raise UsageError(
            f"leave_out is a mask (B, rows, columns) that leaves a patch of each image, found {mask.shape}."
        )
    return mask
