"""With few images the ResNet wins; the ViT catches up with more."""

from __future__ import annotations

from vitlab.study.reproduce.bench import MUON, SGD, Network, Workbench
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import Criterion, difference
from vitlab.training.recipe import Recipe

FRACTIONS = {"10 %": 0.1, "100 %": 1.0}
NETWORKS: dict[str, Network] = {"ViT": "vit", "ResNet": "resnet"}
ARMS = {
    f"{label}, {share}": (kind, fraction) for label, kind in NETWORKS.items() for share, fraction in FRACTIONS.items()
}
GAP = {"ResNet, 10 %": 1.0, "ViT, 10 %": -1.0, "ResNet, 100 %": -1.0, "ViT, 100 %": 1.0}


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    def recipe(arm: tuple[Network, float], seed: int) -> Recipe:
        kind, fraction = arm
        return bench.network(kind, 15, seed, optim=SGD if kind == "resnet" else MUON, fraction=fraction)

    return grid(ARMS, recipe, seeds)


CLAIM = Claim(
    name="data-hungry",
    title=Text(
        "With few images the ResNet wins, and with more the ViT catches up", "图像少时 ResNet 占优，图像多了 ViT 追上来"
    ),
    paper=Citation("ViT", "2010.11929", "Section 4.3, Figures 3 and 4"),
    says=Text(
        "On subsets of JFT, ViT-B/32 is much worse than a ResNet-50 of similar cost with 9 M images, and better with "
        "90 M.",
        "在 JFT 的子集上，ViT-B/32 用 9 M 图像时远差于开销相近的 ResNet-50，用 90 M 以上时更好。",
    ),
    here=Text(
        "A ViT and a ResNet are trained with a tenth of the images and with all, with the same number of steps.",
        "ViT 与 ResNet 分别用十分之一和全部图像训练，步数相同。",
    ),
    arms=tuple(Arm(name, series=name.partition(",")[0], x=100 * fraction) for name, (_, fraction) in ARMS.items()),
    rule=(
        difference("ResNet, 10 %", "ViT, 10 %", low=0.0),
        Criterion("lead of the ResNet at 10 % − at 100 %", GAP, low=0.0),
    ),
    steps=steps,
    axis="training images, %",
    minutes=4,
)
