"""Networks for short names like "vit" or "deit", of similar size and cost for the given image size.

resolve_model("swin", ("swin", {}), side=32)     # swin_cifar
resolve_model("swin", ("swin", {}), side=500)    # swin_tiny
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitlab.errors import UsageError, VitlabError
from vitlab.models.config import nearest
from vitlab.models.registry import MODELS, find
from vitlab.models.vit_config import ViTConfig
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
    short_names = _short_names(side)
    name, options = short_names.get(short, (short, {}))
    try:
        entry, carried = find(name)
        options = {**carried, **options, **overrides}
        config = entry.config.with_options(**options)
    except VitlabError as error:
        near = nearest(short, list(short_names))
        raise UsageError(f"{label}: {error} Short names: {', '.join(short_names)}.{near}") from None
    if config.wraps_encoder:
        raise UsageError(f"{label} learns without labels (see vitlab study ssl): name vit, swin or resnet.")
    distilled = isinstance(config, ViTConfig) and config.tokens.distill_token
    return StudyModel(label, entry.name, options, entry.family, distilled)


def _short_names(side: int) -> dict[str, ModelSpec]:
    if side > SMALL_SIDE:
        return FULL
    cifar = [name for name in MODELS if name.endswith("_cifar") and "classes" in MODELS[name].config.to_dict()]
    others = {name.removesuffix("_cifar"): (name, {}) for name in cifar}
    table = {**others, **SMALL, **(TINY if side <= 14 else {})}
    size = {"image_size": -(-side // 4) * 4}  # whole patches
    return {short: (name, {**options, **size}) for short, (name, options) in table.items()}
