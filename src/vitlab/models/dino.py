"""DINO: self-distillation with no labels (arXiv:2104.14294), Algorithm 1 with multi-crop, eqs. 1-4.

    model = vitlab.create("dino_cifar")
    out = model(views, teacher_temperature(step, warmup))    # views: two global ones first, then the local ones
    out.loss.backward()                                      # and a step of the optimiser
    model.update_teacher(teacher_momentum(step, total))
    model.update_centre(out.teacher_mean)
    model.encoder(images)                                    # (B, D): what is evaluated, explained and fine-tuned

A forward pass changes nothing: teacher and centre move when they are told to.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UsageError
from vitlab.layers.collective import all_max, all_sum, world_size
from vitlab.models.base import Network, WrapsEncoder
from vitlab.models.config import Config, option_paths
from vitlab.models.entry import IMAGENET_CROP, Entry, Paper, half
from vitlab.models.plain import PlainConfig, PlainTransformer
from vitlab.models.vit_config import SMALL_IMAGES, VARIANTS, ViTConfig

SIZES = ("patch_size", "channels", "width", "depth", "heads")  # of the encoder
CHANGEABLE = ("image_size", "gradient_checkpointing", "stochastic_depth")  # with the same weights


@dataclass(frozen=True)
class Projection(Config):
    """The head h of section 3.1: an MLP, l2 normalisation, and a linear layer whose weights are normalised."""

    out_dim: int = 65536  # K
    hidden: int = 2048
    bottleneck: int = 256  # what the MLP ends in
    layers: int = 3  # of the MLP
    norm_last_layer: bool = True  # rows of the last layer keep length 1; False: their lengths are learned


@dataclass(frozen=True)
class DINOConfig(Config):
    image_size: tuple[int, int] = (224, 224)  # (H, W) of the global views
    patch_size: int = 16  # P
    channels: int = 3  # C
    width: int = 384  # D
    depth: int = 12  # L
    heads: int = 6  # h
    mlp_ratio: float = 4.0
    eps: float = 1e-6
    stem: Literal["patch", "conv"] = "patch"
    positions: Literal["learned", "sincos"] = "learned"  # resized for the local views
    registers: int = 0
    layer_scale: float = 0.0
    stochastic_depth: float = 0.0  # of the student; the teacher always runs whole
    gradient_checkpointing: bool = False
    projection: Projection = field(default_factory=Projection)
    student_temperature: float = 0.1  # tau_s
    centring: bool = True  # False: the teacher may collapse to one output
    sinkhorn: int = 0  # rounds of Sinkhorn-Knopp in place of the centre, as DINOv2 has (3); for short runs
    centre_momentum: float = 0.9  # m
    backbone: dict[str, Any] = field(default_factory=dict[str, Any])  # family and config of an encoder by another paper

    def __post_init__(self) -> None:
        super().__post_init__()
        p = self.projection
        if p.out_dim < 2 or min(p.hidden, p.bottleneck, p.layers) < 1:
            raise UsageError("out_dim must be at least 2; hidden, bottleneck and layers at least 1.")
        if self.student_temperature <= 0:
            raise UsageError(f"student_temperature={self.student_temperature} must be above 0: use 0.1.")
        if not 0 <= self.centre_momentum < 1:
            raise UsageError(f"centre_momentum={self.centre_momentum} must be at least 0 and below 1: use 0.9.")
        if self.sinkhorn < 0:
            raise UsageError(f"sinkhorn={self.sinkhorn} must be 0 (off) or a number of rounds: use 3.")
        for name in SIZES:
            if (own := getattr(self.encoder, name)) != getattr(self, name):  # where there is a backbone
                raise UsageError(f"{name}={getattr(self, name)} is not possible: the encoder has {own}.")

    @property
    def encoder(self) -> PlainConfig:
        """The student's and the teacher's network f, without the head."""
        if self.backbone:
            kind: type[PlainConfig] = _registry().FAMILIES[self.backbone["family"]][0]
            names = [name for name in CHANGEABLE if name in option_paths(kind)]
            return kind.from_dict(self.backbone["config"]).with_options(**{name: getattr(self, name) for name in names})
        names = ("image_size", "patch_size", "channels", "width", "depth", "heads", "mlp_ratio", "eps", "stem")
        names += ("positions", "registers", "layer_scale", "stochastic_depth", "gradient_checkpointing")
        return ViTConfig().with_options(classes=0, **{name: getattr(self, name) for name in names})

    def with_encoder(self, family: str, encoder: Config) -> Self:
        """The same head and loss around another encoder: by the options above, or as a `backbone` with its own."""
        if not isinstance(encoder, PlainConfig):
            raise UsageError(f"DINO has a ViT or a network like it as its encoder, not a {family}.")
        has = option_paths(type(encoder))
        sizes = {name: encoder.option(name) for name in (*SIZES, *CHANGEABLE) if name in has}
        if isinstance(encoder, ViTConfig) and encoder.positions.kind in ("learned", "sincos"):
            own = {name: encoder.option(name) for name in ("mlp_ratio", "eps", "registers", "layer_scale")}
            own |= {"stem": encoder.stem.kind, "positions": encoder.positions.kind}
            config = replace(self, **sizes, **own, backbone={})
            if config.encoder == encoder:
                return config
        values = json.loads(json.dumps({"family": family, "config": encoder.to_dict()}))  # as it will be read again
        return replace(self, **sizes, backbone=values)

    @property
    def classes(self) -> int:
        """None are learned."""
        return 0

    @property
    def grid(self) -> tuple[int, int]:
        return self.encoder.grid


def _variant(size: str, patch_size: int, *, norm_last_layer: bool) -> DINOConfig:
    projection = Projection(norm_last_layer=norm_last_layer)
    return DINOConfig(**VARIANTS[size], patch_size=patch_size, projection=projection)


def _like(name: str, **head: Any) -> DINOConfig:
    """Of the size of one of the small ViTs."""
    encoder = {key: value for key, value in SMALL_IMAGES[name].items() if key != "classes"}
    return DINOConfig(**encoder, projection=Projection(**head))


MODELS = {  # Table 1; the released ViT-S learn the lengths in their last layer, the ViT-B do not
    "dino_small_patch16": _variant("S", 16, norm_last_layer=False),
    "dino_small_patch8": _variant("S", 8, norm_last_layer=False),
    "dino_base_patch16": _variant("B", 16, norm_last_layer=True),
    "dino_base_patch8": _variant("B", 8, norm_last_layer=True),
    "dino_cifar": _like("vit_cifar", out_dim=1024, hidden=512, bottleneck=128),
    "dino_digits": _like("vit_digits", out_dim=256, hidden=128, bottleneck=64),
}


def _registry() -> Any:
    from vitlab.models import registry  # which lists this paper too

    return registry


class NormalisedLinear(nn.Module):
    """y_k = g_k <w_k / |w_k|, x> (weight normalisation, arXiv:1602.07868); without `lengths` every g_k is 1."""

    def __init__(self, inputs: int, outputs: int, *, lengths: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.lengths = nn.Parameter(torch.ones(outputs)) if lengths else None
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, F.normalize(self.weight, dim=1))  # (B, K)
        return y if self.lengths is None else y * self.lengths


class DINOHead(nn.Module):
    """h: features (B, D) -> (B, K). GELU between the layers and, as in the paper, no BatchNorm."""

    def __init__(self, width: int, c: Projection):
        super().__init__()
        sizes = [width, *[c.hidden] * (c.layers - 1), c.bottleneck]
        self.mlp = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.last = NormalisedLinear(c.bottleneck, c.out_dim, lengths=not c.norm_last_layer)
        for layer in self.mlp:
            assert isinstance(layer, nn.Linear)
            nn.init.trunc_normal_(layer.weight, std=layer.in_features**-0.5)  # 0.02, as released, fits 2048 inputs only
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.mlp):
            x = layer(F.gelu(x) if number else x)
        return self.last(F.normalize(x, dim=-1))  # (B, K)


class DINOOutput(NamedTuple):
    loss: Tensor
    teacher_mean: Tensor  # (K,), of this batch: what `update_centre` takes
    numbers: dict[str, Tensor]  # see `watch`; each one number, without gradient


class DINO(WrapsEncoder):
    """g = h(f(x)), twice: the student learns to say of every view what the teacher says of the two global ones."""

    family = "dino"
    untrained = ("student_head", "teacher_head")

    def __init__(self, config: DINOConfig):
        super().__init__(config)
        self.student: PlainTransformer = _registry().build(config.backbone.get("family", "vit"), config.encoder)
        self.student_head = DINOHead(self.student.feature_width, config.projection)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False).eval()
        self.teacher_head = copy.deepcopy(self.student_head).requires_grad_(False).eval()
        self.centre: Tensor
        self.register_buffer("centre", torch.zeros(config.projection.out_dim))

    @property
    def encoder(self) -> PlainTransformer:
        """The teacher's network, the better one throughout training (section 5.1). Its weights ask no gradient."""
        return self.teacher

    def load_encoder(self, encoder: Network) -> None:
        """Into the student and the teacher."""
        super().load_encoder(encoder)
        self._load_into(self.student, encoder)

    @property
    def last_layer(self) -> list[nn.Parameter]:
        """The student's weights that stay as they are in the first epoch: set their gradients to None."""
        return list(self.student_head.last.parameters())

    def train(self, mode: bool = True) -> DINO:
        """The teacher has no dropout and no stochastic depth, whatever the mode."""
        super().train(mode)
        self.teacher.eval()
        self.teacher_head.eval()
        return self

    def forward(self, views: Sequence[Tensor], teacher_temperature: float, *, watched: bool = True) -> DINOOutput:
        """views: each (B, C, H, W), the two global ones first; watched=False leaves the numbers out."""
        _check_views(views, teacher_temperature)
        c = self.config
        features = torch.cat(_in_groups(self.student, views))  # (V*B, D)
        logits = _wide(self.student_head(features))
        log_student = F.log_softmax(logits / c.student_temperature, dim=-1)
        log_student = torch.unflatten(log_student, 0, (len(views), -1))  # (V, B, K)
        with torch.no_grad():
            seen = self.teacher(torch.cat([views[0], views[1]]))  # (2B, D)
            answers = _wide(self.teacher_head(seen))  # (2B, K)
            if c.sinkhorn:
                log_teacher = sinkhorn(answers / teacher_temperature, c.sinkhorn)
            else:
                centred = answers - self.centre if c.centring else answers
                log_teacher = F.log_softmax(centred / teacher_temperature, dim=-1)
            log_teacher = torch.unflatten(log_teacher, 0, (2, -1))  # (2, B, K)
            teacher = log_teacher.exp()
        loss = multi_crop_loss(teacher, log_student)
        numbers: dict[str, Tensor] = {}
        if watched:
            with torch.no_grad():
                numbers = watch(teacher, log_teacher, loss, _wide(features[: len(seen)]), _wide(seen), self.centre)
        return DINOOutput(loss, answers.mean(dim=0), numbers)

    @torch.no_grad()
    def update_teacher(self, momentum: float) -> None:
        """theta_t <- lambda theta_t + (1 - lambda) theta_s, after the optimiser's step."""
        for teacher, student in ((self.teacher, self.student), (self.teacher_head, self.student_head)):
            for theta_t, theta_s in zip(teacher.parameters(), student.parameters(), strict=True):
                theta_t.lerp_(theta_s, 1 - momentum)

    @torch.no_grad()
    def update_centre(self, batch_mean: Tensor, count: float = 1.0) -> None:
        """c <- m c + (1 - m) mean, eq. 4, over the batches of all processes; `count`: images behind this mean."""
        if not self.config.centring:
            return
        total = all_sum(torch.cat([batch_mean * count, batch_mean.new_full((1,), count)]))
        self.centre.lerp_(total[:-1] / total[-1], 1 - self.config.centre_momentum)


