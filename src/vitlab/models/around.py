"""What networks around an encoder share (MAE, DINO). It may be used alone, so it holds what goes with pictures."""

from __future__ import annotations

from typing import Any

from torch import nn


class AroundEncoder(nn.Module):
    """`encoder` is a part of it, whatever it is called there."""

    encoder: Any

    @property
    def preprocess(self) -> Any:
        """How a picture becomes this model's input."""
        return self.encoder.preprocess

    @preprocess.setter
    def preprocess(self, value: Any) -> None:
        self.encoder.preprocess = value

    @property
    def card(self) -> Any:
        """Where the weights come from."""
        return self.encoder.card

    @card.setter
    def card(self, value: Any) -> None:
        self.encoder.card = value
