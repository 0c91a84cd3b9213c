"""What the name of a timm ViT says that its weights do not show: heads, activation, a missing norm, other blocks.

    facts_of("vit_so150m_patch16_reg4_gap_256")     # {"heads": 14, "eps": 1e-6, "activation": "gelu"}

A folder of timm's hub names the architecture, and model_args only where something was changed.
"""

from __future__ import annotations

import re
from typing import Any

from vitlab.models.vit_config import SIZES

HEADS: dict[str, tuple[int, int]] = {  # size in vit_SIZE_patch16_... -> width, heads
    **{size: (variant["width"], variant["heads"]) for size, (_, _, variant) in SIZES.items()},
    **dict.fromkeys(("wee", "xsmall"), (256, 4)),
    "little": (320, 5),
    **dict.fromkeys(("medium", "mediumd"), (512, 8)),
    "betwixt": (640, 10),
    "so150m": (896, 14),
    "so150m2": (832, 13),
    "so400m": (1152, 16),
    "intern300m": (1024, 16),
    "giant": (1408, 16),
    "giantopt": (1536, 16),
    "gigantic": (1664, 16),
}
OTHER_HEADS: dict[str, tuple[int, int]] = {  # names whose size means something else
    r"vit_base_patch16_gap_224": (768, 16),  # I-JEPA's way to divide it
    r"vit_base_patch\d+_plus_.*": (896, 14),
    r"vit_giant_.*(dinov2|tipsv2)": (1536, 24),
    r"test_vit2?": (64, 2),
}
OPTIONS: dict[str, dict[str, Any]] = {  # regex of names -> options; the later stand above the earlier
    r"(vit|deit3?|flexivit|eva_large)_.*|test_vit\d?": {"eps": 1e-6, "activation": "gelu"},
    r"vit_.*_clip_.*": {"eps": 1e-5, "activation": "gelu"},
    r"vit_.*_clip_quickgelu_.*": {"activation": "quick_gelu"},
    r"vit_(base_patch32|so400m_patch16|giantopt_patch16)_siglip_.*": {"activation": "gelu_tanh"},
    r"vit_large_patch16_siglip_(gap_)?512": {"activation": "gelu_tanh"},
    r"vit_intern300m_.*": {"final_norm": "no"},
}
OTHER_NETWORKS = {  # regex of names -> what makes them another network, where the weights may look alike
    r"vit_.*_rpn_.*": "norms after attention and MLP, inside the residual branches",
    r"vit_.*_\d+x2_.*": "two parallel attentions and MLPs in each block",
    r"vit_(.*_xp|d?pwee)_.*": "attention and MLP side by side in each block",
    r"vit_d(wee|little)_.*": "differential attention",
    r"test_vit4": "RMSNorm",
}


def facts_of(name: str, width: int | None = None) -> dict[str, Any]:
    """Options by name. Without heads for weights of another `width` than the name has: it may be an older one's."""
    name = name.split(".")[0]  # the tag of its weights
    size = re.match(r"(?:vit|deit3?)_([a-z0-9]+)_", name)
    heads = next((pair for pattern, pair in OTHER_HEADS.items() if re.fullmatch(pattern, name)), None)
    heads = heads or (HEADS.get(size[1]) if size else None)
    facts: dict[str, Any] = {} if heads is None or width not in (None, heads[0]) else {"heads": heads[1]}
    for pattern, options in OPTIONS.items():
        facts |= options if re.fullmatch(pattern, name) else {}
    return facts


def other_network(name: str) -> str | None:
    """What a ViT of this name has that is not known here."""
    name = name.split(".")[0]
    return next((what for pattern, what in OTHER_NETWORKS.items() if re.fullmatch(pattern, name)), None)
