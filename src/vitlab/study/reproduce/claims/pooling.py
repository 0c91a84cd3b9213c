"""Class token or the mean of the patches?"""

from __future__ import annotations

from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import difference

POOLING = {
    "class token": {"model.pooling": "class", "model.class_token": True},
    "mean": {"model.pooling": "mean", "model.class_token": False},
}
MARGIN = 0.02


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return grid(POOLING, lambda varied, seed: bench.network("vit", 20, seed, varied), seeds)


CLAIM = Claim(
    name="pooling",
    title=Text("The class token and mean pooling come out alike", "分类 token 与平均池化效果相当"),
    paper=Citation("ViT", "2010.11929", "Appendix D.3, Figure 9"),
    says=Text(
        "Both work about equally well on ImageNet (5-shot); they only need different learning rates.",
        "两者在 ImageNet（5-shot）上效果相当，只是需要不同的学习率。",
    ),
    here=Text(
        "A ViT with 4 layers is trained for 20 epochs with each, at the same learning rate.",
        "4 层 ViT，两种方式各训练 20 个 epoch，学习率相同。",
    ),
    arms=tuple(map(Arm, POOLING)),
    rule=(difference("class token", "mean", low=-MARGIN, high=MARGIN),),
    steps=steps,
    minutes=2,
)
