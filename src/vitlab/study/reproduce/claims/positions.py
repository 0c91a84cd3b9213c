"""Learned or sin-cos positions, or none at all?"""

from __future__ import annotations

from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import difference

KINDS = ("learned", "sincos", "none")
POSITIONS = {kind: {"model.positions": kind} for kind in KINDS}
MARGIN = 0.02


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return grid(POSITIONS, lambda varied, seed: bench.network("vit", 20, seed, varied), seeds)


CLAIM = Claim(
    name="positions",
    title=Text(
        "Learned and sin-cos positions come out alike; without positions accuracy drops",
        "可学习位置与正余弦位置效果相当；没有位置则准确率下降",
    ),
    paper=Citation("MoCo v3", "2104.02057", "Section 4; also ViT (2010.11929), Table 8"),
    says=Text(
        "MoCo v3, linear probe: sin-cos 76.5 %, learned 76.1 %, none 74.9 %. ViT, 5-shot: none 61.4 %, learned 64.2 %.",
        "MoCo v3 线性探测：正余弦 76.5 %，可学习 76.1 %，无 74.9 %。ViT 5-shot：无 61.4 %，可学习 64.2 %。",
    ),
    here=Text(
        "A ViT with 4 layers and 16 patches is trained from scratch with labels, 20 epochs with each.",
        "4 层、16 个图块的 ViT，用标签从零训练，每种 20 个 epoch。",
    ),
    arms=tuple(map(Arm, KINDS)),
    rule=(
        difference("learned", "sincos", low=-MARGIN, high=MARGIN),
        difference("learned", "none", low=0.0),
    ),
    steps=steps,
)
