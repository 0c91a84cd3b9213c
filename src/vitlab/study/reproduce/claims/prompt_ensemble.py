"""Are many prompts better than one?"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean

from vitlab.checkpoints.load import load_with_report
from vitlab.models.two_towers import TwoTowers
from vitlab.study.reproduce.bench import Workbench, train
from vitlab.study.reproduce.claim import Arm, Citation, Claim, ClaimStep, Text
from vitlab.study.reproduce.grid import seed_by_seed
from vitlab.study.reproduce.verdict import difference
from vitlab.text.templates import LISTS
from vitlab.training.batches import ImageSet
from vitlab.training.evaluate import evaluate_zeroshot
from vitlab.training.job import data_of
from vitlab.training.loop import Show

ONE, ALL, NAME = "one prompt", "all prompts", "name alone"
TEMPLATES = LISTS["held_out"]


def measure(bench: Workbench, seed: int, folder: Path, show: Show) -> dict[str, float]:
    recipe = bench.pretraining("clip", 10, seed)
    model, data = load_with_report(train(recipe, folder, show))[0], data_of(recipe)
    assert isinstance(model, TwoTowers) and model.preprocess is not None
    images = ImageSet(data.test or data.val, model.preprocess)

    def top1(*templates: str) -> float:
        return evaluate_zeroshot(model, images, data.classes, templates).top(1)

    return {NAME: top1("{}"), ONE: fmean(map(top1, TEMPLATES)), ALL: top1(*TEMPLATES)}


def steps(bench: Workbench, seeds: int) -> list[ClaimStep]:
    return seed_by_seed(seeds, partial(measure, bench))


CLAIM = Claim(
    name="prompt-ensemble",
    title=Text("An ensemble of prompts is better than one", "多个提示模板的集成优于单个模板"),
    paper=Citation("CLIP", "2103.00020", "Section 3.1.4"),
    says=Text(
        "On ImageNet, 80 prompts together give 3.5 points more than one default prompt.",
        "在 ImageNet 上，80 个提示的集成比单个默认提示高 3.5 个百分点。",
    ),
    here=Text(
        f"A CLIP is trained for 10 epochs. {len(TEMPLATES)} prompts that it has not seen: zero-shot accuracy with all "
        "together, and the mean over those with one each.",
        f"训练 10 个 epoch 的 CLIP。{len(TEMPLATES)} 个训练时没见过的提示：全部集成的零样本准确率，与各自单用的平均。",
    ),
    arms=tuple(map(Arm, (NAME, ONE, ALL))),
    rule=(difference(ALL, ONE, low=0.0),),
    steps=steps,
    measured="zero-shot accuracy",
    minutes=1,
)
