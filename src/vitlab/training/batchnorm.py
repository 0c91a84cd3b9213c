"""Running statistics of batch norm, which change by forward passes and not by gradients.

Each process sees its own part of every batch, so after a step all take the mean over the processes: the model that is
evaluated and saved is then the same in all. optim.ema averages them like the weights.
Reasons: docs/decisions/0009-batch-norm-statistics.md.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from vitlab.training.processes import Processes


def statistics(model: nn.Module) -> list[Tensor]:
    """Mean and variance of every batch norm."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    values = [value for norm in norms for value in (norm.running_mean, norm.running_var)]
    return [value for value in values if value is not None]


@torch.no_grad()
def share_statistics(model: nn.Module, who: Processes) -> None:
    """Set them to the mean over all processes; all must call this together."""
    values = statistics(model)
    if who.world == 1 or not values:
        return
    means = who.sum(torch.cat(values)) / who.world
    for value, mean in zip(values, means.split([len(value) for value in values]), strict=True):
        value.copy_(mean)


@torch.no_grad()
def update_average(average: AveragedModel, model: nn.Module, decay: float) -> None:
    """A step of the running average. torch's averages the weights and copies everything else."""
    before = [value.clone() for value in statistics(average)]
    first = not cast("Tensor", average.n_averaged)  # all is copied then
    average.update_parameters(model)
    for value, old in zip(statistics(average), before, strict=True):
        if not first:
            value.copy_(old.lerp(value, 1 - decay))
