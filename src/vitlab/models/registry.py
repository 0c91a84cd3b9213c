"""Names -> models: canonical names, the names people bring from timm and the papers, and the nearest one on a miss."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatch
from typing import Any

from vitlab.errors import UsageError
from vitlab.models.base import Network
from vitlab.models.clip import CLIP, CLIPConfig
from vitlab.models.clip import MODELS as CLIP_MODELS
from vitlab.models.config import Config
from vitlab.models.deit import DISTILLED, PLAIN
from vitlab.models.dino import DINO, DINOConfig
from vitlab.models.dino import MODELS as DINO_MODELS
from vitlab.models.dinov2 import ENCODERS
from vitlab.models.mae import MODELS as MAE_MODELS
from vitlab.models.mae import MAEConfig, MaskedAutoencoder
from vitlab.models.pvt import MODELS as PVTS
from vitlab.models.pvt import MODELS_V2 as PVTS_V2
from vitlab.models.pvt import PVT, PVTConfig, PVTv2, PVTv2Config
from vitlab.models.resnet import MODELS as RESNETS
from vitlab.models.resnet import ResNet, ResNetConfig
from vitlab.models.swin import MODELS as SWINS
from vitlab.models.swin import Swin, SwinConfig
from vitlab.models.twins import MODELS as TWINS
from vitlab.models.twins import Twins, TwinsConfig
from vitlab.models.vit import VisionTransformer
from vitlab.models.vit_config import PATCH_SIZES, SMALL_IMAGES, VARIANTS, ViTConfig

FAMILIES: dict[str, tuple[type[Config], Callable[[Any], Network]]] = {
    "vit": (ViTConfig, VisionTransformer),
    "clip": (CLIPConfig, CLIP),
    "dino": (DINOConfig, DINO),
    "mae": (MAEConfig, MaskedAutoencoder),
    "resnet": (ResNetConfig, ResNet),
    "swin": (SwinConfig, Swin),
    "pvt": (PVTConfig, PVT),
    "pvt_v2": (PVTv2Config, PVTv2),
    "twins": (TwinsConfig, Twins),
}

IMAGENET: dict[str, Any] = dict(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALF: dict[str, Any] = dict(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))  # Google's ViT
OPENAI: dict[str, Any] = dict(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
SIZES = {"tiny": "Ti", "small": "S", "base": "B", "large": "L", "huge": "H"}


@dataclass(frozen=True)
class Entry:
    """One registered model; `preprocess` holds plain values, `aliases` further exact names."""

    name: str
    family: str
    config: Any  # the family's Config
    preprocess: dict[str, Any] = field(default_factory=lambda: HALF)
    aliases: tuple[str, ...] = ()


def _entries() -> list[Entry]:
    found = []
    for size, variant in SIZES.items():
        default = 14 if size == "huge" else 16
        for patch in PATCH_SIZES:
            aliases = (f"ViT-{variant}/{patch}", f"{variant}/{patch}") + ((f"vit_{size}",) if patch == default else ())
            config = ViTConfig(**VARIANTS[variant], patch_size=patch)
            found.append(Entry(f"vit_{size}_patch{patch}", "vit", config, HALF, aliases))
    for name, options in SMALL_IMAGES.items():
        grey = {"mean": (0.5,), "std": (0.5,)}
        found.append(Entry(name, "vit", ViTConfig().with_options(**options), grey if "channels" in options else HALF))
    crop = {**IMAGENET, "interpolation": "bicubic", "how": "crop", "resize": 256, "size": (224, 224)}
    for name, config in {**PLAIN, **DISTILLED}.items():
        found.append(Entry(name, "vit", config, crop, (name.removesuffix("_patch16"),)))
    for name, config in ENCODERS.items():
        found.append(Entry(name, "vit", config, crop))
    for name, config in DINO_MODELS.items():
        size, patch = name.split("_")[1], config.patch_size
        aliases = ()
        if config.image_size == (224, 224):  # facebook's hub calls them dino_vits16
            aliases = (f"dino_vit{size[0]}{patch}",) + ((f"dino_{size}",) if patch == 16 else ())
        small = {"mean": (0.5,) * config.channels, "std": (0.5,) * config.channels}
        found.append(Entry(name, "dino", config, crop if aliases else small, aliases))
    for name, config in MAE_MODELS.items():
        size = name.removeprefix("mae_")
        published = size in SIZES
        aliases = (f"vit_mae_{size}",) if published else ()
        small = {"mean": (0.5,) * config.channels, "std": (0.5,) * config.channels}
        found.append(Entry(name, "mae", config, crop if published else small, aliases))
    for name, config in CLIP_MODELS.items():
        small = {"mean": (0.5,) * config.channels, "std": (0.5,) * config.channels}
        published = name.startswith("clip_vit_")
        values = {**OPENAI, "interpolation": "bicubic", "how": "crop"} if published else small
        found.append(Entry(name, "clip", config, values, _clip_aliases(name, config) if published else ()))
    for name, config in RESNETS.items():  # torchvision's and timm's names; the paper writes ResNet-50
        published = config.image_size == (224, 224)
        aliases = (name.replace("resnet", "ResNet-"),) if published else ()
        values = {**crop, "interpolation": "bilinear"} if published else HALF
        found.append(Entry(name, "resnet", config, values, aliases))
    for name, config in SWINS.items():
        size, px = name.split("_")[1], config.image_size[0]
        published = size in SIZES
        aliases = (f"swin_{size}_patch4_window{config.window}_{px}",)  # timm's and the hub's
        aliases += (f"Swin-{SIZES[size][0]}", f"swin_{size[0]}") if published and px == 224 else ()  # the paper's
        values = crop if px == 224 else {**crop, "resize": px, "size": (px, px)}
        found.append(Entry(name, "swin", config, values if published else HALF, aliases if published else ()))
    for family, models in {"pvt": PVTS, "pvt_v2": PVTS_V2, "twins": TWINS}.items():
        for name, config in models.items():
            published = config.image_size == (224, 224)
            aliases = _pyramid_aliases(name) if published else ()
            found.append(Entry(name, family, config, crop if published else HALF, aliases))
    return found


def _pyramid_aliases(name: str) -> tuple[str, ...]:
    """Of PVT, PVT v2 and Twins: the hub's names and the papers' (PVT-Tiny, PVTv2-B2-Li, Twins-SVT-S)."""
    *family, size = name.replace("pvt_v2", "pvtv2").replace("b2_li", "b2-li").split("_")
    paper = "-".join([*family, size[0] if family[0] == "twins" else size])
    return (paper, f"{name.replace('_', '-')}-224") if family[0] == "pvt" else (paper,)


def _clip_aliases(name: str, config: CLIPConfig) -> tuple[str, ...]:
    """clip_ViT-B/32; the hub's name; and open_clip's, which tells the activation: ViT-B-32 alone is one with GELU."""
    variant = next(key for key in VARIANTS if VARIANTS[key]["width"] == config.image.width)
    size = f"@{config.image_size[0]}px" if config.image_size[0] != 224 else ""
    theirs = f"ViT-{variant}-{config.image.patch_size}{size.replace('@', '-').removesuffix('px')}"
    theirs += "" if config.text.activation == "gelu" else "-quickgelu"
    return f"clip_ViT-{variant}/{config.image.patch_size}{size}", name.replace("_", "-"), theirs


MODELS = {entry.name: entry for entry in _entries()}
ALIASES = {alias.lower(): entry.name for entry in MODELS.values() for alias in (entry.name, *entry.aliases)}


def find(name: str) -> tuple[Entry, dict[str, Any]]:
    """The entry a name means, and the options the name carries: vit_base_patch16_384 is vit_base_patch16 at 384 px."""
    plain = name.lower().split(".")[0]  # timm puts the weights' tag behind a dot; the architecture is the same
    if plain in ALIASES:
        return MODELS[ALIASES[plain]], {}
    sized = re.fullmatch(r"(\w+)_(\d+)", plain)
    if sized and sized[1] in ALIASES:
        return MODELS[ALIASES[sized[1]]], {"image_size": int(sized[2])}
    dino = re.fullmatch(r"vit_(small|base|large|giant)_patch14_(reg4_)?dinov2", plain)  # timm's names for DINOv2
    if dino:
        return MODELS[f"dinov2_{dino[1]}" + ("_registers" if dino[2] else "")], {}
    mae = re.fullmatch(r"mae_vit_(\w+)_patch(\d+)", plain)  # facebook's names for MAE
    if mae and f"mae_{mae[1]}" in MODELS and MODELS[f"mae_{mae[1]}"].config.patch_size == int(mae[2]):
        return MODELS[f"mae_{mae[1]}"], {}
    swin = re.fullmatch(r"swin_(tiny|small|base|large)_patch4_window(\d+)_(\d+)", plain)
    if swin:
        return MODELS[f"swin_{swin[1]}"], {"window": int(swin[2]), "image_size": int(swin[3])}
    near = get_close_matches(plain, list(ALIASES), n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    raise UsageError(f"there is no model named {name!r}.{hint} `vitlab models` lists all names.")


def list_models(pattern: str = "*") -> list[str]:
    """Canonical names that match, by themselves or by an alias: with * and ? as a whole, otherwise any part of it."""
    pattern = pattern.lower()
    wild = any(c in pattern for c in "*?[")
    found = {n for alias, n in ALIASES.items() if (fnmatch(alias, pattern) if wild else pattern in alias)}
    if not found and not wild:  # a whole name with an image size or tag: vit_base_patch16_384
        with suppress(ValueError):
            found = {find(pattern)[0].name}
    return [name for name in MODELS if name in found]


def build_config(name: str, **options: Any) -> tuple[Entry, Any]:
    """The entry and the config that a name and options mean."""
    entry, carried = find(name)
    return entry, entry.config.with_options(**{**carried, **options})


def build(family: str, config: Any) -> Any:
    """A freshly initialised model of this config, on torch's current default device."""
    return FAMILIES[family][1](config)
