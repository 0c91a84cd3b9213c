"""Binary cross-entropy: each class is its own question, answered yes or no (arXiv:2110.00476, sec. 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from vitlab.training.objectives.base import Inputs
from vitlab.training.objectives.supervised import Supervised


class BinaryCrossEntropy(Supervised):
    """Targets stay soft where labels are smoothed or images mixed."""

    def loss(self, forward: Callable[..., Any], inputs: Inputs) -> tuple[Tensor, dict[str, float]]:
        logits = forward(inputs["images"], reducer=self.train_reducer)  # (B, K)
        per_image = F.binary_cross_entropy_with_logits(logits, inputs["targets"], reduction="none").sum(dim=1)
        return per_image.mean(), {}
