"""How far do the heads of the first layer reach?

The rule was written after the distances of three of the five models had been seen; that of all other claims before
any result.
"""

from __future__ import annotations

from pathlib import Path

from vitlab.explain.distance import attention_statistics
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.bundled import bundled_encoder, images_for, model_by_model
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.verdict import difference, value
from vitlab.training.loop import Show

MODELS = ("digits", "cifar10", "dino", "mae", "clip")
WIDEST, NARROWEST = "first layer, widest head", "first layer, narrowest head"
FIRST, LAST = "first layer, mean", "last layer, mean"
FAR, NEAR = 0.9, 0.5  # of the distance of uniform attention


def measure(name: str, folder: Path, show: Show) -> dict[str, float]:
    model = bundled_encoder(name)
    statistics = attention_statistics(model, images_for(model))
    share = statistics.distance / statistics.uniform_distance  # (layers, heads)
    means = {FIRST: float(share[0].mean()), LAST: float(share[-1].mean())}
    return {WIDEST: float(share[0].max()), NARROWEST: float(share[0].min()), **means}


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return model_by_model(MODELS, measure)


CLAIM = Claim(
    name="attention-distance",
    title=Text(
        "In the first layer some heads reach far and others stay near; distance grows with depth",
        "第一层中有的头看得远、有的头只看近处；距离随深度增加",
    ),
    paper=Citation("ViT", "2010.11929", "Section 4.5, Figure 7 right; Appendix D.7"),
    says=Text(
        "Some heads attend to most of the image already in the lowest layers, others have small distances there; "
        "distance increases with depth.",
        "最底层就有头关注图像的大部分，另一些头的距离一直很小；距离随网络深度增加。",
    ),
    here=Text(
        "Mean attention distance in the bundled models, on the photos of the package (digits: 30 digits), as a share "
        "of the distance of uniform attention. Note: this rule was written after three of the models had been seen.",
        "内置模型在软件包自带照片上的平均注意力距离（digits 用 30 个数字），以均匀注意力的距离为 1。"
        "注意：写下这条规则之前，已看过其中三个模型的结果。",
    ),
    arms=tuple(map(Arm, (WIDEST, NARROWEST, FIRST, LAST))),
    rule=(value(WIDEST, low=FAR), value(NARROWEST, high=NEAR), difference(LAST, FIRST, low=0.0)),
    steps=steps,
    scale="number",
    measured="attention distance (1: uniform attention)",
    seeded=False,
    minutes=0.1,
)