def sinkhorn(logits: Tensor, rounds: int) -> Tensor:
    """Log-probabilities (B, K) of which each output has an equal share over the batches of all processes.

    Rows and columns are made to sum to one in turns (SwAV, arXiv:2006.09882; DINOv2, arXiv:2304.07193, section 4).
    """
    for _ in range(rounds):
        logits = logits - _log_sum_over_all(logits)  # every output
        logits = logits.log_softmax(dim=1)  # every image
    return logits


def _log_sum_over_all(logits: Tensor) -> Tensor:
    """log of the sum of exp over the images of all processes, (1, K)."""
    if world_size() == 1:
        return logits.logsumexp(dim=0, keepdim=True)
    highest = all_max(logits.amax(dim=0, keepdim=True))
    return all_sum((logits - highest).exp().sum(dim=0, keepdim=True)).log() + highest


def multi_crop_loss(teacher: Tensor, log_student: Tensor) -> Tensor:
    """Eq. 3 as a mean: H(P_t(x), P_s(x')) of every global x and every other view x'; (2, B, K), (V, B, K) -> ()."""
    pairs = -torch.einsum("tbk,vbk->tv", teacher, log_student) / teacher.shape[1]  # (2, V)
    another = ~torch.eye(*pairs.shape, dtype=torch.bool, device=pairs.device)  # no view is compared with itself
    return pairs[another].mean()


