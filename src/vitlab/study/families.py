"""Networks for short names like "vit" or "deit", of similar size and cost for the given image size.

resolve_model("swin", ("swin", {}), side=32)     # swin_cifar
resolve_model("swin", ("swin", {}), side=500)    # swin_tiny
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitlab.errors import UsageError
from vitlab.models.config import nearest
from vitlab.models.registry import MODELS, find
from vitlab.study.model_spec import ModelSpec

SMALL_SIDE = 64  # pixels; up to here networks for small images are used
SMALL: dict[str, ModelSpec] = {  # 0.6 to 0.9 M parameters, 32 to 68 M MACs at 32 px
    "vit": ("vit_cifar", {"width": 128, "depth": 6, "heads": 4}),
    "deit": ("vit_cifar", {"width": 128, "depth": 6, "heads": 4, "distill_token": True}),
    "swin": ("swin_cifar", {}),
    "resnet": ("resnet_cifar", {}),
}
TINY: dict[str, ModelSpec] = {  # up to 14 px, with patches of 2 x 2
    "vit": ("vit_digits", {}),
    "deit": ("vit_digits", {"distill_token": True}),
}
FULL: dict[str, ModelSpec] = {  # 22 to 28 M parameters, 4.1 to 4.6 G MACs at 224 px, as in the DeiT and Swin papers
    "vit": ("vit_small_patch16", {}),
    "deit": ("deit_small_distilled_patch16", {}),
    "swin": ("swin_tiny", {}),
    "resnet": ("resnet50", {}),
}


@dataclass(frozen=True)
class StudyModel:
    """A model of a study: its label, and what is built."""

    label: str
    name: str
    options: dict[str, Any]
    family: str
    distilled: bool = False  # has a distillation token

    @property
    def is_cnn(self) -> bool:
        return self.family == "resnet"


def resolve_model(label: str, spec: ModelSpec, side: int) -> StudyModel:
    """`side`: the longer side of the images in pixels. Registered names stand for themselves."""
    short, overrides = spec
    known_names = _short_names(side)
    name, options = known_names.get(short, (short, {}))
    try:
        entry, carried = find(name)
        options = {**carried, **options, **overrides}
        config: Any = entry.config.with_options(**options)
    except ValueError as error:
        near = nearest(short, list(known_names))
        raise UsageError(f"{label}: {error} Short names: {', '.join(known_names)}.{near}") from None
    if config.wraps_encoder:
        raise UsageError(f"{label} learns without labels (see vitlab study ssl): name vit, swin or resnet.")
    token = getattr(getattr(config, "tokens", None), "distill_token", False)
    return StudyModel(label, entry.name, options, entry.family, token)


def _short_names(side: int) -> dict[str, ModelSpec]:
    if side > SMALL_SIDE:
        return FULL
    others = {n.removesuffix("_cifar"): (n, {}) for n in MODELS if n.endswith("_cifar") and "classes" in _options(n)}
    table = {**others, **SMALL, **(TINY if side <= 14 else {})}
    size = {"image_size": -(-side // 4) * 4}  # whole patches
    return {short: (name, {**options, **size}) for short, (name, options) in table.items()}


def _options(name: str) -> dict[str, Any]:
    return MODELS[name].config.to_dict()
