"""Which network a word like "vit" or "deit" means for given pictures: of like size and cost, so that they compare.

resolve("swin", ("swin", {}), side=32)     # swin_cifar
resolve("swin", ("swin", {}), side=500)    # swin_tiny
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vitlab.models.config import nearest
from vitlab.models.registry import MODELS, find
from vitlab.study.model_spec import Named

SMALL_SIDE = 64  # pixels; up to here a network for small images is meant
SMALL: dict[str, Named] = {  # 0.6 to 0.9 M parameters, 32 to 68 M MACs at 32 px
    "vit": ("vit_cifar", {"width": 128, "depth": 6, "heads": 4}),
    "deit": ("vit_cifar", {"width": 128, "depth": 6, "heads": 4, "distill_token": True}),
    "swin": ("swin_cifar", {}),
    "resnet": ("resnet_cifar", {}),
}
TINY: dict[str, Named] = {  # up to 14 px: patches of 2 x 2
    "vit": ("vit_digits", {}),
    "deit": ("vit_digits", {"distill_token": True}),
}
FULL: dict[str, Named] = {  # 22 to 28 M parameters, 4.1 to 4.6 G MACs at 224 px: the rivals of the DeiT and Swin papers
    "vit": ("vit_small_patch16", {}),
    "deit": ("deit_small_distilled_patch16", {}),
    "swin": ("swin_tiny", {}),
    "resnet": ("resnet50", {}),
}


@dataclass(frozen=True)
class Network:
    """A model of a study: what it is called, and what is built."""

    called: str
    name: str
    options: dict[str, Any]
    family: str
    distilled: bool = False  # it has a token for a teacher's answers

    @property
    def convolves(self) -> bool:
        return self.family == "resnet"


def resolve(called: str, named: Named, side: int) -> Network:
    """`side`: of the pictures, the longer one, in pixels. A registered name means itself."""
    word, more = named
    words = _words(side)
    name, options = words.get(word, (word, {}))
    try:
        entry, carried = find(name)
        options = {**carried, **options, **more}
        config: Any = entry.config.with_options(**options)
    except ValueError as error:
        raise ValueError(f"{called}: {error} In a word: {', '.join(words)}.{nearest(word, list(words))}") from None
    if hasattr(config, "encoder"):
        raise ValueError(f"{called} learns without labels (vitlab study ssl compares that): name vit, swin or resnet.")
    token = getattr(getattr(config, "tokens", None), "distill_token", False)
    return Network(called, entry.name, options, entry.family, token)


def _words(side: int) -> dict[str, Named]:
    if side > SMALL_SIDE:
        return FULL
    others = {n.removesuffix("_cifar"): (n, {}) for n in MODELS if n.endswith("_cifar") and "classes" in _options(n)}
    table = {**others, **SMALL, **(TINY if side <= 14 else {})}
    size = {"image_size": -(-side // 4) * 4}  # whole patches
    return {word: (name, {**options, **size}) for word, (name, options) in table.items()}


def _options(name: str) -> dict[str, Any]:
    return MODELS[name].config.to_dict()
