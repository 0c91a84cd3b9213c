"""What the processes of a distributed run do together; in one process each of these does nothing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed


def world_size() -> int:
    started = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if started else 1


def all_sum(values: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if world_size() > 1:
        distributed.all_reduce(values)  # pyright: ignore[reportUnknownMemberType]  # torch gives it no types
    return values


def all_mean(values: Tensor) -> Tensor:
    """The mean over all processes, as a new tensor."""
    return all_sum(values.clone()) / world_size()


def all_max(values: Tensor) -> Tensor:
    """The maximum over all processes, in place."""
    if world_size() > 1:
        distributed.all_reduce(values, distributed.ReduceOp.MAX)  # pyright: ignore[reportUnknownMemberType]
    return values


def gather(features: Tensor) -> Tensor:
    """The features (B, ...) of all processes, in their order, with gradients; in one process, its own.

    The loss over what is gathered is the whole batch's in every process, and the mean of the gradients over processes,
    which DistributedDataParallel takes, is the whole batch's too. Processes may have different numbers of rows.
    """
    return features if world_size() == 1 else _Gather.apply(features)  # type: ignore[return-value]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> Tensor:
        count = torch.tensor([len(features)], device=features.device)
        ctx.counts = [int(n) for n in _all_gather(count)]
        padding = (0, 0) * (features.ndim - 1) + (0, max(ctx.counts) - len(features))
        parts = _all_gather(F.pad(features, padding).contiguous())
        return torch.cat([part[:n] for part, n in zip(parts, ctx.counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        """Every process's loss reads these features, so all their gradients are added up."""
        rank = distributed.get_rank()
        start = sum(ctx.counts[:rank])
        return all_sum(slopes[0].contiguous())[start : start + ctx.counts[rank]]


def _all_gather(values: Tensor) -> list[Tensor]:
    """Tensors of one shape, one from each process."""
    parts = [torch.empty_like(values) for _ in range(world_size())]
    distributed.all_gather(parts, values)  # pyright: ignore[reportUnknownMemberType]  # torch gives it no types
    return parts