def _in_groups(network: nn.Module, views: Sequence[Tensor]) -> list[Tensor]:
    """Views of one size go through together, so there are as many passes as sizes; (B, D) for each view, in order."""
    features: dict[int, Tensor] = {}
    for size in dict.fromkeys(view.shape[-2:] for view in views):
        members = [number for number, view in enumerate(views) if view.shape[-2:] == size]
        parts = network(torch.cat([views[number] for number in members])).chunk(len(members))
        features |= dict(zip(members, parts, strict=True))
    return [features[number] for number in range(len(views))]


def _wide(x: Tensor) -> Tensor:
    """Softmax and sums in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _check_views(views: Sequence[Tensor], teacher_temperature: float) -> None:
    if isinstance(views, Tensor):
        raise UsageError("DINO learns from a list of views, not from one tensor. For features: model.encoder(images).")
    if len(views) < 2:
        raise UsageError(f"DINO needs the two global views at least, found {len(views)}: use images.multicrop.")
    if len({view.shape for view in views[:2]}) > 1 or len({len(view) for view in views}) > 1:
        sizes = ", ".join("x".join(map(str, view.shape)) for view in views)
        raise UsageError(f"views must hold the same images, and the first two be of one size; found {sizes}.")
    if not teacher_temperature > 0:
        raise UsageError(f"teacher_temperature={teacher_temperature} must be above 0: the paper's is 0.04 to 0.07.")


# ---- what a doctor reads


def watch(
    teacher: Tensor, log_teacher: Tensor, loss: Tensor, student_features: Tensor, teacher_features: Tensor, c: Tensor
) -> dict[str, Tensor]:
    """Signs of health. The loss is entropy + divergence (eq. 5); K outputs used alike have an entropy of ln K."""
    entropy = -(teacher * log_teacher).sum(dim=-1).mean()
    best, which = teacher.max(dim=-1)  # (2, B)
    used = which.flatten().bincount().count_nonzero()  # how many outputs are some large view's first choice
    return {
        "teacher_entropy": entropy,  # ln K: uniform; 0: each image has one output
        "kl": loss.detach() - entropy,
        "student_std": spread(student_features),
        "teacher_std": spread(teacher_features),
        "rank": effective_rank(teacher_features),
        "centre_norm": c.norm(),  # pyright: ignore[reportUnknownMemberType]
        "max_probability": best.mean(),
        "used_outputs": used.to(loss.dtype),
    }


def spread(features: Tensor) -> Tensor:
    """The deviation of directions over a batch, times sqrt(D): 1 where they point anywhere, 0 where all are one."""
    return F.normalize(features, dim=1).std(dim=0, unbiased=False).mean() * features.shape[1] ** 0.5


def effective_rank(features: Tensor) -> Tensor:
    """exp of the entropy of the singular values (arXiv:2210.02885): 1 where all features are multiples of one."""
    x = features.double()
    if not torch.isfinite(x).all():  # eigvalsh would raise, and hide where it began
        return features.new_tensor(math.nan)
    gram = x @ x.mT if x.shape[0] < x.shape[1] else x.mT @ x  # the smaller one; its eigenvalues are their squares
    eigenvalues = cast(Tensor, torch.linalg.eigvalsh(gram))  # pyright: ignore[reportUnknownMemberType]  # has no types
    values = eigenvalues.clamp_min(0).sqrt()
    p = values / values.sum().clamp_min(torch.finfo(x.dtype).tiny)
    return (-torch.xlogy(p, p).sum()).exp().to(features.dtype)


# ---- schedules: functions of the step alone, counted from 0, so that a resumed run goes on exactly


def cosine(start: float, end: float, step: int, total: int) -> float:
    """From `start` at step 0 to `end` at `total`."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(step / max(total, 1), 1.0)))


