"""One claim, one file; CLAIMS lists them in the order of the table."""

from __future__ import annotations

from vitlab.errors import UsageError
from vitlab.models.config import nearest
from vitlab.study.reproduce.claim import Claim
from vitlab.study.reproduce.claims import (
    attention_distance,
    conv_stem,
    data_hungry,
    dino_collapse,
    distillation,
    mae_mask_ratio,
    mixup,
    patch_order,
    pooling,
    position_similarity,
    positions,
    post_norm,
    prompt_ensemble,
    quadratic_attention,
    registers,
    tome,
)

MODULES = (
    pooling,
    positions,
    patch_order,
    position_similarity,
    attention_distance,
    registers,
    quadratic_attention,
    data_hungry,
    distillation,
    mixup,
    conv_stem,
    post_norm,
    mae_mask_ratio,
    dino_collapse,
    prompt_ensemble,
    tome,
)
CLAIMS: dict[str, Claim] = {module.CLAIM.name: module.CLAIM for module in MODULES}


def find_claim(name: str) -> Claim:
    if name not in CLAIMS:
        near = nearest(name, list(CLAIMS))
        raise UsageError(f"there is no claim {name!r}.{near} Claims: {', '.join(CLAIMS)}, or all.")
    return CLAIMS[name]
