"""The learning rate, parameter groups (what decays, how fast each layer learns) and optimisers, with Muon in float32.

Muon (https://kellerjordan.github.io/posts/muon) orthogonalises the momentum of each matrix by Newton-Schulz steps.
torch's own does them one matrix at a time in bfloat16, which CPUs without bfloat16 units emulate slowly; `Muon` here
does all matrices of one shape at once in float32. Of sharded matrices every process computes the full update.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from vitlab.errors import TrainingError
from vitlab.training.recipe import OptimRecipe
from vitlab.training.sharding import full_tensor, is_share, share_like

LONGEST_WARMUP = 0.25  # of a run
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
TOKENS = r"class_token|distill_token|mask_token|register_tokens"
BLOCK = re.compile(r"(?:^|\.)(?:blocks|stages\.(\d+))\.(\d+)\.")  # stage, where there are stages; number within it
EMBEDDING = re.compile(rf"(?:^|\.)(?:patch_embed|stem|(?:embeds|positions)\.(\d+)|positions|norm_pre|{TOKENS})(?:\.|$)")
STAGE_NORM = re.compile(r"(?:^|\.)norms\.(\d+)\.")  # at the end of a stage
STEM_FILTERS = re.compile(r"(?:^|\.)patch_embed\.(?:filters\.\d+|proj)\.weight$")
NO_DECAY = re.compile(rf"(^|\.)({TOKENS}|positions\.table|relative\.table|query)$")


def warmup_steps(recipe: OptimRecipe, steps_per_epoch: int, total: int) -> tuple[int, int]:
    """Steps of warm-up that the recipe asks for, and that a run of `total` steps gets: never more than a quarter."""
    wanted = recipe.warmup_steps or round(recipe.warmup_epochs * steps_per_epoch)
    return wanted, min(wanted, int(LONGEST_WARMUP * total))


def lr_factor(step: int, total: int, *, warmup: int, schedule: str, final: float) -> float:
    """Factor of the base rate at `step` of `total`, counted from 0. The warm-up rises linearly and ends at 1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(total - warmup, 1)  # 0 .. 1
    if schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    if schedule == "linear":
        return final + (1 - final) * (1 - progress)
    return 1.0