def teacher_momentum(step: int, total: int, start: float = 0.996, end: float = 1.0) -> float:
    """lambda."""
    return cosine(start, end, step, total)


def weight_decay(step: int, total: int, start: float = 0.04, end: float = 0.4) -> float:
    return cosine(start, end, step, total)


def teacher_temperature(step: int, warmup: int, start: float = 0.04, end: float = 0.07) -> float:
    """tau_t, in a straight line over the first `warmup` steps (the paper: 30 epochs), then `end`."""
    return start + (end - start) * min(step / warmup, 1.0) if warmup else end


def last_layer_frozen(step: int, steps_per_epoch: int, epochs: float = 1) -> bool:
    """Whether the last layer's gradients are to be dropped at this step, as the released code does in the beginning."""
    return step < steps_per_epoch * epochs


# ---- names


def _entry(name: str, config: DINOConfig) -> Entry:
    if config.image_size != (224, 224):
        return Entry(name, "dino", config, half(config.channels))
    size, patch = name.split("_")[1], config.patch_size
    aliases = (f"dino_vit{size[0]}{patch}", *([f"dino_{size}"] if patch == 16 else []))  # dino_vits16: facebook's hub
    return Entry(name, "dino", config, IMAGENET_CROP, aliases)


PAPER = Paper("dino", DINOConfig, DINO, [_entry(name, config) for name, config in MODELS.items()])
