"""Do outlier tokens appear, for which registers were invented?"""

from __future__ import annotations

from pathlib import Path

from vitlab.explain.weights import high_norm_tokens
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.bundled import bundled_encoder, images_for, model_by_model
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.verdict import value
from vitlab.training.loop import Show

MODELS = ("digits", "cifar10", "dino", "mae", "clip")
OUTLIERS = "outlier tokens"
SHARE = 0.01  # half of the paper's


def measure(name: str, folder: Path, show: Show) -> dict[str, float]:
    model = bundled_encoder(name)
    return {OUTLIERS: high_norm_tokens(model, images_for(model)).mean_share}


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return model_by_model(MODELS, measure)


CLAIM = Claim(
    name="registers",
    title=Text("ViTs without registers have outlier tokens", "没有 register 的 ViT 会出现离群 token"),
    paper=Citation("Vision Transformers Need Registers", "2309.16588", "Section 2.1, Figures 3 and 4"),
    says=Text(
        "About 2 % of the patch tokens of DINOv2 grow to ten times the norm of the others; only in large models.",
        "DINOv2 约 2 % 的图块 token 的范数长到其余的十倍；只出现在大模型中。",
    ),
    here=Text(
        "Share of patch tokens longer than three times the median, in the last layers of the bundled models, none of "
        "which has registers, on the photos of the package (digits: 30 digits). They are small, so by the paper's own "
        "last words there should be none.",
        "内置模型（都没有 register）最后几层中范数超过中位数三倍的图块 token 所占比例，"
        "使用软件包自带照片（digits 用 30 个数字）。"
        "这些模型很小，按论文的后半句本就不该出现。",
    ),
    arms=(Arm(OUTLIERS),),
    rule=(value(OUTLIERS, low=SHARE),),
    steps=steps,
    measured="share of patch tokens",
    seeded=False,
    minutes=0.1,
)
