"""Attention is quadratic in the number of pixels, windows are linear: by counted multiply-adds."""

from __future__ import annotations

from pathlib import Path

from vitlab.explain.inspect import inspect
from vitlab.study.reproduce.bench import Workbench
from vitlab.study.reproduce.bundled import model_by_model
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.verdict import value
from vitlab.study.scaling import exponent
from vitlab.training.loop import Show

SIZES = (224, 448, 896)  # whole windows of 7 x 7 patches
NETWORKS = ("tiny", "small", "base")
ATTENTION, VIT, SWIN = "softmax(QKᵀ)V of the ViT", "whole ViT", "whole Swin"


def measure(size: str, folder: Path, show: Show) -> dict[str, float]:
    """k of MACs ~ pixels^k."""
    pixels = [side * side for side in SIZES]
    vits = [inspect(f"vit_{size}", image_size=side) for side in SIZES]
    swins = [inspect(f"swin_{size}", image_size=side) for side in SIZES]
    attention = [sum(step.macs for step in vit.steps if step.name.split(".")[-1] == "heads") for vit in vits]
    return {
        ATTENTION: exponent(pixels, attention),
        VIT: exponent(pixels, [vit.macs for vit in vits]),
        SWIN: exponent(pixels, [swin.macs for swin in swins]),
    }


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return model_by_model(NETWORKS, measure)


CLAIM = Claim(
    name="quadratic-attention",
    title=Text(
        "Global attention is quadratic in the pixels, windows are linear", "全局注意力对像素数是二次的，窗口是线性的"
    ),
    paper=Citation("Swin", "2103.14030", "Section 3.2, eqs. 1-2"),
    says=Text(
        "Global attention costs 4hwC² + 2(hw)²C, window attention 4hwC² + 2M²hwC: quadratic and linear in hw.",
        "全局注意力的开销为 4hwC² + 2(hw)²C，窗口注意力为 4hwC² + 2M²hwC：对 hw 分别是二次和线性。",
    ),
    here=Text(
        "Exponent k of MACs ~ pixels^k from 224 to 896 pixels, counted on ViT and Swin, tiny, small and base.",
        "从 224 到 896 像素，乘加数 ~ 像素数^k 的指数 k；在 tiny、small、base 三种 ViT 与 Swin 上计数。",
    ),
    arms=tuple(map(Arm, (ATTENTION, VIT, SWIN))),
    rule=(value(ATTENTION, low=1.95, high=2.05), value(SWIN, low=0.95, high=1.05)),
    steps=steps,
    scale="number",
    measured="exponent k of MACs ~ pixels^k",
    seeded=False,
    minutes=0.3,
)
