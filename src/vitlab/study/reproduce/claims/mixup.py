"""Do Mixup and CutMix help?"""

from __future__ import annotations

from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import difference

MIXING = {
    "no mixing": {"augment.mixup": 0.0, "augment.cutmix": 0.0},
    "Mixup": {"augment.mixup": 0.8, "augment.cutmix": 0.0},
    "CutMix": {"augment.mixup": 0.0, "augment.cutmix": 1.0},
}


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return grid(MIXING, lambda varied, seed: bench.network("vit", 20, seed, varied), seeds)


CLAIM = Claim(
    name="mixup",
    title=Text("Mixup and CutMix improve a ViT", "Mixup 与 CutMix 能提升 ViT"),
    paper=Citation("DeiT", "2012.12877", "Table 8"),
    says=Text(
        "DeiT-B, 300 epochs on ImageNet: 81.8 % with both, 80.0 % without CutMix, 78.7 % without Mixup, 75.8 % without "
        "either.",
        "DeiT-B 在 ImageNet 上训练 300 个 epoch：两者都用 81.8 %，"
        "去掉 CutMix 80.0 %，去掉 Mixup 78.7 %，都去掉 75.8 %。",
    ),
    here=Text(
        "A ViT with 4 layers, 20 epochs: without mixing, with Mixup (alpha 0.8), and with CutMix (alpha 1).",
        "4 层 ViT，20 个 epoch：不混合、Mixup（alpha 0.8）、CutMix（alpha 1）。",
    ),
    arms=tuple(map(Arm, MIXING)),
    rule=(difference("Mixup", "no mixing", low=0.0), difference("CutMix", "no mixing", low=0.0)),
    steps=steps,
)
