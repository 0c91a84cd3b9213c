"""What the figures of `vitlab explain` say about the outlier tokens of their images: a note, frames, numbers, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.explain.draw.sheet import ImageMarks, mark_of
from vitlab.explain.outliers import Outlier, OutlierTokens
from vitlab.explain.subject import Subject
from vitlab.explain.views import View

NAMED = 3  # outliers in a note; JSON has all
FRAMED = 8  # in a line of the figure


@dataclass(frozen=True)
class FigureOutliers:
    views: Sequence[View]
    tokens: OutlierTokens | None  # None: this model is not tested for them
    by_image: list[list[Outlier]]  # for each image

    @classmethod
    def of(cls, subject: Subject) -> FigureOutliers:
        tokens = subject.outliers
        return cls(subject.views, tokens, [[] for _ in subject.views] if tokens is None else tokens.listed())

    @property
    def any(self) -> bool:
        return any(self.by_image)

    @property
    def mask(self) -> Tensor:
        """(B, grid_h, grid_w)"""
        if self.tokens is None:
            return torch.zeros(len(self.views), *self.views[0].grid, dtype=torch.bool)
        return self.tokens.mask

    @property
    def patches(self) -> list[list[int]]:
        """The numbers of each image's outliers, row by row."""
        return [
            [one.row * view.grid[1] + one.column for one in row]
            for view, row in zip(self.views, self.by_image, strict=True)
        ]

    @property
    def numbers(self) -> dict[str, Any]:
        """For the .npz file; `sinks` are those that draw far more attention than others."""
        return {} if self.tokens is None else {"outliers": self.mask.numpy(), "sinks": self.tokens.sink.numpy()}

    @property
    def results(self) -> dict[str, Any]:
        return {} if self.tokens is None else {"outliers": self.tokens.to_dicts()}

    @property
    def note(self) -> str:
        """For the figure."""
        if not self.any:
            return ""
        if len(self.views) == 1:
            places = [f"{one.row}, {one.column}" for one in self.by_image[0]]
            more = ", ..." if len(places) > FRAMED else ""
            return f"White: outlier tokens, at row, column {' / '.join(places[:FRAMED])}{more}."
        return f"White: outlier tokens, in {sum(map(bool, self.by_image))} of {len(self.views)} images."

    @property
    def notes(self) -> list[str]:
        """For the terminal."""
        if not self.any:
            return []
        if len(self.views) == 1:
            return [f"outlier tokens: {_listed(self.by_image[0])}."]
        return [f"{sum(map(bool, self.by_image))} of {len(self.views)} images have outlier tokens: --json lists them."]

    def marks(self, own: Sequence[bool]) -> list[ImageMarks] | None:
        """Frames around each image's outliers, in those of its maps that are `own`."""
        if not self.any:
            return None
        frames = [[mark_of(view, p) for p in row] for view, row in zip(self.views, self.patches, strict=True)]
        return [ImageMarks((), [((), each if mine else ()) for mine in own]) for each in frames]


def _listed(outliers: Sequence[Outlier]) -> str:
    more = f"; and {len(outliers) - NAMED} more" if len(outliers) > NAMED else ""
    return "; ".join(map(str, outliers[:NAMED])) + more
