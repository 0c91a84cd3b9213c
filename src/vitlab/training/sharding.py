"""FSDP2 (arXiv:2304.11277): each process keeps a shard of every parameter, of its gradient and of its optimiser state;
a block's parameters are gathered while it computes. Files hold full tensors: one process can load what many wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor, nn

from vitlab.checkpoints import native
from vitlab.errors import TrainingError
from vitlab.layers.lora import adapt, lora_layers
from vitlab.models import registry
from vitlab.models.base import Network
from vitlab.training.processes import Processes


def shard(model: Network, who: Processes) -> None:
    """Shard a model's parameters in place: every block by itself, then the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if who.device.type not in ("cpu", "cuda"):
        raise TrainingError(f"run.sharding=fsdp needs cpu or cuda, not {who.device.type}: set run.device=cpu.")
    mesh = init_device_mesh(who.device.type, (who.world,))
    blocks = cast("list[nn.Module]", model.blocks)  # every classifier has them
    attentions = [getattr(block, "attention", None) for block in blocks]
    tables = [getattr(attention, "relative", None) for attention in attentions]  # a ViT reads them before the block
    for part in (*(table for table in tables if table is not None), *blocks, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    if who.device.type == "cpu":  # some versions of gloo give the sum for the mean (pytorch issue 162338)
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)


def is_share(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor, whose import takes most of a second


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard; an unsharded one as it is. All processes must call this together."""
    return tensor.full_tensor() if is_share(tensor) else tensor  # type: ignore[attr-defined]


def share_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This process's shard of a full tensor, cut as `like` is; the tensor itself where `like` is not sharded."""
    if not is_share(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    everywhere = DTensor.from_local(tensor.to(like.device), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere.redistribute(placements=placements)


def gather(tensors: Mapping[str, Tensor], keep: bool = True) -> dict[str, Tensor]:
    """Full tensors in main memory, one after another; a process with keep=False only sends its shards."""
    gathered: dict[str, Tensor] = {}
    for key, value in tensors.items():
        value = full_tensor(value.detach())
        if keep:
            gathered[key] = value.cpu().contiguous()
    return gathered


def full_model(model: Network, keep: bool = True) -> Network | None:
    """The model, or a full copy of a sharded one; None with keep=False."""
    if not any(is_share(parameter) for parameter in model.parameters()):
        return model if keep else None
    state = gather(model.state_dict(), keep)
    if not keep:
        return None
    copy: Network = native.on_meta(lambda: registry.build(model.family, model.config))
    if adapted := lora_layers(model):
        first = next(iter(adapted.values()))
        adapt(copy, list(adapted), first.rank, first.alpha)
        learns = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        for name, parameter in copy.named_parameters():
            parameter.requires_grad_(name in learns)
    copy.load_state_dict(state, assign=True)
    copy.preprocess, copy.labels, copy.card = model.preprocess, model.labels, model.card
    copy.task = model.task
    return copy


def load(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Load full tensors into a module, sharded or not."""
    state = module.state_dict()
    module.load_state_dict({k: share_like(v, state[k]) if k in state else v for k, v in tensors.items()})
