"""Early convolutions: better, and less dependent on AdamW."""

from __future__ import annotations

from typing import Any

from vitlab.study.reproduce.bench import ADAMW, SGD, Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import Criterion, difference
from vitlab.training.recipe import Recipe

STEMS = {"conv stem": "conv", "patch stem": "patch"}
OPTIMISERS = {"AdamW": ADAMW, "SGD": SGD}
ARMS = {f"{stem}, {name}": (kind, optim) for stem, kind in STEMS.items() for name, optim in OPTIMISERS.items()}
LOSS = {"patch stem, AdamW": 1.0, "patch stem, SGD": -1.0, "conv stem, AdamW": -1.0, "conv stem, SGD": 1.0}


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    def recipe(arm: tuple[str, dict[str, Any]], seed: int) -> Recipe:
        kind, optim = arm
        return bench.network("vit", 20, seed, {"model.stem": kind}, optim=optim)

    return grid(ARMS, recipe, seeds)


CLAIM = Claim(
    name="conv-stem",
    title=Text("A convolutional stem is better, and loses less with SGD", "卷积 stem 更好，换成 SGD 也损失更少"),
    paper=Citation("Early Convolutions", "2106.14881", "Section 5, Figures 3 to 5"),
    says=Text(
        "With a convolutional stem a ViT converges faster and reaches a higher accuracy, and SGD comes close to AdamW, "
        "while with a patch stem SGD is far worse.",
        "用卷积 stem 的 ViT 收敛更快、准确率更高，SGD 也接近 AdamW；用图块 stem 时 SGD 差得多。",
    ),
    here=Text(
        "A ViT with 4 layers, 20 epochs, with each stem and each optimiser (AdamW, lr 0.002; SGD, lr 0.1).",
        "4 层 ViT，20 个 epoch，两种 stem 与两种优化器各一（AdamW，lr 0.002；SGD，lr 0.1）。",
    ),
    arms=tuple(map(Arm, ARMS)),
    rule=(
        difference("conv stem, AdamW", "patch stem, AdamW", low=0.0),
        Criterion("loss by SGD: patch stem − conv stem", LOSS, low=0.0),
    ),
    steps=steps,
    minutes=4,
)
