"""Is hiding 75 % of the patches best?"""

from __future__ import annotations

from pathlib import Path

from vitlab.checkpoints.load import load_with_report
from vitlab.study.reproduce.bench import Workbench, train
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import grid
from vitlab.study.reproduce.verdict import difference
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import features, probe_accuracy
from vitlab.training.job import data_of
from vitlab.training.loop import Show
from vitlab.training.recipe import Recipe

RATIOS = (0.25, 0.5, 0.75, 0.9)
ARMS = {f"{100 * ratio:.0f} %": {"model.mask_ratio": ratio} for ratio in RATIOS}


def probe(recipe: Recipe, run: Path, show: Show) -> float:
    """Accuracy of a linear probe on the frozen encoder."""
    model = load_with_report(train(recipe, run, show))[0].encoder
    data = data_of(recipe)
    assert model.preprocess is not None, "a loaded checkpoint has one"
    splits = data.train, data.test or data.val
    learned, tested = (features(model, ImageSet(split, model.preprocess)) for split in splits)
    return probe_accuracy(learned, tested)


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return grid(ARMS, lambda varied, seed: bench.pretraining("mae", 15, seed, varied), seeds, probe)


CLAIM = Claim(
    name="mae-mask-ratio",
    title=Text("Hiding 75 % of the patches is best", "遮住 75 % 的图块最好"),
    paper=Citation("MAE", "2111.06377", "Section 4.1, Figure 5"),
    says=Text(
        "Linear probe on ImageNet: 54.6 % with a small mask ratio, 73.5 % with 75 %, and less again above that.",
        "ImageNet 线性探测：遮挡比例很小时 54.6 %，75 % 时 73.5 %，更高又下降。",
    ),
    here=Text(
        "An MAE is pre-trained for 15 epochs with each ratio; linear probe on the frozen encoder. Of 16 patches of a "
        "digit, 75 % leaves 4 visible, 90 % one.",
        "每个比例预训练 15 个 epoch 的 MAE，在冻结的编码器上做线性探测。"
        "一个数字有 16 个图块，75 % 剩 4 个，90 % 剩 1 个。",
    ),
    arms=tuple(Arm(name, x=100 * ratio) for name, ratio in zip(ARMS, RATIOS, strict=True)),
    rule=(difference("75 %", "25 %", low=0.0), difference("75 %", "90 %", low=0.0)),
    steps=steps,
    measured="test accuracy of a linear probe",
    axis="hidden patches, %",
)