def parameter_groups(model: nn.Module, weight_decay: float, layer_decay: float = 1.0) -> list[dict[str, Any]]:
    """Groups of {params, names, weight_decay, lr_scale}: norms, biases, positions and tokens do not decay."""
    layers = layers_of([name for name, _ in model.named_parameters()])
    depth = max(layers.values())
    groups: dict[tuple[float, float], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay = 0.0 if parameter.ndim < 2 or NO_DECAY.search(name) else weight_decay
        scale = layer_decay ** (depth - layers[name])
        group = groups.setdefault((decay, scale), {"params": [], "names": [], "weight_decay": decay, "lr_scale": scale})
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def layers_of(names: list[str]) -> dict[str, int]:
    """0 for the embedding, 1 .. for the blocks, counted through all stages; norm and head come last."""
    blocks = [match for name in names if (match := BLOCK.search(name))]
    depths: dict[int, int] = {}  # of each stage
    for match in blocks:
        stage = int(match[1] or 0)
        depths[stage] = max(depths.get(stage, 0), int(match[2]) + 1)

    def layer(name: str) -> int:
        if match := BLOCK.search(name):
            return sum(depths[stage] for stage in range(int(match[1] or 0))) + int(match[2]) + 1
        if match := STAGE_NORM.search(name):
            return sum(depths[stage] for stage in range(int(match[1]) + 1))
        if match := EMBEDDING.search(name):
            before = range(int(match[1] or 0))  # stages that it comes after
            return sum(depths[stage] for stage in before) + (1 if before else 0)
        return sum(depths.values()) + 1

    return {name: layer(name) for name in names}


def newton_schulz(matrices: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """Push the singular values of every (m, n) matrix of a batch towards 1: (k, m, n) -> (k, m, n)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class EagerOptimizer(Optimizer):
    """An optimiser outside torch.compile, which here compiles models only.

    torch's wrappers of these methods, and of `step`, import the whole compiler, which takes as long as torch itself.
    """

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)


class EagerSGD(EagerOptimizer, SGD):
    step = torch.no_grad()(unwrap(SGD.step))


class EagerAdam(EagerOptimizer, Adam):
    step = torch.no_grad()(unwrap(Adam.step))


class EagerAdamW(EagerOptimizer, AdamW):
    step = torch.no_grad()(unwrap(AdamW.step))


class Muon(EagerOptimizer):
    """torch.optim.Muon's update, in float32 and batched by shape.

    A filter (D, C, k, k) counts as a matrix (D, C k k).
    """

    def __init__(
        self, params: ParamsT, lr: float = 0.02, weight_decay: float = 0.0, momentum: float = 0.95, steps: int = 5
    ):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, steps=steps))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[tuple(parameter.shape)].append(parameter)
            for shape, parameters in by_shape.items():
                updates = torch.stack([self._with_momentum(p, group["momentum"]).flatten(1) for p in parameters])
                rows, columns = updates.shape[1:]
                updates = newton_schulz(updates, group["steps"])  # (k, rows, columns)
                rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
                for parameter, update in zip(parameters, updates, strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(share_like(update.view(shape), parameter), alpha=-rate)

    def _with_momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """Nesterov: the gradient, interpolated towards its running average; (rows, columns), not sharded."""
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        state["momentum"].lerp_(parameter.grad, 1 - momentum)
        return full_tensor(parameter.grad.lerp(state["momentum"], momentum))


class Optimisers:
    """One or two optimisers driven as one: their rates, their steps, and their state by parameter name."""

    def __init__(self, model: nn.Module, recipe: OptimRecipe):
        groups = parameter_groups(model, recipe.weight_decay, recipe.layer_decay)
        if not groups:
            raise TrainingError(
                "no parameter is left to learn: model.freeze leaves nothing, e.g. on a model with classes=0."
            )
        self.parts: list[Optimizer] = []
        if recipe.name == "muon":
            matrices, rest = _split_matrices(groups)
            if not matrices:
                raise TrainingError(
                    "optim.name=muon moves the matrices inside a transformer's blocks, and none of them learns here (a "
                    "ResNet has none, model.freeze=encoder and model.lora leave none): use optim.name=sgd or "
                    "optim.name=adamw."
                )
            self.parts.append(Muon(matrices, lr=recipe.muon_lr))
            groups = rest
        if recipe.name == "sgd":
            self.parts.append(EagerSGD(groups, lr=recipe.lr, momentum=recipe.momentum))
        elif groups:
            kind = EagerAdam if recipe.name == "adam" else EagerAdamW
            self.parts.append(kind(groups, lr=recipe.lr, betas=recipe.betas, fused=_in_one_kernel(groups)))
        self.names = {
            p: n for part in self.parts for g in part.param_groups for n, p in zip(g["names"], g["params"], strict=True)
        }
        for part in self.parts:
            for group in part.param_groups:
                group["base_lr"], group["decays"] = group["lr"] * group["lr_scale"], group["weight_decay"] > 0

    def set_factor(self, factor: float) -> float:
        """Set every rate to its base times `factor`; returns the largest, for the log."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["base_lr"] * factor
        return max(group["lr"] for group in self.parts[-1].param_groups)

    def set_decay(self, weight_decay: float) -> None:
        """For all groups that decay."""
        for part in self.parts:
            for group in part.param_groups:
                group["weight_decay"] = weight_decay if group["decays"] else 0.0

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """State as `name|entry` -> tensor, sharded as the parameters are."""
        tensors: dict[str, Tensor] = {}
        for part in self.parts:
            for parameter, state in part.state.items():
                for entry, value in state.items():
                    value = value if isinstance(value, Tensor) else torch.tensor(float(value))
                    tensors[f"{self.names[parameter]}|{entry}"] = value
        return tensors

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load the full tensors of `tensors`."""
        by_name = {name: parameter for parameter, name in self.names.items()}
        for key, value in tensors.items():
            name, _, entry = key.partition("|")
            if name not in by_name:
                raise TrainingError(
                    f"the saved optimiser knows {name!r}, which this model does not train: another recipe?"
                )
            parameter = by_name[name]
            part = next(p for p in self.parts if any(parameter is q for g in p.param_groups for q in g["params"]))
            if value.shape == parameter.shape:  # the count of steps is a lone number, which stays on the CPU
                value = share_like(value.to(parameter.device), parameter)
            part.state[parameter][entry] = value.clone()


def _in_one_kernel(groups: list[dict[str, Any]]) -> bool | None:
    """Whether torch updates a parameter in one kernel, which on a CPU it does not by itself; None: torch chooses."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    plain = all(p.device.type == "cpu" and p.is_floating_point() and not is_share(p) for p in parameters)
    return True if plain else None


def has_gradients(optimizer: Optimizer) -> bool:
    """False where all that it moves is frozen in this step."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _split_matrices(groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Matrices inside the blocks, and the filters of a hybrid stem, for Muon; the rest for AdamW."""
    matrices, rest = [], []
    for group in groups:
        inside = [_is_matrix(n, p) for n, p in zip(group["names"], group["params"], strict=True)]
        for wanted, target in ((True, matrices), (False, rest)):
            picked = [i for i, is_matrix in enumerate(inside) if is_matrix == wanted]
            if picked:
                part = {key: [group[key][i] for i in picked] for key in ("params", "names")}
                target.append({**group, **part})
    return matrices, rest


def _is_matrix(name: str, parameter: Tensor) -> bool:
    if parameter.ndim == 4:
        return parameter.shape[-1] == 3 and STEM_FILTERS.search(name) is not None
    return parameter.ndim == 2 and BLOCK.search(name) is not None and name.endswith(".weight")
